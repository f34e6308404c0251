"""The content-addressed store: blobs under keys, each distinct content once.

It differs from ExecuTorch's `NamedDataStore` in four ways: `add` copies nothing, equal contents are found by xxh3-128
and confirmed by comparing the bytes, a blob's alignment suits all its keys, and a store can have a base of `.ptd` files
that are deployed already.
"""

from __future__ import annotations

import io
import itertools
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from blobstore.core.disk.folders import folders
from blobstore.core.disk.kinds import Format
from blobstore.core.disk.progress import Progress
from blobstore.core.disk.staging import Staging, refuse_inputs
from blobstore.core.errors import (
    FileAccessError,
    IntegrityError,
    InvalidAlignmentError,
    InvalidFileError,
    InvalidTagError,
    KeyConflictError,
    KeyNotFoundError,
    LayoutError,
    OutputPathError,
    UnsupportedDataError,
)
from blobstore.core.formats.data_map import MergedDataMap, NamedDataMap
from blobstore.core.formats.keys import OF_PROGRAMS, WORKING_COPY, check_key, suggest
from blobstore.core.formats.ptd.header import PtdHeaderError
from blobstore.core.formats.ptd.manifest import ManifestError, peek_metadata
from blobstore.core.formats.ptd.reader import open_ptd
from blobstore.core.formats.ptd.writer import MAX_ALIGNMENT, BlobEntry, batch_of, write_batch
from blobstore.core.memory.batch import Batch
from blobstore.core.memory.buffers import LARGE, address_of, same_bytes
from blobstore.core.memory.digest import Digest, digest
from blobstore.core.memory.distinct import Distinct
from blobstore.core.memory.layout import ScalarType, TensorLayout
from blobstore.core.memory.mapped_file import Paths, as_path, as_paths, check_length, map_file
from blobstore.core.memory.tensors import FileSlice, as_bytes
from blobstore.core.reprs import count, fields_line, line
from blobstore.core.text import size

__all__ = [
    "DEFAULT_TAG",
    "BlobStore",
    "StoreStats",
    "check_tag",
    "file_name",
    "nbytes",
    "ptd_bytes",
    "stage_ptd",
]

DEFAULT_TAG = "blobs"
"""The tag of the file that `BlobStore.write` puts untagged blobs in."""


class NamedDataOutput(Protocol):
    """ExecuTorch's `NamedDataStoreOutput`, as far as `BlobStore.merge` reads it."""

    buffers: Any
    pte_data: Any
    external_data: Any


@dataclass(frozen=True)
class StoreStats:
    """What a store holds; sizes in bytes are without padding and tables of contents.

    Attributes:
        keys: the number of keys.
        blobs: the number of distinct contents.
        total_bytes: the size that the keys would have if each had a copy of its own.
        unique_bytes: the size of the distinct contents.
        base_keys: the number of keys that were added but are in the base already, so they are not written.
        base_bytes: the size of their contents.
    """

    __repr__ = fields_line

    keys: int
    blobs: int
    total_bytes: int
    unique_bytes: int
    base_keys: int
    base_bytes: int

    @property
    def saved_bytes(self) -> int:
        """The bytes that sharing saves, including sharing with the base."""
        return self.total_bytes - self.unique_bytes + self.base_bytes


@dataclass(slots=True)
class _Key:
    blob: int
    alignment: int
    tag: str | None
    layout: TensorLayout | None


class BlobStore:
    """Blobs by key.

    The store keeps *views* of the memory that is added, so this memory must not change, and a mapped file must not be
    truncated, until the store is written. If it happens, writing raises an error and never makes a wrong file. Only one
    thread may use a store at a time.

    Args:
        base: `.ptd` files that are deployed already. A key that they hold with the same bytes is accepted and not
            written again; a key that they hold with different bytes is a conflict.

    Raises:
        FileAccessError, InvalidFileError: a base file cannot be opened.
        KeyConflictError: two base files contradict each other.
    """

    def __init__(self, *, base: Paths = ()) -> None:
        self._base = MergedDataMap([open_ptd(path) for path in as_paths(base)])
        self._base_keys = frozenset(self._base)
        self._sources: set[Path] = set(self._base.sources)
        self._in_base: dict[str, int] = {}
        self._keys: dict[str, _Key] = {}
        self._blobs: list[tuple[memoryview, Digest]] = []
        self._by_contents = Distinct()
        self._by_memory: dict[tuple[int, int], int] = {}

    def add(
        self,
        key: str,
        data: Any,
        *,
        alignment: int = 1,
        tag: str | None = None,
        layout: TensorLayout | None = None,
    ) -> Digest:
        """Add a blob under a key. If an error is raised, the store is as it was.

        Args:
            key: any non-empty text without NUL, unique over the whole store.
            data: a torch tensor on the CPU, a numpy array, a `FileSlice`, or anything with the buffer protocol. The store
                keeps a view of its memory.
            alignment: the blob's offset in a file will be a multiple of this, in bytes. A blob with several keys gets the
                least common multiple.
            tag: the file that the blob is meant for, a plain file name; None leaves the choice to the method that writes.
            layout: for bytes, the tensor that they are; for a tensor or an array, the expected layout.

        Returns:
            The content address of the blob.

        Raises:
            KeyConflictError: the key has other bytes, another layout or another tag, here or in the base.
            InvalidKeyError, InvalidTagError, InvalidAlignmentError: an argument is invalid.
            FileAccessError, InvalidFileError: the file of a `FileSlice` cannot be read, or is shorter.
            UnsupportedDataError, LayoutError: `data` gives no access to its bytes, or does not have this `layout`.
        """
        check_key(key)
        _check_alignment(key, alignment)
        if tag is not None:
            check_tag(tag)
        try:
            view, layout = as_bytes(data, layout)
        except (UnsupportedDataError, LayoutError) as error:
            raise type(error)(f"key {key!r}: {error}") from error
        check_length(view)
        memory = address_of(view) if len(view) >= LARGE else None
        address = self._address(view, memory)
        if key in self._base_keys:  # it is deployed already, so it is compared, counted and not written
            self._check_base(key, view, layout)
            self._in_base[key] = len(view)
            return address
        blob = self._by_contents.find(view, address)
        entry = self._keys.get(key)
        if entry is not None:
            self._check_same(key, entry, blob, address, tag, layout)
            alignment = math.lcm(entry.alignment, alignment)
            _check_alignment(key, alignment)
            self._keys[key] = _Key(entry.blob, alignment, tag, layout)
            return address
        if blob is None:
            blob = len(self._blobs)
            self._blobs.append((view, address))
            if memory is not None:
                self._by_memory[memory] = blob
            self._by_contents.add(view, address, blob)
        self._keys[key] = _Key(blob, alignment, tag, layout)
        if isinstance(data, FileSlice):
            self._sources.add(as_path(data.path))
        return address

    def merge(self, other: BlobStore | NamedDataMap | NamedDataOutput, *, tag: str | None = None) -> None:
        """Add everything that another store, a data map, or the output of ExecuTorch's NamedDataStore holds.

        Args:
            other: what to add. Keys keep their alignment, layout and order. The store keeps views of the buffers of a
                NamedDataStoreOutput, except for file-backed ones, which are read into memory.
            tag: the tag for blobs that have none in `other`.

        Raises:
            KeyConflictError: as for `add`.
            IntegrityError: a blob of a data map does not have the digest that its file records.
            In every case nothing of `other` was added.
        """
        keys, blobs, in_base = dict(self._keys), len(self._blobs), dict(self._in_base)
        try:
            for key, data, alignment, other_tag, layout in _contents(other):
                tag_now = tag if other_tag is None else other_tag
                address = self.add(key, data, alignment=alignment, tag=tag_now, layout=layout)
                if isinstance(other, NamedDataMap) and address != (recorded := other.digest(key)):
                    raise IntegrityError(
                        other.name, f"the bytes of {key!r} are damaged: expected {recorded}, found {address}"
                    )
        except BaseException:
            # What was added last goes again, and the indexes are made anew of what stays.
            self._keys, self._in_base = keys, in_base
            for view, _ in self._blobs[blobs:]:
                self._by_memory.pop(address_of(view), None)
            del self._blobs[blobs:]
            self._by_contents = Distinct()
            for number, (view, address) in enumerate(self._blobs):
                self._by_contents.add(view, address, number)
            raise
        if isinstance(other, BlobStore):
            self._sources |= other._sources
        elif isinstance(other, NamedDataMap):
            self._sources |= set(other.sources)

    @property
    def stats(self) -> StoreStats:
        """Counts and sizes."""
        return StoreStats(
            keys=len(self._keys),
            blobs=len(self._blobs),
            total_bytes=sum(len(self._blobs[key.blob][0]) for key in self._keys.values()),
            unique_bytes=sum(len(view) for view, _ in self._blobs),
            base_keys=len(self._in_base),
            base_bytes=sum(self._in_base.values()),
        )

    @property
    def tags(self) -> tuple[str | None, ...]:
        """The tags in use, in the order in which they were added; None stands for untagged blobs."""
        return tuple(dict.fromkeys(key.tag for key in self._keys.values()))

    def entries(self) -> list[BlobEntry]:
        """The keys with their blobs, in the order in which they were added."""
        return [
            BlobEntry(key, *self._blobs[known.blob], known.blob, known.alignment, known.layout)
            for key, known in self._keys.items()
        ]

    def tag(self, key: str) -> str | None:
        """The tag that a key was added with.

        Raises:
            KeyNotFoundError: no such key.
        """
        if key in self:
            return self._keys[key].tag
        raise KeyNotFoundError(
            f"no key {key!r} among the {len(self._keys)} keys of the store{suggest(key, self._keys)}"
        )

    def digest(self, key: str) -> Digest:
        """The content address of a blob.

        Raises:
            KeyNotFoundError: no such key.
        """
        self.tag(key)
        return self._blobs[self._keys[key].blob][1]

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and key in self._keys

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self) -> str:
        nbytes = sum(len(view) for view, _ in self._blobs)
        return line("BlobStore", "", count(len(self._keys), "key"), count(len(self._blobs), "blob"), size(nbytes))

    def write_ptd(
        self,
        path: str | os.PathLike[str],
        *,
        tag: str | None = None,
        metadata: Mapping[str, str] | None = None,
        progress: Progress | None = None,
        force: bool = False,
    ) -> int:
        """Write a .ptd. At every moment the path has the old file or the new one, complete.

        Keys are in the order in which they were added, so equal contents in equal order give equal files.

        Args:
            path: the file; a .ptd that exists is replaced.
            tag: write only the blobs with this tag; left out, all blobs.
            metadata: text to store in the file, under text keys.
            progress: called with every step.
            force: also replace a file of another format, one that blobs come from, or the data file of programs.

        Returns:
            The size of the file in bytes.

        Raises:
            InvalidTagError: no blob has this tag.
            UnsupportedDataError: the metadata does not map str to str.
            OutputPathError: the path is that of a base, of a file that blobs come from, of a data file that was written
                together with programs, or of a file that is not a .ptd.
            DataChangedError: a blob changed since it was added.
            FileAccessError: writing failed, or a file that blobs come from was truncated.
        """
        if tag is not None and not (isinstance(tag, str) and tag in self.tags):
            raise InvalidTagError(f"no blob has the tag {tag!r}; the tags are {list(self.tags)}")
        if not force:
            refuse_inputs([as_path(path)], self._sources)
        entries = [entry for entry in self.entries() if tag is None or self.tag(entry.key) == tag]
        with Staging(progress, force=force) as staging:
            return stage_ptd(staging, path, batch_of(entries), metadata)

    def to_bytes(self, *, metadata: Mapping[str, str] | None = None) -> bytes:
        """The bytes of the .ptd that `write_ptd` would write, with all keys, whatever their tags.

        Args:
            metadata: free text to keep with them.

        Raises:
            UnsupportedDataError: the metadata is not text.
            DataChangedError: a blob changed since it was added.
            FileAccessError: a file that blobs come from was truncated.
        """
        return ptd_bytes(batch_of(self.entries()), metadata)

    def write(
        self,
        directory: str | os.PathLike[str],
        *,
        metadata: Mapping[str, str] | None = None,
        force: bool = False,
    ) -> dict[str, Path]:
        """Write one .ptd for each tag: all files or none. If the process is killed meanwhile, the next writer finishes it.

        Args:
            directory: the folder. It is made if it is missing, and removed again if writing then fails.
            metadata: text to store in each file, under text keys.
            force: also replace files of other formats, files that blobs come from, or data files of programs.

        Returns:
            The path of each file, by tag. Untagged blobs go to the file of `DEFAULT_TAG`.

        Raises:
            As `write_ptd`.
        """
        files: dict[str, list[BlobEntry]] = {}
        for entry in self.entries():
            tag = self.tag(entry.key)
            files.setdefault(DEFAULT_TAG if tag is None else tag, []).append(entry)
        folder = as_path(directory)
        paths = {tag: folder / file_name(tag) for tag in files}
        if not force:
            refuse_inputs(paths.values(), self._sources)
        with folders([folder]), Staging(force=force) as staging:
            for tag, path in paths.items():
                stage_ptd(staging, path, batch_of(files[tag]), metadata)
        return paths

    def _address(self, view: memoryview, memory: tuple[int, int] | None) -> Digest:
        """The digest of a blob. Large memory that the store has already is not read again.

        The store holds that memory, so nothing else can have been allocated there. If it changed, writing raises an error.
        """
        blob = None if memory is None else self._by_memory.get(memory)
        return digest(view) if blob is None else self._blobs[blob][1]

    def _check_base(self, key: str, view: memoryview, layout: TensorLayout | None) -> None:
        if self._base.get_tensor_layout(key) != layout:
            raise KeyConflictError(
                f"key {key!r} is {layout}, but {self._base.get_tensor_layout(key)} in the base {self._base.name}"
            )
        if not same_bytes(view, self._base.get_data(key)):
            raise KeyConflictError(f"key {key!r} has other bytes in the base {self._base.name}")

    def _check_same(
        self, key: str, entry: _Key, blob: int | None, address: Digest, tag: str | None, layout: TensorLayout | None
    ) -> None:
        if blob != entry.blob:
            raise KeyConflictError(
                f"key {key!r} is in the store with other bytes: {self._blobs[entry.blob][1]} there, {address} now"
            )
        if layout != entry.layout:
            raise KeyConflictError(f"key {key!r} is in the store as {entry.layout}, now as {layout}")
        if tag != entry.tag:
            raise KeyConflictError(f"key {key!r} is in the store with the tag {entry.tag!r}, now with {tag!r}")


def nbytes(entries: Iterable[BlobEntry]) -> int:
    """The size of the distinct blobs of these keys, in bytes."""
    return sum({entry.blob: len(entry.data) for entry in entries}.values())


def ptd_bytes(batch: Batch, metadata: Mapping[str, str] | None) -> bytes:
    """The bytes of the .ptd of a batch; raises what `BlobStore.to_bytes` does."""
    file = io.BytesIO()
    write_batch(file, batch, _check_metadata(metadata))
    return file.getvalue()


def stage_ptd(staging: Staging, path: str | os.PathLike[str], batch: Batch, metadata: Mapping[str, str] | None) -> int:
    """Write a .ptd as one of the files of `staging`; its size in bytes.

    Raises:
        As `BlobStore.write_ptd`, but for the tag and for files that blobs come from.
    """
    checked = _check_metadata(metadata)
    if not staging.force and not OF_PROGRAMS.items() <= checked.items():
        _refuse_data_of_programs(as_path(path))
    with staging.open(path, batch.nbytes, kind=Format.PTD) as file:
        return write_batch(file, batch, checked)


def _refuse_data_of_programs(path: Path) -> None:
    """Refuse to replace a data file that was written together with programs: they would not load any more.

    Raises:
        OutputPathError: the path is such a file.
    """
    with suppress(FileAccessError, InvalidFileError, PtdHeaderError, ManifestError):
        # The table of a large file takes longer to read than a small one to write, and one that is malformed may be
        # replaced. So the manifest comes first, and the table only if the answer may be no.
        if OF_PROGRAMS.items() <= peek_metadata(map_file(path)).items():
            open_ptd(path).close()
            raise OutputPathError(
                f"{path}: this data file was written together with programs, which would not find their weights any "
                "more; choose another name, or use force (--force)"
            )


def check_tag(tag: str) -> None:
    """Raise InvalidTagError unless `tag` is a plain file name that stays in the folder that it is written to."""
    if not isinstance(tag, str) or not tag or tag in {".", ".."}:
        raise InvalidTagError(f"tag {tag!r} is not a file name")
    if any(c in tag for c in "/\\\0:") or any(ord(c) < 32 for c in tag):
        raise InvalidTagError(f"tag {tag!r} has a separator or a control character; expected a plain file name")
    try:
        nbytes = len(os.fsencode(tag))
    except UnicodeEncodeError as error:
        raise InvalidTagError(f"tag {tag!r} is not possible in a file name: {error.reason}") from None
    if ".." in tag or tag != tag.strip() or nbytes > 200:
        raise InvalidTagError(f"tag {tag!r} has '..', surrounding blanks, or more than 200 bytes")


def file_name(tag: str) -> str:
    """The file name of a tag, with the ending .ptd, as ExecuTorch writes it."""
    return tag if tag.endswith(".ptd") else tag + ".ptd"


def _check_metadata(metadata: Mapping[str, str] | None) -> Mapping[str, str]:
    """The metadata of a new file, {} for None, without the mark of a working copy, which a file of its contents is not.

    Raises:
        UnsupportedDataError: it does not map str to str.
    """
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping):
        raise UnsupportedDataError(f"metadata must map str to str, got a {type(metadata).__qualname__}")
    for text in itertools.chain.from_iterable(metadata.items()):
        try:
            text.encode()
        except (AttributeError, UnicodeEncodeError):
            raise UnsupportedDataError(f"metadata must map str to str, got {text!r}") from None
    return {key: text for key, text in metadata.items() if key != WORKING_COPY}


def _check_alignment(key: str, alignment: int) -> None:
    if isinstance(alignment, bool) or not isinstance(alignment, int) or not 1 <= alignment <= MAX_ALIGNMENT:
        raise InvalidAlignmentError(
            f"key {key!r}: alignment must be an integer in 1..{MAX_ALIGNMENT}, got {alignment!r}"
        )


def _contents(
    other: BlobStore | NamedDataMap | NamedDataOutput,
) -> Iterator[tuple[str, Any, int, str | None, TensorLayout | None]]:
    """Key, data, alignment, tag and layout of everything in `other`."""
    if isinstance(other, BlobStore):
        for entry in other.entries():
            yield entry.key, entry.data, entry.alignment, other.tag(entry.key), entry.layout
    elif isinstance(other, NamedDataMap):
        for key in other:
            yield key, other.get_data(key), other.alignment(key), None, other.get_tensor_layout(key)
    elif hasattr(other, "pte_data") and hasattr(other, "external_data"):
        yield from _contents_of_output(other)
    else:
        raise UnsupportedDataError(
            f"cannot merge {type(other).__qualname__}: expected a BlobStore, a NamedDataMap or a NamedDataStoreOutput"
        )


def _contents_of_output(output: NamedDataOutput) -> Iterator[tuple[str, Any, int, str | None, TensorLayout | None]]:
    tagged: list[tuple[str | None, Any]] = [(None, output.pte_data), *output.external_data.items()]
    for tag, named in tagged:
        for key, entry in named.items():
            data = output.buffers[entry.buffer_index]
            if not isinstance(data, bytes):
                data = data.to_bytes()
            layout = entry.tensor_layout and TensorLayout(
                ScalarType(int(entry.tensor_layout.scalar_type)),
                tuple(entry.tensor_layout.sizes),
                tuple(entry.tensor_layout.dim_order),
            )
            yield key, data, entry.alignment or 1, tag, layout
