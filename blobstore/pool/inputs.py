"""Objects of buckets as files of a version: only those are read that no version of the pool has read before."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blobstore.core.constants import HOLE_LIMIT
from blobstore.core.disk.folders import check_room
from blobstore.core.disk.names import is_plain_path
from blobstore.core.disk.progress import Progress
from blobstore.core.errors import DataChangedError, PoolError
from blobstore.core.memory.mapped_file import named
from blobstore.pool.relations import stored_rows
from blobstore.pool.scan import FileRange, PartTensor, ScannedFile, ScannedPart
from blobstore.pool.tables import Tables
from blobstore.pool.versions import described_files
from blobstore.storage.objects import PARALLEL, Objects

__all__ = ["BucketFile", "bucket_files", "fetched", "files_read_before", "is_url"]


@dataclass(frozen=True)
class BucketFile:
    """An object of a bucket.

    Attributes:
        objects, path: where it is.
        name: in a version.
        size: in bytes.
        etag: what the store calls this content; None if it has no names for contents.
    """

    objects: Objects
    path: str
    name: str
    size: int
    etag: str | None

    @property
    def url(self) -> str:
        """The whole URL."""
        return self.objects.name(self.path)

    @property
    def origin(self) -> dict[str, str]:
        """What the event of a version says about it, besides name, size and digest."""
        return {} if self.etag is None else {"url": self.url, "etag": self.etag}


def is_url(path: object) -> bool:
    """Whether this names objects of a bucket, and no file."""
    return isinstance(path, str) and "://" in path and not path.startswith("file://")


def bucket_files(url: str, options: Mapping[str, str]) -> list[BucketFile]:
    """An object by its name, or those below a path by theirs.

    Raises:
        PoolError: there are none, or one has a name that no file of a version can have.
        TransferError: the store refuses.
    """
    below = Objects(url, options)
    listed = below.list("")
    if listed:
        files = [
            BucketFile(below, one.path, one.path, one.size, one.etag) for one in listed if not one.path.endswith("/")
        ]
    else:
        folder, _, name = below.url.rpartition("/")
        if folder.endswith("/"):
            raise PoolError(f"{url}: there are no objects in this bucket")
        beside = Objects(folder, options)
        found = beside.entry(name)
        files = [] if found is None else [BucketFile(beside, name, name, found.size, found.etag)]
    if not files:
        raise PoolError(f"{url}: there is no such object, and none below it")
    for file in files:
        if not is_plain_path(file.name, anywhere=False):
            raise PoolError(f"{file.url}: {file.name!r} cannot be the name of a file of a version")
    return files


def files_read_before(tables: Tables, files: Sequence[BucketFile]) -> list[ScannedFile]:
    """Those of the files that a version which is there has read, and whose contents are all stored.

    Args:
        files: by URL, ETag and size they are the same.
    """
    wanted = {(file.url, file.etag, file.size): file.name for file in files if file.etag is not None}
    found: dict[str, ScannedFile] = {}
    for identity, one in _read_from_buckets(tables) if wanted else ():
        name = wanted.get((one.get("url", ""), one.get("etag", ""), one["size"]))
        if name is None or name in found:
            continue
        file = ScannedFile(name, one["size"], one["sha256"], one["blake3"], _parts(tables, identity, one["name"]))
        if _is_whole(file):
            found[name] = file
    there = stored_rows(tables, {part.digest for file in found.values() for part in file.parts}, unmarked=True)
    return [file for file in found.values() if all(part.digest in there for part in file.parts)]


def _read_from_buckets(tables: Tables) -> Iterator[tuple[str, dict[str, Any]]]:
    """The files of versions that are there which came from buckets, each with the id of its version."""
    events = tables.query(
        "SELECT id, files FROM events WHERE kind = 'add' AND contains(files, '\"etag\"') "
        "AND id NOT IN (SELECT id FROM events WHERE kind = 'drop')"
    )
    for identity, described in events:
        yield from ((identity, one) for one in described_files(described))


def _is_whole(file: ScannedFile) -> bool:
    """Whether the parts of a file were all seen: those of a version that appeared just now may not have been."""
    end = 0
    for part in file.parts:
        if not end <= part.source.start <= end + HOLE_LIMIT:
            return False
        end = part.source.stop
    return bool(file.parts or not file.size) and end <= file.size <= end + HOLE_LIMIT


def _parts(tables: Tables, identity: str, file: str) -> tuple[ScannedPart, ...]:
    rows = tables.query(
        'SELECT DISTINCT "offset", size, digest, tensor, dtype, shape, "order" FROM parts WHERE id = ? AND file = ? '
        "ORDER BY ALL",
        identity,
        file,
    )
    parts = []
    for (start, size, digest), own in itertools.groupby(rows, lambda row: row[:3]):
        tensors = [PartTensor(*row[3:]) for row in own]
        named = tuple(tensor for tensor in tensors if tensor.name)
        parts.append(ScannedPart(FileRange("", start, start + size), digest, named, *tensors[0][1:], b"", b""))
    return tuple(parts)


@contextlib.contextmanager
def fetched(files: Sequence[BucketFile], progress: Progress | None) -> Iterator[list[tuple[str, str]]]:
    """Objects as files of the folder for temporary files, while they are added: paths, and names in the version.

    Raises:
        DataChangedError: an object was replaced since it was listed.
        FileAccessError, TransferError: writing fails, or the store refuses.
    """
    done, total = 0, sum(file.size for file in files)
    place = Path(tempfile.gettempdir())
    if files:
        largest = max(files, key=lambda file: file.size)
        check_room(place, total, place / Path(largest.name).name, largest.size, "the version")
    with named(place):
        temporary = tempfile.TemporaryDirectory(prefix="blobstore-")
    with temporary as folder, ThreadPoolExecutor(PARALLEL) as threads:
        paths = [Path(folder) / str(number) / Path(file.name).name for number, file in enumerate(files)]
        try:
            for file, _ in zip(files, threads.map(_fetch, files, paths), strict=True):
                done += file.size
                if progress:
                    progress("fetching", done, total)
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise
        yield [(str(path), file.name) for path, file in zip(paths, files, strict=True)]


def _fetch(file: BucketFile, path: Path) -> None:
    with named(path):
        path.parent.mkdir()
        with path.open("wb") as written:
            size = 0
            for piece in file.objects.stream(file.path, file.etag):
                written.write(piece)
                size += len(piece)
    if size != file.size:
        raise DataChangedError(f"{file.url}: expected {file.size} bytes, found {size}")
