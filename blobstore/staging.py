"""Writing files so that each is the old one or the new one, whole, whatever happens in between."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, cast

from blobstore.errors import FileAccessError, OutputPathError
from blobstore.mapped_file import as_path, same_file

__all__ = ["Progress", "Staging", "named", "refuse_inputs"]

Progress = Callable[[str, int, int], None]
"""Told what is being done, how many bytes of it are done, and of how many."""

_BUFFER = 1 << 20  # gathers small writes; larger ones go straight to the file


class Staging:
    """A group of output files that take their places together, or not at all.

    Each file is written beside its target under a temporary name. When the `with` block ends without an error, all
    are flushed to the disk and then renamed; otherwise they are removed and whatever stood at the targets is
    untouched. (Each rename is atomic; a power cut between two of them leaves the first new and the second old.)

    Args:
        progress: told of every write.
    """

    def __init__(self, progress: Progress | None = None) -> None:
        self._progress = progress
        self._staged: dict[Path, tuple[Path, Path, BinaryIO]] = {}  # by the target, without links in its folder

    @contextlib.contextmanager
    def open(self, path: str | os.PathLike[str], nbytes: int = 0) -> Iterator[BinaryIO]:
        """Stage a file: the `with` block writes it; it takes its place later. Progress counts up to `nbytes`.

        Raises:
            FileAccessError: the folder is missing or may not be written, the target is a folder, or writing failed
                (a full disk, say). Names the target, not the temporary file.
            OutputPathError: this target is staged already.
        """
        target = as_path(path)
        place = Path(os.path.realpath(target.parent), target.name)
        if place in self._staged:
            raise OutputPathError(f"{target}: two outputs would have this path")
        with named(target):
            if target.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            temporary = _beside(target)
            file = temporary.open("xb", buffering=_BUFFER)
        self._staged[place] = (target, temporary, file)
        with named(target):
            if self._progress:
                yield cast(BinaryIO, _Counted(file, f"writing {target.name}", nbytes, self._progress))
            else:
                yield file
            file.flush()

    def __enter__(self) -> Staging:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._commit()
        finally:
            self._discard()

    def _commit(self) -> None:
        for target, _, file in self._staged.values():
            with named(target):
                os.fsync(file.fileno())
                file.close()
        with contextlib.ExitStack() as backups, contextlib.ExitStack() as undo:
            for number, (target, temporary, _) in enumerate(self._staged.values(), 1):
                with named(target):
                    # once the last one is in its place, nothing is left that can fail
                    put_back = _keep_old(target, backups) if number < len(self._staged) else None
                    os.replace(temporary, target)
                if put_back:
                    undo.callback(put_back)
            undo.pop_all()
        for folder in {target.parent for target, _, _ in self._staged.values()}:
            with contextlib.suppress(OSError):  # some file systems cannot sync a folder
                descriptor = os.open(folder, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)

    def _discard(self) -> None:
        for _, temporary, file in self._staged.values():
            with contextlib.suppress(OSError):
                file.close()
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        self._staged.clear()


class _Counted:
    """A file that tells how much was written to it."""

    def __init__(self, file: BinaryIO, what: str, total: int, progress: Progress) -> None:
        self._file, self._what, self._total, self._progress, self._done = file, what, total, progress, 0

    def write(self, data: bytes | memoryview) -> int:
        written = self._file.write(data)
        self._done += len(data)
        self._progress(self._what, min(self._done, self._total), self._total)
        return written


def _beside(target: Path) -> Path:
    """A new name in the same folder; a short one, as the target's own may be as long as names can be."""
    return target.with_name(f".blobstore-{secrets.token_hex(12)}.tmp")


def _keep_old(target: Path, backups: contextlib.ExitStack) -> Callable[[], None] | None:
    """What puts back what is at `target` now, for as long as `backups` is open; None if that is not possible."""
    if not os.path.lexists(target):
        return target.unlink
    backup = _beside(target)
    try:
        os.link(target, backup, follow_symlinks=False)
    except OSError:  # some file systems have no links
        return None
    backups.callback(backup.unlink, missing_ok=True)
    return lambda: os.replace(backup, target)


@contextlib.contextmanager
def named(target: Path) -> Iterator[None]:
    """Give an OSError the name of the file that the user asked for."""
    try:
        yield
    except FileAccessError:
        raise
    except OSError as error:
        raise FileAccessError(target, error) from None


def refuse_inputs(outputs: Iterable[Path], inputs: Collection[Path]) -> None:
    """Raise OutputPathError if an output is one of the inputs."""
    for output in outputs:
        for source in inputs:
            if same_file(output, source):
                raise OutputPathError(f"{output}: the output is one of the inputs, {source}")
