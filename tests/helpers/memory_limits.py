"""Groups of processes with a limit of memory (cgroup), for tests and benchmarks."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

_VERSION_1 = Path("/sys/fs/cgroup/memory")
_VERSION_2 = Path("/sys/fs/cgroup")
_numbers = count()


class Group:
    """Processes that have a limit of memory together. It counts the pages of the files that they read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(self, pid: int) -> None:
        """Move a process into the group. What it has in memory already does not count."""
        (self._folder / "cgroup.procs").write_text(str(pid), encoding="ascii")


@contextmanager
def group(nbytes: int) -> Iterator[Group]:
    """A group with that much memory. Its processes must end before it does.

    Raises:
        OSError: this process may not make one.
    """
    version_1 = _VERSION_1.is_dir()
    folder = (_VERSION_1 if version_1 else _VERSION_2) / f"blobstore-{os.getpid()}-{next(_numbers)}"
    folder.mkdir()
    try:
        limit = folder / ("memory.limit_in_bytes" if version_1 else "memory.max")
        with limit.open("r+", encoding="ascii") as file:  # which is there if the group may have a limit
            file.write(str(nbytes))
        yield Group(folder)
    finally:
        folder.rmdir()


def available() -> bool:
    """Whether this process may make a group."""
    try:
        with group(1 << 30):
            return True
    except OSError:
        return False
