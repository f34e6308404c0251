"""The folder of a device: the files of its releases, and which release is the current one.

    files/SHA256             objects: each file once, whatever releases have it, and for each release the list of its parts
    indexes/SHA256.json      the index of each release that is here; .sig its signature
    indexes/newest           name, version and time of the release that was last switched to, or was about to be; older ones are refused
    releases/SHA256/…        a release: links with the names of its files
    current                  a link to the release that counts
    partial/PLACE/SHA256     objects that are being fetched, apart for each place that they come from; made/SHA256 complete ones
    incoming/                what the application's own downloader fetched

A release appears whole when the link `current` is renamed. Everything before that adds files that nothing names yet.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from blobstore.core.disk.journal import sync_folder
from blobstore.core.disk.kinds import check_folder_name
from blobstore.core.disk.locks import Lock, exclusive
from blobstore.core.disk.names import TEMPORARY, temporary_beside
from blobstore.core.disk.recovery import recover
from blobstore.core.disk.staging import Staging
from blobstore.core.errors import BlobStoreError, FileAccessError, IntegrityError, InvalidFileError, ReleaseError
from blobstore.core.memory.digest import sha256 as digest_of
from blobstore.core.memory.mapped_file import named
from blobstore.core.reprs import fields_line
from blobstore.releases.index.index import (
    INDEX_LIMIT,
    TABLE_LIMIT,
    Index,
    Name,
    Object,
    Size,
    Struct,
    parse_index,
    parse_json,
)
from blobstore.releases.index.parts import Parts, parse_parts
from blobstore.releases.sources.source import INDEXES, SIGNATURES, read_small, sha256_of

__all__ = ["CURRENT", "Installed", "LocalBlob", "Mark", "Removed"]

CURRENT = "current"
_NEWEST = "newest"
_MARK = re.compile(r"^(\S{1,100}) (\S{1,100}) ([0-9]{1,16})\n\Z")
_DIGEST = re.compile(r"^[0-9a-f]{64}$")
_MADE = "made"


@dataclass(frozen=True)
class LocalBlob:
    """A blob in a file that is here.

    Attributes:
        path: the file.
        offset, size: where it lies, in bytes.
    """

    path: Path
    offset: int
    size: int


class Mark(Struct, frozen=True):
    """The release that was last switched to, or was about to be when that failed, also if nothing leads to it.

    Attributes:
        name, version, published: as in its index, in whatever format that is.
    """

    name: Name
    version: Name
    published: Size


@dataclass(frozen=True)
class Removed:
    """What `gc` removed.

    Attributes:
        releases: the number of releases.
        files: the number of files.
        nbytes: their size.
        in_use: releases that stay only because a process uses them.
    """

    __repr__ = fields_line

    releases: int
    files: int
    nbytes: int
    in_use: int


class Installed:
    """The folder of a device.

    Args:
        folder: where it is.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files, self.partial, self.incoming = (folder / name for name in ("files", "partial", "incoming"))
        self._releases, self._indexes = folder / "releases", folder / INDEXES

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder if it is missing, keep other processes out, and clean up after killed ones.

        Raises:
            OutputPathError: the name is that of a file.
            ReleaseError: releases are published in this folder; `gc` would remove their files.
        """
        check_folder_name(self.folder)
        with named(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            publishes = (self.folder / SIGNATURES).exists() and not self._indexes.exists()
        if publishes:
            raise ReleaseError(f"{self.folder}: releases are published in this folder; pull them into another one")
        with exclusive(self.folder):
            with named(self.folder):
                for place in (self.files, self.partial, self._releases, self._indexes):
                    place.mkdir(exist_ok=True)
                for one in os.scandir(self.folder):
                    if one.is_symlink() and TEMPORARY.fullmatch(one.name):
                        os.unlink(one.path)
            for place in (self.files, self._releases, self._indexes):
                recover(place)
            yield

    @contextlib.contextmanager
    def fetching(self, source: str) -> Iterator[Path]:
        """A folder for what is fetched from a source, which no other process uses; waits for one that fetches from there.

        What a process that ended left of it is in there, whatever source it fetched from. Other sources are not waited
        for, and the folder of the device is not locked, so a server that keeps this process waiting keeps nobody else.

        Args:
            source: the name of the source.
        """
        place = self.partial / digest_of(source.encode(errors="surrogateescape"))[:16]
        lock = Lock()
        try:
            while not self._take(lock, place):
                with contextlib.suppress(FileNotFoundError):
                    lock.take(place, wait=True)
                lock.close()  # who held it may have removed the folder
                lock = Lock()
            yield place
        finally:
            lock.close()

    def _take(self, lock: Lock, place: Path) -> bool:
        """Lock the folder of a source, made or taken over from a process that ended; False if another one has it."""
        with self.locked(), named(place):
            if not place.is_dir():
                for one in self._abandoned():
                    one.rename(place)
                    break
                else:
                    place.mkdir()
            if not lock.take(place):
                return False
            (place / _MADE).mkdir(exist_ok=True)
            self.deliver(place)
            return True

    def _abandoned(self) -> Iterator[Path]:
        """Folders of sources that no process fetches from. Each is locked until the next one is asked for."""
        for one in sorted(self.partial.iterdir()):
            if one.is_dir() and not one.is_symlink():
                lock = Lock()
                try:
                    if lock.take(one):
                        yield one
                finally:
                    lock.close()

    @staticmethod
    def made(place: Path) -> Path:
        """Where objects are made, in the folder of a source."""
        return place / _MADE

    def deliver(self, place: Path) -> None:
        """Give the objects that were made their place, where `gc` would find them. Call this in `locked`."""
        with named(place):
            recover(self.made(place))
            objects = [one for one in os.scandir(self.made(place)) if _DIGEST.fullmatch(one.name)]
            for one in objects:
                os.replace(one.path, self.path(one.name))
            if objects:
                sync_folder(self.files)

    def finish(self, place: Path) -> None:
        """Remove the folder of a source, unless something is in it. Call this in `locked`."""
        with contextlib.suppress(OSError):
            self.made(place).rmdir()
            place.rmdir()

    @contextlib.contextmanager
    def holding(self, views: Iterable[str]) -> Iterator[None]:
        """Keep releases whole that a pull takes blobs from: `gc` leaves them alone."""
        with contextlib.ExitStack() as stack:
            for view in views:
                lock = Lock()
                stack.callback(lock.close)
                with contextlib.suppress(OSError):  # one that is gone has nothing to take
                    lock.take(self.view_path(view), shared=True)
            yield

    # Releases

    @property
    def view(self) -> str | None:
        """The current release: the SHA-256 of its index, and its name below `releases`. None if there is none."""
        try:
            target = str((self.folder / CURRENT).readlink())
        except OSError as error:
            if error.errno in {errno.ENOENT, errno.ENOTDIR}:
                return None
            if error.errno == errno.EINVAL:
                raise InvalidFileError(
                    self.folder / CURRENT, "expected a link to a release, found something else"
                ) from None
            raise FileAccessError(self.folder / CURRENT, error) from None
        name = Path(target).name
        if not _DIGEST.fullmatch(name) or target != f"releases/{name}":
            raise InvalidFileError(self.folder / CURRENT, f"expected a link to a release, found one to {target!r}")
        return name

    def view_path(self, view: str) -> Path:
        """The folder of a release."""
        return self._releases / view

    def sound_index(self) -> str | None:
        """As `view`, but None if that index is damaged, so that it is fetched again."""
        sha256 = self.view
        try:
            if sha256 is not None:
                self.index_bytes(sha256)
        except BlobStoreError:
            return None
        return sha256

    def index_bytes(self, sha256: str) -> bytes:
        """The bytes of an index that is here.

        Raises:
            FileAccessError, IntegrityError: it cannot be read, or does not have the digest that is its name.
        """
        return _read_named(self._indexes / f"{sha256}.json", sha256, INDEX_LIMIT)

    def index(self, sha256: str) -> Index:
        """An index that is here."""
        return parse_index(self.index_bytes(sha256), str(self._indexes / f"{sha256}.json"))

    def mark(self) -> Mark | None:
        """The release below which no other one counts: the current one, or a newer one that was marked; None if there was none.

        Raises:
            FileAccessError, IntegrityError, InvalidFileError: what tells it cannot be read, or is damaged.
        """
        marks = []
        path = self._indexes / _NEWEST
        if os.path.lexists(path):
            match = _MARK.match(read_small(path, 1 << 10).decode("ascii", "replace"))
            if match is None:
                raise InvalidFileError(path, "expected the name, the version and the time of a release")
            marks.append(Mark(match[1], match[2], int(match[3])))
        if (current := self.view) is not None:
            place = str(self._indexes / f"{current}.json")
            marks.append(parse_json(self.index_bytes(current), Mark, place, "an index of a release"))
        return max(marks, key=lambda one: one.published, default=None)

    def signature(self, sha256: str) -> str | None:
        """The signature of an index that is here, None if it has none."""
        with contextlib.suppress(FileAccessError, UnicodeDecodeError):
            return read_small(self._indexes / f"{sha256}.sig", 1 << 16).decode("ascii")
        return None

    def views(self) -> list[str]:
        """The releases that are here, the newest first."""
        views: list[tuple[int, str]] = []
        with contextlib.suppress(OSError):
            for one in os.scandir(self._releases):
                if _DIGEST.fullmatch(one.name):
                    try:
                        views.append((self.index(one.name).published, one.name))
                    except BlobStoreError:
                        views.append((-1, one.name))
        return [name for _, name in sorted(views, reverse=True)]

    def complete(self, view: str, *, verify: bool = False) -> bool:
        """Whether all files of a release are here; their contents are read only to `verify` them."""
        try:
            index = self.index(view)
        except BlobStoreError:
            return False
        place = self.view_path(view)
        # Reading all files of a release takes seconds to minutes, a pull that finds nothing new takes milliseconds.
        here = self.sound if verify else self.has
        return all(here(file.object) and os.path.lexists(place / file.name) for file in index.files)

    def switch(self, index: bytes, sha256: str, signature: str | None) -> Path:
        """Make a release whose files are here the current one; its folder."""
        parsed = parse_index(index, str(self._indexes / f"{sha256}.json"))
        # The index comes first: `gc` reads the indexes, and must know the files of a release before anything leads to them.
        with Staging(force=True, follow=False) as staging:
            records = [(".json", index)]
            if signature is not None:
                records.append((".sig", signature.encode()))
            for ending, data in records:
                with staging.open(self._indexes / (sha256 + ending), len(data)) as record:
                    record.write(data)
        place = self.view_path(sha256)
        with named(place):
            new = temporary_beside(place)
            new.mkdir()
            folders = [new]
            for file in parsed.files:
                link = new / file.name
                for folder in reversed(link.relative_to(new).parents[:-1]):
                    if not (new / folder).is_dir():
                        (new / folder).mkdir()
                        folders.append(new / folder)
                # Relative, so that the folder of the device can be moved.
                up = "../" * (2 + file.name.count("/"))
                link.symlink_to(f"{up}files/{file.sha256}")
            for folder in folders:
                sync_folder(folder)
            if place.is_dir():
                # A process may have this folder open as a `Release`; its links stay unless they are wrong.
                if self._same(place, new):
                    shutil.rmtree(new)
                else:  # a release that a fault left incomplete
                    old = temporary_beside(place)
                    os.replace(place, old)
                    os.replace(new, place)
                    shutil.rmtree(old, ignore_errors=True)
            else:
                os.replace(new, place)
            sync_folder(self._releases)
        # before the switch, because what fails must leave the old release; it can then still be pulled again
        with Staging(force=True, follow=False) as staging, staging.open(self._indexes / _NEWEST) as newest:
            newest.write(f"{parsed.name} {parsed.version} {parsed.published}\n".encode())
        self._lead_to(sha256)
        return place

    def _lead_to(self, view: str) -> None:
        """Let `current` lead to a release; if that fails, it leads where it led before."""
        current, old = self.folder / CURRENT, self.view
        link, back = temporary_beside(current), temporary_beside(current)
        try:
            with named(current):
                if old is not None:  # made now, because a full disk may have no room for it later
                    back.symlink_to(f"releases/{old}")
                link.symlink_to(f"releases/{view}")
                os.replace(link, current)
                try:
                    sync_folder(self.folder)
                except BaseException:
                    if old is not None:
                        os.replace(back, current)
                    else:
                        current.unlink()
                    raise
        finally:
            for one in (link, back):
                with contextlib.suppress(OSError):
                    one.unlink(missing_ok=True)

    @staticmethod
    def _same(one: Path, other: Path) -> bool:
        def links(folder: Path) -> dict[str, str]:
            return {
                path.relative_to(folder).as_posix(): str(path.readlink())
                for path in folder.rglob("*")
                if path.is_symlink()
            }

        return links(one) == links(other)

    # Objects and blobs

    def path(self, sha256: str) -> Path:
        """Where an object is."""
        return self.files / sha256

    def has(self, wanted: Object) -> bool:
        """Whether an object is here. Objects were compared with their digests before they got their names."""
        try:
            status = os.lstat(self.path(wanted.sha256))
        except OSError:
            return False
        return stat.S_ISREG(status.st_mode) and status.st_size == wanted.size

    def sound(self, wanted: Object) -> bool:
        """Whether an object is here and has its digest; all of it is read."""
        try:
            return self.has(wanted) and sha256_of(self.path(wanted.sha256), 0, wanted.size) == wanted.sha256
        except FileAccessError:
            return False

    def parts(self, index: Index) -> Parts:
        """What the files of a release that is here consist of.

        Raises:
            FileAccessError, IntegrityError, InvalidFileError: the list is not here, or damaged.
        """
        place = self.path(index.parts.sha256)
        return parse_parts(_read_named(place, index.parts.sha256, TABLE_LIMIT), index, str(place))

    def current(self) -> tuple[Object, Parts] | None:
        """The list of the parts of the current release, and what it says; None if there is none, or it is damaged."""
        with contextlib.suppress(BlobStoreError):
            if (view := self.view) is not None:
                index = self.index(view)
                return index.parts, self.parts(index)
        return None

    def blobs(self) -> dict[str, LocalBlob]:
        """The contents of all files that are here, by SHA-256."""
        local: dict[str, LocalBlob] = {}
        seen: set[str] = set()
        for view in self.views():
            with contextlib.suppress(BlobStoreError):
                index = self.index(view)
                for wanted, listed in self.parts(index).of(index):
                    if wanted.sha256 in seen or not self.has(wanted):
                        continue
                    seen.add(wanted.sha256)
                    for part in listed:
                        local.setdefault(part.sha256, LocalBlob(self.path(wanted.sha256), part.offset, part.size))
        return local

    # Cleaning up

    def gc(self, keep: int) -> Removed:
        """Remove what neither the newest releases nor a living process needs.

        Args:
            keep: how many releases stay, with the current one.
        """
        with self.locked():
            current = self.view
            ordered = ([current] if current else []) + [view for view in self.views() if view != current]
            in_use = [view for view in ordered[keep:] if not self._remove_view(view)]
            kept = {*ordered[:keep], *in_use}
            needed: set[str] = set()
            for view in kept:
                index = self.index(view)
                needed |= {index.parts.sha256, *(file.sha256 for file in index.files)}
            removed = [*_remove_all_but(needed, self.files), *_remove_all_but(kept, self._indexes)]
            for place in self._abandoned():
                removed += [*_remove_all_but(set(), self.made(place)), *_remove_all_but(set(), place)]
                recover(self.made(place))
                self.finish(place)
            if self.incoming.is_dir():
                shutil.rmtree(self.incoming, ignore_errors=True)
            return Removed(len(ordered) - len(kept), len(removed), sum(removed), len(in_use))

    def _remove_view(self, view: str) -> bool:
        """Remove the folder of a release; False if a process has it open."""
        lock, place = Lock(), self.view_path(view)
        try:
            with named(place):
                if not lock.take(place):
                    return False
                shutil.rmtree(place)
                return True
        finally:
            lock.close()


def _remove_all_but(wanted: set[str], folder: Path) -> Iterator[int]:
    """Remove files that are named by digests, whatever their ending; the size of each."""
    if not folder.is_dir():
        return
    with named(folder):
        entries = list(os.scandir(folder))
    for one in entries:
        digest = one.name.split(".")[0]
        if digest not in wanted and _DIGEST.fullmatch(digest):
            with named(Path(one.path)):
                size = one.stat(follow_symlinks=False).st_size
                os.unlink(one.path)
            yield size


def _read_named(path: Path, sha256: str, limit: int) -> bytes:
    """The bytes of a file that is named by their digest."""
    data = read_small(path, limit)
    if (found := digest_of(data)) != sha256:
        raise IntegrityError(path, f"expected the SHA-256 that is its name, found {found}")
    return data
