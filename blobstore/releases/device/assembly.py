"""Making the files of a release from what was fetched and what is here.

Each file has a recipe: the whole object, or its parts in order, each from a spool or from a file that is here. Whoever
makes a file reads behind the threads that fetch, so hashing and decoding go on while bytes arrive. A part that turns out
wrong is fetched again, once; one from a file that is here is fetched instead.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from blobstore.core.disk.journal import sync_folder
from blobstore.core.errors import IntegrityError
from blobstore.core.memory.mapped_file import PIECE, named, open_regular
from blobstore.releases.device.installed import LocalBlob
from blobstore.releases.device.spool import Spool
from blobstore.releases.device.transfer import Transfer
from blobstore.releases.index.index import Object, Part, Way
from blobstore.releases.index.objects import ObjectWriter
from blobstore.releases.sources.source import pieces_of

__all__ = ["Recipe", "Step", "make"]


@dataclass(frozen=True)
class Step:
    """Where the bytes of one part come from.

    Attributes:
        part: the part.
        local: a blob that is here: the part itself, or what `way` is a patch against.
        spool: what is fetched.
        at: where the part, or its encoded form, lies in the spool.
        way: how it is encoded; None if it is not.
    """

    part: Part
    local: LocalBlob | None = None
    spool: Spool | None = None
    at: int = 0
    way: Way | None = None

    @property
    def fetched(self) -> tuple[int, int] | None:
        """The range of the spool that is needed."""
        if self.spool is None:
            return None
        return self.at, self.at + (self.way.stored if self.way is not None else self.part.size)


@dataclass
class Recipe:
    """How to make an object.

    Attributes:
        wanted: the object.
        plain: the spool of the object itself; its bytes replace those that turn out wrong.
        steps: its parts, in order; None to take the spool as it is.
    """

    wanted: Object
    plain: Spool
    steps: list[Step] | None = None


class _WrongError(Exception):
    """A step did not give the bytes of its part."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(reason)
        self.number = number


def make(recipe: Recipe, files: Path, transfer: Transfer) -> None:
    """Make an object; it is in its place, complete and synced, when this returns.

    Raises:
        IntegrityError: the bytes that were fetched are wrong, twice.
        TransferError, FileAccessError: fetching or writing failed.
    """
    if recipe.steps is None:
        _take_whole(recipe, files, transfer)
        return
    steps = list(recipe.steps)
    tried: set[int] = set()
    while True:
        try:
            with ObjectWriter(files) as writer:
                for number, step in enumerate(steps):
                    _pad(writer, step.part.offset)
                    _write_step(writer, number, step)
                _pad(writer, recipe.wanted.size)
                writer.finish(recipe.wanted)
            return
        except _WrongError as error:
            number, step = error.number, steps[error.number]
            name = f"{recipe.wanted.sha256}, {step.part.size} bytes at {step.part.offset}"
            # One more attempt per step: what is wrong twice was published wrong, and would be fetched for ever.
            if number in tried:
                raise IntegrityError(files / name, f"what was fetched is wrong again: {error}") from None
            if step.local is not None:  # the blob that is here may be damaged
                steps[number] = Step(step.part, None, recipe.plain, step.part.offset)
                transfer.again(recipe.plain, step.part.offset, step.part.offset + step.part.size)
            else:
                tried.add(number)
                assert step.spool is not None and step.fetched is not None  # noqa: S101 - it is here or there
                transfer.again(step.spool, *step.fetched)


def _pad(writer: ObjectWriter, end: int) -> None:
    while writer.size < end:
        writer.write(bytes(min(PIECE, end - writer.size)))


def _write_step(writer: ObjectWriter, number: int, step: Step) -> None:
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


def _pieces(step: Step) -> Iterator[bytes | memoryview]:
    size = step.part.size
    if step.spool is None:
        assert step.local is not None  # noqa: S101 - it is here or there
        yield from _local(step.local)
        return
    spool, at, stop = step.spool, step.at, step.fetched[1] if step.fetched else 0

    def read(count: int) -> bytes:
        nonlocal at
        piece = spool.read(at, min(count, stop - at))
        at += len(piece)
        return piece

    if step.way is None:
        while at < stop:
            yield read(PIECE)
        return
    from blobstore.releases.index.encoding import decode

    if step.local is None:
        yield from decode(step.way.encoding, size, read)
        return
    local = step.local
    with open_regular(local.path) as descriptor:

        def base(start: int, count: int) -> bytes:
            piece = os.pread(descriptor, count, local.offset + start)
            if len(piece) != count:
                raise ValueError(f"{local.path} was truncated")
            return piece

        yield from decode(step.way.encoding, size, read, base)


def _local(blob: LocalBlob) -> Iterator[bytes]:
    with open_regular(blob.path) as descriptor:
        yield from pieces_of(descriptor, blob.offset, blob.offset + blob.size)


def _take_whole(recipe: Recipe, files: Path, transfer: Transfer) -> None:
    """Hash the spool as it fills, and give it its place."""
    spool, wanted = recipe.plain, recipe.wanted
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
