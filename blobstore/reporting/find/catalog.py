"""All contents of all files: which are equal, and where each of them is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from blobstore.core.memory.layout import TensorLayout
from blobstore.core.regions.region import Region, RegionKind
from blobstore.reporting.model import FileReport, Place
from blobstore.reporting.read import Fingerprint, Spot

__all__ = ["Catalog", "Content"]


@dataclass(eq=False)
class Content:
    """Equal bytes, and everywhere they are.

    Attributes:
        digest: xxh3-128 in hexadecimal.
        nbytes: their size.
        spot: one of the places.
        layout: how they are a tensor, if any of the places says so.
        print: what is known of them.
        places: in the order of the files.
        is_payload: whether all places are payloads of delegates.
    """

    digest: str
    nbytes: int
    spot: Spot
    layout: TensorLayout | None
    print: Fingerprint
    places: list[Place] = field(default_factory=list)
    is_payload: bool = True

    @property
    def is_constant(self) -> bool:
        """Whether they are one value repeated."""
        return bool(self.print.repeats)

    @property
    def width(self) -> int:
        """Bytes of an element; 0 when that is not known."""
        return self.layout.scalar_type.itemsize if self.layout is not None else 0


class Catalog:
    """The blobs of files that were fingerprinted.

    Args:
        files: the files.
        prints: for each file, the fingerprint of each of its regions, None for what is no blob.
    """

    def __init__(self, files: Sequence[FileReport], prints: Sequence[Sequence[Fingerprint | None]]) -> None:
        self.files = files
        self.by_digest: dict[tuple[str, int], Content] = {}
        for f, (file, of_file) in enumerate(zip(files, prints, strict=True)):
            for r, (region, known) in enumerate(zip(file.regions, of_file, strict=True)):
                if known is not None:
                    self._add((f, r), file, region, known)
        self.contents = list(self.by_digest.values())

    def _add(self, place: Place, file: FileReport, region: Region, known: Fingerprint) -> None:
        key = (known.digest, region.nbytes)
        content = self.by_digest.get(key)
        if content is None:
            spot = Spot(file.path, region.start, region.stop)
            content = self.by_digest[key] = Content(known.digest, region.nbytes, spot, region.layout, known)
        elif content.layout is None and region.layout is not None:
            content.layout, content.print = region.layout, known
            content.spot = Spot(file.path, region.start, region.stop)
        content.places.append(place)
        content.is_payload &= region.kind is RegionKind.PAYLOAD

    def region(self, place: Place) -> Region:
        return self.files[place[0]].regions[place[1]]

    def places(self, contents: Iterable[Content]) -> tuple[Place, ...]:
        """Where several contents are, in order."""
        return tuple(place for content in contents for place in content.places)
