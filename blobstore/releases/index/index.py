"""The index of a release: what it consists of, where each content is, and what is loaded with what.

An index is JSON. It names every file of the release with its size and SHA-256. A file may have a *table*, JSON too, that
lists its parts (blobs, mostly) with their digests, and in which other forms a part can travel. So whoever trusts the
index can check everything else. docs/releases.md describes both; `schema` gives their JSON Schemas.

Both come from servers and are hostile until they are parsed here.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable
from functools import cached_property
from typing import Annotated, Any, Literal, TypeVar

from blobstore.core.constants import HOLE_LIMIT, INDEX_LIMIT, MOST_FILES, TABLE_LIMIT
from blobstore.core.disk.names import is_plain_path
from blobstore.core.distribution import install
from blobstore.core.errors import InvalidFileError, MissingDependencyError, ReleaseError

try:
    import msgspec
    from msgspec import UNSET, Meta, Struct, UnsetType
except ImportError as error:
    raise MissingDependencyError(f"releases need msgspec: {install('releases')}") from error

__all__ = [
    "HOLE_LIMIT",
    "INDEX_LIMIT",
    "TABLE_LIMIT",
    "VERSION",
    "WORTH",
    "DataSet",
    "File",
    "Index",
    "Object",
    "Pack",
    "Part",
    "Program",
    "Struct",
    "Table",
    "Way",
    "check_file_name",
    "check_name",
    "decode_json",
    "encode",
    "encode_json",
    "parse_index",
    "parse_table",
    "schema",
]

# `$` alone would also match before a line break at the end
WORTH = 0.98
"""A form with more than this share of the plain bytes is neither published nor fetched."""

_NAME = r"^[A-Za-z0-9][A-Za-z0-9._+-]{0,99}$(?!\n)"

VERSION = r"^[0-9]{1,4}(\.[0-9]{1,4}){0,3}$(?!\n)"
"""Versions of ExecuTorch."""

Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$(?!\n)")]
Size = Annotated[int, Meta(ge=0, le=(1 << 53) - 1)]
Name = Annotated[str, Meta(pattern=_NAME)]
FileName = Annotated[str, Meta(min_length=1, max_length=1024)]


class Object(Struct, frozen=True, omit_defaults=True):
    """Immutable bytes, named by their digest.

    Attributes:
        sha256: in lower case hexadecimal digits.
        size: in bytes.
    """

    sha256: Sha256
    size: Size


class File(Struct, frozen=True, omit_defaults=True):
    """One file of the release.

    Attributes:
        name: its path below the folder of the release, with `/`.
        kind: "program" (.pte), "data" (.ptd), or "other".
        sha256, size: of its contents.
        table: the table of its parts; only with one can it travel in another form, or be assembled.
        travels: bytes of its smallest form for a device that has nothing, without the table; `size` if it has none.
    """

    name: FileName
    kind: Literal["program", "data", "other"]
    sha256: Sha256
    size: Size
    table: Object | None = None
    travels: Size | UnsetType = UNSET

    @property
    def object(self) -> Object:
        """The contents."""
        return Object(self.sha256, self.size)


class DataSet(Struct, frozen=True, omit_defaults=True):
    """Data files that are one map of keys: where several have a key, the last one counts.

    Attributes:
        name: that of the data file as it was published.
        files: names of files, the oldest first.
        adapter: whether it is a LoRA adapter, which no program takes by itself.
    """

    name: FileName
    files: Annotated[tuple[FileName, ...], Meta(min_length=1, max_length=10_000)]
    adapter: bool = False


class Program(Struct, frozen=True, omit_defaults=True):
    """What is loaded with what.

    Attributes:
        name: of the file of the program.
        data: names of the data sets that it takes keys from.
    """

    name: FileName
    data: Annotated[tuple[FileName, ...], Meta(max_length=MOST_FILES)] = ()


class Pack(Struct, frozen=True, omit_defaults=True):
    """Small files one behind the other, so that they are fetched with one request.

    Attributes:
        sha256, size: of the pack.
        files: names of files, and where each begins in the pack.
    """

    sha256: Sha256
    size: Size
    files: Annotated[tuple[tuple[FileName, Size], ...], Meta(max_length=MOST_FILES)]

    @property
    def object(self) -> Object:
        """The contents."""
        return Object(self.sha256, self.size)


class Index(Struct, frozen=True, omit_defaults=True, dict=True):
    """A release.

    Attributes:
        format: the version of this format.
        name: of the product. A folder on a device holds releases of one name.
        version: as its publisher calls it.
        published: when, in seconds since 1970 UTC; grows with every release of a name. A device refuses older ones.
        executorch: the first version of ExecuTorch that runs the programs, such as "1.5".
        base: the version that the deltas were made for.
        files: all files, without those that only exist on the way.
        data: the data sets.
        programs: the programs with their data sets.
        packs: where small files lie together.
    """

    format: Literal["blobstore.release.1"]
    name: Name
    version: Name
    published: Size
    executorch: Annotated[str, Meta(pattern=VERSION)]
    files: Annotated[tuple[File, ...], Meta(max_length=MOST_FILES)]
    base: Name | None = None
    data: Annotated[tuple[DataSet, ...], Meta(max_length=MOST_FILES)] = ()
    programs: Annotated[tuple[Program, ...], Meta(max_length=MOST_FILES)] = ()
    packs: Annotated[tuple[Pack, ...], Meta(max_length=MOST_FILES)] = ()

    def file(self, name: str) -> File:
        """The file with a name that is in the index."""
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, File]:
        return {file.name: file for file in self.files}


class Way(Struct, frozen=True, array_like=True):
    """One form in which a part can travel.

    Attributes:
        encoding: see `blobstore.releases.index.encoding`.
        object: which of the table's objects holds it; -1 if no bytes are needed.
        at, stored: where it lies there: first byte, and number of bytes.
        base: the SHA-256 of the blob that it is a patch against, or a copy of; "" for none.
    """

    encoding: Annotated[str, Meta(pattern=r"^(zstd|planes:[248]|patch:[1248]|copy)$(?!\n)")]
    object: Annotated[int, Meta(ge=-1, le=1_000)]
    at: Size
    stored: Size
    base: Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?$(?!\n)")] = ""


class Part(Struct, frozen=True, array_like=True):
    """A range of a file with one content.

    Attributes:
        offset, size: where it lies in the file, in bytes.
        sha256: of its bytes.
        ways: other forms, beside the bytes themselves in the plain file.
    """

    offset: Size
    size: Annotated[int, Meta(ge=1, le=(1 << 53) - 1)]
    sha256: Sha256
    ways: Annotated[tuple[Way, ...], Meta(max_length=4)] = ()


class Table(Struct, frozen=True, omit_defaults=True):
    """The parts of a file. What lies between them is zeros, at most `HOLE_LIMIT` of them in one place.

    Attributes:
        format: the version of this format.
        sha256, size: of the file.
        parts: by ascending offset, without overlaps.
        objects: what the ways of the parts refer to.
    """

    format: Literal["blobstore.table.1"]
    sha256: Sha256
    size: Size
    parts: tuple[Part, ...]
    objects: Annotated[tuple[Object, ...], Meta(max_length=1_000)] = ()


_T = TypeVar("_T", Index, Table)
_Any = TypeVar("_Any")


def decode_json(data: bytes, kind: type[_Any]) -> _Any:
    """A value of JSON, which must have this type.

    Raises:
        ValueError: it is malformed, or has another type.
    """
    try:
        text = data.decode()  # msgspec does not look into what it skips
        parsed = msgspec.json.decode(text, type=kind)
        json.loads(text, object_pairs_hook=_check_unique, parse_int=len, parse_float=len)
    except RecursionError as error:
        raise ValueError(str(error)) from None
    return parsed


def encode_json(value: object) -> bytes:
    """JSON that `decode_json` reads."""
    return msgspec.json.encode(value)


def _parse(data: bytes, kind: type[_T], where: str) -> _T:
    try:
        return decode_json(data, kind)
    except ValueError as error:
        what = "an index of a release" if kind is Index else "a table of a release"
        raise InvalidFileError(where, f"this is not {what}: {error}") from None


def _check_unique(pairs: list[tuple[str, object]]) -> None:
    """Raise ValueError if an object has a key twice: readers would not agree on its value."""
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise ValueError(f"the key {key!r} occurs twice in one object")
        seen.add(key)


def parse_index(data: bytes, where: str) -> Index:
    """Read and check an index.

    Args:
        data: the JSON.
        where: the file or URL that it comes from, for messages.

    Raises:
        InvalidFileError: it is malformed, or names something outside the folder of a release.
    """
    index = _parse(data, Index, where)

    def fail(reason: str) -> InvalidFileError:
        return InvalidFileError(where, reason)

    files = _check_files(index, fail)
    sets = _check_sets(index, files, fail)
    for program in index.programs:
        if program.name not in files or files[program.name].kind != "program":
            raise fail(f"{program.name!r} is listed as a program, but no file of a program has this name")
        for data_name in program.data:
            if data_name not in sets:
                raise fail(f"program {program.name!r} takes data set {data_name!r}, which is not there")
    for pack in index.packs:
        for name, at in pack.files:
            if name not in files or at + files[name].size > pack.size:
                raise fail(f"a pack of {pack.size} bytes cannot hold {name!r} at byte {at}")
    return index


def _check_files(index: Index, fail: Callable[[str], InvalidFileError]) -> dict[str, File]:
    """Check names, forms and sizes of the files, and return them by name."""
    seen: dict[str, str] = {}
    for file in index.files:
        try:
            check_file_name(file.name)
        except ReleaseError as error:
            raise fail(str(error)) from None
        folded = unicodedata.normalize("NFC", file.name).casefold()
        if folded in seen:
            raise fail(f"the file names {seen[folded]!r} and {file.name!r} are one on some file systems")
        seen[folded] = file.name
        if file.travels is not UNSET and file.table is None:
            raise fail(f"{file.name!r} has another form but no table")
        if file.table is not None and file.table.size > TABLE_LIMIT:
            raise fail(f"the table of {file.name!r} has {file.table.size} bytes, at most {TABLE_LIMIT} are possible")
    for folded, name in seen.items():
        parent = folded.rpartition("/")[0]
        while parent:
            if parent in seen:
                raise fail(f"{seen[parent]!r} is a file, and the folder of {name!r}")
            parent = parent.rpartition("/")[0]
    sizes = {file.sha256: file.size for file in index.files}
    if any(sizes[file.sha256] != file.size for file in index.files):
        raise fail("two files have one digest and different sizes")
    return {file.name: file for file in index.files}


def _check_sets(index: Index, files: dict[str, File], fail: Callable[[str], InvalidFileError]) -> set[str]:
    sets: set[str] = set()
    placed: set[str] = set()
    for data in index.data:
        if data.name in sets:
            raise fail(f"data set {data.name!r} occurs twice")
        sets.add(data.name)
        try:
            check_file_name(data.name)  # merged, it is a file of this name
        except ReleaseError as error:
            raise fail(str(error)) from None
        if data.name in files and data.name not in data.files:
            raise fail(f"data set {data.name!r} has the name of a file that it does not list")
        for name in data.files:
            if name not in files or files[name].kind != "data":
                raise fail(f"data set {data.name!r} lists {name!r}, which is no data file of the release")
            if name in placed:
                raise fail(f"the data file {name!r} is in two data sets, or twice in one")
            placed.add(name)
    return sets


def parse_table(data: bytes, file: File, where: str) -> Table:
    """Read and check the table of a file.

    Args:
        data: the JSON.
        file: the file whose table it must be.
        where: the file or URL that it comes from, for messages.

    Raises:
        InvalidFileError: it is malformed, or the table of another file.
    """
    table = _parse(data, Table, where)
    if (table.sha256, table.size) != (file.sha256, file.size):
        raise InvalidFileError(where, f"this is the table of another file than {file.name!r}")
    end = 0
    for part in table.parts:
        if part.offset < end or part.offset + part.size > table.size:
            raise InvalidFileError(
                where,
                f"the part of {part.size} bytes at {part.offset} overlaps another one, or the end of the file at "
                f"{table.size}",
            )
        _check_hole(end, part.offset, where)
        end = part.offset + part.size
        for way in part.ways:
            kind = way.encoding.partition(":")[0]
            if kind == "copy":
                sound = way.object == -1 and way.stored == 0 and bool(way.base)
            else:
                sound = (
                    0 <= way.object < len(table.objects)
                    and way.at + way.stored <= table.objects[way.object].size
                    and bool(way.base) == (kind == "patch")
                )
            if not sound:
                raise InvalidFileError(
                    where,
                    f"the part at {part.offset} cannot travel as {way.encoding!r}: it refers to bytes that are not there",
                )
    _check_hole(end, table.size, where)
    return table


def _check_hole(start: int, stop: int, where: str) -> None:
    if stop - start > HOLE_LIMIT:
        raise InvalidFileError(
            where, f"no part covers the {stop - start} bytes at {start}; at most {HOLE_LIMIT} may lie between parts"
        )


def encode(value: Index | Table) -> bytes:
    """JSON, the same for equal values; an index is indented, for people."""
    data = encode_json(value)
    return msgspec.json.format(data, indent=1) + b"\n" if isinstance(value, Index) else data


def schema(kind: type[Index] | type[Table]) -> dict[str, Any]:
    """The JSON Schema of an index or a table."""
    return msgspec.json.schema(kind)


def check_name(text: str, what: str) -> str:
    """The name or version of a release, if it can be one.

    Raises:
        ReleaseError: it has other characters, or is too long.
    """
    if not isinstance(text, str) or not re.match(_NAME, text):
        raise ReleaseError(
            f"{text!r} cannot be the {what} of a release: expected at most 100 letters, digits and . _ + -, with a letter or "
            "digit first"
        )
    return text


def check_file_name(name: str) -> None:
    """Check that a file name leads into a folder, on every system.

    Raises:
        ReleaseError: it leads elsewhere, or cannot be a file name.
    """
    if not is_plain_path(name):
        raise ReleaseError(
            f"{name!r} cannot be the name of a file of a release: expected a plain path that leads into a folder"
        )
