"""Making the table of a file that is published, and the objects in which its parts travel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from blobstore.core.disk.progress import Progress
from blobstore.core.memory.mapped_file import check_length
from blobstore.releases.index.contents import Region, digest_of
from blobstore.releases.index.encoding import best_width, encode
from blobstore.releases.index.index import WORTH, Object, Part, Table, Way
from blobstore.releases.index.objects import ObjectWriter

__all__ = ["BaseBlobs", "make_table", "travelling"]

_SMALL = 64
"""A blob with fewer bytes travels as it is: a frame has about 20."""


@dataclass(frozen=True)
class BaseBlobs:
    """What devices with the base have.

    Attributes:
        digests: SHA-256 of every blob.
        find: gives the digest and the bytes of a blob by its key and size, if there is one.
        ways: the form in which a blob travelled then, and the object that has it.
    """

    digests: frozenset[str]
    find: Callable[[str, int], tuple[str, memoryview] | None]
    ways: Mapping[str, tuple[Way, Object]] = field(default_factory=dict)


NOTHING = BaseBlobs(frozenset(), lambda key, size: None)
"""The base of a first release."""


def make_table(
    files: Path,
    of: Object,
    regions: Sequence[Region],
    base: BaseBlobs = NOTHING,
    *,
    encoded: bool = True,
    progress: Progress | None = None,
) -> Table:
    """Describe a file, and write the objects in which its parts travel in fewer bytes.

    One object has the parts for devices that have nothing, another the patches for those with the base.

    Args:
        files: the folder of objects.
        of: the file.
        regions: what it consists of.
        base: what the base has.
        encoded: look for forms with fewer bytes.
        progress: called after every region.
    """
    rows = [(region, digest_of(region.data)) for region in regions]
    ways: dict[int, list[Way]] = {}
    objects: list[Object] = []
    copied: set[int] = set()
    for region, sha256 in rows:
        if sha256 in base.digests:
            copied.add(region.offset)
            ways.setdefault(region.offset, []).append(Way("copy", -1, 0, 0, sha256))
            if encoded and sha256 in base.ways:  # for devices without the base
                way, home = base.ways[sha256]
                if home not in objects:
                    objects.append(home)
                ways[region.offset].append(Way(way.encoding, objects.index(home), way.at, way.stored))
    if encoded:
        new = [row for row in rows if row[0].offset not in copied]
        for choose in (_patch, _planes):
            with ObjectWriter(files) as writer:
                written = _write_ways(writer, new, base, choose, progress)
                saved = sum(len(region.data) - way.stored for region, way in written)
                if written and saved > (1 - WORTH) * sum(len(region.data) for region, _ in new):
                    for region, way in written:
                        numbered = Way(way.encoding, len(objects), way.at, way.stored, way.base)
                        ways.setdefault(region.offset, []).append(numbered)
                    objects.append(writer.finish())
    parts = tuple(
        Part(region.offset, len(region.data), sha256, tuple(ways.get(region.offset, ()))) for region, sha256 in rows
    )
    return Table("blobstore.table.1", of.sha256, of.size, parts, tuple(objects))


_Choice = tuple[str, int, "memoryview | None", str]


def _planes(region: Region, base: BaseBlobs) -> _Choice | None:
    width, share = best_width(region.data, region.widths)
    return (f"planes:{width}" if width > 1 else "zstd", width, None, "") if share < WORTH else None


def _patch(region: Region, base: BaseBlobs) -> _Choice | None:
    for key in region.keys:
        base_blob = base.find(key, len(region.data))
        if base_blob is not None:
            width, share = best_width(region.data, region.widths, base_blob[1])
            if share < WORTH:
                return f"patch:{width}", width, base_blob[1], base_blob[0]
    return None


def _write_ways(
    writer: ObjectWriter,
    rows: Iterable[tuple[Region, str]],
    base: BaseBlobs,
    choose: Callable[[Region, BaseBlobs], _Choice | None],
    progress: Progress | None,
) -> list[tuple[Region, Way]]:
    """Encode those regions that become smaller, one behind the other."""
    written: list[tuple[Region, Way]] = []
    seen: dict[tuple[str, str], Way] = {}
    rows = list(rows)
    total, done = sum(len(region.data) for region, _ in rows), 0
    for region, sha256 in rows:
        done += len(region.data)
        check_length(region.data)
        choice = choose(region, base) if len(region.data) >= _SMALL else None
        if choice is not None:
            encoding, width, other, other_digest = choice
            way = seen.get((sha256, encoding))
            if way is None:
                at = writer.size
                for piece in encode(region.data, width, other):
                    writer.write(piece)
                way = seen[sha256, encoding] = Way(encoding, 0, at, writer.size - at, other_digest)
            if way.stored < len(region.data):
                written.append((region, way))
        if progress:
            progress("encoding", done, total)
    return written


def travelling(table: Table) -> int:
    """The bytes that a device without anything fetches for a file, without the table."""
    return sum(min([part.size, *(way.stored for way in part.ways if not way.base)]) for part in table.parts)
