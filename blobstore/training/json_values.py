"""Plain values, with tensors among them, as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from blobstore.core.errors import UnsupportedDataError

__all__ = ["decode", "encode", "text"]


def encode(value: Any, key: str, tensors: dict[str, Tensor]) -> Any:
    """A value as JSON values; a tensor becomes `{"tensor": key}`.

    Args:
        value: None, a bool, int, float, str or tensor, or a list, tuple or dict of such values.
        key: the key of the value if it is a tensor, and the beginning of the keys of tensors in it.
        tensors: receives the tensors by key.

    Raises:
        UnsupportedDataError: the value is something else.
    """
    if isinstance(value, Tensor):
        tensors[key] = value
        return {"tensor": key}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return {"float": float(value).hex()}
    if isinstance(value, list | tuple):
        items = [encode(item, f"{key}/{i}", tensors) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return {"dict": {name: encode(item, f"{key}/{name}", tensors) for name, item in value.items()}}
    raise UnsupportedDataError(f"{key} has type {type(value).__name__}, which is neither a tensor nor a plain value")


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The value that `encode` was given.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: `encode` cannot have returned these values.
    """
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "float":
        return float.fromhex(content)
    if kind == "tuple":
        return tuple(decode(item, tensors) for item in content)
    if kind == "dict":
        return {name: decode(item, tensors) for name, item in content.items()}
    raise ValueError(f"unknown kind of value {kind!r}")


def text(value: Any) -> str:
    """A JSON value that must be a string.

    Raises:
        TypeError: it is not one.
    """
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value
