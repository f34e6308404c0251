"""Payloads of delegates that hold a known tensor byte for byte."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import xxhash

from blobstore.core.regions.region import RegionKind
from blobstore.core.regions.source import is_url
from blobstore.reporting.find.catalog import Catalog, Content
from blobstore.reporting.find.kinds.building import make, whole
from blobstore.reporting.model import Claim, Finding, FindingKind
from blobstore.reporting.read import Engine, search_payload

__all__ = ["find"]

_PART = 1 << 26
_DETAIL = "at byte {} of the payload"
_ADVICE = "lower it through BlobStorePartitioner, which moves weights out of payloads"


def find(catalog: Catalog, engine: Engine) -> list[Finding]:
    """One finding for each tensor and payload; its bytes in the payload are claimed, as often as they are there."""
    known = [c for c in catalog.contents if c.print.needle is not None and not c.is_payload and not c.is_constant]
    searches = list(_all_searches(catalog, known))
    hits: dict[tuple[Content, Content], set[int]] = defaultdict(set)
    proofs = engine.prove(search_payload, [(search.key, search.arguments) for search in searches])
    for search, matches in zip(searches, proofs, strict=True):
        for i, start in matches or ():
            hits[search.payload, search.tensors[i]].add(start)
    findings = [_equal(catalog, content) for content in known if _is_payload_too(catalog, content)]
    return findings + [_held(payload, tensor, sorted(begins)) for (payload, tensor), begins in hits.items()]


class _Search(NamedTuple):
    """A part of a payload, in which tensors are looked for.

    Attributes:
        payload: the payload.
        tensors: what is looked for.
        key: under which the cache knows the result.
        arguments: of `search_payload`.
    """

    payload: Content
    tensors: list[Content]
    key: str
    arguments: tuple[Any, ...]


def _all_searches(catalog: Catalog, known: Iterable[Content]) -> Iterator[_Search]:
    """In each payload, for all tensors that are not larger."""
    by_size = sorted(known, key=lambda content: content.nbytes)
    sizes = [content.nbytes for content in by_size]
    for payload in catalog.contents:
        fitting = by_size[: bisect.bisect_right(sizes, payload.nbytes)]
        if fitting and payload.is_payload and not payload.is_constant:
            yield from _searches(payload, fitting)


def _searches(payload: Content, fitting: Sequence[Content]) -> Iterator[_Search]:
    """In parts, so that several workers share one large payload; a remote one is fetched whole."""
    tensors = sorted(fitting, key=lambda content: content.digest)  # the cache knows them by this order
    of_all = xxhash.xxh3_128_hexdigest("".join(content.digest for content in tensors).encode())
    needles, spots = [content.print.needle for content in tensors], [content.spot for content in tensors]
    part = payload.nbytes if is_url(payload.spot.path) else _PART
    for start in range(0, payload.nbytes, part):
        window = (start, min(start + part, payload.nbytes))
        key = f"contained:{payload.digest}:{of_all}:{start}"
        yield _Search(payload, tensors, key, (payload.spot, window, needles, spots))


def _held(payload: Content, tensor: Content, begins: Sequence[int]) -> Finding:
    return make(
        FindingKind.CONTAINED,
        [*tensor.places, *payload.places],
        [Claim(f, r, start, start + tensor.nbytes) for f, r in payload.places for start in begins],
        detail=_DETAIL.format(", ".join(map(str, begins[:3]))),
        advice=_ADVICE,
    )


def _is_payload_too(catalog: Catalog, content: Content) -> bool:
    """Whether some place of a known tensor is a whole payload."""
    return any(catalog.region(place).kind is RegionKind.PAYLOAD for place in content.places)


def _equal(catalog: Catalog, content: Content) -> Finding:
    """A payload that is a tensor and nothing else."""
    payloads = [place for place in content.places if catalog.region(place).kind is RegionKind.PAYLOAD]
    others = [place for place in content.places if place not in payloads]
    claims = whole(catalog, payloads)
    return make(FindingKind.CONTAINED, [*others, *payloads], claims, detail=_DETAIL.format("0"), advice=_ADVICE)
