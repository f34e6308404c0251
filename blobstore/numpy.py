"""Numpy arrays by name in a .ptd: the calls of `safetensors.numpy`."""

from __future__ import annotations

import os

from blobstore.core import files
from blobstore.core.files import save, save_file
from blobstore.core.memory.tensors import Array

__all__ = ["load", "load_file", "save", "save_file"]


def load_file(filename: str | os.PathLike[str], *, tied: bool = False) -> dict[str, Array]:
    """`blobstore.load_file` as numpy arrays, which can be written to without changing the file.

    Args:
        filename: a .ptd; a .safetensors and a .pte are taken, too.
        tied: whether writing to one of the names that share a blob writes to all of them.

    Raises:
        As `blobstore.load_file`.
    """
    return files.load_file(filename, "np", tied=tied)


def load(data: bytes) -> dict[str, Array]:
    """The tensors of a .ptd in memory as numpy arrays, which are copies.

    Raises:
        As `blobstore.core.files.load`.
    """
    return files.load(data, "np")


def __dir__() -> list[str]:
    return list(__all__)
