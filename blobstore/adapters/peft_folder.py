"""What PEFT saves: a folder with `adapter_config.json` and `adapter_model.safetensors`, read and checked."""

from __future__ import annotations

import os
from pathlib import Path

from blobstore.adapters.foundation import library, plain_of
from blobstore.adapters.peft_pair import PeftAdapter, PeftPair
from blobstore.core.errors import AdapterError, UpdateError
from blobstore.core.hub import local_folder
from blobstore.core.memory.arrays import Plain
from blobstore.core.memory.mapped_file import as_path

__all__ = ["CONFIG_NAME", "MODEL_NAME", "adapter_path", "read_peft"]

CONFIG_NAME = "adapter_config.json"
MODEL_NAME = "adapter_model.safetensors"
_FILES = {".ptd", ".safetensors", ".gguf"}


def adapter_path(source: str | os.PathLike[str]) -> Path:
    """The path of an adapter: `source` itself, or the folder that a name of Hugging Face's Hub stands for, as
    `local_folder` finds it.

    Raises:
        As `local_folder`.
    """
    path = as_path(source)
    return path if path.suffix in _FILES else local_folder(source, [CONFIG_NAME, MODEL_NAME])


def read_peft(directory: str | os.PathLike[str]) -> PeftAdapter:
    """Read and check an adapter that PEFT saved.

    Args:
        directory: the folder with `adapter_config.json` and `adapter_model.safetensors`.

    Raises:
        FileAccessError, InvalidFileError: a file cannot be opened, or is malformed.
        AdapterError: a field of the configuration or a tensor cannot be honoured; it is named.
        LayoutError: the shapes of a pair do not match.
        UnsupportedDataError: a tensor has another dtype than a float.
        UpdateError: a tensor has infinities or NaN.
    """
    folder = as_path(directory)
    if folder.suffix == ".gguf":
        raise AdapterError(f"{folder}: an adapter in GGUF is not read; import the folder of PEFT that it was made of")
    scale, origin, rows = library().read_peft(os.fsencode(folder))
    pairs = [
        PeftPair(module, plain_of(a), plain_of(b), a_key, b_key, scale_of_pair)
        for module, a_key, a, b_key, b, scale_of_pair in rows
    ]
    for pair in pairs:
        for key, tensor in ((pair.a_key, pair.a), (pair.b_key, pair.b)):
            _check_finite(tensor, f"{folder / MODEL_NAME}: '{key}'")
    return PeftAdapter(pairs, scale, origin)


def _check_finite(tensor: Plain, what: str) -> None:
    from blobstore.logical.steps import check_finite  # here, because it imports the native module

    if not check_finite(tensor):
        raise UpdateError(f"{what} has values that are not finite")
