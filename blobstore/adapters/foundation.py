"""What an adapter is made for: the fingerprint of a foundation, and the named tensors of a file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from blobstore.core.errors import UnsupportedDataError
from blobstore.core.memory.arrays import DTYPES, Plain
from blobstore.core.memory.layout import ScalarType
from blobstore.core.memory.mapped_file import Paths, as_paths
from blobstore.core.reprs import fields_line

__all__ = [
    "NamedTensor",
    "check_texts",
    "foundation_fingerprint",
    "is_text",
    "library",
    "named_tensors",
    "native_paths",
    "plain_of",
]


@dataclass(frozen=True)
class NamedTensor:
    """A tensor of a model in a data file.

    Attributes:
        name: its fully qualified name.
        scalar_type, sizes: its dtype and shape in the model.
        nbytes: its size in the file in bytes; if it is stored in several layouts, the sum.
        keys: the keys that it is stored under.
        aliases: its other names, if the model uses it in several places, such as tied embeddings.
    """

    __repr__ = fields_line

    name: str
    scalar_type: ScalarType
    sizes: tuple[int, ...]
    nbytes: int
    keys: tuple[str, ...]
    aliases: tuple[str, ...] = ()


def library() -> Any:
    """The native module.

    Raises:
        MissingDependencyError: the native package is not installed.
    """
    from blobstore.runtime.native import (
        native,  # here, because the command line lists adapters only when it is asked to
    )

    return native


def is_text(value: object) -> bool:
    """Whether a value is a name as the native module takes it."""
    from blobstore.runtime.native import is_utf8

    return is_utf8(value)


def check_texts(texts: Mapping[str, str] | None, what: str) -> dict[str, str]:
    """A mapping from names to names, which errors call `what`, or UnsupportedDataError; None is an empty one."""
    if texts is None:
        return {}
    if not isinstance(texts, Mapping):
        raise UnsupportedDataError(f"{what} must be a mapping by name, not a {type(texts).__qualname__}")
    for text in (*texts.keys(), *texts.values()):
        if not is_text(text):
            raise UnsupportedDataError(f"{what} must map str to str, found {text!r}")
    return dict(texts)


def native_paths(paths: Paths) -> list[bytes]:
    """Paths as the native module takes them."""
    return [os.fsencode(path) for path in as_paths(paths)]


def named_tensors(rows: Iterable[Any]) -> dict[str, NamedTensor]:
    """The native module's named tensors, by name."""
    return {
        name: NamedTensor(name, ScalarType(kind), tuple(sizes), nbytes, tuple(keys), tuple(aliases))
        for name, kind, sizes, nbytes, keys, aliases in rows
    }


def plain_of(tensor: Any) -> Plain:
    """A tensor that the native module returned, which holds its memory."""
    data, scalar_type, sizes = tensor
    kind = ScalarType(scalar_type)
    return np.frombuffer(data, DTYPES[kind]).reshape(sizes), kind


def foundation_fingerprint(foundation: Paths) -> str:
    """The fingerprint of a foundation, 32 hexadecimal digits. A file that is rewritten with the same keys, layouts and
    contents keeps its fingerprint.

    Args:
        foundation: its `.ptd`, or several that are used together.

    Raises:
        FileAccessError, InvalidFileError, IntegrityError: a file cannot be opened or trusted.
        KeyConflictError: two files have different contents under one key.
        AdapterError: a file is an adapter itself, or no file is given.
        MissingDependencyError: the native package is not installed.
    """
    return str(library().foundation_fingerprint(native_paths(foundation)))
