"""Payloads of delegates that hold a known tensor byte for byte."""

from __future__ import annotations

import xxhash

from blobstore.reporting.catalog import Catalog, Content
from blobstore.reporting.engine import Engine
from blobstore.reporting.findings.building import make
from blobstore.reporting.model import Claim, Finding, FindingKind
from blobstore.reporting.proofs import search_payload
from blobstore.reporting.source import is_url

__all__ = ["find"]

_PART = 1 << 26


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
            spots = [content.spot for content in tensors]
            # in parts, so that several workers share one large payload; a remote one is fetched whole
            part = payload.nbytes if is_url(payload.spot.path) else _PART
            for start in range(0, payload.nbytes, part):
                window = (start, min(start + part, payload.nbytes))
                tasks.append((f"contained:{payload.digest}:{of_all}:{start}", (payload.spot, window, needles, spots)))
                searched.append((payload, tensors))
    hits: dict[Content, dict[int, set[int]]] = {}
    tensors_of = dict(searched)
    for (payload, _), found in zip(searched, engine.prove(search_payload, tasks), strict=True):
        for i, start in found or ():
            hits.setdefault(payload, {}).setdefault(i, set()).add(start)
    findings = []
    for payload, starts in hits.items():
        tensors = tensors_of[payload]
        for i, begins in starts.items():
            claims = [
                Claim(f, r, start, start + tensors[i].nbytes) for f, r in payload.places for start in sorted(begins)
            ]
            findings.append(
                make(
                    FindingKind.CONTAINED,
                    [*tensors[i].places, *payload.places],
                    claims,
                    detail=f"at byte {', '.join(map(str, sorted(begins)[:3]))} of the payload",
                    advice="lower it with a backend that takes its weights by key (named data)",
                )
            )
    return findings
