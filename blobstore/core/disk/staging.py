"""Writing a group of files so that all of them are old or all of them are new, and complete, whatever happens."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, cast

from blobstore.core.disk.journal import Identity, Journal, Move, identity, sync_folder
from blobstore.core.disk.kinds import Format, check_replaceable
from blobstore.core.disk.locks import HAS_LOCKS, Lock, create_locked
from blobstore.core.disk.names import journal_name, temporary_beside
from blobstore.core.disk.output import Output
from blobstore.core.disk.progress import Progress, check_progress
from blobstore.core.disk.recovery import ScratchFolder, recover
from blobstore.core.errors import FileAccessError, OutputPathError
from blobstore.core.memory.mapped_file import as_path, named, which_file

__all__ = ["Staging", "check_writable", "refuse_inputs"]

_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL}
"""Errors of file systems without hard links, or without one to this file; then the old file cannot be put back."""

_BUFFER = 1 << 20  # gathers small writes; larger ones go straight to the file


class Staging:
    """A group of output files that take their places together, or not at all.

    Each file is written beside its target under a temporary name. When the `with` block ends without an error, all
    files are synced to the disk and then renamed, in the order in which they were staged. After an error they are
    removed, and the files at the targets are untouched. Each rename is atomic. A group of several files has a journal,
    which is on the disk before the first rename: if the process is killed between two renames, `recover` does the rest.

    If a target is a link, the link stays and the file that it leads to is replaced. A new file takes the permissions of
    the file that it replaces, and its owner if this process may set that; where nothing is replaced, the umask applies.

    Before the first file is staged in a folder, `recover` cleans up what killed processes left there.

    Args:
        progress: called after every write.
        force: replace files of any format.
        folder: gets a copy of the journal like the folders of the files, so that `recover` on it finishes the group.
        many: write the files below `folder` in one temporary folder in it, and the journal in `folder` alone. That takes no open
            file for each, and the same time for each, however many there are.
        dry_run: check the targets, accept what is written, and change nothing on the disk.
        follow: whether the file that a link at a target leads to is replaced. If not, a link is a FileAccessError, as for the
            library's own records: it never makes a link in their place.
    """

    def __init__(
        self,
        progress: Progress | None = None,
        *,
        force: bool = False,
        folder: Path | None = None,
        many: bool = False,
        dry_run: bool = False,
        follow: bool = True,
    ) -> None:
        self._staged: list[_Staged] = []
        self._places: set[Path] = set()
        self._clean: set[Path] = set()
        self._scratch: ScratchFolder | None = None
        self._journal: list[_Staged] = []  # its copies
        self._folders: dict[Path, None] = {}  # the last of the three attributes that `__del__` needs
        check_progress(progress)
        self._progress, self._force, self._dry_run, self._follow = progress, force, dry_run, follow
        self._tried: set[Path] = set()  # the targets of a dry run
        if folder is not None and not dry_run:
            inside = Path(os.path.realpath(folder))
            self._enter(inside)
            if many:
                self._scratch = ScratchFolder(inside)
                with named(inside):
                    self._device = self._scratch.__enter__().stat().st_dev

    @property
    def force(self) -> bool:
        """Whether files of any format are replaced."""
        return self._force

    @contextlib.contextmanager
    def open(
        self, path: str | os.PathLike[str], nbytes: int = 0, *, kind: Format = Format.UNKNOWN, again: bool = False
    ) -> Iterator[BinaryIO]:
        """Stage a file: the `with` block writes it, and the commit of the group puts it in its place.

        Args:
            path: the target.
            nbytes: about how many bytes it will have; progress counts up to this.
            kind: the format of what is written; with UNKNOWN, files of any format are replaced.
            again: the target is staged already, and this file replaces that one later in the same commit.

        Raises:
            FileAccessError: the folder is missing or not writable, the target is not a regular file, or writing
                failed (a full disk, for example). It names the target, not the temporary file.
            OutputPathError: the target is staged already, or a file of another format is there.
        """
        target = as_path(path)
        if not self._follow and target.is_symlink():
            raise FileAccessError(target, OSError(errno.ELOOP, "a link is in its place, which is not followed"))
        # without following, a link that appears from now on is itself replaced
        place = Path(os.path.realpath(target) if self._follow else target)
        if not again and (place in self._tried or place in self._places):
            raise OutputPathError(f"{target}: two outputs would have this path")
        check_replaceable(target, kind, force=self._force or kind is Format.UNKNOWN)
        if self._dry_run:
            self._tried.add(place)
            check_writable(place.parent, target)
            with named(target):
                yield cast(BinaryIO, _Nowhere())
            return
        with named(target):
            scratch = self._scratch_for(place)
            self._enter(place.parent, has_journal=scratch is None)
            # Listed before it is created, so that no exception, not even one from a signal handler, can leave it behind.
            staged = _Staged(target, place, scratch)
            self._staged.append(staged)
            self._places.add(place)
            output = staged.make(f"writing {target.name}", nbytes, self._progress)
            file = io.BufferedWriter(output, _BUFFER)
            yield cast(BinaryIO, file)
            file.flush()
            file.detach()  # the output stays open until the commit
            if scratch is not None:
                staged.sync()
                staged.close()

    def _scratch_for(self, place: Path) -> Path | None:
        """The temporary folder, if a file can be renamed from there to a place."""
        return self._scratch.path if self._scratch and place.parent.stat().st_dev == self._device else None

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
        if hasattr(self, "_folders"):  # an exception may have interrupted the constructor
            self._discard()  # an exception may have interrupted the clean-up

    def _enter(self, folder: Path, *, has_journal: bool = True) -> None:
        """Clean up a folder before the first file is staged in it."""
        if folder not in self._clean:
            recover(folder)
            self._clean.add(folder)
        if has_journal:
            self._folders[folder] = None

    def _commit(self) -> None:
        """Bring all files to the disk, and then to their places; after an error in the second part, undo it."""
        for staged in self._staged:
            if staged.scratch is None:  # others are synced and closed by now
                with named(staged.target):
                    staged.sync()
        if len(self._staged) > 1 and HAS_LOCKS:
            self._write_journal()
        try:
            for staged in self._staged:
                with named(staged.target):
                    staged.keep_old()
                    os.replace(staged.temporary, staged.place)
            # Sync the folders before the backups are deleted, so that freeing the old files does not delay the sync.
            self._sync_folders(staged.place.parent for staged in self._staged)
        except BaseException:
            self._undo()
            raise

    def _undo(self) -> None:
        """Put the old files back; if that is not possible for all, leave the group to `recover`, with all its files."""
        put_back = [staged.put_back() for staged in reversed(self._staged)]  # a list, so that each is tried
        if not all(put_back) and self._journal:
            for staged in (*self._journal, *self._staged):
                staged.close()
            if self._scratch is not None:
                self._scratch.leave()
                self._scratch = None
            self._journal.clear()
            self._staged.clear()

    def _write_journal(self) -> None:
        """Write a copy of the journal into every folder of the group, and wait until the copies are on the disk."""
        seen: dict[Path, Identity | None] = {}
        moves = []
        for staged in self._staged:
            with named(staged.target):
                before = seen[staged.place] if staged.place in seen else identity(staged.place)
                seen[staged.place] = after = identity(staged.temporary)
            moves.append(Move(staged.place, staged.temporary, staged.backup, before, after, staged.scratch))
        first, *others = self._folders
        journal = Journal(moves, [first, *others])
        name = journal_name()
        for folder in others:
            self._write_copy(journal, folder / name)
        self._sync_folders([*self._folders, *([self._scratch.path] if self._scratch else [])])
        self._write_copy(journal, first / name)
        self._sync_folders([first])

    def _write_copy(self, journal: Journal, path: Path) -> None:
        with named(path.parent):
            copy = _Staged(path.parent, path)
            self._journal.append(copy)
            file = io.BufferedWriter(copy.make("", 0, None))
            with contextlib.suppress(OSError):  # whatever the umask is: no other user may say what is renamed
                copy.temporary.chmod(0o600)
            file.write(journal.text(path.parent))
            file.detach()
            copy.sync()
            os.replace(copy.temporary, copy.place)

    @staticmethod
    def _sync_folders(folders: Iterable[Path]) -> None:
        for folder in dict.fromkeys(folders):
            with named(folder):
                sync_folder(folder)

    def _discard(self) -> None:
        """Remove the temporary files and the journal. Failures are ignored, because nothing needs these files any more."""
        while self._journal:
            self._journal[-1].remove()
            del self._journal[-1]
        while self._staged:
            self._staged[-1].discard()
            del self._staged[-1]
        if self._scratch is not None:
            self._scratch.__exit__(None, None, None)


class _Staged:
    """A staged file: the commit renames `temporary` to `place`, and `backup` keeps the old file until it is complete.

    Both are in a locked folder `scratch`, or if there is none, beside `place` and locked themselves.
    """

    def __init__(self, target: Path, place: Path, scratch: Path | None = None) -> None:
        self.target, self.place, self.scratch = target, place, scratch
        beside = place if scratch is None else scratch / place.name
        self.temporary, self.backup = temporary_beside(beside), temporary_beside(beside)
        self._output: Output | None = None
        self._lock = Lock()  # on the backup
        self._had_old: bool | None = None  # unknown before `keep_old`

    def make(self, what: str, total: int, progress: Progress | None) -> Output:
        """Create the temporary file and lock it."""
        old = _status(self.place)
        mode = 0o666 if old is None else stat.S_IMODE(old.st_mode) & 0o777

        def create(path: Path) -> int:
            if self._output is not None:
                self._output.close()
            self.temporary = path  # known before it exists, so that no exception leaves it behind
            self._output = Output(path, mode, what, total, progress)
            return self._output.fileno()

        if self.scratch is None:
            create_locked(self.place, create)
        else:
            create(self.temporary)
        assert self._output is not None  # noqa: S101 - it was created
        if old is not None:
            _take_over(self._output.fileno(), old, mode)
        return self._output

    def sync(self) -> None:
        assert self._output is not None  # noqa: S101 - `make` comes before the commit
        self._output.sync()

    def keep_old(self) -> None:
        """Give the old file, if any, a second name, where the file system has links."""
        try:
            os.lstat(self.place)
        except FileNotFoundError:
            self._had_old = False
            return
        self._had_old = True
        if self.scratch is None:
            with contextlib.suppress(OSError):  # a lock keeps `recover` in other processes from removing the backup
                self._lock.take(self.place, shared=True)
        try:
            os.link(self.place, self.backup, follow_symlinks=False)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise

    def put_back(self) -> bool:
        """Undo the rename if it happened. Which files exist shows where the commit was interrupted.

        Returns:
            Whether that was possible; always true where the file system has no links, and hence no backup.
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
        """Remove the file itself and what belongs to it."""
        with contextlib.suppress(OSError):
            self.place.unlink(missing_ok=True)
        self.discard()

    def discard(self) -> None:
        """Remove the temporary file and the backup; failures are ignored."""
        for path in (self.temporary, self.backup):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Close what is open; failures are ignored."""
        with contextlib.suppress(OSError):
            self._lock.close()
        if self._output is not None:
            with contextlib.suppress(OSError):
                self._output.close()


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _take_over(descriptor: int, old: os.stat_result, mode: int) -> None:
    """Give a new file the owner, if this process may, and then the permissions of the file that it replaces."""
    new = os.fstat(descriptor)
    if hasattr(os, "fchown") and (new.st_uid, new.st_gid) != (old.st_uid, old.st_gid):
        with contextlib.suppress(OSError):
            os.fchown(descriptor, old.st_uid, old.st_gid)
    if hasattr(os, "fchmod"):
        os.fchmod(descriptor, mode)


class _Nowhere(io.RawIOBase):
    """Accepts, counts and drops what is written."""

    def __init__(self) -> None:
        self._position = 0

    def tell(self) -> int:
        return self._position

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        nbytes = memoryview(data).nbytes
        self._position += nbytes
        return nbytes


def check_writable(folder: Path, target: Path) -> None:
    """Check that files can be made in a folder, or if it is missing, that it can be made.

    Raises:
        FileAccessError: they cannot; it names `target`.
    """
    with named(target):
        there = next(path for path in (folder, *folder.parents) if os.path.lexists(path) or path == path.parent)
        if not there.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(there))
        if not os.access(there, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(there))


def refuse_inputs(outputs: Iterable[Path], inputs: Collection[Path]) -> None:
    """Raise OutputPathError if an output is one of the inputs."""
    sources = {which_file(source): source for source in inputs}
    for output in outputs:
        if (source := sources.get(which_file(output))) is not None:
            raise OutputPathError(f"{output}: the output is one of the inputs, {source}")
