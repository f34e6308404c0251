"""Pulling a release: find what is missing, fetch it, check it, switch."""

from __future__ import annotations

import contextlib
import os
import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path

from blobstore.core.disk.progress import Progress, check_progress
from blobstore.core.errors import BlobStoreError, ReleaseError, TrustError
from blobstore.core.memory.mapped_file import as_path, named
from blobstore.core.reprs import count, line
from blobstore.core.text import size
from blobstore.releases.device.assembly import DamagedHereError, make
from blobstore.releases.device.installed import Installed, Removed
from blobstore.releases.device.polls import Polls
from blobstore.releases.device.shopping import Shopping
from blobstore.releases.device.transfer import Transfer
from blobstore.releases.index.index import Index, parse_index
from blobstore.releases.index.needs import check_executorch, check_time
from blobstore.releases.index.objects import store_bytes
from blobstore.releases.sources.patience import GoneError, Patience, telling
from blobstore.releases.sources.places import open_source
from blobstore.releases.sources.source import Found, Source

__all__ = ["PullOptions", "Pulled", "gc", "install", "pull"]

_THREADS = 6
_MAKERS = 2


@dataclass(frozen=True)
class Pulled:
    """What `pull` did.

    Attributes:
        name, version, sha256: of the release; the digest is that of its index.
        path: the folder with its files.
        changed: whether another release was the current one before.
        files, release_bytes: number and size of all files of the release.
        new_files: the number of files that were missing.
        fetched_bytes: bytes that were fetched, index and lists included.
        requests: the number of requests; 0 from a folder.
        stale: the version that the server still offers, though a newer one is installed; None if it offers none that is
            older.
    """

    name: str
    version: str
    sha256: str
    path: Path
    changed: bool
    files: int
    release_bytes: int
    new_files: int
    fetched_bytes: int
    requests: int
    stale: str | None = None

    def __repr__(self) -> str:
        files = f"{count(self.files, 'file')} of {size(self.release_bytes)}"
        travel = f"{self.new_files:,} new", f"{size(self.fetched_bytes)} fetched"
        return line("Pulled", f"{self.name} {self.version} in {self.path}", files, *travel)


@dataclass(frozen=True)
class PullOptions:
    """What the user demands of a release; `pull` describes each."""

    key: str | os.PathLike[str] | None = None
    allow_rollback: bool = False
    plain: bool = False
    executorch: str | None = None
    verify: bool = False


def pull(
    reference: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    key: str | os.PathLike[str] | None = None,
    allow_rollback: bool = False,
    plain: bool = False,
    executorch: str | None = None,
    verify: bool = False,
    threads: int = _THREADS,
    patience: Patience | None = None,
    progress: Progress | None = None,
) -> Pulled:
    """Make a release the current one of a folder, and fetch only what the folder lacks.

    `directory/current` leads to the old release or to the new one, whole, at every moment. If the process is killed, or
    fails, the next call goes on where this one stopped. Of several processes that pull into the folder from the same place, one
    fetches and the others wait; no process waits for the server of another place.

    Args:
        reference: where the release is, such as `registry/name:tag`, `https://host/…/index.json`, `oci:DIR:tag`, or the path
            of an index.
        directory: the folder of the device; it is made if it is missing.
        key: the file of a public key, whose signature the release must have.
        allow_rollback: accept a release that is older than the installed one.
        plain: decode nothing, and fetch whole files; the release must have been published with `plain`.
        executorch: the version of ExecuTorch that the device has; None for the one that is installed here, if there is one.
        verify: compare every file that is here with its digest, also of a release that is the current one already, and
            fetch damaged ones again. Otherwise only that is compared which something new is built on.
        threads: how many requests are sent at a time.
        patience: how long to try.
        progress: called with every step, and with what is waited for, unless `patience` has a notice.

    Raises:
        ReleaseError: this is not a reference, the folder has releases of another name or is one that releases are
            published in, the programs need a newer ExecuTorch, or the release is more than a day ahead of the clock.
        TrustError: the release is not signed by the key, not the pinned one, not of the version that the reference says, or
            older than the installed one.
        InvalidFileError, IntegrityError: the index, or what was fetched, is not what it must be.
        TransferError: a server cannot be reached, or refuses. It is a `ServerBusyError` if the server asks to come back
            later than patience lasts.
        FileAccessError: the folder cannot be written. In every case the old release stays the current one.
    """
    check_progress(progress)
    patience, progress = telling(Patience() if patience is None else patience, progress)
    with open_source(reference, patience, threads) as source:
        options = PullOptions(key, allow_rollback, plain, executorch, verify)
        return install(source, as_path(directory), options, threads, progress)


def gc(directory: str | os.PathLike[str], *, keep: int = 1) -> Removed:
    """Remove from a folder what neither its newest releases nor a living process needs.

    Files that a process has mapped stay in its memory. A release that a process has open as a `Release` stays whole.

    Args:
        directory: the folder of the device.
        keep: how many releases stay, with the current one; at least 1.

    Raises:
        ReleaseError: it has no release, or `keep` is below 1.
        FileAccessError: something cannot be removed.
    """
    installed = Installed(as_path(directory))
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise ReleaseError(f"at least one release must be kept, not {keep!r}")
    if installed.view is None:
        raise ReleaseError(f"{installed.folder}: no release is installed here")
    return installed.gc(keep)


def install(source: Source, directory: Path, options: PullOptions, threads: int, progress: Progress | None) -> Pulled:
    """As `pull`, from a source that is open."""
    installed = Installed(directory)
    found, stale = _asked(installed, source, options)
    done = _nothing_new(installed, source, found.sha256, options)
    if done is None:
        with installed.fetching(source.name) as place:
            done = _Update(installed, source, found, options, place).run(threads, progress)
    return replace(done, stale=stale)


class _Update:
    """The way of a folder to a release: look at what is here, fetch what is missing, and look again.

    The lock of the device is not held while bytes are fetched: a slow server must not keep other pulls waiting. So whatever
    other processes did meanwhile counts: a release may be newer now, or an object collected.

    Args:
        installed: the folder of the device.
        source: where the release is.
        found: the release.
        options: what the user demands of it.
        place: the folder for what is fetched; see `Installed.fetching`.
    """

    def __init__(self, installed: Installed, source: Source, found: Found, options: PullOptions, place: Path) -> None:
        self._installed, self._source, self._options, self._place = installed, source, options, place
        self._found, self._given = found, (installed, source, found.sha256, options)
        self._data, self._signature = _evidence(installed, source, found, options)
        self._compared, self._new = False, 0
        self._verify, self._fresh = options.verify, False

    def run(self, threads: int, progress: Progress | None) -> Pulled:
        """Until the release is the current one."""
        while True:
            with self._installed.locked():
                self._installed.deliver(self._place)
                done = None if self._new else _nothing_new(*self._given)  # others may have taken it
                if done is None:
                    index = _checked_index(*self._given, self._data, self._signature)
                    done = self._switched(index)
                if done is not None:
                    self._installed.finish(self._place)
                    return done
                held = contextlib.ExitStack()
                held.enter_context(self._installed.holding(self._installed.views()))
            with held:
                self._obtain(index, threads, progress)

    def _switched(self, index: Index) -> Pulled | None:
        """Switch to the release, if all its files are here, and were looked for once."""
        installed, sha256 = self._installed, self._found.sha256
        if not self._compared or not all(installed.has(one) for one in (*index.distinct, index.parts)):
            return None
        changed = installed.view != sha256
        path = installed.switch(self._data, sha256, self._signature)
        Polls(installed, self._source).keep(self._found)
        return _result(index, sha256, path, changed, self._new, self._source)

    def _obtain(self, index: Index, threads: int, progress: Progress | None) -> None:
        """Get what is missing; if what this relied on is wrong, the next attempt does not."""
        shopping = Shopping(
            self._installed,
            self._source,
            self._place,
            plain=self._options.plain,
            fresh=self._fresh,
            verify=self._verify,
        )
        shopping.add(index, self._found.sha256, verify=self._options.verify)
        self._compared = True
        shopping.check_room(self._installed.files)
        try:
            self._new += _obtain(self._source, self._installed.made(self._place), shopping, threads, progress)
        except DamagedHereError:
            if self._verify:
                raise
            self._verify = True  # everything that the next plan relies on is compared first
        except GoneError:
            if self._fresh:
                raise
            self._fresh = True  # the publisher moved what the list of ways led to


def _result(index: Index, sha256: str, path: Path, changed: bool, new: int, source: Source) -> Pulled:
    return Pulled(
        index.name,
        index.version,
        sha256,
        path,
        changed,
        len(index.files),
        index.size,
        new,
        source.fetched,
        source.requests,
    )


class _OlderError(TrustError):
    """A release is older than the one that is or was installed, and nothing else is wrong with it.

    Attributes:
        version: of the older release.
    """

    def __init__(self, message: str, version: str) -> None:
        super().__init__(message)
        self.version = version


def _asked(installed: Installed, source: Source, options: PullOptions) -> tuple[Found, str | None]:
    """What a source offers, and the version if that is older than the installed release, which then stays.

    Where the reference names no version, such as `latest`, an older release than the installed one is refused, because
    somebody may play it back. But a cache between the server and the device may have kept it, too. That is told by two
    things, after caches were asked not to answer: the device had this very index before, or the cache says that it has
    it since before the installed release was published. Either way nothing is installed, so whoever plays back an index
    can keep a device as it is, which is what playing back the newest one does.

    Returns:
        what to install: what was found, or the current release.

    Raises:
        TrustError: nothing explains that it is older.
    """
    polls, current = Polls(installed, source), installed.sound_index()
    found = _look_up(installed, source, polls, current, options)
    if found.sha256 == current:
        polls.keep(found)
    if current is None or found.sha256 == current or not (source.cached and source.moving):
        return found, None
    polls.note(current)
    if options.allow_rollback or _older(installed, source, found, options) is None:
        return found, None
    found = source.find(current, fresh=True)
    older = None if found.sha256 == current else _older(installed, source, found, options)
    if older is None:
        return found, None
    if polls.had(found.sha256) or _from_before(installed, found):
        return Found(current, None), older.version
    raise older


def _look_up(installed: Installed, source: Source, polls: Polls, current: str | None, options: PullOptions) -> Found:
    """What a source offers. Only if the current release is whole, the source may answer that nothing changed."""
    view = installed.view
    whole = current is not None and view is not None and installed.complete(view)
    found = source.find(current, tag=polls.tag(current) if current is not None and whole else None)
    if found.unchanged and _nothing_new(installed, source, found.sha256, options) is None:
        return source.find(current)  # something is lacking, such as a signature
    return found


def _older(installed: Installed, source: Source, found: Found, options: PullOptions) -> _OlderError | None:
    """Why what was found is refused, if that is its age alone. Raises every other error of `_checked_index`."""
    data, signature = _evidence(installed, source, found, options)
    try:
        _checked_index(installed, source, found.sha256, options, data, signature)
    except _OlderError as error:
        return error
    return None


def _evidence(installed: Installed, source: Source, found: Found, options: PullOptions) -> tuple[bytes, str | None]:
    """The bytes of the index that was found, and its signature if there has to be one."""
    data = found.index if found.index is not None else installed.index_bytes(found.sha256)
    return data, None if options.key is None else source.signature(found.sha256)


def _from_before(installed: Installed, found: Found) -> bool:
    """Whether a cache has an index since before the installed release was published."""
    mark, now = installed.mark(), time.time()
    return mark is not None and found.age > 0 and now - found.age < mark.published <= now


def _nothing_new(installed: Installed, source: Source, sha256: str, options: PullOptions) -> Pulled | None:
    """The result if the release is the current one already, whole, and signed if it must be."""
    view = installed.view
    if view is None or view != sha256 or not installed.complete(view, verify=options.verify):
        return None
    index = installed.index(sha256)
    source.check(index)
    if options.key is not None:
        try:
            check_trust(source, installed.index_bytes(sha256), installed.signature(sha256), options.key)
        except TrustError:  # it may have been signed since
            return None
    return _result(index, sha256, installed.view_path(view), False, 0, source)


def _checked_index(
    installed: Installed, source: Source, sha256: str, options: PullOptions, data: bytes, signature: str | None
) -> Index:
    """The index with this digest, if the folder may switch to it: signed, well-formed, a successor, and for its ExecuTorch."""
    if options.key is not None:
        check_trust(source, data, signature, options.key)
    index = parse_index(data, source.name)
    source.check(index)
    check_successor(installed, index, sha256, source, allow_rollback=options.allow_rollback)
    check_executorch(index, options.executorch, source.name)
    return index


def check_trust(source: Source, data: bytes, signature: str | None, key: str | os.PathLike[str]) -> None:
    """Raise TrustError unless an index is signed by a key."""
    from blobstore.releases.sources.trust import check_signature

    check_signature(data, signature, key, source.name)


def check_successor(installed: Installed, index: Index, sha256: str, source: Source, *, allow_rollback: bool) -> None:
    """Refuse a release of another name, an older one, or one from the future; `index` has the digest `sha256`."""
    check_time(index.published, source.name)
    try:
        old = installed.mark()
    except BlobStoreError as error:
        # Without a mark any older release could be played back, so this is refused rather than ignored.
        if allow_rollback or installed.view == sha256:
            return  # it is about to be mended
        raise TrustError(
            f"{source.name}: it is unknown whether version {index.version} is newer than the installed one, because its mark "
            f"or index is damaged ({error}); pull that release again, or allow_rollback (--allow-rollback)"
        ) from None
    if old is None:
        return
    if old.name != index.name:
        raise ReleaseError(
            f"{source.name}: this is a release of {index.name!r}, and {installed.folder} has releases of {old.name!r}; pull it "
            "into another folder"
        )
    if index.published < old.published and not allow_rollback and installed.view != sha256:
        raise _OlderError(
            f"{source.name}: version {index.version} is older than version {old.version}, which is or was installed; allow_rollback "
            "(--allow-rollback) accepts it",
            index.version,
        )


def _obtain(source: Source, folder: Path, shopping: Shopping, threads: int, progress: Progress | None) -> int:
    """Fetch and make the files that are missing, in a folder; their number."""
    transfer = Transfer(source, threads, progress)
    for spool in shopping.spools:
        transfer.ask(spool, shopping.ranges.get(spool.wanted.sha256, ()))
    transfer.start()
    # Making two files at a time hashes one while the other one waits for bytes or for the disk.
    pool = ThreadPoolExecutor(_MAKERS)
    try:
        _make_all(shopping, folder, transfer, pool)
        transfer.join()
    except BaseException as error:
        transfer.stop()
        for spool in shopping.spools:
            spool.fail(error)
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    kept = {assembly.wanted.sha256 for assembly in shopping.assemblies}
    with named(folder):
        for base in {assembly.wanted.sha256 for assembly in shopping.bases} - kept:
            (folder / base).unlink(missing_ok=True)
    if shopping.parts is not None:
        store_bytes(folder, shopping.parts)
    shopping.discard()
    return len(shopping.assemblies)


def _make_all(shopping: Shopping, folder: Path, transfer: Transfer, pool: ThreadPoolExecutor) -> None:
    for assembly in shopping.bases:
        make(assembly, folder, transfer)
    # A file that is fetched whole gets its place at the end, because parts of others may be read from it.
    for whole in (False, True):
        assemblies = [assembly for assembly in shopping.assemblies if (assembly.whole is not None) == whole]
        made = [pool.submit(make, assembly, folder, transfer) for assembly in assemblies]
        done, _ = wait(made, return_when=FIRST_EXCEPTION)
        for one in done:
            one.result()
