"""What the metadata of an imported adapter says of PEFT's files, so that export gives back the tensors that were there."""

from __future__ import annotations

import json
from dataclasses import dataclass

from blobstore.adapters.adapter_file import Adapter
from blobstore.adapters.foundation import is_text
from blobstore.adapters.peft_scales import is_factor
from blobstore.core.constants import PEFT_KEY
from blobstore.core.errors import InvalidFileError
from blobstore.core.memory.dtypes import FLOATS
from blobstore.core.memory.layout import ScalarType

__all__ = ["RECORD", "PeftOrigin", "PeftRecord"]

RECORD = PEFT_KEY
"""The metadata of an adapter that was imported: JSON."""

_KEPT = ("base_model_name_or_path", "task_type")  # what the tensors do not show, and PEFT needs to find the base


@dataclass(frozen=True)
class PeftOrigin:
    """Where the tensors of a module came from: their keys, rank and dtypes in PEFT's file, and what was done to lora_b.
    `first` is its first row there."""

    a_key: str
    b_key: str
    rank: int
    kinds: tuple[ScalarType, ScalarType]
    factor: float
    head_dim: int
    first: int = 0


@dataclass(frozen=True)
class PeftRecord:
    """What the metadata of an imported adapter says: each module of the program that has one, and what is kept of PEFT's
    configuration."""

    config: dict[str, str]
    modules: dict[str, PeftOrigin]

    def to_json(self) -> str:
        modules = {
            module: [
                *(one.a_key, one.b_key, one.rank, *(kind.name for kind in one.kinds), one.factor, one.head_dim),
                *([one.first] if one.first else []),
            ]
            for module, one in self.modules.items()
        }
        return json.dumps({"config": self.config, "modules": modules}, separators=(",", ":"))

    @classmethod
    def of(cls, adapter: Adapter) -> PeftRecord | None:
        """That of an adapter; None if it has none.

        Raises:
            InvalidFileError: it is malformed.
        """
        text = adapter.metadata.get(RECORD)
        if text is None:
            return None
        try:
            record = json.loads(text)
            config, modules = record["config"], record["modules"]
            if not all(name in _KEPT and is_text(value) for name, value in config.items()):
                raise ValueError(f"config has other fields than texts of {' and '.join(_KEPT)}")
            return cls(config, {str(module): _origin(*fields) for module, fields in modules.items()})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise InvalidFileError(adapter.path, f"the metadata {RECORD} is malformed: {error}") from None


def _origin(
    a_key: str, b_key: str, rank: int, a_kind: str, b_kind: str, factor: float, head_dim: int, first: int = 0
) -> PeftOrigin:
    if not (is_text(a_key) and is_text(b_key) and all(type(number) is int for number in (rank, head_dim, first))):
        raise TypeError("the fields of a module have other types")
    if rank <= 0 or head_dim < 0 or head_dim % 2 or first < 0:
        raise ValueError(
            f"the rank {rank}, the size of a head {head_dim} or the row {first} of '{a_key}' is impossible"
        )
    if not is_factor(factor):
        raise ValueError(f"the factor of '{b_key}' must be a number other than 0, found {factor!r}")
    kinds = ScalarType[a_kind], ScalarType[b_kind]
    if not FLOATS.issuperset(kinds):
        raise ValueError("the dtypes of a module are no floats")
    return PeftOrigin(a_key, b_key, rank, kinds, float(factor), head_dim, first)
