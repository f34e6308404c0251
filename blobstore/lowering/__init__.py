"""Lowering so that weights can be changed by name while a program runs; see docs/howto/lowering.md.

Importing this package needs neither torch nor executorch. Both are imported when one of its names is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from blobstore.core.lazy import lazily, usable

if TYPE_CHECKING:
    from blobstore.lowering.export import lower, quiet
    from blobstore.lowering.lowered import LoweredProgram
    from blobstore.lowering.named_data import to_named_data
    from blobstore.lowering.plugin import BlobStoreBackend, BlobStorePartitioner, register_inner
    from blobstore.lowering.pt2e import restore_names

__all__ = [
    "BlobStoreBackend",
    "BlobStorePartitioner",
    "LoweredProgram",
    "lower",
    "quiet",
    "register_inner",
    "restore_names",
    "to_named_data",
]

_HOME = {
    "export": ("lower", "quiet"),
    "lowered": ("LoweredProgram",),
    "named_data": ("to_named_data",),
    "plugin": ("BlobStoreBackend", "BlobStorePartitioner", "register_inner"),
    "pt2e": ("restore_names",),
}


if not TYPE_CHECKING:  # to a type checker, a name that is not there is an error

    def __getattr__(name: str) -> object:
        why = "lowering needs all of executorch"
        return lazily(__name__, _HOME, name, needs="lowering", extra="executorch", why=why)


def __dir__() -> list[str]:
    return usable(__name__, __all__)
