"""Payloads of delegates that hold a known tensor byte for byte."""

from __future__ import annotations

import xxhash

from blobstore.reporting.catalog import Catalog, Content
from blobstore.reporting.engine import Engine
from blobstore.reporting.findings.building import make
from blobstore.reporting.model import Claim, Finding, FindingKind
from blobstore.reporting.proofs import search_payload

__all__ = ["find"]


def find(catalog: Catalog, engine: Engine) -> list[Finding]:
    """One finding for each tensor and payload; its bytes in the payload are claimed, as often as they are there."""
    known = [c for c in catalog.contents if c.print.needle is not None and not c.is_payload and not c.is_constant]
    payloads = [c for c in catalog.contents if c.is_payload and not c.is_constant]
    tasks = []
    searched: list[tuple[Content, list[Content]]] = []
    for payload in payloads:
        tensors = [content for content in known if content.nbytes <= payload.nbytes]
        if tensors:
            of_all = xxhash.xxh3_128_hexdigest("".join(sorted(content.digest for content in tensors)).encode())
            tensors.sort(key=lambda content: content.digest)  # the cache knows them by this order
            needles = [content.print.needle for content in tensors]
            tasks.append((f"contained:{payload.digest}:{of_all}", (payload.spot, needles, [t.spot for t in tensors])))
            searched.append((payload, tensors))
    findings = []
    for (payload, tensors), hits in zip(searched, engine.prove(search_payload, tasks), strict=True):
        starts: dict[int, list[int]] = {}
        for i, start in hits or ():
            starts.setdefault(i, []).append(start)
        for i, found in starts.items():
            claims = [Claim(f, r, start, start + tensors[i].nbytes) for f, r in payload.places for start in found]
            findings.append(
                make(
                    FindingKind.CONTAINED,
                    [*tensors[i].places, *payload.places],
                    claims,
                    detail=f"at byte {', '.join(map(str, sorted(found)[:3]))} of the payload",
                    advice="lower it with a backend that takes its weights by key (named data)",
                )
            )
    return findings
