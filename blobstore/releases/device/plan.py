"""Releases for applications that download themselves: what to fetch, and a switch that takes what was fetched.

A plan stays in the folder of the device with the index that it was made for, so the second step needs no network, and is
about the same release even if a newer one was published meanwhile. It trusts neither the plan nor the fetched files
more than `pull` trusts a server.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from blobstore.core.disk.progress import Progress, check_progress
from blobstore.core.disk.staging import Staging
from blobstore.core.errors import BlobStoreError, FileAccessError, InvalidFileError, ReleaseError
from blobstore.core.memory.digest import sha256
from blobstore.core.memory.mapped_file import as_path, named
from blobstore.core.reprs import fields_line, line
from blobstore.core.text import size
from blobstore.releases.device.installed import Installed
from blobstore.releases.device.pull import Pulled, PullOptions, asked, checked_index, install, nothing_new
from blobstore.releases.device.shopping import Shopping
from blobstore.releases.device.transfer import Transfer
from blobstore.releases.index.index import INDEX_LIMIT, TABLE_LIMIT, Index, Sha256, Struct, decode_json, encode_json
from blobstore.releases.index.objects import store_bytes
from blobstore.releases.index.references import parse_reference
from blobstore.releases.sources.fetched import FetchedSource, fetched_name
from blobstore.releases.sources.patience import Patience
from blobstore.releases.sources.places import open_source
from blobstore.releases.sources.source import Found, Source, read_small

__all__ = ["Fetch", "Plan", "commit", "plan"]

_PLAN = "plan.json"
_PLAN_LIMIT = 2 * (INDEX_LIMIT + TABLE_LIMIT)  # base64, and a signature


@dataclass(frozen=True)
class Fetch:
    """Bytes to fetch into one file.

    Attributes:
        url: where they are. A registry may ask for a token there, and any server for a password.
        range: the value of the header `Range`; None for all bytes.
        size: the number of bytes.
        sha256: of the object: that of the fetched file if there is no range.
        file: the name that `commit` looks for.
    """

    __repr__ = fields_line

    url: str
    range: str | None
    size: int
    sha256: str
    file: str


@dataclass(frozen=True)
class Plan:
    """What a folder lacks of a release.

    Attributes:
        name, version, sha256: of the release; the digest is that of its index.
        current: whether it is the current release already, whole, so that there is nothing to do.
        release_bytes: size of all files of the release.
        bytes: size of all that is to be fetched.
        fetches: what is to be fetched, in any order.
    """

    name: str
    version: str
    sha256: str
    current: bool
    release_bytes: int
    bytes: int
    fetches: tuple[Fetch, ...]

    def __repr__(self) -> str:
        left = f"{len(self.fetches):,} to fetch, {size(self.bytes)} of {size(self.release_bytes)}"
        return line("Plan", f"{self.name} {self.version}", "is the current release" if self.current else left)


class _Record(Struct, frozen=True):
    """A plan in the folder of a device; `index` and `ways` are base64 in JSON."""

    format: Literal["blobstore.plan.1"]
    reference: str
    sha256: Sha256
    index: bytes
    signature: str | None
    ways: bytes | None
    plain: bool


def plan(
    reference: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    key: str | os.PathLike[str] | None = None,
    allow_rollback: bool = False,
    plain: bool = False,
    executorch: str | None = None,
    patience: Patience | None = None,
) -> Plan:
    """Find what a folder lacks of a release, for another program to fetch; then call `commit`.

    The index and its lists are fetched here. Contents that are here and would be used are compared with their digests, so it
    reads as much as `commit` does. The plan is kept in the folder until it is committed, another one is made, or `gc` is
    called; the current release does not change.

    Args:
        reference, directory, key, allow_rollback, plain, executorch, patience: as in `pull`.

    Raises:
        As `pull`.
    """
    installed = Installed(as_path(directory))
    with open_source(reference, Patience() if patience is None else patience, 1) as source:
        options = PullOptions(key, allow_rollback, plain, executorch)
        found, _ = asked(installed, source, options)
        with installed.fetching(_text(reference)) as place:
            data = found.index if found.index is not None else installed.index_bytes(found.sha256)
            signature = source.signature(found.sha256)
            index = checked_index(installed, source, found.sha256, data, signature, options)
            current = nothing_new(installed, source, found.sha256, options) is not None
            plain = plain or (index.plain and not source.remote)
            fetches, ways = (
                ((), None) if current else _fetches(installed, source, place, index, found.sha256, plain=plain)
            )
            record = _Record("blobstore.plan.1", _text(reference), found.sha256, data, signature, ways, plain)
            with installed.locked():
                installed.deliver(place)
                installed.finish(place)
                with named(installed.incoming):
                    installed.incoming.mkdir(exist_ok=True)
                with Staging(force=True, follow=False) as staging, staging.open(installed.incoming / _PLAN) as file:
                    file.write(encode_json(record))
    return Plan(
        index.name,
        index.version,
        found.sha256,
        current,
        index.size,
        sum(one.size for one in fetches),
        fetches,
    )


def commit(
    reference: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    fetched: str | os.PathLike[str],
    *,
    key: str | os.PathLike[str] | None = None,
    allow_rollback: bool = False,
    executorch: str | None = None,
    progress: Progress | None = None,
) -> Pulled:
    """Make a planned release the current one of a folder, from fetched files. Nothing is sent to a server.

    Everything is checked as `pull` checks it: signature, age, and the digest of every file. The fetched files are
    copied and stay as they are; remove them afterwards.

    Args:
        reference: as it was given to `plan`.
        directory: the folder of the device.
        fetched: the folder of the fetched files, each named as its `Fetch.file`. Other files there are ignored.
        key, allow_rollback, executorch, progress: as in `pull`.

    Raises:
        ReleaseError: there is no plan of this reference in the folder.
        TransferError: bytes are missing in the fetched files, also if the folder lacks more than it did for the plan.
        InvalidFileError, IntegrityError: the plan, or a fetched file, is not what it must be.
        TrustError, FileAccessError: as in `pull`. In every case the old release stays the current one.
    """
    check_progress(progress)
    installed = Installed(as_path(directory))
    place = installed.incoming / _PLAN
    record = _read(place, reference, installed)
    found = Found(record.sha256, record.index)
    with (
        FetchedSource(as_path(fetched), _text(reference), found, record.signature, record.ways) as source,
        _nothing_kept_of_a_failure(installed, source.name),
    ):
        source.reference = parse_reference(reference)
        options = PullOptions(key, allow_rollback, record.plain, executorch)
        done = install(source, installed.folder, options, 1, progress)
    with contextlib.suppress(OSError):
        place.unlink()
    return done


@contextlib.contextmanager
def _nothing_kept_of_a_failure(installed: Installed, source: str) -> Iterator[None]:
    """After a failure, the next plan lists all that is missing: what was copied may be wrong, and is not checked yet."""
    try:
        yield
    except BlobStoreError:
        with contextlib.suppress(FileAccessError), installed.fetching(source) as place, named(place):
            shutil.rmtree(place)
        raise


def _read(place: Path, reference: str | os.PathLike[str], installed: Installed) -> _Record:
    advice = "plan (--plan) makes one"
    try:
        data = read_small(place, _PLAN_LIMIT)
    except FileAccessError as error:
        if os.path.lexists(place):
            raise
        raise ReleaseError(f"{installed.folder}: there is no plan here; {advice}") from error
    try:
        record = decode_json(data, _Record)
    except ValueError as error:
        raise InvalidFileError(place, f"this is not a plan: {error}; {advice}") from None
    if sha256(record.index) != record.sha256:
        raise InvalidFileError(place, f"the index in it does not have the SHA-256 {record.sha256}; {advice}")
    if record.reference != _text(reference):
        raise ReleaseError(
            f"{installed.folder}: expected a plan of {_text(reference)}, found one of {record.reference}; {advice}"
        )
    return record


def _text(reference: str | os.PathLike[str]) -> str:
    """A reference in JSON; the name of a folder need not be Unicode."""
    return parse_reference(reference).text.encode(errors="backslashreplace").decode()


def _fetches(
    installed: Installed, source: Source, place: Path, index: Index, index_sha256: str, *, plain: bool
) -> tuple[tuple[Fetch, ...], bytes | None]:
    """What to fetch, by which ways; the list of parts is stored, so that the commit finds it."""
    shopping = Shopping(installed, source, place, plain=plain, verify=True)
    shopping.add(index, index_sha256)
    if shopping.parts is not None:
        store_bytes(installed.made(place), shopping.parts)
    # as few files as possible: downloaders of a system resume long ones themselves
    longest = max((spool.wanted.size for spool in shopping.spools), default=0) + 1
    transfer = Transfer(source, 1, None, longest=longest, planned=True)
    for spool in shopping.spools:
        transfer.ask(spool, shopping.ranges.get(spool.wanted.sha256, ()))
    fetches = tuple(
        Fetch(
            source.url(wanted),
            None if (start, stop) == (0, wanted.size) else f"bytes={start}-{stop - 1}",
            stop - start,
            wanted.sha256,
            fetched_name(wanted, start, stop),
        )
        for wanted, start, stop in transfer.requests
    )
    return fetches, shopping.ways
