"""Reading versions: their files to the byte, and their tensors as a data map."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TypeVar

from blobstore.core.constants import HOLE_LIMIT
from blobstore.core.disk.folders import check_room
from blobstore.core.disk.kinds import by_name
from blobstore.core.disk.progress import Progress
from blobstore.core.disk.staging import Staging
from blobstore.core.errors import IntegrityError, InvalidFileError, LayoutError, OutputPathError, PoolError
from blobstore.core.formats.data_map import NamedDataMap
from blobstore.core.memory.layout import ScalarType, TensorLayout
from blobstore.core.memory.mapped_file import leads_into, named
from blobstore.pool.bases import KeptBases
from blobstore.pool.chunks import Chunk, made
from blobstore.pool.derived import needed_of_base
from blobstore.pool.digests import blake3
from blobstore.pool.packs import Range, Reader, Stored, pack_path
from blobstore.pool.relations import CHAIN, stored_rows
from blobstore.pool.tables import Tables
from blobstore.pool.versions import Version, VersionFile
from blobstore.storage.objects import PARALLEL, REQUEST, Objects

__all__ = ["Blobs", "FilePart", "PoolDataMap", "files_of", "parts_of", "restore"]

_ZEROS = memoryview(bytes(HOLE_LIMIT))
_GAP = 1 << 16  # fewer bytes than a request costs in time
_BATCH = 1 << 25  # bytes of a bucket that are held at a time, twice: what is decoded, and what comes next
_BLOBS = 512  # of a batch, which bounds its gaps

_T = TypeVar("_T")
_Fetched = dict[Range, memoryview]


@dataclass(frozen=True)
class FilePart:
    """A part of a file of a version, under one of its names: a row of the table."""

    file: str
    offset: int
    size: int
    tensor: str
    dtype: str
    shape: str
    order: str
    digest: bytes


def parts_of(tables: Tables, version: Version) -> list[FilePart]:
    """The parts of all files of a version, by file and offset; of one with several names, one for each name."""
    rows = tables.query(
        'SELECT DISTINCT file, "offset", size, tensor, dtype, shape, "order", digest FROM parts '
        "WHERE id = ? AND file <> '' ORDER BY file, \"offset\", size, tensor",
        version.id,
    )
    parts = [FilePart(*row) for row in rows]
    for part in parts:
        if min(part.offset, part.size) < 0:
            raise PoolError(f"the table of parts has a row with wrong values, of {part.file!r}")
    return parts


class Blobs:
    """Reads contents of a pool, one by one or many in a row. A base that several in a row need is read once.

    Args:
        objects, tables: of the pool.
        digests: of the contents.
        bases: those that are kept for other versions, too.

    Raises:
        PoolError: one of them is not in the pool.
    """

    def __init__(
        self, objects: Objects, tables: Tables, digests: Iterable[bytes], bases: KeptBases | None = None
    ) -> None:
        self._objects, self._tables = objects, tables
        self._bases = KeptBases() if bases is None else bases
        self._bases.next_version()
        self._reader = Reader(objects)
        self._base: tuple[bytes, range | None, memoryview] | None = None
        self._gone: set[bytes] = set()
        self._rows = self._look_up(list(dict.fromkeys(digests)))

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
        return self._retried(digest, {}, self._whole)

    def stream(self, digests: Iterable[bytes]) -> Generator[memoryview]:
        """The bytes of contents, one after the other. Those of a bucket that lie side by side come with one request.

        Raises:
            As `read`.
        """
        for digest, fetched in self._arriving(digests):
            yield self._retried(digest, fetched, self._whole)

    def stream_chunks(
        self, digests: Iterable[bytes], threads: Executor | None = None
    ) -> Generator[Iterator[memoryview]]:
        """The bytes of contents in chunks, each valid until the next one. Of each content all are to be taken before the next.

        They are not compared with their digests: the caller proves them by what they are parts of.

        Args:
            digests: which contents.
            threads: make chunks ahead; by default each is made when it is asked for.

        Raises:
            As `read`, also while chunks are taken.
        """
        with contextlib.closing(made(self._chunks(digests), threads)) as chunks:
            for _, own in groupby(chunks, itemgetter(0)):
                yield (chunk for _, chunk in own)

    def _chunks(self, digests: Iterable[bytes]) -> Iterator[tuple[int, Chunk]]:
        """The chunks of contents, with the numbers of these; of an empty content an empty one."""

        def chunks(row: Stored, fetched: _Fetched) -> Iterator[Chunk]:
            base = None if row.base is None else self._base_of(row)
            found = self._reader.chunks(row, base, fetched, self._bases)
            if found is not None:
                return found
            return iter([Chunk(row.size, lambda *_: self._retried(row.digest, fetched, whole))])

        def whole(row: Stored, fetched: _Fetched) -> memoryview:
            return self._whole(row, fetched, check=False)

        for number, (digest, fetched) in enumerate(self._arriving(digests)):
            is_empty = True
            for chunk in self._retried(digest, fetched, chunks):
                yield number, chunk
                is_empty = False
            if is_empty:
                yield number, Chunk(0, lambda *_: _ZEROS[:0])

    def _retried(self, digest: bytes, fetched: _Fetched, use: Callable[[Stored, _Fetched], _T]) -> _T:
        try:
            return use(self._rows[digest], fetched)
        except PoolError:
            # a collection may have moved it to another pack, and of one that died, rows may lead to a pack that is gone
            self._gone |= {row.pack for row in self._needed(digest) if self._objects.size(pack_path(row.pack)) is None}
            self._tables.fresh()
            self._rows = self._look_up(list(self._rows))
            return use(self._rows[digest], {})

    def _arriving(self, digests: Iterable[bytes]) -> Generator[tuple[bytes, _Fetched]]:
        """Contents, one after the other, with what was fetched of a bucket for each."""
        if self._objects.folder is not None:
            yield from ((digest, {}) for digest in digests)
            return
        threads = ThreadPoolExecutor(PARALLEL)
        try:
            coming: deque[tuple[list[bytes], list[Future[_Fetched]]]] = deque()
            for batch in self._batches(digests):
                rows = [row for digest in batch for row in self._needed(digest)]
                coming.append((batch, [threads.submit(self._fetch, ranges) for ranges in _merged(rows)]))
                if len(coming) > 1:
                    yield from _arrived(*coming.popleft())
            while coming:
                yield from _arrived(*coming.popleft())
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
        chain = [self._rows[digest]]
        while chain[-1].base in self._rows and len(chain) < CHAIN:
            chain.append(self._rows[chain[-1].base])
        return (row for row in reversed(chain) if row.length)

    def _fetch(self, ranges: Sequence[Range]) -> _Fetched:
        """Ranges of a pack that lie side by side."""
        pack, start, _ = ranges[0]
        stop = max(offset + length for _, offset, length in ranges)
        data = self._objects.read(pack_path(pack), start, stop - start)
        if data is None:  # whoever reads them finds out why
            return {}
        return {(pack, offset, length): data[offset - start :][:length] for _, offset, length in ranges}

    def _look_up(self, digests: Sequence[bytes]) -> dict[bytes, Stored]:
        rows = stored_rows(self._tables, digests, gone=self._gone)
        if missing := [digest for digest in digests if digest not in rows]:
            raise PoolError(
                f"{self._objects.url}: {len(missing)} blobs are missing, such as {missing[0].hex()}, or their bases are"
            )
        return rows

    def _base_of(self, row: Stored) -> Stored:
        assert row.base is not None  # noqa: S101 - the caller asked
        return self._rows[row.base]

    def _whole(self, row: Stored, fetched: _Fetched, *, check: bool = True) -> memoryview:
        if row.base is None:
            return self._reader.read(row, None, fetched, check=check)
        kept, within = self._base, needed_of_base(row.encoding)  # other threads read, too
        if kept is None or kept[:2] != (row.base, within):
            # what is made of it is compared with a digest
            data = self._read_base(row, fetched, within)
            self._base = kept = (row.base, within, data)
        try:
            return self._reader.read(row, kept[2], fetched, check=check)
        except IntegrityError:
            self._read_base(row, {}, None, check=True)  # perhaps it is a base that is damaged
            raise

    def _read_base(self, row: Stored, fetched: _Fetched, within: range | None, *, check: bool = False) -> memoryview:
        """The base of a row, which may be a difference to one that is whole."""
        base = self._base_of(row)
        if base.base is None:
            return self._reader.read(base, None, fetched, check=check, within=within)
        below = self._base_of(base)
        if below.base is not None:
            raise PoolError(f"{self._objects.url}: the base {base.digest.hex()} is a difference to a difference")
        return self._reader.read(base, self._reader.read(below, None, fetched, check=check), fetched, check=check)


def _arrived(batch: Sequence[bytes], coming: Sequence[Future[_Fetched]]) -> Iterator[tuple[bytes, _Fetched]]:
    fetched = {where: data for one in coming for where, data in one.result().items()}
    return ((digest, fetched) for digest in batch)


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
    objects: Objects,
    tables: Tables,
    version: Version,
    directory: Path,
    *,
    force: bool,
    progress: Progress | None,
    bases: KeptBases,
    threads: Executor | None,
) -> list[Path]:
    """Write the files of a version into a folder, all or none.

    Raises:
        IntegrityError: a file would not be the one that was added.
        OutputPathError: a file of another kind has one of the names, and `force` is not set; or one would be in the pool.
        FileAccessError: the disk has less room than they need, or refuses.
    """
    parts = parts_of(tables, version)
    blobs = Blobs(objects, tables, (part.digest for part in parts), bases)
    paths = [directory / file.name for file in version.files]
    for path in paths:
        if objects.folder is not None and leads_into(path, objects.folder):
            raise OutputPathError(
                f"{path}: this is in the pool {objects.folder} itself; get the files in another folder"
            )
    if version.files:
        largest = max(version.files, key=lambda file: file.size)
        check_room(directory, version.size, directory / largest.name, largest.size, "the version")
    for folder in sorted({path.parent for path in paths}):
        with named(folder):
            folder.mkdir(parents=True, exist_ok=True)
    done, total = 0, version.size
    with Staging(None, force=force, folder=directory, many=True) as staging:
        for path, (size, pieces) in zip(paths, files_of(blobs, version, parts, threads), strict=True):
            with staging.open(path, size, kind=by_name(path)) as file:
                for piece in pieces:
                    file.write(piece)
                    done += len(piece)
                    if progress:
                        progress("restoring", done, total)
    return paths


def files_of(
    blobs: Blobs, version: Version, parts: Sequence[FilePart], threads: Executor | None = None
) -> Iterator[tuple[int, Iterator[memoryview]]]:
    """The size of each file of a version, and its bytes in order, which are to be taken before the next one's.

    A piece is valid until the next one; `threads` decode ahead. Behind the last piece of a file, its digest is compared.

    Raises:
        IntegrityError: with the bytes: a file is not the one that was added.
        InvalidFileError: the parts of a file overlap, or do not fit its size; from the bytes, as what `Blobs.read` raises.
    """
    placed: dict[str, dict[int, FilePart]] = defaultdict(dict)
    for part in parts:
        placed[part.file][part.offset] = part  # one for each name begins there
    order = [part.digest for file in version.files for part in placed[file.name].values()]
    with contextlib.closing(blobs.stream_chunks(order, threads)) as contents:
        for file in version.files:
            own = list(placed[file.name].values())
            yield file.size, _proved(blobs, _pieces(contents, own, file.name, file.size), own, file)


def _proved(
    blobs: Blobs, pieces: Iterator[memoryview], parts: Sequence[FilePart], file: VersionFile
) -> Iterator[memoryview]:
    hasher = blake3()
    for piece in pieces:
        hasher.update(piece)
        yield piece
    if (found := hasher.hexdigest()) != file.blake3:
        for part in parts:
            blobs.read(part.digest)  # an error that names the damaged one
        raise IntegrityError(file.name, f"expected BLAKE3 {file.blake3}, the parts in the pool give {found}")


def _pieces(
    contents: Iterator[Iterator[memoryview]], parts: Iterable[FilePart], name: str, size: int
) -> Generator[memoryview]:
    end = 0
    for part in parts:
        if not end <= part.offset <= end + HOLE_LIMIT or part.offset + part.size > size:
            raise InvalidFileError(
                name, f"the part of {part.size} bytes at {part.offset} does not fit the file in the pool"
            )
        if part.offset > end:
            yield _ZEROS[: part.offset - end]
        end = part.offset
        for chunk in next(contents):
            yield chunk
            end += len(chunk)
        if end != part.offset + part.size:
            raise InvalidFileError(
                name, f"the part at {part.offset} has {part.size} bytes, its blob {end - part.offset}"
            )
    if size - end > HOLE_LIMIT:
        raise InvalidFileError(name, f"no part covers the last {size - end} bytes")
    yield _ZEROS[: size - end]


class PoolDataMap(NamedDataMap):
    """The tensors of a version by name. Bytes are read when they are asked for, and only then.

    If several files of the version have a name, it is `file:name`.
    """

    def __init__(self, objects: Objects, tables: Tables, version: Version) -> None:
        self.name = f"{objects.url}: {version.name}@{version.version}"
        parts: dict[tuple[str, str], list[FilePart]] = defaultdict(list)
        for part in parts_of(tables, version):
            if part.tensor:
                parts[part.tensor, part.file].append(part)
        times = Counter(tensor for tensor, _ in parts)
        self._parts = {
            tensor if times[tensor] == 1 else f"{file}:{tensor}": own for (tensor, file), own in parts.items()
        }
        self._keys = list(self._parts)
        self._blobs = Blobs(objects, tables, (part.digest for own in parts.values() for part in own))

    def _key_list(self) -> Sequence[str]:
        return self._keys

    def views(self) -> Iterator[tuple[str, memoryview]]:
        """The keys, each with its bytes. Those of a bucket that lie side by side come with one request."""
        self._check_open()
        contents = self._blobs.stream(part.digest for own in self._parts.values() for part in own)
        with contextlib.closing(contents):
            for key, own in self._parts.items():
                yield key, _joined([next(contents) for _ in own])

    def _view(self, key: str) -> memoryview:
        return _joined([self._blobs.read(part.digest) for part in self._parts[key]])

    def _size(self, key: str) -> int:
        return sum(part.size for part in self._parts[key])

    def _layout(self, key: str) -> TensorLayout | None:
        part = self._parts[key][0]
        kind = ScalarType.__members__.get(part.dtype.upper())
        if kind is None:
            return None
        try:
            sizes = tuple(map(int, part.shape.split(","))) if part.shape else ()
            layout = TensorLayout(kind, sizes, tuple(map(int, part.order.split(","))) if part.order else None)  # type: ignore[arg-type]
        except (ValueError, LayoutError) as error:
            raise InvalidFileError(self.name, f"{key!r} has no valid layout in the pool: {error}") from None
        return layout if layout.nbytes == self._size(key) else None


def _joined(views: Sequence[memoryview]) -> memoryview:
    return views[0] if len(views) == 1 else memoryview(b"".join(views))
