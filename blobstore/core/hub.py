"""Names on Hugging Face's Hub, which stand for folders in its local cache."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence
from pathlib import Path

from blobstore.core.errors import FileAccessError
from blobstore.core.memory.mapped_file import as_path

__all__ = ["local_folder"]

_HUB = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)(?:@([\w./-]+))?", re.ASCII)


def local_folder(source: str | os.PathLike[str], files: Sequence[str]) -> Path:
    """The folder of a model or adapter: `source` itself; or, if nothing is there, that of `user/name` or `user/name@revision`
    in the cache of `huggingface_hub`. Nothing is downloaded.

    Args:
        source: see above.
        files: what the folder has to have, for the message.

    Raises:
        FileAccessError: a name of the Hub, or one of the files, is not in the cache, or `huggingface_hub` is not installed.
        UnsupportedDataError: the source is no path.
    """
    path = as_path(source)
    match = _HUB.fullmatch(source) if isinstance(source, str) else None
    if match is None or path.exists():
        return path
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError:
        raise _missing(path, "to look for it in the Hub's cache, install huggingface_hub") from None
    name, revision = match.groups()
    command = f"hf download {name}" + (f" --revision {revision}" if revision else "")
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=list(files), local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        raise _missing(path, f"it is not in the Hub's cache either; fetch it with `{command}`") from None
    if absent := [file for file in files if not (folder / file).exists()]:
        raise _missing(
            path, f"in the Hub's cache, it lacks {' and '.join(absent)}; fetch it completely with `{command}`"
        )
    return folder


def _missing(path: Path, more: str) -> FileAccessError:
    return FileAccessError(path, OSError(errno.ENOENT, f"No such file or directory; {more}"))
