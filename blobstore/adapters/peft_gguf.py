"""LoRA adapters in GGUF, as llama.cpp's `convert_lora_to_gguf.py` writes them, read as what PEFT saved.

Such a file has the tensors under llama.cpp's names, the alpha, and the architecture. For some architectures llama.cpp
reorders the rows of q and k as Llama's own checkpoints have them. The size of a head, which would undo that, is not in the
file; programs that rotate neighbouring elements need these rows as they are.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from blobstore.adapters.peft_names import PREFIX
from blobstore.adapters.peft_pair import PeftAdapter, PeftPair
from blobstore.core.errors import (
    AdapterError,
    FileAccessError,
    InvalidFileError,
    LayoutError,
    UnsupportedDataError,
)
from blobstore.core.memory.arrays import Plain
from blobstore.core.memory.layout import ScalarType
from blobstore.core.requirements import needed

__all__ = ["read_gguf"]

_REORDERED = {"llama", "granite", "smollm3"}
_PLAIN = {"qwen2", "qwen3", "phi3", "gemma", "gemma2", "gemma3"}
_MODULES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_REFUSED = {"adapter.alora.invocation_tokens": "the adapter acts on a part of the tokens only"}
_FIELDS = {"adapter.type", "adapter.lora.alpha", "adapter.lora.task_name", "adapter.lora.prompt_prefix"}
"""Fields of adapters that are read here, or do not change what an adapter computes."""

_HALF = re.compile(r"(.+)\.weight\.lora_([ab])", re.DOTALL)
_IN_LAYER = re.compile(r"blk\.(\d+)\.(\w+)", re.ASCII)


def read_gguf(path: Path) -> PeftAdapter:
    """Read an adapter.

    Raises:
        FileAccessError, InvalidFileError: the file cannot be opened, or is malformed.
        AdapterError: it is no LoRA adapter, of an architecture or a module that is not known here, or has a field that
            cannot be honoured.
        LayoutError: the shapes of a pair do not match.
        UnsupportedDataError: a tensor is quantized, or the file is big-endian.
        MissingDependencyError: the package `gguf` is not installed.
    """
    reader = _opened(path)
    if _field(reader, "general.type") != "adapter" or _field(reader, "adapter.type") != "lora":
        raise AdapterError(f"{path}: not a LoRA adapter: general.type and adapter.type must be 'adapter' and 'lora'")
    for name in reader.fields:
        if name.startswith("adapter.") and name not in _FIELDS and _field(reader, name) not in (False, [], ""):
            reason = _REFUSED.get(
                name, "this field is unknown to this version, and may change what the adapter computes"
            )
            raise AdapterError(
                f"{path}: {name} cannot be honoured: {reason}; merge the adapter into its base with PEFT"
            )
    architecture = _field(reader, "general.architecture")
    if architecture not in _REORDERED | _PLAIN:
        raise AdapterError(
            f"{path}: the order of rows of the architecture {architecture!r} is not known; import PEFT's folder"
        )
    halves: dict[str, dict[str, Plain]] = {}  # for each module of Hugging Face's model its tensors `A` and `B`
    for tensor in reader.tensors:
        match = _HALF.fullmatch(tensor.name)
        if match is None:
            raise AdapterError(f"{path}: '{tensor.name}' cannot be honoured: it is no part of a LoRA pair")
        module = _module(path, match[1], architecture)
        halves.setdefault(module, {})[match[2].upper()] = _plain(path, tensor)
    if not halves:
        raise AdapterError(f"{path}: there are no LoRA tensors")
    alpha = _alpha(reader, path)
    pairs = list(_pairs(path, halves, alpha, architecture in _REORDERED))
    rank = Counter(pair.rank for pair in pairs).most_common(1)[0][0]
    return PeftAdapter(pairs, alpha / rank if alpha else 1.0, {})


def _opened(path: Path) -> Any:
    with needed("adapters in GGUF need a package", "gguf"):
        from gguf import GGUFReader
    try:
        reader = GGUFReader(path)
    except OSError as error:
        raise FileAccessError(path, error) from None
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError) as error:
        raise InvalidFileError(path, f"not a GGUF file: {error}") from None
    if reader.byte_order == "S":  # bfloat16 is raw bytes to the reader, in whichever order the writer left them
        raise UnsupportedDataError(
            f"{path}: a big-endian file; expected little-endian, which llama.cpp's gguf_convert_endian.py makes of it"
        )
    return reader


def _field(reader: Any, name: str) -> Any:
    field = reader.get_field(name)
    return None if field is None else field.contents()


def _alpha(reader: Any, path: Path) -> float:
    """The alpha; 0 if there is none."""
    alpha = _field(reader, "adapter.lora.alpha")
    if alpha is None:
        return 0.0
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise InvalidFileError(path, f"adapter.lora.alpha must be a finite number, found {alpha!r}")
    return alpha


def _module(path: Path, name: str, architecture: str) -> str:
    match = _IN_LAYER.fullmatch(name)
    if match is not None and match[2] in _MODULES:
        fused = architecture == "phi3" and match[2] == "ffn_up"  # llama.cpp has both halves there
        return f"model.layers.{match[1]}.{'mlp.gate_up_proj' if fused else _MODULES[match[2]]}"
    if name == "output":
        return "lm_head"
    what = "an adapter of an embedding" if name == "token_embd" else "a module that is not known here"
    raise AdapterError(f"{path}: '{name}.weight' cannot be honoured: it is {what}")


def _plain(path: Path, tensor: Any) -> Plain:
    kinds = {"F32": ScalarType.FLOAT, "F16": ScalarType.HALF, "BF16": ScalarType.BFLOAT16}
    kind = kinds.get(tensor.tensor_type.name)
    if kind is None:
        listed = ", ".join(kinds)
        raise UnsupportedDataError(f"{path}: '{tensor.name}' is {tensor.tensor_type.name}, expected one of {listed}")
    data = np.ascontiguousarray(tensor.data)
    if kind is ScalarType.BFLOAT16:
        data = data.view(np.uint16)
    sizes = tuple(int(size) for size in reversed(tensor.shape))
    return data.reshape(sizes), kind


def _pairs(path: Path, halves: Mapping[str, Mapping[str, Plain]], alpha: float, reordered: bool) -> Iterator[PeftPair]:
    for module, both in halves.items():
        rank = _rank(path, module, both)
        # Without an alpha, which 0 stands for, too, llama.cpp takes the products as they are.
        scale = alpha / rank if alpha else 1.0
        a_key, b_key = (f"{PREFIX}{module}.lora_{half}.weight" for half in "AB")
        yield PeftPair(module, both["A"], both["B"], a_key, b_key, scale, reordered)


def _rank(path: Path, module: str, both: Mapping[str, Plain]) -> int:
    """The rank of a module, whose two tensors must be there and fit each other."""
    for half, other in ("AB", "BA"):
        if half not in both:
            raise AdapterError(f"{path}: module '{module}' has lora_{other.lower()}, and no lora_{half.lower()}")
    a, b = both["A"][0], both["B"][0]
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
        raise LayoutError(
            f"{path}: the tensors of '{module}', {list(a.shape)} and {list(b.shape)}, must be matrices with one rank"
        )
    return int(a.shape[0])
