"""Where an adapter of PEFT is: a folder, or a name of Hugging Face's Hub whose files are in its local cache."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

from blobstore.adapters.peft_config import CONFIG_NAME
from blobstore.adapters.peft_folder import MODEL_NAME
from blobstore.core.errors import FileAccessError
from blobstore.core.memory.mapped_file import as_path

__all__ = ["adapter_path"]

_FILES = {".ptd", ".safetensors", ".gguf"}
_HUB = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)(?:@([\w./-]+))?", re.ASCII)


def adapter_path(source: str | os.PathLike[str]) -> Path:
    """The path of an adapter: `source` itself; or, if nothing is there, that of `user/name` or `user/name@revision` in the
    cache of `huggingface_hub`. Nothing is downloaded.

    Raises:
        FileAccessError: a name of the Hub is not in the cache, or `huggingface_hub` is not installed.
        UnsupportedDataError: the source is no path.
    """
    path = as_path(source)
    match = _HUB.fullmatch(source) if isinstance(source, str) else None
    if match is None or path.exists() or path.suffix in _FILES:
        return path
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError:
        raise _missing(path, "to look for it in the Hub's cache, install huggingface_hub") from None
    name, revision = match.groups()
    try:
        return Path(
            snapshot_download(name, revision=revision, allow_patterns=[CONFIG_NAME, MODEL_NAME], local_files_only=True)
        )
    except (LocalEntryNotFoundError, HFValidationError):
        command = f"hf download {name}" + (f" --revision {revision}" if revision else "")
        raise _missing(path, f"it is not in the Hub's cache either; fetch it with `{command}`") from None


def _missing(path: Path, more: str) -> FileAccessError:
    return FileAccessError(path, OSError(errno.ENOENT, f"No such file or directory; {more}"))
