"""The programs that are loaded on a cache, by this runtime or by ExecuTorch's own, as far as updates must know them."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blobstore.errors import InvalidFileError
from blobstore.formats.pte.program import ProgramFile, read_program
from blobstore.logical.reach import LoadedProgram
from blobstore.native import native

if TYPE_CHECKING:
    from blobstore.runtime.cache import BlobCache

__all__ = ["LoadedPrograms", "register"]

_lock = threading.Lock()  # guards the set of programs of every cache
if hasattr(os, "register_at_fork"):  # otherwise a forked child could find it locked for ever
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


class LoadedPrograms:
    """The programs that are loaded on one cache or on a cache above it. They are held weakly."""

    def __init__(self) -> None:
        self._programs: weakref.WeakSet[LoadedProgram] = weakref.WeakSet()
        self._served: dict[tuple[bytes, int], ProgramFile | None] = {}  # by path and inode

    def add(self, program: LoadedProgram) -> None:
        """Add a program of this runtime."""
        with _lock:
            self._programs.add(program)

    def find(self, cache: BlobCache) -> list[LoadedProgram]:
        """All programs that are loaded now.

        Args:
            cache: the cache that this object belongs to.
        """
        with _lock:
            programs = list(self._programs)
        return [*programs, *self._find_served(cache)]

    def _find_served(self, cache: BlobCache) -> list[LoadedProgram]:
        """The programs that ExecuTorch's own runtime has loaded while it was served the cache.

        Only their delegates are known. Those of one method of one program are taken together.
        """
        parts: dict[tuple[str, bytes, int], list[Any]] = {}
        for method, path, inode, *rest in native.served_delegates(cache._native):
            parts.setdefault((method, path, inode), []).append(rest)
        files: dict[tuple[bytes, int], ProgramFile | None] = {}
        found = []
        for (method, path, inode), delegates in parts.items():
            files[path, inode] = file = self._served.get((path, inode)) or _open_served(path, inode)
            own = {key for keys, others, _, _ in delegates for key in (*keys, *others)}
            same = {number for _, _, numbers, _ in delegates for number in numbers}
            same -= {number for _, _, _, numbers in delegates for number in numbers}
            found.append(
                LoadedProgram(
                    f"a program with a method '{method}'" if file is None else file.path,
                    functools.partial(files.get, (path, inode)),
                    lambda: cache.tensors,
                    lambda: cache._keys,
                    functools.partial(_is_shared_in, cache, same),
                    own,
                )
            )
        self._served = files  # drops the programs that are gone
        return found


def register(native_program: Any, path: Path, cache: BlobCache) -> LoadedProgram:
    """Record a program on its cache and on every base of that. Its `Program` and its methods keep the record alive."""
    loaded = LoadedProgram(
        path,
        lambda: ProgramFile(path, memoryview(native_program.file())),
        lambda: cache.tensors,
        lambda: cache._keys,
    )
    below: BlobCache | None = cache
    while below is not None:
        below._programs.add(loaded)
        below = below.base
    return loaded


def _open_served(path: bytes, inode: int) -> ProgramFile | None:
    """A program that ExecuTorch has mapped, or None if its path no longer leads to the same file."""
    try:
        name = os.fsdecode(path)
        return read_program(name) if path and Path(name).stat().st_ino == inode else None
    except (OSError, InvalidFileError):
        return None


def _is_shared_in(cache: BlobCache, ids: set[int], key: str) -> bool:
    """Whether a key belongs to a shared working copy that one of the caches with these ids has mapped."""
    owner: BlobCache | None = cache
    while owner is not None and not owner._native.owns(key):
        owner = owner.base
    return owner is not None and owner.mode == "shared" and owner.id in ids
