"""The `params.json` that ExecuTorch's exporter takes, and other small files of JSON."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from blobstore.core.errors import InvalidFileError
from blobstore.core.formats.safetensors import parse_json
from blobstore.core.memory.mapped_file import as_path, map_file

__all__ = ["params_head_dim", "read_json"]

_MOST = 1 << 24  # bytes


def params_head_dim(params: Mapping[str, Any] | str | os.PathLike[str]) -> int:
    """What the `params.json` of an export says of the rotary embedding.

    Returns:
        The size of a head if neighbouring elements are rotated, as Llama's own code does; 0 if halves are.

    Raises:
        FileAccessError: the file cannot be opened.
        InvalidFileError: it is malformed.
    """
    path: str | os.PathLike[str] = "params" if isinstance(params, Mapping) else as_path(params)
    fields = params if isinstance(params, Mapping) else read_json(path)
    if not isinstance(fields, Mapping):
        raise InvalidFileError(path, "expected a JSON object")
    hf_rope = fields.get("use_hf_rope") or False
    if not isinstance(hf_rope, bool):
        raise InvalidFileError(path, f"use_hf_rope must be true or false, found {hf_rope!r}")
    if hf_rope:
        return 0
    head = fields.get("head_dim")
    if head is None:
        heads, dim = fields.get("n_heads"), fields.get("dim")
        if type(heads) is not int or type(dim) is not int or heads <= 0 or dim <= 0 or dim % heads:
            raise InvalidFileError(path, f"expected head_dim, or dim and n_heads, found {dim!r} and {heads!r}")
        head = dim // heads
    if type(head) is not int or head <= 0 or head % 2:
        raise InvalidFileError(path, f"head_dim must be a positive even integer, found {head!r}")
    return head


def read_json(path: str | os.PathLike[str]) -> Any:
    """A small JSON file: at most 16 MiB, and no key twice in one object."""
    path = as_path(path)
    data = map_file(path)
    if len(data) > _MOST:
        raise InvalidFileError(path, f"{len(data):,} bytes are too many for a configuration")
    return parse_json(data, path, "file")
