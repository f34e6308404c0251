"""What two readers say about the same bytes, and files in memory that have these bytes."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from blobstore.core.errors import BlobStoreError

KIND, ANSWER, KEPT = b"\n== answers ==\n", b"\n== answer ==\n", b"== kept ==\n"
"""In the bytes of a server: what ends the reference, divides answers, and begins one after which the connection stays."""


class DisagreementError(Exception):
    """Two readers of one format disagree about a file, or one changed what it must not."""


class MemoryFile:
    """Bytes as a file in memory, which any reader can open by its path."""

    def __init__(self, data: bytes, suffix: str = "") -> None:
        self._descriptor = os.memfd_create(f"fuzz{suffix}")
        os.write(self._descriptor, data) if data else None
        self.path = Path(f"/proc/self/fd/{self._descriptor}")

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder that goes again."""
    return tempfile.TemporaryDirectory(prefix="fuzz-")


def answer(read: Callable[[], Any]) -> Any:
    """The result of a reader, or its error."""
    try:
        return read()
    except BlobStoreError as error:
        return error


def agree(one: Any, other: Any, what: str) -> None:
    """Raise DisagreementError unless both refuse the bytes, or give the same."""
    refused = isinstance(one, BlobStoreError), isinstance(other, BlobStoreError)
    if refused == (True, True) or (refused == (False, False) and one == other):
        return
    raise DisagreementError(f"{what}: Python gives {one!r:.300}, C++ gives {other!r:.300}")


def insist(sound: bool, what: str) -> None:
    """Raise DisagreementError unless something is sound."""
    if not sound:
        raise DisagreementError(what)


def tree(folder: Path) -> dict[str, bytes | str | None]:
    """All that is below a folder by its relative path: what a file holds, or where a link leads."""

    def content(path: Path) -> bytes | str | None:
        return str(path.readlink()) if path.is_symlink() else path.read_bytes() if path.is_file() else None

    return {path.relative_to(folder).as_posix(): content(path) for path in sorted(folder.rglob("*"))}
