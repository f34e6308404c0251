"""Readers are pickled as the path of their file, and open it again where they arrive.

Nothing of the file travels, so a map of gigabytes is sent to a worker process at no cost. The file there must be the
one that was open here: a `.ptd` with digests is compared by these, any other file by its size and its time of change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from blobstore.core.errors import DataChangedError, InvalidFileError, UnsupportedOperationError
from blobstore.core.memory.digest import digest
from blobstore.core.memory.mapped_file import origin_of

__all__ = ["by_path"]

_Identity = tuple[int, int | bytes]
"""The size of a file, and a digest of its digests or when it was last changed, in nanoseconds."""


def by_path(reader: Any, opener: Callable[[str], Any], data: memoryview, recorded: memoryview | None = None) -> Any:
    """The value of a reader's `__reduce__`: `opener` opens its file, and `recorded` are bytes that identify the contents,
    if any.

    Raises:
        UnsupportedOperationError: the bytes are not a map of a file.
    """
    origin = origin_of(data)
    if origin is None:
        raise UnsupportedOperationError(
            f"{reader.name}: only a map of a file can be pickled, not one of bytes in memory; pickle the bytes"
        )
    place, size, modified = origin
    return _reopen, (type(reader), opener, place, (size, digest(recorded).xxh3_128 if recorded else modified))


def _reopen(kind: type, opener: Callable[[str], Any], path: str, identity: _Identity) -> Any:
    """Open the file of a pickled reader; DataChangedError if it is another file, or was changed."""
    try:
        reader = opener(path)
    except InvalidFileError as error:  # it was valid when the reader was pickled
        raise _changed(path, kind, identity, str(error)) from None
    reduced: Any = reader.__reduce__()
    reopened: _Identity = reduced[1][-1]
    if reopened != identity:
        raise _changed(path, kind, identity, _told(reopened))
    return reader


def _changed(path: str, kind: type, expected: _Identity, found: str) -> DataChangedError:
    return DataChangedError(
        f"{path}: the file was changed or replaced after the {kind.__name__} on it was pickled: expected "
        f"{_told(expected)}, found {found}"
    )


def _told(identity: _Identity) -> str:
    size, mark = identity
    return f"{size} bytes, " + (f"digest {mark.hex()}" if isinstance(mark, bytes) else f"changed at {mark} ns")
