"""In which forms the contents of a release can be fetched: as they are, as byte planes, or as a difference to another one.

The ways lie beside the index, are not signed, and may change: a publisher that collects or packs anew writes them again.
Nobody needs to trust them, because whatever they lead to is compared with its SHA-256. They come from servers, and their
bounds are checked here. They are JSON in a zstd frame: who cannot read that cannot read most forms either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from blobstore.core.errors import InvalidFileError
from blobstore.core.requirements import needed
from blobstore.releases.index.index import TABLE_LIMIT, Meta, Object, Sha256, Size, Struct, encode_json, parse_json
from blobstore.releases.index.parts import Parts

__all__ = [
    "EARLIER",
    "WAYS",
    "Route",
    "Way",
    "Ways",
    "cheapest",
    "compressed",
    "decompressed",
    "encode_ways",
    "parse_ways",
]

WAYS, EARLIER = "ways.json.zst", "earlier.json.zst"
"""The names of the files beside an index. The second one is for devices that have none of the bases of the first: it also has the
ways to these bases."""

_MAGIC = b"\x28\xb5\x2f\xfd"  # of a zstd frame
_DEEPEST = 8
"""How many differences may follow each other."""

_MOST_OBJECTS = 100_000
_MOST_WAYS = 64
_ENCODING = r"^[a-z0-9:+]{1,40}$(?!\n)"


class Way(Struct, frozen=True, array_like=True):
    """One form in which a content can be fetched.

    Attributes:
        encoding: see `blobstore.core.codec.blobs`. A reader leaves out ways with an encoding that it does not know.
        object: which of the objects holds it.
        at, stored: where it lies there: first byte, and number of bytes.
        base: which content it is a difference to; -1 for none.
    """

    encoding: Annotated[str, Meta(pattern=_ENCODING)]
    object: Annotated[int, Meta(ge=0, le=_MOST_OBJECTS)]
    at: Size
    stored: Size
    base: Annotated[int, Meta(ge=-1, le=(1 << 31))] = -1


class Ways(Struct, frozen=True):
    """The ways to the contents of a release.

    Attributes:
        format: the version of this format.
        index: SHA-256 of the index of the release.
        objects: what the ways refer to.
        bases: contents which the release does not have, and to which others are differences: SHA-256 and size.
        ways: for each content of the release, in the order of `Parts.contents`, and for each base, its ways.
    """

    format: Literal["blobstore.ways.1"]
    index: Sha256
    objects: Annotated[tuple[Object, ...], Meta(max_length=_MOST_OBJECTS)]
    bases: tuple[tuple[Sha256, Size], ...]
    ways: tuple[Annotated[tuple[Way, ...], Meta(max_length=_MOST_WAYS)], ...]


def parse_ways(data: bytes, index_sha256: str, parts: Parts, where: str) -> Ways:
    """Read and check the ways of a release.

    Args:
        data: the JSON, in a zstd frame or as it is.
        index_sha256: the digest of the index of the release.
        parts: its parts.
        where: the file or URL that it comes from, for messages.

    Raises:
        InvalidFileError: they are malformed, or those of another release.
    """
    what = "a list of the ways to the contents of a release"
    ways = parse_json(decompressed(data, where, what), Ways, where, what)
    if ways.index != index_sha256:
        raise InvalidFileError(
            where, f"expected the ways of the index sha256:{index_sha256}, found those of {ways.index}"
        )
    sizes = [*parts.contents.values(), *(size for _, size in ways.bases)]
    if len(ways.ways) != len(sizes):
        raise InvalidFileError(where, f"expected the ways of {len(sizes)} contents, found those of {len(ways.ways)}")
    for number, listed in enumerate(ways.ways):
        for way in listed:
            sound = way.object < len(ways.objects) and way.at + way.stored <= ways.objects[way.object].size
            if way.base >= 0:
                sound = sound and way.base < len(sizes) and sizes[way.base] == sizes[number] and way.base != number
            if not sound or (way.encoding == "raw" and way.stored != sizes[number]):
                raise InvalidFileError(
                    where,
                    f"content {number} cannot travel as {way.encoding!r}: this way refers to bytes that are not there",
                )
    return ways


def _zstandard() -> Any:
    with needed("lists of ways need zstandard", "releases"):
        import zstandard
    return zstandard


def decompressed(data: bytes, where: str, what: str) -> bytes:
    """What a frame of zstd has, that may come from anywhere; other bytes as they are.

    Raises:
        InvalidFileError: it is malformed, or has more than `TABLE_LIMIT` bytes.
    """
    if not data.startswith(_MAGIC):
        return data
    zstandard = _zstandard()
    try:
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= TABLE_LIMIT:
            raise InvalidFileError(
                where, f"this is not {what}: it says that it has {size} bytes, at most {TABLE_LIMIT} are possible"
            )
        text: bytes = zstandard.ZstdDecompressor().decompress(data, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise InvalidFileError(where, f"this is not {what}: {error}") from None
    return text


def encode_ways(ways: Ways) -> bytes:
    """What `parse_ways` reads, the same for equal ways."""
    return compressed(encode_json(ways))


def compressed(data: bytes) -> bytes:
    """Bytes in a frame of zstd."""
    frame: bytes = _zstandard().ZstdCompressor(level=9).compress(data)
    return frame


@dataclass(frozen=True)
class Route:
    """How to get a content.

    Attributes:
        cost: bytes to fetch for it, with those of the contents that it is made of.
        way: the last step; None if it is here.
    """

    cost: int
    way: Way | None


def cheapest(
    ways: Sequence[Sequence[Way]], here: Sequence[bool], readable: Callable[[Way], bool] = lambda way: True
) -> list[Route | None]:
    """The cheapest route to each content, through others if that is cheaper; None where there is none.

    Args:
        ways: of each content.
        here: whether it is here.
        readable: whether a way can be decoded.
    """
    start = Route(0, None)
    best: list[Route | None] = [start if there else None for there in here]
    differences = []
    for number, way in _usable(ways, here, readable):
        if way.base >= 0:
            differences.append((number, way))
        else:
            _improve(best, number, way, start)
    for _ in range(_DEEPEST):  # each round makes chains longer by one
        known = list(best)
        for number, way in differences:
            _improve(best, number, way, known[way.base])
        if known == best:
            break
    return best


def _usable(
    ways: Sequence[Sequence[Way]], here: Sequence[bool], readable: Callable[[Way], bool]
) -> Iterator[tuple[int, Way]]:
    """The ways to contents that are not here."""
    for number, listed in enumerate(ways):
        if not here[number]:
            yield from ((number, way) for way in listed if readable(way))


def _improve(best: list[Route | None], number: int, way: Way, before: Route | None) -> None:
    """Take a way to a content if it is cheaper than what is known; `before` leads to what the way begins with."""
    old = best[number]
    if before is not None and (old is None or before.cost + way.stored < old.cost):
        best[number] = Route(before.cost + way.stored, way)
