"""Blobs of one layout that differ in a small share of their elements: fine-tuned, pruned or patched weights."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence

from blobstore.reporting.find.catalog import Catalog, Content
from blobstore.reporting.find.kinds.building import DEPLOYED, make, whole
from blobstore.reporting.find.kinds.kept import Kept
from blobstore.reporting.model import Finding, FindingKind, Place
from blobstore.reporting.read import Engine, count_differences

__all__ = ["MIN_ELEMENTS", "find"]

MIN_ELEMENTS = 64
"""Blobs with fewer elements are not compared."""

_INDEX = 4  # bytes that say which element a difference replaces
_MAX_BASES = 3


def find(catalog: Catalog, engine: Engine, kept: Kept, limit: float) -> list[Finding]:
    """Pairs of contents that differ in at least one and at most the share `limit` of their elements.

    Each content is compared with a few others that share most of its sampled groups of elements, always with the
    first content that has a group; so the work grows with the number of contents and not with its square. What is
    saved is what is left when only the differences are stored, each with its index.
    """
    groups: dict[Hashable, list[Content]] = defaultdict(list)
    for content in catalog.contents:
        if content.print.bands and not content.is_payload and content.nbytes // (content.width or 4) >= MIN_ELEMENTS:
            layout = content.layout and (content.layout.scalar_type, content.layout.sizes, content.layout.dim_order)
            groups[content.nbytes, layout].append(content)
    findings: list[Finding] = []
    for members in groups.values():
        if len(members) > 1:
            findings += _in_group(members, catalog, engine, kept, limit)
    return findings


def _in_group(members: list[Content], catalog: Catalog, engine: Engine, kept: Kept, limit: float) -> list[Finding]:
    width = members[0].width or (4 if members[0].nbytes % 4 == 0 else 1)
    elements = members[0].nbytes // width
    allowed = int(elements * limit)
    bases = _likely_bases(members, kept)
    pairs = [(base, content) for content, likely in bases.items() for base in likely]
    tasks = [
        (f"near:{base.digest}:{content.digest}:{width}:{allowed}", (base.spot, content.spot, width, allowed))
        for base, content in pairs
    ]
    best: dict[Content, tuple[int, Content]] = {}
    for (base, content), differ in zip(pairs, engine.prove(count_differences, tasks), strict=True):
        if differ is not None and (content not in best or differ < best[content][0]):
            best[content] = (differ, base)
    findings = []
    for content, (differ, base) in best.items():
        kept_bytes = differ * (width + _INDEX)
        if kept_bytes < content.nbytes:
            findings.append(
                make(
                    FindingKind.NEAR_DUPLICATE,
                    catalog.places([base, content]),
                    whole(catalog, content.places, kept_bytes),
                    detail=f"{differ:,} of {elements:,} elements differ",
                    advice=_advice(catalog, [*base.places, *content.places]),
                    share=differ / elements,
                )
            )
    return findings


def _advice(catalog: Catalog, places: Sequence[Place]) -> str:
    if {catalog.files[f].format for f, _ in places} <= DEPLOYED:
        return "publish one as a version on top of the other (blobstore publish --base): devices fetch what differs"
    return "save one of them, and of the other the elements that differ"


def _likely_bases(members: list[Content], kept: Kept) -> dict[Content, list[Content]]:
    """For each content the earlier ones that it shares most bands with, if any."""
    shared: dict[Content, Counter[Content]] = {}
    for band in range(0, len(members[0].print.bands), 8):  # one after the other, so that one table is enough
        first: dict[str, Content] = {}
        for content in members:
            base = first.setdefault(content.print.bands[band : band + 8], content)
            if base is not content and kept.root(base) is not kept.root(content):
                shared.setdefault(content, Counter())[base] += 1
    ordered = [content for content in members if content in shared]
    return {content: [base for base, _ in shared[content].most_common(_MAX_BASES)] for content in ordered}
