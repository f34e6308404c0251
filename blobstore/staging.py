"""Writing files so that each is the old one or the new one, whole, whatever happens in between."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from blobstore.errors import FileAccessError, OutputPathError
from blobstore.mapped_file import same_file

__all__ = ["Staging", "refuse_inputs"]

_BUFFER = 1 << 20  # gathers small writes; larger ones go straight to the file


class Staging:
    """A group of output files that take their places together, or not at all.

    Each file is written beside its target under a temporary name. When the `with` block ends without an error, all
    are flushed to the disk and then renamed; otherwise they are removed and whatever stood at the targets is
    untouched. (Each rename is atomic; a power cut between two of them leaves the first new and the second old.)
    """

    def __init__(self) -> None:
        self._staged: list[tuple[Path, Path, BinaryIO]] = []

    @contextlib.contextmanager
    def open(self, path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
        """Stage a file: the `with` block writes it, leaving the block closes it; it takes its place later.

        Raises:
            FileAccessError: the folder is missing or may not be written, the target is a folder, or writing failed
                (a full disk, say). Names the target, not the temporary file.
            OutputPathError: this target is staged already.
        """
        target = Path(path)
        if any(same_file(target, other) for other, _, _ in self._staged):
            raise OutputPathError(f"{target}: two outputs would have this path")
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(6)}.tmp")
        with _named(target):
            if target.is_dir():
                raise IsADirectoryError(21, os.strerror(21))
            descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            file = os.fdopen(descriptor, "w+b", buffering=_BUFFER)
        self._staged.append((target, temporary, file))
        with _named(target):
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
        for target, _, file in self._staged:
            with _named(target):
                os.fsync(file.fileno())
                file.close()
        for target, temporary, _ in self._staged:
            with _named(target):
                os.replace(temporary, target)
        for folder in {target.parent for target, _, _ in self._staged}:
            with contextlib.suppress(OSError):  # some file systems cannot sync a folder
                descriptor = os.open(folder, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)

    def _discard(self) -> None:
        for _, temporary, file in self._staged:
            with contextlib.suppress(OSError):
                file.close()
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        self._staged.clear()


@contextlib.contextmanager
def _named(target: Path) -> Iterator[None]:
    """Give an OSError the name of the file that the user asked for."""
    try:
        yield
    except FileAccessError:
        raise
    except OSError as error:
        raise FileAccessError(target, error) from None


def refuse_inputs(
    outputs: list[str | os.PathLike[str]] | list[Path], inputs: list[str | os.PathLike[str]] | list[Path]
) -> None:
    """Raise OutputPathError if an output is one of the inputs."""
    for output in outputs:
        for source in inputs:
            if same_file(output, source):
                raise OutputPathError(f"{os.fspath(output)}: the output is one of the inputs, {os.fspath(source)}")
