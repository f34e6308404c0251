"""The pool: every version of every model, each content once, in a folder or a bucket.

with Pool("models", create=True) as pool:
    pool.add("llama-chat", "llama/chat@7")
    weight = pool.open("llama/chat@7")["layers.0.attention.wq.weight"]
    pool.get("llama/chat@7", "restored")
"""

from __future__ import annotations

from blobstore.core.lazy import lazily, usable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from blobstore.pool.adding import Added
    from blobstore.pool.collecting import Collected
    from blobstore.pool.contents import PoolDataMap
    from blobstore.pool.pool import Pool, PoolStats, Shared
    from blobstore.pool.versions import Version

__all__ = ["Added", "Collected", "Pool", "PoolDataMap", "PoolStats", "Shared", "Version"]

_HOME = {
    "adding": ("Added",),
    "collecting": ("Collected",),
    "contents": ("PoolDataMap",),
    "pool": ("Pool", "PoolStats", "Shared"),
    "versions": ("Version",),
}


if not TYPE_CHECKING:  # so that type checkers know which names there are

    def __getattr__(name: str) -> object:
        return lazily(__name__, _HOME, name)


def __dir__() -> list[str]:
    return usable(__name__, __all__)
