"""Reading versions: their files to the byte, and their tensors as a data map."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from blobstore.core.constants import HOLE_LIMIT
from blobstore.core.disk.kinds import by_name
from blobstore.core.disk.progress import Progress
from blobstore.core.disk.staging import Staging
from blobstore.core.errors import IntegrityError, InvalidFileError, LayoutError, PoolError
from blobstore.core.formats.data_map import NamedDataMap
from blobstore.core.memory.layout import ScalarType, TensorLayout
from blobstore.pool.objects import Objects
from blobstore.pool.packs import Reader, Stored
from blobstore.pool.relations import stored_rows
from blobstore.pool.tables import Tables
from blobstore.pool.versions import Version

__all__ = ["Blobs", "PoolDataMap", "file_pieces", "parts_of", "restore"]

_ZEROS = memoryview(bytes(HOLE_LIMIT))


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
        'SELECT file, "offset", size, tensor, dtype, shape, "order", digest FROM parts '
        "WHERE id = ? AND file <> '' ORDER BY file, \"offset\", tensor",
        version.id,
    )
    return [_Part(*row) for row in rows]


class Blobs:
    """Reads contents of a pool. A base that several of them need is read once in a row.

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
        try:
            return self._read(self._rows[digest])
        except PoolError:
            self._tables.fresh()  # a collection may have moved it to another pack
            self._rows = self._look_up(self._rows)
            return self._read(self._rows[digest])

    def _look_up(self, digests: Sequence[bytes] | dict[bytes, Stored]) -> dict[bytes, Stored]:
        rows = stored_rows(self._tables, digests)
        if missing := [digest for digest in digests if digest not in rows]:
            raise PoolError(
                f"{self._objects.url}: {len(missing)} blobs are missing, such as {missing[0].hex()}, or their bases are"
            )
        return rows

    def _read(self, row: Stored) -> memoryview:
        if row.base is None:
            return self._reader.read(row)
        if self._base is None or self._base[0] != row.base:
            base = self._rows[row.base]
            if base.base is not None:
                raise PoolError(f"{self._objects.url}: the base {row.base.hex()} is a difference itself")
            self._base = (row.base, self._reader.read(base))
        return self._reader.read(row, self._base[1])


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
        for (name, size, sha256), path in zip(version.files, paths, strict=True):
            with staging.open(path, size, kind=by_name(path)) as file:
                hasher = hashlib.sha256()
                for piece in file_pieces(blobs, [part for part in parts if part.file == name], name, size):
                    hasher.update(piece)
                    file.write(piece)
                    done += len(piece)
                    if progress:
                        progress("restoring", done, total)
                if hasher.hexdigest() != sha256:
                    raise IntegrityError(
                        path, f"expected SHA-256 {sha256}, the parts in the pool give {hasher.hexdigest()}"
                    )
    return paths


def file_pieces(blobs: Blobs, parts: Sequence[_Part], name: str, size: int) -> Iterator[memoryview]:
    """The bytes of a file, in order.

    Raises:
        InvalidFileError: its parts overlap, or do not fit its size.
    """
    end = 0
    for part in {part.offset: part for part in parts}.values():  # one for each name begins there
        if not end <= part.offset <= end + HOLE_LIMIT or part.offset + part.size > size:
            raise InvalidFileError(
                name, f"the part of {part.size} bytes at {part.offset} does not fit the file in the pool"
            )
        yield _ZEROS[: part.offset - end]
        data = blobs.read(part.digest)
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
        names = [part.tensor for part in parts]
        twice = {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else set()
        self._parts = {f"{part.file}:{part.tensor}" if part.tensor in twice else part.tensor: part for part in parts}
        self._keys = list(self._parts)
        self._blobs = Blobs(objects, tables, list(dict.fromkeys(part.digest for part in parts)))

    def _key_list(self) -> Sequence[str]:
        return self._keys

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
