"""Where an adapter of PEFT is: a folder, or a name of Hugging Face's Hub whose files are in its local cache."""

from __future__ import annotations

import os
from pathlib import Path

from blobstore.adapters.peft_folder import CONFIG_NAME, MODEL_NAME
from blobstore.core.hub import local_folder
from blobstore.core.memory.mapped_file import as_path

__all__ = ["adapter_path"]

_FILES = {".ptd", ".safetensors", ".gguf"}


def adapter_path(source: str | os.PathLike[str]) -> Path:
    """The path of an adapter: `source` itself, or the folder that a name of the Hub stands for, as `local_folder` finds it.

    Raises:
        As `local_folder`.
    """
    path = as_path(source)
    return path if path.suffix in _FILES else local_folder(source, [CONFIG_NAME, MODEL_NAME])
