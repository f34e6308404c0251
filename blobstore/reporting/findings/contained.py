"""Payloads of delegates that hold a known tensor byte for byte."""

from __future__ import annotations

import xxhash

from blobstore.reporting.catalog import Catalog, Content
from blobstore.reporting.engine import Engine
from blobstore.reporting.findings.building import make, whole
from blobstore.reporting.model import Claim, Finding, FindingKind, RegionKind
from blobstore.reporting.proofs import search_payload
from blobstore.reporting.source import is_url

__all__ = ["find"]

_PART = 1 << 26
_DETAIL = "at byte {} of the payload"
_ADVICE = "lower it through BlobStorePartitioner, which moves weights out of payloads"


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
    for (payload, _), matches in zip(searched, engine.prove(search_payload, tasks), strict=True):
        for i, start in matches or ():
            hits.setdefault(payload, {}).setdefault(i, set()).add(start)
    findings = [_equal(catalog, content) for content in known if _is_payload_too(catalog, content)]
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
                    detail=_DETAIL.format(", ".join(map(str, sorted(begins)[:3]))),
                    advice=_ADVICE,
                )
            )
    return findings


def _is_payload_too(catalog: Catalog, content: Content) -> bool:
    """Whether some place of a known tensor is a whole payload."""
    return any(catalog.region(place).kind is RegionKind.PAYLOAD for place in content.places)


def _equal(catalog: Catalog, content: Content) -> Finding:
    """A payload that is a tensor and nothing else."""
    payloads = [place for place in content.places if catalog.region(place).kind is RegionKind.PAYLOAD]
    others = [place for place in content.places if place not in payloads]
    claims = whole(catalog, payloads)
    return make(FindingKind.CONTAINED, [*others, *payloads], claims, detail=_DETAIL.format("0"), advice=_ADVICE)
