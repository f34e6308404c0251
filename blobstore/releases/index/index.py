"""The index of a release: its files, and what is loaded with what.

An index is JSON. It names every file of the release with its size and SHA-256, and the list of the contents that these
consist of. So whoever trusts the index can check everything else. docs/releases.md describes it; `schema` gives its JSON
Schema. It comes from servers and is hostile until it is parsed here.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable
from functools import cached_property
from typing import Annotated, Any, Literal, TypeVar

from blobstore.core.constants import INDEX_LIMIT, MOST_FILES, TABLE_LIMIT
from blobstore.core.disk.names import is_plain_path
from blobstore.core.errors import InvalidFileError, ReleaseError
from blobstore.core.reprs import line
from blobstore.core.requirements import needed

with needed("releases need msgspec", "releases"):
    import msgspec
    from msgspec import Meta, Struct

__all__ = [
    "INDEX_LIMIT",
    "TABLE_LIMIT",
    "VERSION",
    "File",
    "Index",
    "Meta",
    "Name",
    "Object",
    "Sha256",
    "Size",
    "Struct",
    "check_file_name",
    "check_name",
    "encode",
    "encode_json",
    "parse_index",
    "parse_json",
    "schema",
]

# `$` alone would also match before a line break at the end
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._+-]{0,99}$(?!\n)"

VERSION = r"^[0-9]{1,4}(\.[0-9]{1,4}){0,3}$(?!\n)"
"""Versions of ExecuTorch."""

Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$(?!\n)")]
Size = Annotated[int, Meta(ge=0, le=(1 << 53) - 1)]
Name = Annotated[str, Meta(pattern=_NAME)]
FileName = Annotated[str, Meta(min_length=1, max_length=1024)]


class Object(Struct, frozen=True, omit_defaults=True, array_like=True):
    """Immutable bytes, named by their digest.

    Attributes:
        sha256: in lower case hexadecimal digits.
        size: in bytes.
        folder: where it lies below a release folder: "packs" if a pool has packed contents into it.
    """

    sha256: Sha256
    size: Size
    folder: Literal["files", "packs"] = "files"

    @property
    def path(self) -> str:
        """Its path below a release folder."""
        return f"packs/{self.sha256[:2]}/{self.sha256}" if self.folder == "packs" else f"files/{self.sha256}"


class File(Struct, frozen=True, omit_defaults=True):
    """One file of the release.

    Attributes:
        name: its path below the folder of the release, with `/`.
        kind: "program" (.pte), "data" (.ptd), "adapter" (a .ptd with a LoRA adapter, which no program takes by itself), or
            "other".
        sha256, size: of its contents.
        data: of a program, the names of the data files that it takes keys from.
    """

    name: FileName
    kind: Literal["program", "data", "adapter", "other"]
    sha256: Sha256
    size: Size
    data: Annotated[tuple[FileName, ...], Meta(max_length=MOST_FILES)] = ()

    @property
    def object(self) -> Object:
        """The contents."""
        return Object(self.sha256, self.size)

    def __repr__(self) -> str:
        return line("File", self.name, self.kind, f"{self.size} bytes")


class Index(Struct, frozen=True, omit_defaults=True, dict=True):
    """A release.

    Attributes:
        format: the version of this format.
        name: of the product. A folder on a device holds releases of one name.
        version: as its publisher calls it.
        published: when, in seconds since 1970 UTC; grows with every release of a name. A device refuses older ones.
        executorch: the first version of ExecuTorch that runs the programs, such as "1.5".
        files: all files.
        parts: the object that says which contents the files consist of.
        plain: whether every file is also an object of its own, for clients that decode nothing.
    """

    format: Literal["blobstore.release.1"]
    name: Name
    version: Name
    published: Size
    executorch: Annotated[str, Meta(pattern=VERSION)]
    files: Annotated[tuple[File, ...], Meta(max_length=MOST_FILES)]
    parts: Object
    plain: bool = False

    def file(self, name: str) -> File:
        """The file with a name that is in the index."""
        return self._by_name[name]

    @cached_property
    def distinct(self) -> tuple[Object, ...]:
        """The contents of the files, each once, in order."""
        return tuple(dict.fromkeys(file.object for file in self.files))

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @cached_property
    def _by_name(self) -> dict[str, File]:
        return {file.name: file for file in self.files}


_Any = TypeVar("_Any")


def encode_json(value: object) -> bytes:
    """JSON that `parse_json` reads."""
    return msgspec.json.encode(value)


def parse_json(data: bytes, kind: type[_Any], where: str, what: str) -> _Any:
    """A value of JSON, which must have this type.

    Raises:
        InvalidFileError: it is malformed, or has another type; the message says that `where` is not `what`.
    """
    try:
        text = data.decode()  # msgspec does not look into what it skips
        parsed = msgspec.json.decode(text, type=kind)
        json.loads(text, object_pairs_hook=_check_unique, parse_int=len, parse_float=len)
    except (ValueError, RecursionError) as error:
        raise InvalidFileError(where, f"this is not {what}: {error}") from None
    return parsed


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
    index = parse_json(data, Index, where, "an index of a release")

    def fail(reason: str) -> InvalidFileError:
        return InvalidFileError(where, reason)

    files = _check_files(index, fail)
    for file in index.files:
        if file.data and file.kind != "program":
            raise fail(f"{file.name!r} takes data, and is no program")
        for name in file.data:
            if name not in files or files[name].kind != "data":
                raise fail(f"program {file.name!r} takes {name!r}, which is no data file of the release")
    if index.parts.size > TABLE_LIMIT or index.parts.folder != "files":
        raise fail(f"the list of parts has {index.parts.size} bytes, at most {TABLE_LIMIT} are possible")
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


def encode(index: Index) -> bytes:
    """JSON, indented, the same for equal releases."""
    return msgspec.json.format(encode_json(index), indent=1) + b"\n"


def schema(kind: type[Any]) -> dict[str, Any]:
    """The JSON Schema of an index, of parts or of ways."""
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
