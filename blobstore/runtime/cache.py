"""The cache: blobs of data files in memory, looked up by key and changed while programs run on them."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from blobstore.core import errors
from blobstore.core.formats.data_map import NUMBER_COLUMNS, TENSOR_COLUMNS, NamedDataMap, tensor_cells
from blobstore.core.formats.keys import prefix_apart
from blobstore.core.memory.arrays import raw
from blobstore.core.memory.digest import Digest, digest
from blobstore.core.memory.layout import ScalarType, TensorLayout
from blobstore.core.memory.mapped_file import Paths, as_path, as_paths, check_length, map_file
from blobstore.core.memory.tensors import (
    AnyTensor,
    Array,
    as_bytes,
    check_by_name,
    default_framework,
    in_dim_order,
    to_framework,
    to_numpy,
)
from blobstore.core.notebook import table
from blobstore.core.reprs import Fact, and_others, count, fields_line, line, shorten
from blobstore.runtime.native import (
    NativeLayout,
    is_utf8,
    layout_of,
    native,
    native_layout,
    native_path,
)
from blobstore.runtime.packed import PackedStore, as_packed
from blobstore.runtime.tensors import Item, LogicalTensors, Updated

if TYPE_CHECKING:
    import torch

    from blobstore.core.formats.ptd.reader import PtdDataMap

__all__ = ["BlobCache", "CacheStats", "Transaction", "check_cache", "make_working_copy"]


def check_cache(cache: object, what: str) -> None:
    """Raise UnsupportedDataError if an argument, which messages call `what`, is not a `BlobCache`."""
    if not isinstance(cache, BlobCache):
        raise errors.UnsupportedDataError(f"{what} must be a BlobCache, not a {type(cache).__qualname__}")


@dataclass(frozen=True)
class CacheStats:
    """The state and history of a cache. Values are counted, or measured by the kernel; None if it cannot measure them.

    Attributes:
        keys: number of keys, including those of the base.
        mapped_bytes: address space of the cache, without its base.
        resident_bytes: the part of `mapped_bytes` that is in memory now, shared with other processes or not.
        private_bytes: the part of `mapped_bytes` that is memory of this process alone: changed pages, or a copy.
        dirty_keys: number of keys whose bytes were changed.
        dirty_bytes: total size of their blobs.
        lookups: look-ups of a key by programs and by the user; one that continues in the base counts in both caches.
        misses: look-ups that found nothing.
        commits: updates, transactions and loads through this object.
        reverts: reverts through this object.
    """

    __repr__ = fields_line

    keys: int
    mapped_bytes: int
    resident_bytes: int | None
    private_bytes: int | None
    dirty_keys: int
    dirty_bytes: int
    lookups: int
    misses: int
    commits: int
    reverts: int


class _Change(NamedTuple):
    """New bytes for one key in the blob's own dim order, as the native module takes them. It compares `layout` if this is a
    tensor."""

    key: str
    data: Any
    layout: NativeLayout | None
    is_tensor: bool


class BlobCache(NamedDataMap):
    """The blobs of any number of `.ptd` files in memory, looked up as one map, and changed while programs run on them.

    A cache is a `NamedDataMap` and can be used wherever one is expected. What is read from it never changes it: arrays
    and views are read-only, and torch tensors are copies that belong to the caller. Every view is of the live memory: it
    shows commits as they happen, and keeps the memory alive. All methods may be called from any thread.

    Args:
        paths: one file or several. Where several files have a key, its contents must be equal.
        mode: "private": unchanged pages belong to the page cache of the operating system, so all processes share them.
            A commit copies only the pages that it changes, and no other process sees it. "shared": one working copy
            that any number of processes map, read and change together; a commit changes the file, so only what
            `make_working_copy` wrote can be opened in this mode. "copy": the files are read into memory, so later changes to the files have no effect.
        base: a cache whose blobs can be found through this one, except for the keys that `paths` have. Its memory is
            shared, and its commits are visible here. Its blobs are changed through the base, not through this cache.
        packed: a `PackedStore` or its folder: where programs on this cache keep packed weights. By default where those of
            the base do, or nowhere.

    Attributes:
        paths: the files, without those of the base.
        mode: as given.
        base: as given.
        packed: the `PackedStore`, or None.
        name: the cache as messages name it.

    Raises:
        FileAccessError, InvalidFileError, IntegrityError: a file cannot be opened or trusted.
        KeyConflictError: two files have different contents under one key.
        UnsupportedOperationError: the mode is unknown, or it is "shared" with several files, with a file that is no
            working copy, or with one that this thread is reading through another cache.
        UnsupportedDataError: `base` is not a `BlobCache`, or `packed` is neither a store nor a path.
    """

    def __init__(
        self,
        paths: Paths = (),
        mode: Literal["private", "shared", "copy"] = "private",
        *,
        base: BlobCache | None = None,
        packed: PackedStore | str | os.PathLike[str] | None = None,
    ) -> None:
        if not isinstance(mode, str) or mode not in {"private", "shared", "copy"}:
            raise errors.UnsupportedOperationError(f"mode must be 'private', 'shared' or 'copy', not {mode!r}")
        self.paths = tuple(as_paths(paths))
        if base is not None:
            check_cache(base, "base")
        self.mode = mode
        self.base = base
        self.packed: PackedStore | None = as_packed(packed) or (base.packed if base is not None else None)
        opened = native.BlobCache.open(
            [native_path(path) for path in self.paths],
            mode,
            base._native if base is not None else None,
            self.packed._native if self.packed is not None else None,
        )
        self._hold(opened)

    @classmethod
    def _around(cls, opened: Any, paths: Sequence[Path], packed: PackedStore | None) -> BlobCache:
        """The object for a cache that the native library opened on files, in mode "private"."""
        cache = cls.__new__(cls)
        cache.paths, cache.mode, cache.base, cache.packed = tuple(paths), "private", None, packed
        cache._hold(opened)
        return cache

    def _hold(self, opened: Any) -> None:
        self._native = opened
        self.name = os.fsdecode(self._native.name)
        self._keys: list[str] = self._native.keys()
        self._maps = [map_file(path) for path in self.paths]  # so that `files` reads these files, not later ones

    # The interface of NamedDataMap

    def _key_list(self) -> Sequence[str]:
        return self._keys

    def _view(self, key: str) -> memoryview:
        if not is_utf8(key):
            raise KeyError(key)
        return memoryview(self._native.view(key))

    def _layout(self, key: str) -> TensorLayout | None:
        if not is_utf8(key):
            raise KeyError(key)
        return layout_of(self._native.layout(key))

    def __contains__(self, name: object) -> bool:
        """Whether `cache[name]` knows a name: it is a key, or a tensor of the model."""
        return self._has(name) or name in self.tensors

    def _has(self, key: object) -> bool:
        """Whether it is a key."""
        self._check_open()
        return is_utf8(key) and bool(self._native.contains(key))

    def _check_open(self) -> None:
        if self._closed:
            raise errors.ClosedError(f"{self.name}: the cache is closed")

    def _check_key(self, key: object) -> None:
        self._check_open()
        if not is_utf8(key):
            raise self._not_found(key)

    def _check_known(self, key: object) -> None:
        """Raise KeyNotFoundError, which names near keys, before the native side says less."""
        self._check_open()
        if not self._has(key):
            raise self._not_found(key)

    def alignment(self, key: str) -> int:
        """The alignment that the file records for a key, in bytes; 1 if it records none."""
        self._check_known(key)
        return int(self._native.alignment(key))

    def digest(self, key: str) -> Digest:
        """The content address of a blob as it is now."""
        data = self.get_data(key)
        recorded = self._native.recorded_digest(key)
        if recorded is not None:
            return Digest(len(data), recorded)
        with self.reading():
            return digest(data)

    def load_data_into(self, key: str, buffer: object, size: int | None = None) -> None:
        """Copy a blob, from a single generation, to the start of `buffer`; see `NamedDataMap.load_data_into`."""
        self._check_open()
        with self.reading():
            super().load_data_into(key, buffer, size)

    @property
    def sources(self) -> tuple[Path, ...]:
        return (*self.paths, *(self.base.sources if self.base is not None else ()))

    # Reading

    def __getitem__(self, name: str) -> AnyTensor:
        """A blob by its key, as `torch(key)` if torch is installed, otherwise as `numpy(key)`; or a copy of a tensor of the
        model, by its name there. So writing to it changes only the caller's copy, or is numpy's error.

        Raises:
            KeyNotFoundError: it is neither a key nor a tensor.
            UpdateError: the tensor was quantized, packed or combined with others, so its value is not stored.
        """
        if self._has(name) or not self.tensors:
            return super().__getitem__(name)
        framework = default_framework()
        with self.reading():
            array, kind = self.tensors.value(name)
            copy = bytearray(raw(array)) if framework == "pt" else bytes(raw(array))  # arrays are read-only, as by key
        return to_framework(framework, memoryview(copy), TensorLayout(kind, array.shape))  # type: ignore[no-any-return]

    def state_dict(self) -> dict[str, AnyTensor]:
        """All tensors of the model by name, from one generation, as `cache[name]` gives them: what `update_state_dict` takes.

        Without records of a model, these are the tensors of the files. State that programs change themselves is left out.

        Raises:
            UpdateError: a tensor was quantized, packed or combined with others, so its value is not stored.
        """
        with self.reading():
            names = [name for name in self.tensors if not self.tensors[name].auxiliary] if self.tensors else self._keys
            return {name: self[name] for name in names if self.tensors or self._layout(name) is not None}

    def layout(self, key: str) -> TensorLayout | None:
        """The layout of a tensor, or None for opaque bytes."""
        return self.get_tensor_layout(key)

    def numpy(self, key: str) -> Array:
        """A read-only array over the live memory, in the tensor's shape; for opaque bytes one of uint8."""
        return to_numpy(self.get_data(key), self.layout(key))

    def torch(self, key: str) -> torch.Tensor:
        """A copy from a single generation as a tensor, in the tensor's shape; for opaque bytes one of uint8.

        torch has no read-only tensors, so it is not a view of the live memory; `numpy` is one.
        """
        self._check_known(key)
        with self.reading():
            return super().torch(key)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Hold back commits during the block, so that everything read in it belongs to one generation.

        Commits of other threads wait for the end of the block, so keep it short. A commit by this thread is an error. In
        mode "shared", so is whatever waits for the locks of the working copy through another cache: reading it,
        committing to it, opening it again or replacing it.

        Raises:
            UnsupportedOperationError: this thread reads the same working copy through another cache.
        """
        held = native.Reading(self._native)
        held.enter()
        try:
            yield
        finally:
            held.leave()

    @functools.cached_property
    def files(self) -> tuple[PtdDataMap, ...]:
        """The files of `paths` as they were when the cache was opened: their keys, layouts, metadata and digests.

        Commits do not show in them; in mode "shared", where a commit changes the file, they show those up to the first
        use of this property. Files that were renamed, replaced or deleted since can still be read. Files of the base
        are not included.

        Raises:
            DataChangedError: a file was overwritten in place since it was opened, so it no longer describes the cache.
            FileAccessError, InvalidFileError, IntegrityError: a file was truncated or damaged since it was opened.
        """
        from blobstore.core.formats.ptd.reader import PtdDataMap  # takes longer than all else that a cache needs

        self._check_open()
        with self.reading():
            for data in self._maps:
                check_length(data)
            files = tuple(PtdDataMap(path, data=data) for path, data in zip(self.paths, self._maps, strict=True))
            dirty = set(self.dirty)
            for file in files if self.mode != "shared" else ():
                for key in file:
                    if key not in dirty and (not self._has(key) or self.digest(key) != file.digest(key)):
                        raise errors.DataChangedError(
                            f"{file.name}: the file was overwritten after the cache was opened: '{key}' differs"
                        )
        return files

    @property
    def id(self) -> int:
        """A number that identifies the cache in this process; numbers are never reused."""
        return int(self._native.id)

    @property
    def generation(self) -> int:
        """Grows with every commit or revert, here or in the base; in mode "shared", also with those of other
        processes."""
        return int(self._native.generation)

    def version(self, key: str) -> int:
        """The generation of the last change of a key, in the cache that owns the key; 0 if it never changed."""
        self._check_known(key)
        return int(self._native.version(key))

    @property
    def dirty(self) -> tuple[str, ...]:
        """The keys of this cache's files that were changed, in the order of the files."""
        return tuple(self._native.dirty())

    @property
    def stats(self) -> CacheStats:
        """The current counts and sizes."""
        return CacheStats(**self._native.stats())

    def verify(self) -> bool:
        """Compare all blobs that were not changed with the digests in the files.

        Returns:
            True if every file had digests to compare with.

        Raises:
            IntegrityError: bytes are damaged; the message names their keys.
            FileAccessError: a file that the cache maps was truncated.
        """
        return bool(self._native.verify())

    # Changing

    @functools.cached_property
    def tensors(self) -> LogicalTensors:
        """The tensors of the model by name: the blobs that each is stored in, or why it cannot be updated."""
        return LogicalTensors(self)

    def update(self, blobs: Mapping[str, Any] | str | os.PathLike[str], *, finite: bool = False) -> Updated:
        """Change tensors or blobs in one commit: either all of them or none. No running method sees a part of it.

        A name is a key or, if the data files have records of it (see docs/howto/lowering.md), a tensor of the model. A tensor
        of the model is given in the model's own shape and dtype, and is stored in the layout that the delegates use.

        The data is read in place, so it must not change during the call. A tensor or array must have the layout of the blob,
        but its dense memory may have another dim order. Of bytes, only the length is checked.

        Args:
            blobs: maps each name to a tensor, an array, or, for a key, an object with the buffer protocol. The path of a
                delta file stands for its blobs, as `load` takes them.
            finite: refuse tensors with infinities or NaN.

        Returns:
            The new generation, and how many numbers of which quantized tensors were clipped: see `Updated`. Scales of
            channels and groups follow from the new numbers; the scale of a whole tensor is in the program and stays.

        Raises:
            KeyNotFoundError: a name is not in this cache's files. Like the errors below, it changes nothing.
            LayoutError: the new data has another shape, type or size.
            UpdateError: a tensor cannot be changed, can be changed only together with others, or is not finite.
            UnsupportedDataError: an object does not provide bytes.
            ProgramError: a delegate of a loaded method cannot pack the new weights. Delegates pack before anything
                changes.
            UnsupportedOperationError: this thread is in `reading()`, of this cache or of another one on the same working
                copy; or, in mode "shared", two keys that share their bytes in the file would get different bytes.
        """
        self._check_open()
        if isinstance(blobs, Mapping):
            return self.tensors.update(blobs, finite=finite)
        if finite or not isinstance(blobs, str | os.PathLike):
            raise errors.UnsupportedDataError(f"expected tensors by name, found a {type(blobs).__qualname__}")
        return Updated(self.load(blobs))

    def update_blobs(self, blobs: Mapping[str, Any]) -> int:
        """Like `update`, but every name is a key, and its value is the bytes as they are stored.

        Use it to restore bytes that were read from this cache, or from another cache on the same files.

        Args:
            blobs: maps each key to an object with the buffer protocol, of the blob's size.

        Returns, raises:
            As `update`.
        """
        self._check_open()
        check_by_name(blobs)
        return self._commit([self._change(key, self._bytes(key, data)[0]) for key, data in blobs.items()])

    def update_state_dict(self, tensors: Mapping[str, Any], *, strict: bool = True, finite: bool = False) -> Updated:
        """Commit every tensor of a model's `state_dict()` that the programs on this cache use, all at once.

        Entries that no program uses are ignored, such as the counters of batch normalization. So is state that the
        programs change themselves, such as key/value caches. Tied tensors may be given under any of their names; if
        several are given, their values must be equal. Non-persistent buffers need not be given.

        Args:
            tensors: maps each name to a tensor or array.
            strict: refuse if a tensor of the programs that are loaded is missing or cannot be changed, or if the update
                does not reach some of their weights, because they are embedded, packed by another backend, or in
                ExecuTorch's own map (see docs/runtime.md, "What an update reaches"). While no program is loaded, all
                tensors of the data files count. Without `strict`, such weights keep their values. Refuse also if more than
                one in a thousand numbers of a tensor would be clipped by a scale that cannot change.
            finite: as in `update`.

        Returns, raises:
            As `update`. An UpdateError also names the programs, methods and weights that are out of reach, or says that
            none of the tensors can be updated.
        """
        self._check_open()
        check_by_name(tensors)
        if strict:
            self.tensors.check_reach(tensors, whole=True)
        names = self.tensors.names_for_state_dict(tensors, strict=strict)
        return self.tensors.update({name: tensors[name] for name in names}, finite=finite, strict=strict)

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """Collect changes and commit them at the end of the block. An exception in the block discards them all.

        Data is copied when it is given, so the caller may reuse its memory at once.
        """
        self._check_open()
        pending = Transaction(self)
        yield pending
        pending.commit()

    def load(self, path: str | os.PathLike[str]) -> int:
        """Commit the blobs of a `.ptd`, such as a delta that `save` wrote, after comparing them with their digests.

        The file is read into memory first, so what was compared is what is committed, even if the file changes
        meanwhile.

        Returns:
            The new generation.

        Raises:
            FileAccessError, InvalidFileError, IntegrityError: the file cannot be opened or trusted.
            KeyNotFoundError, LayoutError: it has a key that is not in this cache's files, or one with another layout.
                Nothing was changed.
            ProgramError: as in `update`.
        """
        try:
            return int(self._native.load(native_path(path)))
        except errors.KeyNotFoundError as error:
            raise errors.KeyNotFoundError(f"{error}{self._instead_of_load(path)}") from None

    def _instead_of_load(self, path: str | os.PathLike[str]) -> str:
        """The end of a message about a file whose keys are not those of this cache."""
        from blobstore.core.formats.ptd.reader import PtdDataMap

        with PtdDataMap(path) as file:
            names = [key for key in file if not self._has(key)]
        if not self.tensors.keys().isdisjoint(names):
            return "; it is a tensor of the model: update_state_dict(load_file(path)) takes the file"
        apart = prefix_apart(names, [*self.tensors] or self._keys, given_in="the file", known_in="the programs")
        return apart and f"; {apart}"

    def revert(self, keys: Iterable[str] | None = None) -> int:
        """Restore the bytes of the files, for some keys or for all.

        Args:
            keys: one key or several; None for all. Integers mean nothing without their scales, so revert what belongs
                together: `LogicalTensor.keys` of a weight lists it.

        Returns:
            The new generation, or the current one if nothing was dirty.

        Raises:
            KeyNotFoundError: a key is not in this cache's files.
            FileAccessError: a file was truncated; nothing was changed.
            UnsupportedOperationError: the mode is "shared", where a commit changes the file itself. Instead, `load` the
                file that the working copy was made from.
            UnsupportedDataError: `keys` is neither a key nor an iterable.
        """
        if keys is None:
            return int(self._native.revert())
        try:
            wanted = [keys] if isinstance(keys, str) else list(keys)
        except (TypeError, ValueError):  # ValueError: memory that was released
            raise errors.UnsupportedDataError(f"expected keys, found a {type(keys).__qualname__}") from None
        for key in wanted:
            self._check_known(key)
        return int(self._native.revert_keys(wanted))

    def save(self, path: str | os.PathLike[str], *, dirty_only: bool = False) -> int:
        """Write the blobs of this cache's files, from a single generation, to a `.ptd`.

        Args:
            path: the file to write. An existing file is replaced, unless this cache maps it.
            dirty_only: write only what was changed: a delta for `load`.

        Returns:
            The size of the file in bytes.

        Raises:
            OutputPathError: the cache maps the file, or the file exists and is not a `.ptd`, or is the data file of programs.
            FileAccessError: writing failed, or a file that the cache maps was truncated. An existing file is unchanged.
        """
        self._check_open()
        _finish_groups(as_path(path))
        return int(native.save(self._native, native_path(path), dirty_only))

    def _commit(self, changes: list[_Change]) -> int:
        return int(self._native.update(changes))

    def _change(self, key: str, data: Any) -> _Change:
        """The change of one key; the data is put in the blob's dim order."""
        self._check_known(key)
        view, layout = self._bytes(key, data)
        if layout is None:
            return _Change(key, view, None, False)
        own = self.get_tensor_layout(key)
        if own is None and layout.scalar_type == ScalarType.BYTE and len(layout.sizes) == 1:
            return _Change(key, view, None, False)  # opaque bytes in the form that `numpy` and `torch` return
        if own is None:
            raise errors.LayoutError(f"{self.name}: key {key!r} is opaque bytes, the new data is {layout}")
        if (layout.scalar_type, layout.sizes) == (own.scalar_type, own.sizes):
            view, layout = in_dim_order(view, layout, own.dim_order), own
        return _Change(key, view, native_layout(layout), True)

    def _bytes(self, key: str, data: Any) -> tuple[memoryview, TensorLayout | None]:
        """As `as_bytes`, with the key in the message."""
        try:
            return as_bytes(data)
        except errors.UnsupportedDataError as error:
            raise errors.UnsupportedDataError(f"{self.name}: {key!r}: {error}") from None

    # Lifetime

    def close(self) -> None:
        """Refuse all further use of this object.

        Programs that run on the cache, and views, keep the current weights, unless a commit has already begun, or the
        base or another process changes some. The memory is freed when the last of them is gone.
        """
        super().close()
        self._native.close()
        self._maps = []
        vars(self).pop("files", None)

    def _title(self) -> str:
        return and_others([str(path) for path in self.paths]) or self.name

    def _tables(self) -> list[str]:
        """The keys, first those that were changed."""
        self._check_open()
        changed = dict.fromkeys(self.dirty)
        keys = itertools.chain(changed, (key for key in self._keys if key not in changed))
        rows = (
            (
                key,
                *tensor_cells(self._layout(key), len(self._view(key))),
                self.version(key),
                "changed" if key in changed else "",
            )
            for key in keys
        )
        return [
            table(("key", *TENSOR_COLUMNS, "version", ""), rows, len(self._keys), numbers=(*NUMBER_COLUMNS, "version"))
        ]

    def _facts(self) -> tuple[Fact, ...]:
        if self._closed:
            return ("closed",)
        base = "" if self.base is None or not self.paths else f"on {shorten(self.base._title(), 32)}"
        return *super()._facts(), self.mode, lambda: f"generation {self.generation}", base

    def _nbytes(self) -> int:
        nbytes = 0
        for path in self.paths:
            with suppress(OSError):  # a file that is gone stays mapped, but has no size any more
                nbytes += path.stat().st_size
        return nbytes

    def __reduce__(self) -> Any:
        raise errors.UnsupportedOperationError(
            f"{self.name}: a BlobCache cannot be pickled, because its changes are in memory of this process; open one on "
            "the same files in the other process, or share a working copy with mode 'shared'"
        )

    def __enter__(self) -> BlobCache:
        super().__enter__()
        return self


class Transaction:
    """Changes that wait for their commit; see `BlobCache.transaction`.

    `transaction[name] = data` takes what `BlobCache.update` takes, compares it with the blob or tensor, and copies it.
    If a name is set twice, the last data counts. Tensors of the model are stored in the delegates' layout at the
    commit, when all of them are known.
    """

    def __init__(self, cache: BlobCache) -> None:
        self._cache = cache
        self._items: dict[str, list[Item]] = {}

    def __setitem__(self, key: str, data: Any) -> None:
        cache = self._cache
        cache._check_key(key)
        if key in cache.tensors:
            self._items[key] = cache.tensors.copies(key, data)
            return
        change = cache._change(key, data)
        expected = len(cache.get_data(key))
        if change.is_tensor and (found := layout_of(change.layout)) != cache.layout(key):
            raise errors.LayoutError(f"{cache.name}: key {key!r} is {cache.layout(key)}, the new data is {found}")
        if len(change.data) != expected:
            raise errors.LayoutError(
                f"{cache.name}: key {key!r} has {expected} bytes, the new data has {len(change.data)}"
            )
        self._items[key] = [(key, bytes(change.data), change.layout if change.is_tensor else None, "bytes")]

    def update(self, blobs: Mapping[str, Any]) -> None:
        """Set several keys."""
        check_by_name(blobs)
        for key, data in blobs.items():
            self[key] = data

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return line("Transaction on", self._cache._title(), count(len(self), "change"))

    def commit(self) -> Updated:
        """Commit the collected changes and start again with none; the end of the block does this.

        Returns, raises:
            As `BlobCache.update`.
        """
        items, self._items = self._items, {}
        self._cache._check_open()
        return self._cache.tensors.commit([item for parts in items.values() for item in parts])


def make_working_copy(paths: Paths, target: str | os.PathLike[str]) -> int:
    """Write the blobs of some `.ptd` files to one file for `BlobCache(target, "shared")`.

    Unlike in other files, every key has its own bytes in a working copy, even where two keys are equal, because the
    processes that share it may change one and not the other. It records which keys came from which file, so that adapters
    fit as on these, and what their programs multiply adapters with if they agree on that.

    Returns:
        The size of the file in bytes.

    Raises:
        FileAccessError, InvalidFileError, IntegrityError: a file cannot be opened or trusted.
        KeyConflictError: two files have different contents under one key.
        UnsupportedOperationError: this thread is reading the working copy at `target`.
        OutputPathError: the target is one of the files, or exists and is not a `.ptd`, or is the data file of programs.
    """
    files, target = as_paths(paths), as_path(target)
    _finish_groups(target)
    return int(native.make_working_copy([native_path(path) for path in files], native_path(target)))


def _finish_groups(target: Path) -> None:
    """Finish what a killed writer of several files left where `target` leads; the native module removes the rest."""
    from blobstore.core.disk.recovery import recover

    recover(Path(os.path.realpath(target)).parent)
