"""Language models: ExecuTorch's `export_llm`, with weights that can be changed by name, and its runners, each request with
an adapter of its own; see docs/language-models.md.

Importing this package needs neither torch nor executorch. Both are imported when one of its names is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from blobstore.core.lazy import lazily, usable

if TYPE_CHECKING:
    from blobstore.llm.export import export_llm
    from blobstore.llm.runners import Conversation, Runners, RunnersStats, Stop

__all__ = ["Conversation", "Runners", "RunnersStats", "Stop", "export_llm"]

_RUNNERS = {"runners": ("Conversation", "Runners", "RunnersStats", "Stop")}
_EXPORT = {"export": ("export_llm",)}


if not TYPE_CHECKING:  # to a type checker, a name that is not there is an error

    def __getattr__(name: str) -> object:
        if name != "export_llm":
            return lazily(__name__, _RUNNERS, name)
        why = "exporting language models needs more packages"
        return lazily(__name__, _EXPORT, name, needs="export_llm", extra="llm", why=why)


def __dir__() -> list[str]:
    return usable(__name__, __all__)
