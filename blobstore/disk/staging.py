"""Writing files so that each of them, and a group of them, is old or new, whole, whatever happens in between."""

from __future__ import annotations

import contextlib
import errno
import functools
import inspect
import io
import os
import secrets
import shutil
import stat
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, cast

try:
    import fcntl
except ImportError:  # Windows has no locks that go with their process; nothing is swept there
    fcntl = None  # type: ignore[assignment]

from blobstore.disk.journal import JOURNAL, TEMPORARY, Identity, Journal, Move, identity, sync_folder
from blobstore.disk.kinds import Format, check_replaceable
from blobstore.errors import FileAccessError, OutputPathError, UnsupportedDataError
from blobstore.memory.mapped_file import Descriptor, as_path, same_file

__all__ = ["Progress", "ScratchFolder", "Staging", "check_progress", "exclusive", "named", "recover", "refuse_inputs"]

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


_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL}
"""What file systems say that have no hard links, or not to this file; then nothing can be put back."""

_BUFFER = 1 << 20  # gathers small writes; larger ones go straight to the file
_SYNC = 1 << 26  # how much is written before the disk is put to work beside the writing


class Staging:
    """A group of output files that take their places together, or not at all.

    Each file is written beside its target under a temporary name. When the `with` block ends without an error, all
    are flushed to the disk and then renamed, in the order in which they were staged; otherwise they are removed and
    whatever stood at the targets is untouched. Each rename is atomic. A group of several files has a journal, which is
    on the disk before the first rename: if the process is killed between two of them, `recover` does the others.

    A target that is a link stays one: the file that it leads to is replaced. A file that is replaced gives the new one
    its permissions, and its owner if this process may set that; another new file follows the umask.

    The next writer into a folder calls `recover` for what a killed process left there.

    Args:
        progress: told of every write.
        force: replace files of any format.
        folder: gets a copy of the journal, as the folders of the files do: `recover` will be called for it.
    """

    def __init__(self, progress: Progress | None = None, *, force: bool = False, folder: Path | None = None) -> None:
        self._staged: list[_Staged] = []
        self._journal: list[_Staged] = []  # its copies
        self._folders: dict[Path, None] = {}  # `__del__` needs all three
        check_progress(progress)
        self._progress, self._force = progress, force
        if folder is not None:
            self._enter(Path(os.path.realpath(folder)))

    @contextlib.contextmanager
    def open(
        self, path: str | os.PathLike[str], nbytes: int = 0, *, kind: Format = Format.UNKNOWN, again: bool = False
    ) -> Iterator[BinaryIO]:
        """Stage a file: the `with` block writes it; it takes its place later. Progress counts up to `nbytes`.

        Args:
            path: the target.
            nbytes: about how many bytes it will have.
            kind: the format of what is written; UNKNOWN replaces files of any.
            again: the target is staged already, and this file takes the place of that one at its own turn.

        Raises:
            FileAccessError: the folder is missing or may not be written, the target is not a regular file, or writing
                failed (a full disk, say). Names the target, not the temporary file.
            OutputPathError: this target is staged already; or a file of another format is there.
        """
        target = as_path(path)
        place = Path(os.path.realpath(target))
        if not again and any(place == staged.place for staged in self._staged):
            raise OutputPathError(f"{target}: two outputs would have this path")
        check_replaceable(target, kind, force=self._force or kind is Format.UNKNOWN)
        with named(target):
            self._enter(place.parent)
            # Known before it is made, so that no exception can come in between, not even one of a signal handler.
            staged = _Staged(target, place)
            self._staged.append(staged)
            output = staged.make(f"writing {target.name}", nbytes, self._progress)
            file = io.BufferedWriter(output, _BUFFER)
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

    def __del__(self) -> None:
        if hasattr(self, "_folders"):  # an exception may have come before it was complete
            self._discard()  # what an exception in the middle of the clean-up left

    def _enter(self, folder: Path) -> None:
        """Clean up a folder before the first file is staged in it."""
        if folder not in self._folders:
            recover(folder)
            self._folders[folder] = None

    def _commit(self) -> None:
        for staged in self._staged:
            with named(staged.target):
                staged.sync()
        if len(self._staged) > 1 and fcntl is not None:
            self._write_journal()
        try:
            for staged in self._staged:
                with named(staged.target):
                    staged.keep_old()
                    os.replace(staged.temporary, staged.place)
            # Before the old files go: to free them takes the system long, and a sync would wait for it.
            self._sync_folders(staged.place.parent for staged in self._staged)
        except BaseException:
            put_back = [staged.put_back() for staged in reversed(self._staged)]  # all of them, whatever becomes of one
            if not all(put_back) and self._journal:
                self._leave()
            raise

    def _write_journal(self) -> None:
        """Put a copy of the journal into every folder of the group, onto the disk."""
        seen: dict[Path, Identity | None] = {}
        moves = []
        for staged in self._staged:
            with named(staged.target):
                before = seen[staged.place] if staged.place in seen else identity(staged.place)
                seen[staged.place] = after = identity(staged.temporary)
            moves.append(Move(staged.place, staged.temporary, staged.backup, before, after))
        first, *others = self._folders
        journal = Journal(moves, [first, *others])
        name = f".blobstore-{secrets.token_hex(12)}.journal"
        for folder in others:
            self._write_copy(journal, folder / name)
        self._sync_folders(self._folders)
        self._write_copy(journal, first / name)
        self._sync_folders([first])

    def _write_copy(self, journal: Journal, path: Path) -> None:
        with named(path.parent):
            copy = _Staged(path.parent, path)
            self._journal.append(copy)
            file = io.BufferedWriter(copy.make("", 0, None))
            file.write(journal.text(path.parent))
            file.detach()
            copy.sync()
            os.replace(copy.temporary, copy.place)

    @staticmethod
    def _sync_folders(folders: Iterable[Path]) -> None:
        for folder in dict.fromkeys(folders):
            with named(folder):
                sync_folder(folder)

    def _leave(self) -> None:
        """Leave a group that could not be put back to `recover`, with its journal and all files."""
        for staged in (*self._journal, *self._staged):
            staged.close()
        self._journal.clear()
        self._staged.clear()

    def _discard(self) -> None:
        """Remove what is left of the temporary files. None of it is needed: nothing that fails here is an error."""
        while self._journal:
            self._journal[-1].remove()
            del self._journal[-1]
        while self._staged:
            self._staged[0].discard()
            del self._staged[0]


class _Staged:
    """A file on its way: `temporary` becomes `place`, the old file is at `backup` until that is certain."""

    def __init__(self, target: Path, place: Path) -> None:
        self.target, self.place = target, place
        self.temporary, self.backup = _beside(place), _beside(place)
        self._output: _Output | None = None
        self._lock = _Lock()  # of the backup
        self._had_old: bool | None = None  # not known before `keep_old`

    def make(self, what: str, total: int, progress: Progress | None) -> _Output:
        old = _status(self.place)
        mode = 0o666 if old is None else stat.S_IMODE(old.st_mode) & 0o777
        self._output = _Output(self.temporary, mode, what, total, progress)
        while not (_lock(self._output.fileno()) and os.path.lexists(self.temporary)):  # another's `recover` came first
            self._output.close()
            with contextlib.suppress(OSError):
                self.temporary.unlink(missing_ok=True)
            self.temporary = _beside(self.place)
            self._output = _Output(self.temporary, mode, what, total, progress)
        if old is not None:
            _take_over(self._output.fileno(), old, mode)
        return self._output

    def sync(self) -> None:
        assert self._output is not None  # noqa: S101 - it was made before the group could be complete
        self._output.sync()

    def keep_old(self) -> None:
        """Give the old file a second name, if there is one and the file system has links."""
        try:
            os.lstat(self.place)
        except FileNotFoundError:
            self._had_old = False
            return
        self._had_old = True
        with contextlib.suppress(OSError):  # so that nobody takes the backup for one that was left behind
            self._lock.take(self.place, shared=True)
        try:
            os.link(self.place, self.backup, follow_symlinks=False)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise

    def put_back(self) -> bool:
        """Undo the rename if it happened: what to do depends on what is there, wherever the commit was interrupted.

        Returns:
            Whether that was possible; always true where the file system has no links, and so no backup.
        """
        if self._had_old is None or os.path.lexists(self.temporary):
            return True
        try:
            if not self._had_old:
                try:
                    os.replace(self.place, self.temporary)
                except OSError:  # a full disk may have no room for the name
                    self.place.unlink(missing_ok=True)
            elif os.path.lexists(self.backup):
                os.replace(self.backup, self.place)
        except OSError:
            return False
        return True

    def remove(self) -> None:
        """Remove the new file, too."""
        with contextlib.suppress(OSError):
            self.place.unlink(missing_ok=True)
        self.discard()

    def discard(self) -> None:
        for path in (self.temporary, self.backup):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Close what is open; nothing that fails here is an error."""
        with contextlib.suppress(OSError):
            self._lock.close()
        if self._output is not None:
            with contextlib.suppress(OSError):
                self._output.close()


class _Output(io.FileIO):
    """A new file. Its bytes go to the disk while more are written, so that little is left to wait for at the end.

    It is an object that has the descriptor from the moment in which the descriptor exists, so none is ever lost.
    """

    _syncing: threading.Thread | None = None

    def __init__(self, path: Path, mode: int, what: str, total: int, progress: Progress | None) -> None:
        self._what, self._total, self._progress = what, total, progress
        self._done = self._synced = 0
        self._failure: OSError | None = None
        # "x" is O_CREAT | O_EXCL, which does not follow a link either
        super().__init__(path, "x", opener=functools.partial(os.open, mode=mode))

    def write(self, data: Any, /) -> int:
        written = super().write(data)
        self._done += written
        if self._done - self._synced >= _SYNC and not (self._syncing and self._syncing.is_alive()):
            self._synced = self._done
            self._syncing = threading.Thread(target=self._sync)
            with contextlib.suppress(RuntimeError):  # as many threads as there may be: `sync` does all of it
                self._syncing.start()
        if self._progress:
            self._progress(self._what, min(self._done, self._total), self._total)
        return written

    def sync(self) -> None:
        """Wait until all that was written is on the disk."""
        self._wait()
        if self._failure:  # the system reports a failure only once
            raise self._failure
        os.fsync(self.fileno())

    def close(self) -> None:
        self._wait()
        super().close()

    def _sync(self) -> None:
        try:
            getattr(os, "fdatasync", os.fsync)(self.fileno())
        except OSError as error:
            self._failure = error

    def _wait(self) -> None:
        if self._syncing and self._syncing.is_alive():
            self._syncing.join()


class ScratchFolder:
    """A temporary folder inside another; a context manager that gives its path. It goes as temporary files do."""

    def __init__(self, directory: Path) -> None:
        self.path = _beside(directory / "folder")
        self._lock = _Lock()

    def __enter__(self) -> Path:
        recover(self.path.parent)
        while True:
            self.path.mkdir(0o700)
            with contextlib.suppress(FileNotFoundError):
                if self._lock.take(self.path) and os.path.lexists(self.path):
                    return self.path
            self._lock.close()  # another's `recover` came first
            self.path = _beside(self.path)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._discard()

    def __del__(self) -> None:
        if hasattr(self, "_lock"):
            self._discard()

    def _discard(self) -> None:
        if os.path.lexists(self.path):
            shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


class _Lock(Descriptor):
    """A lock on a file or a folder, of this process and of no other; the system releases it when the process ends."""

    def take(self, path: Path, *, shared: bool = False, wait: bool = False) -> bool:
        """Whether it could be had; always true where the file system has no locks.

        Raises:
            OSError: the file cannot be opened.
        """
        return _lock(self.open(path, getattr(os, "O_NOFOLLOW", 0)), shared=shared, wait=wait)


def _lock(descriptor: int, *, shared: bool = False, wait: bool = False) -> bool:
    """Lock a file; False if another process has locked it."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        return True  # this file system has no locks
    return True


@contextlib.contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Keep other processes that ask for the same out of a folder; waits for the one that is in it."""
    lock = _Lock()
    try:
        with named(directory), contextlib.suppress(PermissionError):
            lock.take(Path(os.path.realpath(directory)), wait=True)
        yield
    finally:
        lock.close()


def recover(folder: Path) -> None:
    """Clean up what killed processes left in a folder: finish their groups of files, and remove their temporary files.

    What belongs to another user, or to a process that still works, stays.

    Raises:
        FileAccessError: a group can neither be finished nor undone.
    """
    if fcntl is None:
        return
    try:
        with os.scandir(folder) as entries:
            hidden = [Path(one.path) for one in entries if one.name.startswith(".blobstore-") and not one.is_symlink()]
    except OSError:
        return
    # A list, so that each is tried.
    busy = [path for path in hidden if JOURNAL.fullmatch(path.name) and not _finish(path)]
    # Temporary files have no lock any more while another process finishes their group.
    for path in [] if busy else hidden:
        if TEMPORARY.fullmatch(path.name):
            with contextlib.suppress(OSError), _abandoned(path) as abandoned:
                if abandoned and path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                elif abandoned:
                    path.unlink()


def _finish(path: Path) -> bool:
    """Finish the group of a journal; False if a process of this user is at work on it."""
    with named(path), contextlib.suppress(FileNotFoundError), _abandoned(path) as abandoned:
        if not abandoned:
            return path.lstat().st_uid != os.geteuid()
        journal = Journal.read(path)
        if journal is not None:
            if os.path.lexists(journal.folders[0] / path.name):
                journal.finish()
            for left in journal.leftovers(path.name):
                with contextlib.suppress(OSError):
                    left.unlink(missing_ok=True)
    return True


@contextlib.contextmanager
def _abandoned(path: Path) -> Iterator[bool]:
    """Whether a file is of this user, and no process has it locked; while this lasts it is locked here."""
    lock = _Lock()
    try:
        yield path.lstat().st_uid == os.geteuid() and lock.take(path)
    finally:
        lock.close()


def _beside(target: Path) -> Path:
    """A new name in the same folder; a short one, as the target's own may be as long as names can be."""
    return target.with_name(f".blobstore-{secrets.token_hex(12)}.tmp")


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _take_over(descriptor: int, old: os.stat_result, mode: int) -> None:
    """Give a new file the owner, as far as this process may, and then the permissions of the one that it replaces."""
    new = os.fstat(descriptor)
    if hasattr(os, "fchown") and (new.st_uid, new.st_gid) != (old.st_uid, old.st_gid):
        with contextlib.suppress(OSError):
            os.fchown(descriptor, old.st_uid, old.st_gid)
    if hasattr(os, "fchmod"):
        os.fchmod(descriptor, mode)


@contextlib.contextmanager
def named(target: Path) -> Iterator[None]:
    """Turn an OSError into a FileAccessError that names the file that the user asked for."""
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
