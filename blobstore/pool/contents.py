"""Reading versions: their files to the byte, and their tensors as a data map."""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter, defaultdict, deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from blobstore.core.constants import HOLE_LIMIT
from blobstore.core.disk.kinds import by_name
from blobstore.core.disk.progress import Progress
from blobstore.core.disk.staging import Staging
from blobstore.core.errors import IntegrityError, InvalidFileError, LayoutError, PoolError
from blobstore.core.formats.data_map import NamedDataMap
from blobstore.core.memory.layout import ScalarType, TensorLayout
from blobstore.pool.objects import PARALLEL, REQUEST, Objects
from blobstore.pool.packs import Range, Reader, Room, Stored, pack_path
from blobstore.pool.relations import stored_rows
from blobstore.pool.tables import Tables
from blobstore.pool.versions import Version

__all__ = ["Blobs", "PoolDataMap", "files_of", "parts_of", "restore"]

_ZEROS = memoryview(bytes(HOLE_LIMIT))
_GAP = 1 << 16  # fewer bytes than a request costs in time
_BATCH = 1 << 25  # bytes of a bucket that are held at a time, twice: what is decoded, and what comes next
_BLOBS = 512  # of a batch, which bounds its gaps


@dataclass(frozen=True)
class _Part:
    file: str
    offset: int
    size: int
    tensor: str
    dtype: str
    shape: str
    order: str
    digest: bytes


def parts_of(tables: Tables, version: Version) -> list[_Part]:
    """The parts of all files of a version, by file and offset; of one with several names, one for each name."""
    rows = tables.query(
        'SELECT DISTINCT file, "offset", size, tensor, dtype, shape, "order", digest FROM parts '
        "WHERE id = ? AND file <> '' ORDER BY file, \"offset\", size, tensor",
        version.id,
    )
    return [_Part(*row) for row in rows]


@dataclass
class _Rooms:
    """Memory for contents that are read in a row, one at a time.

    Attributes:
        base: which is in its room.
    """

    base: tuple[bytes, memoryview] | None = None
    for_base: Room = field(default_factory=Room)
    for_content: Room = field(default_factory=Room)


class Blobs:
    """Reads contents of a pool, one by one or many in a row. A base that several in a row need is read once.

    Args:
        objects, tables: the pool.
        digests: what will be read.

    Raises:
        PoolError: one of them is not in the pool.
    """

    def __init__(self, objects: Objects, tables: Tables, digests: Sequence[bytes]) -> None:
        self._objects, self._tables = objects, tables
        self._reader = Reader(objects)
        self._base: tuple[bytes, memoryview] | None = None
        self._rows = self._look_up(digests)

    def row(self, digest: bytes) -> Stored:
        """Where a content lies."""
        return self._rows[digest]

    def read(self, digest: bytes) -> memoryview:
        """The bytes of a content, compared with its digest.

        Raises:
            IntegrityError: they are damaged.
            PoolError: its pack is gone.
            FileAccessError, TransferError: the store refuses.
        """
        return self._found(digest, {}, None)

    def _found(self, digest: bytes, fetched: _Fetched, rooms: _Rooms | None) -> memoryview:
        try:
            return self._read(self._rows[digest], fetched, rooms)
        except PoolError:
            self._tables.fresh()  # a collection may have moved it to another pack
            self._rows = self._look_up(self._rows)
            return self._read(self._rows[digest], {}, rooms)

    def stream(self, digests: Iterable[bytes], *, check: bool = True) -> Generator[memoryview]:
        """The bytes of contents, one after the other. Those of a bucket that lie side by side come with one request.

        Args:
            digests: which.
            check: compare them with their digests. If not, each is valid until the next one, and the caller proves them by
                what they are parts of.

        Raises:
            As `read`.
        """
        rooms = None if check else _Rooms()
        if self._objects.folder is not None:
            yield from (self._found(digest, {}, rooms) for digest in digests)
            return
        threads = ThreadPoolExecutor(PARALLEL)
        try:
            coming: deque[tuple[list[bytes], list[Future[_Fetched]]]] = deque()
            for batch in self._batches(digests):
                rows = [row for digest in batch for row in self._needed(digest)]
                coming.append((batch, [threads.submit(self._fetch, ranges) for ranges in _merged(rows)]))
                if len(coming) > 1:
                    yield from self._arrived(*coming.popleft(), rooms)
            while coming:
                yield from self._arrived(*coming.popleft(), rooms)
        finally:
            threads.shutdown(cancel_futures=True)

    def _batches(self, digests: Iterable[bytes]) -> Iterator[list[bytes]]:
        batch: list[bytes] = []
        nbytes = 0
        for digest in digests:
            more = sum(row.length for row in self._needed(digest))
            if batch and (nbytes + more > _BATCH or len(batch) == _BLOBS):
                yield batch
                batch, nbytes = [], 0
            batch.append(digest)
            nbytes += more
        if batch:
            yield batch

    def _needed(self, digest: bytes) -> Iterator[Stored]:
        """The rows that are read for a content."""
        row = self._rows[digest]
        if row.base is not None:
            yield self._rows[row.base]
        if row.length:
            yield row

    def _fetch(self, ranges: Sequence[Range]) -> _Fetched:
        """Ranges of a pack that lie side by side."""
        pack, start, _ = ranges[0]
        stop = max(offset + length for _, offset, length in ranges)
        data = self._objects.read(pack_path(pack), start, stop - start)
        if data is None:  # whoever reads them finds out why
            return {}
        return {(pack, offset, length): data[offset - start :][:length] for _, offset, length in ranges}

    def _arrived(
        self, batch: Sequence[bytes], coming: Sequence[Future[_Fetched]], rooms: _Rooms | None
    ) -> Iterator[memoryview]:
        fetched = {where: data for one in coming for where, data in one.result().items()}
        for digest in batch:
            yield self._found(digest, fetched, rooms)

    def _look_up(self, digests: Sequence[bytes] | dict[bytes, Stored]) -> dict[bytes, Stored]:
        rows = stored_rows(self._tables, digests)
        if missing := [digest for digest in digests if digest not in rows]:
            raise PoolError(
                f"{self._objects.url}: {len(missing)} blobs are missing, such as {missing[0].hex()}, or their bases are"
            )
        return rows

    def _read(self, row: Stored, fetched: _Fetched, rooms: _Rooms | None) -> memoryview:
        room = None if rooms is None else rooms.for_content
        if row.base is None:
            return self._reader.read(row, None, fetched.get(row.range), room=room)
        kept = self._base if rooms is None else rooms.base  # other threads read, too
        if kept is None or kept[0] != row.base:
            base = self._rows[row.base]
            if base.base is not None:
                raise PoolError(f"{self._objects.url}: the base {row.base.hex()} is a difference itself")
            # what is made of it is compared with a digest
            its_room = Room() if rooms is None else rooms.for_base
            kept = (row.base, self._reader.read(base, None, fetched.get(base.range), room=its_room))
            if rooms is None:
                self._base = kept
            else:
                rooms.base = kept
        try:
            return self._reader.read(row, kept[1], fetched.get(row.range), room=room)
        except IntegrityError:
            self._reader.read(self._rows[row.base])  # perhaps it is the base that is damaged
            raise


_Fetched = dict[Range, memoryview]


def _merged(rows: Iterable[Stored]) -> list[list[Range]]:
    """The ranges of rows, those together that one request gets."""
    merged: list[list[Range]] = []
    begin = end = 0
    for pack, offset, length in sorted({row.range for row in rows}):
        stop = offset + length
        if merged and merged[-1][0][0] == pack and offset - end <= _GAP and max(stop, end) - begin <= REQUEST:
            merged[-1].append((pack, offset, length))
            end = max(stop, end)
        else:
            merged.append([(pack, offset, length)])
            begin, end = offset, stop
    return merged


def restore(
    objects: Objects, tables: Tables, version: Version, directory: Path, *, force: bool, progress: Progress | None
) -> list[Path]:
    """Write the files of a version into a folder, all or none.

    Raises:
        IntegrityError: a file would not be the one that was added.
        OutputPathError: a file of another kind has one of the names, and `force` is not set.
    """
    parts = parts_of(tables, version)
    blobs = Blobs(objects, tables, list(dict.fromkeys(part.digest for part in parts)))
    paths = [directory / name for name, _, _ in version.files]
    for folder in sorted({path.parent for path in paths}):
        folder.mkdir(parents=True, exist_ok=True)
    done, total = 0, version.size
    with Staging(None, force=force, folder=directory) as staging:
        files = files_of(blobs, version, parts, check=False)  # the files' digests are compared
        for path, (name, size, sha256, pieces) in zip(paths, files, strict=True):
            with staging.open(path, size, kind=by_name(path)) as file:
                hasher = hashlib.sha256()
                for piece in pieces:
                    hasher.update(piece)
                    file.write(piece)
                    done += len(piece)
                    if progress:
                        progress("restoring", done, total)
                if hasher.hexdigest() != sha256:
                    for part in parts:
                        if part.file == name:
                            blobs.read(part.digest)  # an error that names the damaged one
                    raise IntegrityError(
                        path, f"expected SHA-256 {sha256}, the parts in the pool give {hasher.hexdigest()}"
                    )
    return paths


def files_of(
    blobs: Blobs, version: Version, parts: Sequence[_Part], *, check: bool = True
) -> Iterator[tuple[str, int, str, Iterator[memoryview]]]:
    """Name, size and SHA-256 of each file of a version, and its bytes in order, which are read before the next one's.

    Args:
        blobs: reads them.
        version, parts: of the pool.
        check: compare each content with its digest. If not, the caller compares the files.

    Raises:
        InvalidFileError: the parts of a file overlap, or do not fit its size; from the bytes, as what `Blobs.read` raises.
    """
    placed: dict[str, dict[int, _Part]] = defaultdict(dict)
    for part in parts:
        placed[part.file][part.offset] = part  # one for each name begins there
    order = [part.digest for name, _, _ in version.files for part in placed[name].values()]
    with contextlib.closing(blobs.stream(order, check=check)) as contents:
        for name, size, sha256 in version.files:
            yield name, size, sha256, _pieces(contents, placed[name].values(), name, size)


def _pieces(contents: Iterator[memoryview], parts: Iterable[_Part], name: str, size: int) -> Iterator[memoryview]:
    end = 0
    for part in parts:
        if not end <= part.offset <= end + HOLE_LIMIT or part.offset + part.size > size:
            raise InvalidFileError(
                name, f"the part of {part.size} bytes at {part.offset} does not fit the file in the pool"
            )
        yield _ZEROS[: part.offset - end]
        data = next(contents)
        if len(data) != part.size:
            raise InvalidFileError(name, f"the part at {part.offset} has {part.size} bytes, its blob {len(data)}")
        yield data
        end = part.offset + part.size
    if size - end > HOLE_LIMIT:
        raise InvalidFileError(name, f"no part covers the last {size - end} bytes")
    yield _ZEROS[: size - end]


class PoolDataMap(NamedDataMap):
    """The tensors of a version by name. Bytes are read when they are asked for, and only then.

    If several files of the version have a name, it is `file:name`.

    Args:
        objects, tables: the pool.
        version: which.
    """

    def __init__(self, objects: Objects, tables: Tables, version: Version) -> None:
        self.name = f"{objects.url}: {version.name}@{version.version}"
        parts = [part for part in parts_of(tables, version) if part.tensor]
        times = Counter(part.tensor for part in parts)
        self._parts = {part.tensor if times[part.tensor] == 1 else f"{part.file}:{part.tensor}": part for part in parts}
        self._keys = list(self._parts)
        self._blobs = Blobs(objects, tables, list(dict.fromkeys(part.digest for part in parts)))

    def _key_list(self) -> Sequence[str]:
        return self._keys

    def views(self) -> Iterator[tuple[str, memoryview]]:
        """The keys, each with its bytes. Those of a bucket that lie side by side come with one request."""
        self._check_open()
        yield from zip(self._keys, self._blobs.stream(self._parts[key].digest for key in self._keys), strict=True)

    def _view(self, key: str) -> memoryview:
        return self._blobs.read(self._parts[key].digest)

    def _size(self, key: str) -> int:
        return self._parts[key].size

    def _layout(self, key: str) -> TensorLayout | None:
        part = self._parts[key]
        kind = ScalarType.__members__.get(part.dtype.upper())
        if kind is None:
            return None
        try:
            sizes = tuple(map(int, part.shape.split(","))) if part.shape else ()
            layout = TensorLayout(kind, sizes, tuple(map(int, part.order.split(","))) if part.order else None)  # type: ignore[arg-type]
        except (ValueError, LayoutError) as error:
            raise InvalidFileError(self.name, f"{key!r} has no valid layout in the pool: {error}") from None
        return layout if layout.nbytes == part.size else None
