"""Language models: ExecuTorch's `export_llm`, with weights that can be changed by name, and its runners, each request with
an adapter of its own; see docs/language-models.md.

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
    from blobstore.llm.export import export_llm
    from blobstore.llm.runners import Conversation, Runners, RunnersStats, Stop

__all__ = ["Conversation", "Runners", "RunnersStats", "Stop", "export_llm"]


if not TYPE_CHECKING:  # to a type checker, a name that is not there is an error

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name != "export_llm":
            return getattr(importlib.import_module(f"{__name__}.runners"), name)
        check_lowering("export_llm")
        try:
            module = importlib.import_module(f"{__name__}.export")
        except MissingDependencyError:
            raise
        except ImportError as error:
            raise MissingDependencyError(f"exporting language models needs more packages: {install('llm')}") from error
        return getattr(module, name)


def __dir__() -> list[str]:
    return usable(__name__, __all__)
