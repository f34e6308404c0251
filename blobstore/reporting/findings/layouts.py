"""The same elements in another order: transposed, channels-last, or packed in tiles."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from blobstore.reporting.catalog import Catalog, Content
from blobstore.reporting.engine import Engine
from blobstore.reporting.findings.building import make, whole
from blobstore.reporting.findings.kept import Kept
from blobstore.reporting.fingerprint import fold_for
from blobstore.reporting.model import Finding, FindingKind
from blobstore.reporting.proofs import find_order

__all__ = ["Relation", "find", "relate"]

Relation = tuple[Content, Content, list[int], list[int]]
"""A tensor, another content, and the factors and the order that make one of the other."""

_MAX_TRIES = 4


def relate(catalog: Catalog, engine: Engine) -> list[Relation]:
    """Find contents whose elements are those of another, and prove it.

    An order-free fingerprint suggests, a comparison of all elements decides. At least one of the two has to be known
    as a tensor, for its shape.
    """
    groups: dict[tuple[int, int, tuple[int, int]], list[Content]] = defaultdict(list)
    widths = {content.nbytes: set[int]() for content in catalog.contents}
    for content in catalog.contents:
        if content.width:
            widths[content.nbytes].add(content.width)
    for content in catalog.contents:
        if content.print.fold is not None and not content.is_payload:
            for width in {content.width} if content.width else widths[content.nbytes]:
                if width in {1, 2, 4, 8}:
                    fold = fold_for(content.print.fold, width)
                    groups[content.nbytes, width, fold].append(content)
    relations: list[Relation] = []
    seen: set[frozenset[Content]] = set()
    for (_, width, _), members in groups.items():
        relations += _in_group(members, width, engine, seen)
    return relations


def _in_group(members: Sequence[Content], width: int, engine: Engine, seen: set[frozenset[Content]]) -> list[Relation]:
    """Compare each content with a few tensors of its group, the ones of most dimensions first."""
    tensors = [content for content in members if content.layout is not None and len(content.layout.sizes) > 1]
    tensors.sort(key=lambda content: -len(content.layout.sizes if content.layout else ()))
    relations: list[Relation] = []
    related: set[Content] = set()
    for tensor in tensors[:_MAX_TRIES]:
        others = [c for c in members if c is not tensor and c not in related and frozenset((tensor, c)) not in seen]
        seen.update(frozenset((tensor, other)) for other in others)
        shape = _memory_shape(tensor)
        tasks = [
            (f"order:{tensor.digest}:{other.digest}:{width}:{shape}", (tensor.spot, other.spot, shape, width))
            for other in others
        ]
        for other, proof in zip(others, engine.prove(find_order, tasks), strict=True):
            if proof is not None:
                relations.append((tensor, other, list(proof[0]), list(proof[1])))
                related |= {tensor, other}
    return relations


def _memory_shape(content: Content) -> tuple[int, ...]:
    assert content.layout is not None  # noqa: S101 - only tensors are asked
    return tuple(content.layout.sizes[d] for d in content.layout.dim_order)


def find(catalog: Catalog, relations: Sequence[Relation], kept: Kept) -> list[Finding]:
    """One finding for each proof: what does not stay is claimed wherever it is."""
    findings = []
    for tensor, other, factors, order in relations:
        stays = kept.of(tensor)
        gone = [content for content in (tensor, other) if content is not stays]
        if len(gone) == 2:  # both give way to a third, as a finding of another class says; alone, one would stay
            gone = [other]
        first = [content for content in (tensor, other) if content not in gone]
        findings.append(
            make(
                FindingKind.OTHER_LAYOUT,
                catalog.places([*first, *gone]),
                whole(catalog, catalog.places(gone)),
                detail=_describe(tensor, factors, order),
                advice="lower all programs so that the backend stores this weight in one layout",
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
