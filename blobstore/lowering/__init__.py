"""Lowering so that weights can be changed by name while a program runs; see docs/howto/lowering.md.

Importing this package needs neither torch nor executorch. Both are imported when one of its names is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from blobstore.core.distribution import install
from blobstore.core.errors import MissingDependencyError
from blobstore.core.lazy import usable
from blobstore.core.requirements import check_lowering

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

_MODULES = {
    "LoweredProgram": "lowered",
    "lower": "export",
    "quiet": "export",
    "restore_names": "pt2e",
    "to_named_data": "named_data",
}


if not TYPE_CHECKING:  # to a type checker, a name that is not there is an error

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        check_lowering()
        try:
            module = importlib.import_module(f"{__name__}.{_MODULES.get(name, 'plugin')}")
        except MissingDependencyError:
            raise
        except ImportError as error:  # it is there, but something that it needs is not
            raise MissingDependencyError(
                f"lowering needs all of executorch: {install('executorch')} ({error})"
            ) from error
        return getattr(module, name)


def __dir__() -> list[str]:
    return usable(__name__, __all__)
