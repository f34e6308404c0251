"""Equal bytes: across files, across methods, under several names, and as payloads of delegates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from blobstore.core.regions.region import RegionKind
from blobstore.reporting.find.catalog import Catalog
from blobstore.reporting.find.kinds.building import DEPLOYED, make, whole
from blobstore.reporting.model import Finding, FindingKind, Place, Work

__all__ = ["find"]

_WITHIN: dict[str, Work] = {"pte": "dedup", "ptd": "dedup", "safetensors": "convert"}
"""What stores once what a file of a format has several times."""


def find(catalog: Catalog) -> Iterator[Finding]:
    """What would be saved if every content were stored once; of each content, the first place stays.

    First within each file, then between files; these two do not overlap. Which files a command takes together is decided
    later, when all findings are there.
    """
    for content in catalog.contents:
        if len(content.places) < 2:
            continue
        payloads = [p for p in content.places if catalog.region(p).kind is RegionKind.PAYLOAD]
        weights = [p for p in content.places if catalog.region(p).kind is not RegionKind.PAYLOAD]
        if len(payloads) > 1:
            yield make(
                FindingKind.DUPLICATE_PAYLOAD,
                payloads,
                whole(catalog, payloads[1:]),
                advice="lower the parts as one method that both call, or give the payload to the backend by a key",
            )
        yield from _weights(catalog, weights)


def _weights(catalog: Catalog, places: Sequence[Place]) -> Iterator[Finding]:
    by_file: dict[int, list[Place]] = {}
    for place in places:
        by_file.setdefault(place[0], []).append(place)
    for of_file in by_file.values():
        if len(of_file) > 1:
            yield _within(catalog, of_file)
    firsts = [of_file[0] for of_file in by_file.values()]
    if len(firsts) > 1:
        deployed, others = (
            [place for place in firsts if (catalog.files[place[0]].format in DEPLOYED) is taken]
            for taken in (True, False)
        )
        places = [*deployed, *others]
        yield make(
            FindingKind.DUPLICATE_FILES,
            places,
            whole(catalog, places[1:]),
            detail=f"in {len(places)} files",
            work="dedup" if len(deployed) > 1 else None,
        )


def _within(catalog: Catalog, places: Sequence[Place]) -> Finding:
    """Several copies in one file: of different methods, or else a tied weight."""
    file = catalog.files[places[0][0]]
    methods = [set(catalog.region(place).methods) for place in places]
    apart = all(methods) and not set.intersection(*methods)
    kind = FindingKind.DUPLICATE_METHODS if apart else FindingKind.DUPLICATE_TIED
    return make(
        kind,
        places,
        whole(catalog, places[1:]),
        detail=f"{len(places)} copies in one file",
        work=_WITHIN.get(file.format),
        advice="store it once under all its names",
    )
