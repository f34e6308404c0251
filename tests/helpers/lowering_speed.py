"""Three things that torch does over again in each lowering, and that take half of the time of lowering a small model."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["install"]


class _Callables(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return callable(instance)


class _Annotation(metaclass=_Callables):
    """Stands for `Callable` in annotations, which torch evaluates for 12,000 registrations in each lowering."""

    def __class_getitem__(cls, item: Any) -> type[_Annotation]:
        return cls


def install() -> None:
    """Look for new operators instead of going through all of them, once for each namespace; annotate for nothing; and
    share what each node says of the nodes that it comes from, which nobody changes, instead of copying the whole tree."""
    import torch
    from torch._export import utils
    from torch.fx.traceback import NodeSource

    real, known = utils._materialize_cpp_cia_ops, set[str]()
    seen: tuple[int, ...] = ()

    def materialize() -> None:
        nonlocal seen
        # Operators come with libraries and modules, or are defined one by one.
        sources = len(torch.ops.loaded_libraries), len(sys.modules), len(torch.library._defs)
        if sources == seen:
            return
        seen = sources
        there = set(torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd"))
        if there != known:
            real()
            known.update(there)

    utils._materialize_cpp_cia_ops = materialize
    torch._ops.Callable = _Annotation  # type: ignore[misc, assignment]
    NodeSource.__deepcopy__ = lambda source, _: source  # type: ignore[attr-defined]
