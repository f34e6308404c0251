"""The same elements in another order: transposed, channels-last, or packed in tiles."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from blobstore.reporting.find.catalog import Catalog, Content
from blobstore.reporting.find.kinds.building import in_programs, make, whole
from blobstore.reporting.find.kinds.kept import Kept
from blobstore.reporting.model import Finding, FindingKind
from blobstore.reporting.read import Engine, find_order, fold_for

__all__ = ["Relation", "find", "relate"]

Relation = tuple[Content, Content, list[int], list[int]]
"""A tensor, another content, and the factors and the order that make one of the other."""

_MAX_TRIES = 4
_WIDTHS = {1, 2, 4, 8}


def relate(catalog: Catalog, engine: Engine) -> list[Relation]:
    """Find contents whose elements are those of another, and prove it.

    An order-free fingerprint suggests, a comparison of all elements decides. At least one of the two has to be known
    as a tensor, for its shape.
    """
    groups = _groups(catalog)
    relations: list[Relation] = []
    seen: set[frozenset[Content]] = set()
    for number in range(_MAX_TRIES):
        pairs = [pair for group in groups for pair in group.pairs(number, seen)]
        proofs = engine.prove(find_order, [_task(*pair) for pair in pairs])
        proved = [(tensor, other, *proof) for (tensor, other, _), proof in zip(pairs, proofs, strict=True) if proof]
        for group in groups:
            group.related.update(group.members & {content for pair in proved for content in pair[:2]})
        relations += proved
    return relations


def _task(tensor: Content, other: Content, width: int) -> tuple[str, tuple[Any, ...]]:
    shape = _memory_shape(tensor)
    key = f"order:{tensor.digest}:{other.digest}:{width}:{shape}"
    return key, (tensor.spot, other.spot, shape, width)


def _groups(catalog: Catalog) -> list[_Group]:
    """Contents of one size and one fingerprint, for each width that their elements may have."""
    widths: dict[int, set[int]] = defaultdict(set)  # of the tensors of a size
    for content in catalog.contents:
        if content.width:
            widths[content.nbytes].add(content.width)
    groups: dict[tuple[int, int, tuple[int, int]], list[Content]] = defaultdict(list)
    for content in catalog.contents:
        fold = content.print.fold
        if fold is None or content.is_payload:
            continue
        # opaque bytes may be elements of any width that a tensor of their size has
        for width in ({content.width} if content.width else widths[content.nbytes]) & _WIDTHS:
            groups[content.nbytes, width, fold_for(fold, width)].append(content)
    return [_Group(members, width) for (_, width, _), members in groups.items() if len(members) > 1]


class _Group:
    """Contents that may have the same elements: each is compared with a few of the tensors among them, the ones of
    most dimensions first."""

    def __init__(self, members: Sequence[Content], width: int) -> None:
        self.members = dict.fromkeys(members).keys()
        self.width = width
        self.related: set[Content] = set()
        tensors = [content for content in members if content.layout is not None and len(content.layout.sizes) > 1]
        self.tensors = sorted(tensors, key=lambda content: -len(content.layout.sizes if content.layout else ()))

    def pairs(self, number: int, seen: set[frozenset[Content]]) -> Iterator[tuple[Content, Content, int]]:
        """What to compare with the tensor of this number; what was compared before, or was related, is left out."""
        if number < len(self.tensors):
            tensor = self.tensors[number]
            for other in self.members:
                pair = frozenset((tensor, other))
                if other is not tensor and other not in self.related and pair not in seen:
                    seen.add(pair)
                    yield tensor, other, self.width


def _memory_shape(content: Content) -> tuple[int, ...]:
    assert content.layout is not None  # noqa: S101 - only tensors are asked
    return tuple(content.layout.sizes[d] for d in content.layout.dim_order)


def find(catalog: Catalog, relations: Sequence[Relation], kept: Kept) -> list[Finding]:
    """One finding for each proof: what does not stay is claimed wherever it is."""
    findings = []
    for tensor, other, factors, order in relations:
        stays = kept.root(tensor)
        gone = [content for content in (tensor, other) if content is not stays]
        if len(gone) == 2:  # both give way to a third, as a finding of another class says; alone, one would stay
            gone = [other]
        first = [content for content in (tensor, other) if content not in gone]
        lowered = in_programs(catalog, catalog.places([tensor, other]))
        findings.append(
            make(
                FindingKind.OTHER_LAYOUT,
                catalog.places([*first, *gone]),
                whole(catalog, catalog.places(gone)),
                detail=_describe(tensor, factors, order),
                advice="lower all programs so that the backend stores this weight in one layout"
                if lowered
                else "save one of them, and reorder it after loading",
            )
        )
    return findings


def _describe(tensor: Content, factors: list[int], order: list[int]) -> str:
    assert tensor.layout is not None  # noqa: S101 - only tensors are related
    solid = [n for n in _memory_shape(tensor) if n != 1]
    if factors != solid:
        return f"packed in tiles of {factors[1]}x{factors[3]}"
    if len(solid) == 2:
        return "transposed"
    logical = [d for d in tensor.layout.dim_order if tensor.layout.sizes[d] != 1]
    moved = tuple(logical[i] for i in order)
    names: dict[tuple[int, ...], str] = {(0, 2, 3, 1): "channels last", (0, 1, 2, 3): "channels first"}
    name = names.get(moved, "dimensions reordered")
    return f"{name}: {'x'.join(map(str, (tensor.layout.sizes[d] for d in moved)))} as {moved}"
