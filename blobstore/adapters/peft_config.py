"""What an `adapter_config.json` of PEFT says, and what of it a program can honour.

Every field of PEFT's `LoraConfig` (0.21) is decided here on purpose: it is honoured, it does not change what a trained
adapter computes, or it is refused by its name. A field that is unknown to this version is refused, unless it is switched
off. https://huggingface.co/docs/peft/package_reference/lora describes the fields.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blobstore.adapters.peft_patterns import Patterns
from blobstore.core.errors import AdapterError, InvalidFileError
from blobstore.core.formats.safetensors import parse_json
from blobstore.core.memory.mapped_file import as_path, map_file

__all__ = ["CONFIG_NAME", "FIELDS", "MOST_ALPHA", "PeftConfig", "check_field", "check_flag", "read_config"]

CONFIG_NAME = "adapter_config.json"
MOST_ALPHA = 1e300
"""Larger alphas, also negative ones, are refused: they leave no room to calculate with them."""

_DEEPEST = 200  # objects and arrays in each other, as in C++
_MOST = 1 << 24  # bytes; those of PEFT have about a kilobyte

_HONOURED = {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights"}

_NO_EFFECT = {
    # which modules have an adapter: the tensors show it
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    # used while training only
    *("lora_dropout", "velora_config", "inference_mode", "runtime_config"),
    # how the adapter began; `init_lora_weights` shows whether the base was changed, too
    *("eva_config", "corda_config", "lora_ga_config", "loftq_config"),
    # they matter only beside another field, which is refused
    *("megatron_core", "qalora_group_size"),
    # where it came from
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
}

_REFUSED = {
    "use_dora": "weights are decomposed into magnitude and direction",
    "modules_to_save": "whole modules were trained",
    "trainable_token_indices": "rows of the embeddings were trained",
    "lora_bias": "the second matrix has a bias",
    "fan_in_fan_out": "the weights of the base are stored transposed",
    "layer_replication": "layers of the base are repeated",
    "target_parameters": "parameters were adapted, and not modules",
    "megatron_config": "the layers are split over several devices",
    "alora_invocation_tokens": "the adapter acts on a part of the tokens only",
    "arrow_config": "a router chooses among several adapters",
    "use_qalora": "the first matrix takes averages of groups of inputs",
    "use_bdlora": "the matrices are block diagonal",
    "kasa_config": "the weights of the base were truncated, and there is a diagonal between the matrices",
    "monteclora_config": "the matrices are drawn at random",
    "ensure_weight_tying": "the adapters of tied modules are one",
}

_INITIAL = {True, False, None, "gaussian", "eva", "orthogonal"}
"""Initial values that leave the weights of the base as they are."""

FIELDS = _HONOURED | _NO_EFFECT | _REFUSED.keys() | {"bias"}
"""All fields that are decided."""


@dataclass(frozen=True)
class PeftConfig:
    """A configuration that can be honoured.

    Attributes:
        path: the file, for messages.
        fields: what the file says, complete.
        rank, alpha: of modules without an entry in the patterns.
        rslora: whether the scale is alpha / sqrt(rank), and not alpha / rank.
        ranks: all ranks that modules may have.
        alphas: the modules with another alpha.
    """

    path: Path
    fields: Mapping[str, Any]
    rank: int
    alpha: float
    rslora: bool
    ranks: frozenset[int]
    alphas: Patterns

    @classmethod
    def of(cls, fields: Any, path: Path) -> PeftConfig:
        """Check the fields.

        Args:
            fields: the parsed JSON.
            path: the file, for messages.

        Raises:
            InvalidFileError: they are not a configuration.
            AdapterError: a field cannot be honoured.
        """
        if not isinstance(fields, dict):
            raise InvalidFileError(path, "expected a JSON object")
        kind = fields.get("peft_type")
        if kind != "LORA":
            raise AdapterError(f"{path}: peft_type is {kind!r}; only adapters of type 'LORA' can be imported")
        for name, value in fields.items():
            check_field(name, value, path)
        return cls(
            path=path,
            fields=fields,
            rank=_number(fields.get("r", 8), "r", path, whole=True),
            alpha=_number(fields.get("lora_alpha", 8), "lora_alpha", path),
            rslora=check_flag(fields.get("use_rslora", False), "use_rslora", path),
            ranks=frozenset(
                [
                    _number(fields.get("r", 8), "r", path, whole=True),
                    *(number for _, number in _pattern(fields, "rank_pattern", path, whole=True)),
                ]
            ),
            alphas=_patterns(_pattern(fields, "alpha_pattern", path), path),
        )

    def scale(self, module: str, rank: int) -> float:
        """The factor of the product of a pair.

        Args:
            module: its name, without the prefix of PEFT.
            rank: its rank.

        Raises:
            AdapterError: the configuration has no such rank.
        """
        if rank not in self.ranks:
            listed = ", ".join(map(str, sorted(self.ranks)))
            raise AdapterError(f"{self.path}: module '{module}' has rank {rank}, but r and rank_pattern have {listed}")
        return self.alpha_of(module) / self.divisor(rank)

    def alpha_of(self, module: str) -> float:
        """The alpha of a module: that of the first entry that matches, as PEFT takes it."""
        found = self.alphas.number(module)
        return self.alpha if found is None else found

    def divisor(self, rank: int) -> float:
        """What an alpha is divided by to give a scale."""
        return math.sqrt(rank) if self.rslora else rank


def read_config(path: Path) -> PeftConfig:
    """Read a configuration; AdapterError names a field that cannot be honoured."""
    return PeftConfig.of(read_json(path), path)


def read_json(path: str | os.PathLike[str]) -> Any:
    """A small JSON file: at most 16 MiB, nested at most 200 deep, and no key twice in one object."""
    path = as_path(path)
    data = map_file(path)
    if len(data) > _MOST:
        raise InvalidFileError(path, f"{len(data):,} bytes are too many for a configuration")
    parsed = parse_json(data, path, "file")
    level = [parsed]
    for _ in range(_DEEPEST):
        level = [inner for value in level for inner in _inside(value)]
        if not level:
            return parsed
    raise InvalidFileError(path, "the file is nested too deeply")


def _inside(value: Any) -> list[Any]:
    """The objects and arrays in one."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [one for one in inside if isinstance(one, dict | list)]


def check_field(name: str, value: Any, path: Path) -> None:
    """Refuse a field that cannot be honoured.

    Raises:
        AdapterError: it cannot be, and is not switched off.
    """
    if name in _HONOURED - {"init_lora_weights"} or name in _NO_EFFECT:
        return
    if name == "init_lora_weights":
        if not isinstance(value, bool | str | None) or value not in _INITIAL:
            raise AdapterError(
                f"{path}: init_lora_weights is {value!r}, which changes the weights of the base, too; convert the adapter "
                "with path_initial_model_for_weight_conversion when you save it, or merge it"
            )
    elif name == "bias":
        if value != "none":
            raise AdapterError(
                f"{path}: bias is {value!r}: biases of the base were trained, which no adapter file holds"
            )
    elif value not in (None, False, [], {}, ""):
        in_peft = name.removeprefix("adapter.").replace(".", "_")  # adapter.alora.invocation_tokens, in GGUF
        reason = _REFUSED.get(
            in_peft, "this field is unknown to this version, and may change what the adapter computes"
        )
        raise AdapterError(f"{path}: {name} cannot be honoured: {reason}; merge the adapter into its base with PEFT")


def check_flag(value: Any, name: str, path: str | os.PathLike[str]) -> bool:
    """A value that must be true or false, and no number or text for it.

    Raises:
        InvalidFileError: it is something else.
    """
    if not isinstance(value, bool):
        raise InvalidFileError(path, f"{name} must be true or false, found {value!r}")
    return value


def _number(value: Any, name: str, path: Path, *, whole: bool = False) -> Any:
    kind = "positive integer" if whole else "finite number"
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        raise InvalidFileError(path, f"{name} must be a {kind}, found {value!r}")
    if (whole and not 0 < value < 2**31) or abs(value) > MOST_ALPHA or math.isnan(value):
        raise InvalidFileError(path, f"{name} must be a {kind}, found {value!r}")
    return value


def _pattern(fields: Mapping[str, Any], name: str, path: Path, *, whole: bool = False) -> list[tuple[str, Any]]:
    """The entries of rank_pattern or alpha_pattern."""
    pattern = fields.get(name)
    if pattern is None:
        return []
    if not isinstance(pattern, dict):
        raise InvalidFileError(path, f"{name} must map names of modules to numbers, found {pattern!r}")
    return [(key, _number(value, f"{name}[{key!r}]", path, whole=whole)) for key, value in pattern.items()]


def _patterns(entries: Sequence[tuple[str, float]], path: Path) -> Patterns:
    try:
        return Patterns(entries)
    except ValueError as error:
        raise AdapterError(f"{path}: alpha_pattern has {error}") from None
