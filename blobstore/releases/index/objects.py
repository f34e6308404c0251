"""Files that are named by their digest, written so that they appear complete."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from pathlib import Path
from typing import Any

from blobstore.core.disk.journal import sync_folder
from blobstore.core.disk.locks import create_locked
from blobstore.core.disk.output import Output
from blobstore.core.errors import IntegrityError
from blobstore.core.memory.mapped_file import PIECE, named, open_regular
from blobstore.releases.index.index import Object

__all__ = ["ObjectWriter", "store_bytes", "store_file"]


class ObjectWriter(io.RawIOBase):
    """A new object: what is written to it, and then its digest and its name.

    The `with` block calls `finish`; without that the object is dropped. Immutable files that nothing refers to do no
    harm, so an object is in its place before anything names it.

    Args:
        folder: where it goes.

    Raises:
        FileAccessError: writing fails, here or in any method.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder, self._hash, self.size = folder, hashlib.sha256(), 0
        self._temporary: Path | None = None
        self._output: Output | None = None

        def create(path: Path) -> int:
            if self._output is not None:
                self._output.close()
            self._temporary = path
            self._output = Output(path, 0o666, "", 0, None)
            return self._output.fileno()

        with named(folder):
            create_locked(folder / "object", create)

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        assert self._output is not None  # noqa: S101 - it is open
        view = memoryview(data).cast("B")
        self._hash.update(view)
        with named(self._folder):
            at = 0
            while at < len(view):
                at += self._output.write(view[at:])
        self.size += len(view)
        return len(view)

    def finish(self, expected: Object | None = None) -> Object:
        """Bring the bytes to the disk and give them their name.

        Args:
            expected: what must have been written.

        Raises:
            IntegrityError: something else was written. It is dropped.
        """
        assert self._output is not None and self._temporary is not None  # noqa: S101 - it is open
        done = Object(self._hash.hexdigest(), self.size)
        if expected is not None and done != expected:
            raise IntegrityError(
                self._folder / expected.sha256,
                f"expected {expected.size} bytes with the SHA-256 {expected.sha256}, found {done.size} with {done.sha256}",
            )
        place = self._folder / done.sha256
        with named(place):
            self._output.sync()
            os.replace(self._temporary, place)
            self._temporary = None
            sync_folder(self._folder)
        return done

    def close(self) -> None:
        if self._temporary is not None:
            with contextlib.suppress(OSError):
                self._temporary.unlink(missing_ok=True)
            self._temporary = None
        if self._output is not None:
            with contextlib.suppress(OSError):
                self._output.close()
        super().close()


def store_bytes(folder: Path, data: bytes) -> Object:
    """Make an object of some bytes."""
    with ObjectWriter(folder) as writer:
        writer.write(data)
        return writer.finish()


def store_file(folder: Path, path: Path) -> Object:
    """Make an object of a file.

    Raises:
        FileAccessError: the file cannot be read, or writing fails.
    """
    with open_regular(path) as descriptor, ObjectWriter(folder) as writer:
        while piece := os.read(descriptor, PIECE):
            writer.write(piece)
        return writer.finish()
