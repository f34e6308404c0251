"""Writing files so that each is the old one or the new one, whole, whatever happens in between."""

from __future__ import annotations

import contextlib
import errno
import inspect
import io
import os
import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, cast

from blobstore.errors import FileAccessError, OutputPathError, UnsupportedDataError
from blobstore.mapped_file import as_path, same_file

__all__ = ["Progress", "Staging", "check_progress", "named", "refuse_inputs"]

Progress = Callable[[str, int, int], None]
"""Told what is being done, how many bytes of it are done, and of how many."""


def check_progress(progress: Progress | None) -> None:
    """Raise UnsupportedDataError unless this can be called like a `Progress`, or is None."""
    if progress is None:
        return
    try:
        inspect.signature(progress).bind("", 0, 0)
    except TypeError:
        raise UnsupportedDataError(
            f"progress must be callable as progress(what, done, total), not {progress!r}"
        ) from None
    except ValueError:  # written in C, and does not tell
        pass


_BUFFER = 1 << 20  # gathers small writes; larger ones go straight to the file
_SYNC = 1 << 26  # how much is written before the disk is put to work beside the writing


class Staging:
    """A group of output files that take their places together, or not at all.

    Each file is written beside its target under a temporary name. When the `with` block ends without an error, all
    are flushed to the disk and then renamed; otherwise they are removed and whatever stood at the targets is
    untouched. (Each rename is atomic; a power cut between two of them leaves the first new and the second old.)

    Args:
        progress: told of every write.
    """

    def __init__(self, progress: Progress | None = None) -> None:
        check_progress(progress)
        self._progress = progress
        self._staged: dict[Path, tuple[Path, Path, _Output]] = {}  # by the target, without links in its folder

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
            output = _Output(temporary, f"writing {target.name}", nbytes, self._progress)
        self._staged[place] = (target, temporary, output)
        file = io.BufferedWriter(output, _BUFFER)
        with named(target):
            yield cast(BinaryIO, file)
            file.flush()
        file.detach()  # the output is closed when the group is complete

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
        for target, _, output in self._staged.values():
            with named(target):
                output.sync()
                output.close()
        with contextlib.ExitStack() as backups, contextlib.ExitStack() as undo:
            for number, (target, temporary, _) in enumerate(self._staged.values(), 1):
                with named(target):
                    # once the last one is in its place, nothing is left that can fail
                    put_back = _keep_old(target, backups) if number < len(self._staged) else None
                    os.replace(temporary, target)
                if put_back:
                    undo.callback(put_back)
            undo.pop_all()
            # before the old files go: the system must not have to free them while it is waited for
            for folder in {target.parent for target, _, _ in self._staged.values()}:
                with contextlib.suppress(OSError):  # some file systems cannot sync a folder
                    descriptor = os.open(folder, os.O_RDONLY)
                    try:
                        os.fsync(descriptor)
                    finally:
                        os.close(descriptor)

    def _discard(self) -> None:
        for _, temporary, output in self._staged.values():
            with contextlib.suppress(OSError):
                output.close()
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        self._staged.clear()


class _Output(io.RawIOBase):
    """A new file. Its bytes go to the disk while more are written, so that little is left to wait for at the end."""

    def __init__(self, path: Path, what: str, total: int, progress: Progress | None) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666)
        self._what, self._total, self._progress = what, total, progress
        self._done = self._synced = 0
        self._syncing: threading.Thread | None = None
        self._failure: OSError | None = None

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def tell(self) -> int:
        return self._done  # it is only written to, from its start

    def write(self, data: Any, /) -> int:
        written = os.write(self._descriptor, data)
        self._done += written
        if self._done - self._synced >= _SYNC and not (self._syncing and self._syncing.is_alive()):
            self._synced = self._done
            self._syncing = threading.Thread(target=self._sync)
            self._syncing.start()
        if self._progress:
            self._progress(self._what, min(self._done, self._total), self._total)
        return written

    def sync(self) -> None:
        """Wait until all that was written is on the disk."""
        self._wait()
        if self._failure:  # the system tells of it once only
            raise self._failure
        os.fsync(self._descriptor)

    def close(self) -> None:
        if not self.closed:
            self._wait()
            os.close(self._descriptor)
        super().close()

    def _sync(self) -> None:
        try:
            getattr(os, "fdatasync", os.fsync)(self._descriptor)
        except OSError as error:
            self._failure = error

    def _wait(self) -> None:
        if self._syncing:
            self._syncing.join()


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
