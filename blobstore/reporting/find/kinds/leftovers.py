"""Bytes without content: more padding than is needed, and bytes that nothing refers to."""

from __future__ import annotations

from collections.abc import Iterator

from blobstore.core.regions.region import RegionKind
from blobstore.reporting.find.catalog import Catalog
from blobstore.reporting.find.kinds.building import make, whole
from blobstore.reporting.model import Claim, FileReport, Finding, FindingKind, Work

__all__ = ["LEAST_PADDING", "find"]

LEAST_PADDING = 4096
"""Less padding than this, or than half a percent of the file, is not reported."""


def find(catalog: Catalog) -> Iterator[Finding]:
    """At most two findings a file."""
    for f, file in enumerate(catalog.files):
        claims = _padding(f, file)
        work: Work | None = "dedup" if file.format == "ptd" else None  # a program's places are carried over
        lost = sum(claim.stop - claim.start for claim in claims)
        if lost >= LEAST_PADDING and lost * 200 >= file.size:
            total = file.by_kind[RegionKind.PADDING]
            yield make(
                FindingKind.PADDING,
                [(claim.file, claim.region) for claim in claims],
                claims,
                detail=f"{total:,} bytes of padding, {total - lost:,} would do",
                work=work,
                advice="write the file again"
                if work
                else "write it with a smaller segment alignment; keep small blobs in the program (--keep-small)",
            )
        unused = [(f, r) for r, region in enumerate(file.regions) if region.kind is RegionKind.UNREFERENCED]
        if unused:
            yield make(
                FindingKind.UNREFERENCED,
                unused,
                whole(catalog, unused),
                detail=f"{len(unused)} runs of bytes that nothing refers to",
                work=work,
                advice="write the file again",
            )


def _padding(f: int, file: FileReport) -> list[Claim]:
    """What of each run of padding is beyond the next multiple of the file's alignment."""
    claims = []
    for r, region in enumerate(file.regions):
        if region.kind is RegionKind.PADDING:
            needed = min(-region.start % file.alignment, region.nbytes) if region.stop < file.size else 0
            if needed < region.nbytes:
                claims.append(Claim(f, r, needed, region.nbytes))
    return claims
