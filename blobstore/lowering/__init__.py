"""Lowering so that weights can be changed by name while a program runs; see docs/lowering.md.

Importing this package needs neither torch nor executorch; what needs them is imported when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from blobstore.errors import MissingDependencyError

if TYPE_CHECKING:
    from blobstore.lowering.plugin import BlobStoreBackend, BlobStorePartitioner, register_inner
    from blobstore.lowering.quantized import restore_names

__all__ = ["BlobStoreBackend", "BlobStorePartitioner", "register_inner", "restore_names"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        if name == "restore_names":
            from blobstore.lowering import quantized

            return quantized.restore_names
        from blobstore.lowering import plugin
    except ImportError as error:
        raise MissingDependencyError("lowering needs executorch: pip install 'blobstore[executorch]'") from error
    return getattr(plugin, name)
