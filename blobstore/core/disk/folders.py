"""Folders for outputs, which are gone again if writing fails."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from blobstore.core.errors import FileAccessError

__all__ = ["folders"]


@contextlib.contextmanager
def folders(directories: Iterable[Path]) -> Iterator[None]:
    """Make folders. If an error is raised inside, those that were missing before are removed again."""
    made: list[Path] = []
    try:
        for directory in directories:
            try:
                for folder in [*reversed(directory.parents), directory]:
                    if not folder.exists():
                        made.append(folder)
                        folder.mkdir(exist_ok=True)
                if not directory.is_dir():
                    raise NotADirectoryError(20, os.strerror(20))
            except OSError as error:
                raise FileAccessError(directory, error) from None
        yield
    except BaseException:
        for folder in reversed(made):
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise
