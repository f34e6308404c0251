"""Making the files of a release from what was fetched and what is here.

Each file has an assembly: the whole object, or its parts in order, each from a spool or from a file that is here. Whoever
makes a file reads behind the threads that fetch, so hashing and decoding go on while bytes arrive. A part that turns out
wrong is fetched again, once. If a content that is here may be to blame, the caller makes another plan without it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from blobstore.core.disk.journal import sync_folder
from blobstore.core.errors import IntegrityError
from blobstore.core.memory.mapped_file import PIECE, named, open_regular
from blobstore.releases.device.installed import LocalBlob
from blobstore.releases.device.spool import Spool
from blobstore.releases.device.transfer import Transfer
from blobstore.releases.index.index import Object
from blobstore.releases.index.objects import ObjectWriter
from blobstore.releases.index.parts import Part
from blobstore.releases.index.ways import Way
from blobstore.releases.sources.source import pieces_of

__all__ = ["Assembly", "DamagedHereError", "Piece", "make"]


@dataclass(frozen=True)
class Piece:
    """Where the bytes of one part come from.

    Attributes:
        part: the part.
        local: a content that is here: the part itself, or what `way` is a difference to.
        spool: what is fetched.
        way: where the part lies in the spool, and how it is encoded; None if nothing is fetched.
    """

    part: Part
    local: LocalBlob | None = None
    spool: Spool | None = None
    way: Way | None = None

    @property
    def fetched(self) -> tuple[int, int] | None:
        """The range of the spool that is needed."""
        return None if self.way is None else (self.way.at, self.way.at + self.way.stored)


@dataclass
class Assembly:
    """How to make an object.

    Attributes:
        wanted: the object.
        whole: the spool of the object itself, if it is fetched whole.
        steps: otherwise its parts, in order.
    """

    wanted: Object
    whole: Spool | None
    steps: list[Piece] | None


class DamagedHereError(IntegrityError):
    """A content that is here is not what it was when it was installed."""


class _WrongError(Exception):
    """A step did not give the bytes of its part."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(reason)
        self.number = number


def make(assembly: Assembly, files: Path, transfer: Transfer) -> None:
    """Make an object; it is in its place, complete and synced, when this returns.

    Raises:
        DamagedHereError: a content that is here is wrong, or may be.
        IntegrityError: the bytes that were fetched are wrong, twice.
        TransferError, FileAccessError: fetching or writing failed.
    """
    if assembly.whole is not None:
        _take_whole(assembly.wanted, assembly.whole, files, transfer)
        return
    steps = assembly.steps or []
    tried: set[int] = set()
    while True:
        try:
            with ObjectWriter(files) as writer:
                for number, step in enumerate(steps):
                    _pad(writer, step.part.offset)
                    _write_step(writer, number, step)
                _pad(writer, assembly.wanted.size)
                writer.finish(assembly.wanted)
            return
        except _WrongError as error:
            step = steps[error.number]
            name = f"{assembly.wanted.sha256}, {step.part.size} bytes at {step.part.offset}"
            # One more attempt per step: what is wrong twice was published wrong, and would be fetched for ever.
            if step.spool is None or step.fetched is None or error.number in tried:
                if step.local is not None:
                    raise DamagedHereError(step.local.path, f"a content in it is not what it was: {error}") from None
                raise IntegrityError(files / name, f"what was fetched is wrong again: {error}") from None
            tried.add(error.number)
            transfer.again(step.spool, *step.fetched)


def _pad(writer: ObjectWriter, end: int) -> None:
    while writer.size < end:
        writer.write(bytes(min(PIECE, end - writer.size)))


def _write_step(writer: ObjectWriter, number: int, step: Piece) -> None:
    hasher = hashlib.sha256()
    size = 0
    try:
        for piece in _pieces(step):
            hasher.update(piece)
            size += len(piece)
            writer.write(piece)
    except ValueError as error:  # DecodeError, without importing what decodes
        if isinstance(error, IntegrityError):
            raise
        raise _WrongError(number, str(error)) from None
    if (size, hasher.hexdigest()) != (step.part.size, step.part.sha256):
        raise _WrongError(number, f"expected the SHA-256 {step.part.sha256}, found {hasher.hexdigest()}")


def _pieces(step: Piece) -> Iterator[bytes | memoryview]:
    if step.spool is None or step.way is None:
        assert step.local is not None  # noqa: S101 - it is here or there
        yield from _local(step.local)
        return
    spool, at, stop = step.spool, step.way.at, step.way.at + step.way.stored

    def read(count: int) -> bytes:
        nonlocal at
        piece = spool.read(at, min(count, stop - at))
        at += len(piece)
        return piece

    if step.way.encoding == "raw":
        while at < stop:
            yield read(PIECE)
        return
    with contextlib.ExitStack() as stack:
        descriptor = None if step.local is None else stack.enter_context(open_regular(step.local.path))
        yield from _decoded(step, read, descriptor)


def _decoded(step: Piece, read: Callable[[int], bytes], descriptor: int | None) -> Iterator[memoryview]:
    """The bytes of a part, chunk by chunk as they arrive; `descriptor` is the file that has its base."""
    from blobstore.core.codec.blobs import CHUNK, LARGEST_CHUNK, decode

    assert step.way is not None  # noqa: S101 - the caller checked
    for start in range(0, step.part.size, CHUNK):
        size = min(CHUNK, step.part.size - start)
        head = read(4)
        length = int.from_bytes(head, "little")
        if len(head) != 4 or not 0 < length <= LARGEST_CHUNK:
            raise ValueError(f"a chunk of {length} bytes at byte {start}")
        base = None
        if descriptor is not None and step.local is not None:
            piece = os.pread(descriptor, size, step.local.offset + start)
            if len(piece) != size:
                raise ValueError(f"{step.local.path} was truncated")
            base = memoryview(piece)
        yield from decode(step.way.encoding, size, memoryview(head + read(length)), base)
    if read(1):
        raise ValueError("bytes behind the last chunk")


def _local(blob: LocalBlob) -> Iterator[bytes]:
    with open_regular(blob.path) as descriptor:
        yield from pieces_of(descriptor, blob.offset, blob.offset + blob.size)


def _take_whole(wanted: Object, spool: Spool, files: Path, transfer: Transfer) -> None:
    """Hash the spool as it fills, and give it its place."""
    early = spool.early_sync()  # for both attempts, because the system reports a failure only once
    for attempt in range(2):
        hasher = hashlib.sha256()
        for at in range(0, wanted.size, PIECE):
            hasher.update(spool.read(at, min(PIECE, wanted.size - at)))
            early.written(at)
        early.wait()
        if hasher.hexdigest() == wanted.sha256:
            early.finish()
            spool.take(files / wanted.sha256)
            with named(files):
                sync_folder(files)
            return
        if attempt == 0:
            transfer.again(spool, 0, wanted.size)
    spool.discard()
    raise IntegrityError(
        files / wanted.sha256,
        f"what was fetched is wrong, twice: expected the SHA-256 {wanted.sha256}, found {hasher.hexdigest()}",
    )
