"""Delegates of this process: a cache for those that ExecuTorch's own runtime loads, and what all of them did."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from blobstore.core.reprs import fields_line
from blobstore.runtime.cache import BlobCache, check_cache
from blobstore.runtime.native import decode_text, native

__all__ = ["DelegateStats", "delegate_failure", "delegate_stats", "serving"]


@contextmanager
def serving(cache: BlobCache) -> Iterator[None]:
    """Run methods that ExecuTorch's own runtime loads in this block, on this thread, on a cache.

    Delegates that were lowered with `BlobStorePartitioner` hold the cache and follow its commits for as long as the
    method lives. Constants outside of delegates are read from ExecuTorch's own map of its data file. On Linux they
    follow too if that file is the cache's shared working copy; otherwise they keep their values::

        make_working_copy("model.ptd", "live.ptd")
        cache = BlobCache("live.ptd", "shared")
        with serving(cache):
            method = Runtime.get().load_program("model.pte", data_path="live.ptd").load_method("forward")

    While constants that do not follow are loaded, a strict `update_state_dict` is refused. Each delegate checks for
    commits when it starts to run. If a commit happens while a method with several delegates runs, the later delegates
    may therefore use newer weights than the earlier ones: commit between two calls. With `Program` this cannot happen.

    Raises:
        UnsupportedDataError: `cache` is not a `BlobCache`.
    """
    check_cache(cache, "the served cache")
    scope = native.CacheScope(cache._native)
    scope.enter()
    try:
        yield
    finally:
        scope.leave()


@dataclass(frozen=True)
class DelegateStats:
    """Counts over all delegates of `BlobStorePartitioner` in this process.

    Attributes:
        handles: delegates that are loaded now.
        inits: how often an inner backend was initialized, on loading or because weights changed.
        names: versions of blobs that are in use.
    """

    __repr__ = fields_line

    handles: int
    inits: int
    names: int


def delegate_stats() -> DelegateStats:
    """The current counts."""
    return DelegateStats(**native.delegate_stats())


def delegate_failure() -> str | None:
    """The reason of the last failure of a delegate on this thread, or None. Each reason is returned once.

    For callers of ExecuTorch's own runtime, which reports only a number. Errors of `Program` and `Method` include the
    reason.
    """
    reason = native.take_delegate_failure()
    return None if reason is None else decode_text(reason)
