"""What PEFT saves: a folder with `adapter_config.json` and `adapter_model.safetensors`, read and checked."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from blobstore.adapters.peft_config import CONFIG_NAME, PeftConfig, read_config
from blobstore.adapters.peft_gguf import key_of, read_gguf
from blobstore.adapters.peft_names import PREFIX, rows_as_llama
from blobstore.core.errors import AdapterError, LayoutError, UnsupportedDataError, UpdateError
from blobstore.core.formats.safetensors import SafetensorsDataMap
from blobstore.core.memory.arrays import DTYPES, Plain
from blobstore.core.memory.dtypes import FLOATS
from blobstore.core.memory.mapped_file import as_path

__all__ = ["MODEL_NAME", "PeftPair", "half_of", "read_peft"]

MODEL_NAME = "adapter_model.safetensors"
_HALF = re.compile(r"(.+)\.lora_([AB])\.weight", re.DOTALL)
_STRAY = {
    ".lora_embedding_": "an adapter of an embedding",
    ".lora_magnitude_vector": "the magnitude of use_dora",
    ".lora_B.bias": "the bias of lora_bias",
    # Of these two, PEFT saves the weights beside the pairs.
    "lm_head.base_layer.weight": "of an adapter of lm_head, saved with its weight; save it without save_embedding_layers",
    ".base_layer.weight": "of an adapter of an embedding",
    ".base_layer.": "a bias of the base model",
    ".modules_to_save": "a module of modules_to_save",
}


@dataclass(frozen=True)
class PeftPair:
    """The two tensors of a module in PEFT's files.

    Attributes:
        module: what Hugging Face's model calls the module.
        a, b: the tensors, of shapes (rank, in) and (out, rank).
        a_key, b_key: their keys in the file.
        scale: the factor of their product.
        reordered: whether the rows of q and k lie as in Llama's own checkpoints, and not as in Hugging Face's model.
    """

    module: str
    a: Plain
    b: Plain
    a_key: str
    b_key: str
    scale: float
    reordered: bool = False

    @property
    def rank(self) -> int:
        """The rank."""
        return int(self.a[0].shape[0])

    def ordered(self, head_dim: int, source: Path) -> Plain:
        """The second tensor with its rows as a program needs them.

        `head_dim` is the size of a head if the program rotates neighbouring elements and this is its q or k; otherwise 0.
        """
        if self.reordered and not head_dim and self.module.endswith(("q_proj", "k_proj")):
            raise AdapterError(
                f"{source}: the rows of '{self.module}' lie in llama.cpp's order, which the program does not use; import PEFT's "
                "folder instead"
            )
        return (rows_as_llama(self.b[0], head_dim), self.b[1]) if head_dim and not self.reordered else self.b

    def part(self, first: int, rows: int) -> PeftPair:
        """The pair for some rows of the module."""
        return replace(self, b=(self.b[0][first : first + rows], self.b[1]))


def read_peft(directory: str | os.PathLike[str]) -> tuple[PeftConfig, list[PeftPair]]:
    """Read and check an adapter that PEFT saved.

    Args:
        directory: the folder with `adapter_config.json` and `adapter_model.safetensors`; or a file of GGUF, see
            `blobstore.adapters.peft_gguf`.

    Returns:
        The configuration and the pairs, in the order of the file. The arrays are views of the mapped file.

    Raises:
        FileAccessError, InvalidFileError: a file cannot be opened, or is malformed.
        AdapterError: a field of the configuration or a tensor cannot be honoured; it is named.
        LayoutError: the shapes of a pair do not match.
        UnsupportedDataError: a tensor has another dtype than a float.
        UpdateError: a tensor has infinities or NaN.
    """
    folder = as_path(directory)
    if folder.suffix == ".gguf":
        return _read_gguf(folder)
    config = read_config(folder / CONFIG_NAME)
    path = folder / MODEL_NAME
    if not path.exists() and (folder / "adapter_model.bin").exists():
        raise AdapterError(
            f"{folder}: adapter_model.bin is a pickle, which may run code; save it with safe_serialization=True"
        )
    data_map = SafetensorsDataMap(path)
    halves: dict[str, dict[str, str]] = {}
    for key in data_map:
        match = half_of(key)
        if match is None:
            # Whatever is not understood is refused: an adapter without its DoRA vectors, say, computes something else.
            what = next((what for part, what in _STRAY.items() if part in key), "no part of a LoRA pair")
            raise AdapterError(f"{path}: '{key}' cannot be honoured: it is {what}")
        # Some files have the names without the prefix.
        both = halves.setdefault(match[1].removeprefix(PREFIX), {})
        if match[2] in both:
            raise AdapterError(f"{path}: '{both[match[2]]}' and '{key}' belong to one module")
        both[match[2]] = key
    if not halves:
        raise AdapterError(f"{path}: there are no LoRA tensors")
    return config, [_read_pair(data_map, config, module, both) for module, both in halves.items()]


def _read_gguf(path: Path) -> tuple[PeftConfig, list[PeftPair]]:
    from blobstore.logical.steps import check_finite  # here, because it imports the native module

    config, halves, reordered = read_gguf(path)
    pairs = []
    for module, both in halves.items():
        for half, tensor in both.items():
            if not check_finite(tensor):
                raise UpdateError(f"{path}: lora_{half.lower()} of '{module}' has values that are not finite")
        scale = config.scale(module, both["A"][0].shape[0])
        pairs.append(PeftPair(module, both["A"], both["B"], key_of(module, "A"), key_of(module, "B"), scale, reordered))
    return config, pairs


def _read_pair(data_map: SafetensorsDataMap, config: PeftConfig, module: str, keys: Mapping[str, str]) -> PeftPair:
    for half, other in ("AB", "BA"):
        if half not in keys:
            raise AdapterError(f"{data_map.name}: '{keys[other]}' has no lora_{half} beside it")
    a, b = (_plain(data_map, keys[half]) for half in "AB")
    if a[0].ndim != 2 or b[0].ndim != 2 or a[0].shape[0] != b[0].shape[1]:
        raise LayoutError(
            f"{data_map.name}: '{keys['A']}' {list(a[0].shape)} and '{keys['B']}' {list(b[0].shape)} must be matrices with "
            "one rank"
        )
    rank = int(a[0].shape[0])
    return PeftPair(module, a, b, keys["A"], keys["B"], config.scale(module, rank))


def _plain(data_map: SafetensorsDataMap, key: str) -> Plain:
    from blobstore.logical.steps import check_finite  # here, because it imports the native module

    layout = data_map.get_tensor_layout(key)
    if layout is None or layout.scalar_type not in FLOATS:
        raise UnsupportedDataError(f"{data_map.name}: '{key}' has dtype {data_map.dtypes[key]}, expected a float")
    tensor = np.frombuffer(data_map.get_data(key), DTYPES[layout.scalar_type]).reshape(layout.sizes), layout.scalar_type
    if not check_finite(tensor):
        raise UpdateError(f"{data_map.name}: '{key}' has values that are not finite")
    return tensor


def half_of(key: str) -> re.Match[str] | None:
    """The parts of a tensor's key: the module, and `A` or `B`; None if it is no half of a pair."""
    return _HALF.fullmatch(key)
