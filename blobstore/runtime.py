"""Programs that run on a writable cache of weights.

    with BlobCache("weights.ptd") as cache:
        forward = Program("model.pte", cache).method("forward")
        before = forward(x)
        cache.update({"layers.0.weight": new_weight})
        after = forward(x)

ExecuTorch itself runs the programs; what is here decides where their weights lie. `docs/runtime.md` says what memory
costs, which generation of the weights a call sees, and what threads, processes and forks may do.

This is the only module that imports the native package `blobstore-runtime`. It works without torch.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import operator
import os
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from blobstore import errors
from blobstore.disk.kinds import Format
from blobstore.disk.staging import Staging, refuse_inputs
from blobstore.formats.data_map import NamedDataMap
from blobstore.formats.ptd.reader import open_ptd
from blobstore.formats.ptd.writer import Entry, write_ptd
from blobstore.formats.pte.program import ProgramFile, read_program
from blobstore.logical import steps
from blobstore.logical.reach import LoadedProgram, out_of_reach
from blobstore.logical.updates import LogicalTensors
from blobstore.memory.digest import Digest, digest
from blobstore.memory.layout import ScalarType, TensorLayout
from blobstore.memory.mapped_file import Paths, as_path, as_paths
from blobstore.memory.tensors import as_bytes, to_numpy, to_torch
from blobstore.store import BlobStore

if TYPE_CHECKING:
    import torch

__all__ = [
    "BlobCache",
    "CacheStats",
    "DelegateStats",
    "Method",
    "Program",
    "Transaction",
    "ValueInfo",
    "delegate_failure",
    "delegate_stats",
    "make_working_copy",
    "serving",
]

_LIBRARIES = (
    "libexecutorch.so",
    "libexecutorch_threadpool.so",
    "libexecutorch_kernels_optimized.so",
    "libexecutorch_backend_xnnpack.so",
)


def _import_native() -> Any:
    """The native module, linked to the very libraries that `executorch` uses in this process."""
    try:
        spec = importlib.util.find_spec("executorch")
        for folder in spec.submodule_search_locations or () if spec else ():
            for name in _LIBRARIES:
                # by its file: the two packages need not be installed side by side
                if (path := Path(folder, "lib", name)).exists():
                    ctypes.CDLL(str(path))
        from blobstore_runtime import _native
    except ImportError as error:
        raise errors.MissingDependencyError(
            f"running programs needs the native package: pip install 'blobstore[runtime]' ({error})"
        ) from error
    return _native


def _make_error(kind: str, path: bytes, reason: bytes, number: int) -> Exception:
    """The one place where native errors become those of `blobstore.errors`."""
    where, why = os.fsdecode(path), reason.decode(errors="backslashreplace")
    match kind:
        case "invalid_file":
            return errors.InvalidFileError(where, why)
        case "integrity":
            return errors.IntegrityError(where, why)
        case "file_access":
            return errors.FileAccessError(where, OSError(number, why))
    return _ERRORS[kind](f"{where}: {why}" if where else why)


_ERRORS: dict[str, type[errors.BlobStoreError]] = {
    "key_not_found": errors.KeyNotFoundError,
    "key_conflict": errors.KeyConflictError,
    "layout": errors.LayoutError,
    "closed": errors.ClosedError,
    "unsupported": errors.UnsupportedOperationError,
    "program": errors.ProgramError,
    "method_not_found": errors.MethodNotFoundError,
    "input": errors.InputError,
    "missing_backend": errors.MissingBackendError,
    "execution": errors.ExecutionError,
}


def _is_text(value: object) -> bool:
    """Whether it is a string that UTF-8 can express, as the native side needs it."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _native_path(path: str | os.PathLike[str]) -> bytes:
    return os.fsencode(as_path(path))


def check_cache(cache: object, what: str) -> None:
    """Raise UnsupportedDataError if something is not a cache."""
    if not isinstance(cache, BlobCache):
        raise errors.UnsupportedDataError(f"{what} must be a BlobCache, not a {type(cache).__qualname__}")


def _check_by_name(values: object) -> None:
    if not isinstance(values, Mapping):
        raise errors.UnsupportedDataError(f"expected tensors by name, found a {type(values).__qualname__}")


def _index(value: object, what: str) -> int:
    """A number that the native side takes where it counts something."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise errors.InputError(f"{what} must be an integer, not {value!r}") from None
    if not 0 <= number <= sys.maxsize:
        raise errors.InputError(f"{what} {number} is out of range")
    return number


def _open_served(path: bytes, inode: int) -> ProgramFile | None:
    """A program that ExecuTorch has mapped, if its path still leads to it."""
    try:
        name = os.fsdecode(path)
        return read_program(name) if path and Path(name).stat().st_ino == inode else None
    except (OSError, errors.InvalidFileError):
        return None


_NativeLayout = tuple[int, tuple[int, ...], tuple[int, ...]]


def _layout(native: _NativeLayout | None) -> TensorLayout | None:
    return None if native is None else TensorLayout(ScalarType(native[0]), native[1], native[2])


def _native_layout(layout: TensorLayout | None) -> _NativeLayout | None:
    return None if layout is None else (int(layout.scalar_type), layout.sizes, layout.dim_order)


def _argument_bytes(value: Any, wanted: _NativeLayout | None) -> tuple[Any, _NativeLayout]:
    """Memory of a tensor or an array, in the order of dimensions that a method takes."""
    view, layout = as_bytes(value)
    expected = _layout(wanted)
    if layout is None:
        raise errors.InputError(f"expected a tensor or an array, not {type(value).__name__}")
    if expected is not None and layout.dim_order != expected.dim_order and len(layout.sizes) == len(expected.sizes):
        array = to_numpy(view, TensorLayout(layout.scalar_type, layout.sizes, layout.dim_order))
        ordered = np.ascontiguousarray(array.transpose(expected.dim_order))
        view = ordered.reshape(-1).view(np.uint8).data if ordered.size else memoryview(b"")
        layout = TensorLayout(layout.scalar_type, layout.sizes, expected.dim_order)
    native = _native_layout(layout)
    assert native is not None  # noqa: S101 - only an absent layout has no native one
    return view, native


_programs_lock = threading.Lock()  # of the lists of programs that caches have
if hasattr(os, "register_at_fork"):  # so that a child does not find it locked for ever
    os.register_at_fork(
        before=_programs_lock.acquire,
        after_in_parent=_programs_lock.release,
        after_in_child=_programs_lock.release,
    )

_native: Any = _import_native()
_native.set_helpers(
    _argument_bytes,
    lambda view, layout: to_numpy(memoryview(view), _layout(layout)),
    lambda view, layout: to_torch(memoryview(view), _layout(layout)),
    _make_error,
)


@dataclass(frozen=True)
class CacheStats:
    """What a cache holds and did: counted, or measured by the kernel. None: this system does not tell.

    Attributes:
        keys: number of keys, those of the base included.
        mapped_bytes: address space, without that of the base.
        resident_bytes: of that, in memory now, whoever else uses it.
        private_bytes: of that, in memory of this process' own: pages that were changed, or a copy.
        dirty_keys: keys whose bytes were changed.
        dirty_bytes: their bytes.
        lookups: by key, by programs or by the user; one that goes on to the base counts in both.
        misses: of those, how many found nothing.
        commits: updates, transactions and loads through this object.
        reverts: likewise.
    """

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


class BlobCache(NamedDataMap):
    """Blobs of any number of `.ptd` files in memory: looked up as one, and changed while programs run on them.

    It is a `NamedDataMap`, so whatever takes one takes a cache. Every view is of the live memory: it shows commits as
    they happen, and keeps that memory alive. Everything may be called from any thread.

    Args:
        paths: one file, or several; a key that several hold must be equal there.
        mode: "private": clean pages belong to the system's page cache, so that all processes share them, and a change
            copies only the pages that it touches; nobody else sees it. "shared": one working copy (see
            `make_working_copy`) that any number of processes map, read and change together; a commit changes the
            file. "copy": the files are read into memory, so that nothing that happens to them matters.
        base: a cache whose blobs are found through this one too, unless `paths` have the key. Its memory is shared,
            and its commits are seen here; what it owns is changed through it, not from here.

    Raises:
        FileAccessError, InvalidFileError, IntegrityError: a file cannot be opened or trusted.
        KeyConflictError: two files contradict each other.
        UnsupportedOperationError: mode "shared" with several files.
        UnsupportedDataError: `base` is not a cache.
    """

    def __init__(
        self,
        paths: Paths = (),
        mode: Literal["private", "shared", "copy"] = "private",
        *,
        base: BlobCache | None = None,
    ) -> None:
        if not isinstance(mode, str) or mode not in {"private", "shared", "copy"}:
            raise errors.UnsupportedOperationError(f"mode {mode!r} is none of 'private', 'shared', 'copy'")
        self.paths = tuple(as_paths(paths))
        if base is not None:
            check_cache(base, "base")
        self.mode = mode
        self.base = base
        self._native: Any = _native.BlobCache.open(
            [_native_path(path) for path in self.paths], mode, base._native if base is not None else None
        )
        self.name = os.fsdecode(self._native.name)
        self._keys: list[str] = self._native.keys()
        self._programs: weakref.WeakSet[LoadedProgram] = weakref.WeakSet()  # here and on caches above
        self._served: dict[tuple[bytes, int], ProgramFile | None] = {}

    # What NamedDataMap asks for.

    def _key_list(self) -> Sequence[str]:
        return self._keys

    def _view(self, key: str) -> memoryview:
        if not _is_text(key):
            raise KeyError(key)
        return memoryview(self._native.view(key, False))

    def _layout(self, key: str) -> TensorLayout | None:
        if not _is_text(key):
            raise KeyError(key)
        return _layout(self._native.layout(key))

    def __contains__(self, key: object) -> bool:
        self._check_open()
        return _is_text(key) and bool(self._native.contains(key))

    def _check_key(self, key: object) -> None:
        self._check_open()
        if not _is_text(key):
            raise self._not_found(key)

    def _check_known(self, key: str) -> None:
        """Raise KeyNotFoundError, which names near keys, before the native side says less."""
        self._check_key(key)
        if key not in self:
            raise self._not_found(key)

    def alignment(self, key: str) -> int:
        """The alignment that the file records for a key, in bytes; 1 where it records none."""
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
        """Copy a blob, of one generation, to the start of `buffer`; see `NamedDataMap.load_data_into`."""
        self._check_open()
        with self.reading():
            super().load_data_into(key, buffer, size)

    def __repr__(self) -> str:
        name = self.name if len(self.paths) < 4 else f"{self.paths[0]} + {len(self.paths) - 1} others"
        state = "closed" if self._closed else f"{len(self):,} keys, {self._nbytes():,} bytes, mode '{self.mode}'"
        base = "" if self.base is None else f", on {self.base.name}"
        return f"<BlobCache {name}: {state}{base}>"

    def _nbytes(self) -> int:
        nbytes = 0
        for path in self.paths:
            with suppress(OSError):  # a file that is gone stays mapped, but says no size
                nbytes += path.stat().st_size
        return nbytes

    def __reduce__(self) -> Any:
        raise errors.UnsupportedOperationError(
            f"{self.name}: a BlobCache cannot be pickled, because its changes are in memory of this process; open one on "
            "the same files in the other process, or share a working copy with mode 'shared'"
        )

    # Looking.

    def layout(self, key: str) -> TensorLayout | None:
        """How a blob is a tensor; None for opaque bytes."""
        return self.get_tensor_layout(key)

    def numpy(self, key: str) -> np.ndarray:
        """A read-only array over the live memory, in the tensor's shape; opaque bytes are uint8."""
        return to_numpy(self.get_data(key), self.layout(key))

    def torch(self, key: str) -> torch.Tensor:
        """A tensor over the live memory, in the tensor's shape; opaque bytes are uint8.

        For reading: torch has no read-only tensors, but what is written into this one is no commit. It has no
        version, is not seen as dirty, and running methods do not wait for it.
        """
        self._check_known(key)
        return to_torch(memoryview(self._native.view(key, True)), self.layout(key))

    @contextmanager
    def reading(self) -> Iterator[None]:
        """While it is open no commit happens: everything that is read belongs to one generation.

        Commits wait for it, so keep it short; a commit from the same thread is an error.
        """
        held = _native.Reading(self._native)
        held.enter()
        try:
            yield
        finally:
            held.leave()

    @property
    def id(self) -> int:
        """Unlike that of any other cache of this process, ever."""
        return int(self._native.id)

    @property
    def generation(self) -> int:
        """Grows with every commit or revert, here or in the base; in mode "shared", by whichever process."""
        return int(self._native.generation)

    def version(self, key: str) -> int:
        """The generation of the key's last change, counted by the cache that owns it; 0 if it never changed."""
        self._check_known(key)
        return int(self._native.version(key))

    @property
    def dirty(self) -> tuple[str, ...]:
        """The keys of this cache's files that were changed, in the files' order."""
        return tuple(self._native.dirty())

    @property
    def stats(self) -> CacheStats:
        """Counts and bytes as they are now."""
        return CacheStats(**self._native.stats())

    def verify(self) -> bool:
        """Compare everything that was not changed with the digests in the files.

        Returns:
            True if every file had digests to compare with.

        Raises:
            IntegrityError: bytes were damaged; the keys are named.
            FileAccessError: a file that the cache maps was truncated.
        """
        return bool(self._native.verify())

    # Changing. All or nothing, and no running method sees it happen.

    def update(self, blobs: Mapping[str, Any], *, finite: bool = False) -> int:
        """Change tensors or blobs: all of them in one commit, or none.

        A name is a key, or, if records tell of it (see docs/lowering.md), a tensor of the model: then the value is in
        the model's own shape and dtype and is laid out here as the delegates store it.

        The data is read in place while it is committed. Tensors and arrays must have the blob's own layout (dense
        memory in another order of dimensions is put in order); for bytes only the length counts.

        Args:
            blobs: name to a tensor, an array, or, for a key, an object with the buffer protocol.
            finite: refuse tensors with infinities or NaN.

        Returns:
            The new generation.

        Raises:
            KeyNotFoundError: a name is not in this cache's files. Nothing was changed, here and below.
            LayoutError: it has another shape, type or size.
            UpdateError: a tensor cannot be changed, or not alone; or it is not finite.
            UnsupportedDataError: no bytes can be taken from an object.
            ProgramError: a delegate of a loaded method cannot take the new weights; they are packed here, before
                anything changes.
            UnsupportedOperationError: this thread is in `reading()`; or, in mode "shared", the file stores two keys
                once which would differ now.
        """
        self._check_open()
        return int(self._native.update(self._changes(blobs, finite)))

    def update_blobs(self, blobs: Mapping[str, Any]) -> int:
        """As `update`, but each name is a key, and what is given are the bytes as they are stored.

        For what was read from this cache, or one on the same files: bytes that were there before come back exactly.

        Args:
            blobs: key to an object with the buffer protocol, whose size is the blob's.

        Returns, raises:
            As `update`.
        """
        self._check_open()
        _check_by_name(blobs)
        return int(self._native.update([self._change(key, as_bytes(data)[0]) for key, data in blobs.items()]))

    def update_state_dict(self, tensors: Mapping[str, Any], *, strict: bool = True, finite: bool = False) -> int:
        """Change whatever of a model's `state_dict()` the programs on this cache have, in one commit.

        Entries that no program has, such as the counters of batch normalization, are passed over; so is state that the
        programs change themselves, such as key/value caches. Of tied tensors any name will do; if several are given,
        they must not contradict each other. Buffers that are not persistent need not be given.

        Args:
            tensors: name to a tensor or array.
            strict: refuse if the programs have tensors that are not given or cannot be changed, or if programs that are
                loaded now have weights where no update reaches them: inside, packed by another backend, or in a map of
                ExecuTorch's own (see docs/runtime.md, "What an update reaches"). Otherwise these stay.
            finite: as for `update`.

        Returns, raises:
            As `update`; UpdateError also names the programs, methods and weights that are out of reach, or says that none
            of the tensors can be updated.
        """
        self._check_open()
        _check_by_name(tensors)
        if strict:
            self._check_reach(tensors, whole=True)
        names = self.tensors.names_for_state_dict(tensors, strict=strict)
        return self.update({name: tensors[name] for name in names}, finite=finite)

    @functools.cached_property
    def tensors(self) -> LogicalTensors:
        """The tensors that can be changed by name, what each of them takes, and which cannot and why."""
        return LogicalTensors(self)

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """Collect changes and commit them at the end of the block; an exception in the block drops them all.

        Data is copied when it is given, so its memory is free at once.
        """
        self._check_open()
        pending = Transaction(self)
        yield pending
        pending.commit()

    def load(self, path: str | os.PathLike[str]) -> int:
        """Commit the blobs of a `.ptd`, such as a delta that `save` wrote. Its digests are compared first.

        The file is read into memory for that: what is compared is what is committed, whatever happens to the file.

        Returns:
            The new generation.

        Raises:
            FileAccessError, InvalidFileError, IntegrityError: the file cannot be opened or trusted.
            KeyNotFoundError, LayoutError: it has a key that is not in this cache's files, or another layout. Nothing
                was changed.
            ProgramError: as for `update`.
        """
        return int(self._native.load(_native_path(path)))

    def revert(self, keys: Iterable[str] | None = None) -> int:
        """Go back to the bytes of the files, whole or for some keys.

        Returns:
            The new generation; the old one if nothing was dirty.

        Raises:
            KeyNotFoundError: a key is not in this cache's files.
            FileAccessError: a file was truncated; nothing was changed.
            UnsupportedOperationError: in mode "shared", where a commit changes the file itself; `load` the file that
                the working copy was made from.
            UnsupportedDataError: `keys` are neither a key nor several.
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
        """Write the blobs of this cache's files, as they are in one generation, to a `.ptd`.

        Args:
            path: the file; one that is there is replaced, but not one that this cache maps.
            dirty_only: only what was changed: a delta for `load`.

        Returns:
            The size of the file in bytes.

        Raises:
            OutputPathError: the cache maps this file, or it is no .ptd.
            FileAccessError: writing failed, or a file that the cache maps was truncated; a file that was there is as
                before.
        """
        self._check_open()
        path = as_path(path)
        refuse_inputs([path], self.sources)
        store = BlobStore()
        self._native.check_files()
        with self.reading():
            wanted = self.dirty if dirty_only else [key for key in self._keys if self._native.owns(key)]
            for key in wanted:
                store.add(key, self.get_data(key), alignment=self.alignment(key), layout=self.layout(key))
            return store.write_ptd(path)

    # Life time.

    def close(self) -> None:
        """Refuse everything from now on. Programs that run on the cache and views keep the weights as they are, unless
        a commit has begun, or the base or another process changes some; the memory goes with the last of them."""
        super().close()
        self._native.close()

    def __enter__(self) -> BlobCache:
        super().__enter__()
        return self

    @property
    def sources(self) -> tuple[Path, ...]:
        return (*self.paths, *(self.base.sources if self.base is not None else ()))

    def _check_reach(self, tensors: Mapping[str, Any], *, whole: bool = False) -> None:
        """Raise UpdateError if programs that are loaded have weights that an update of these does not reach."""
        with _programs_lock:
            programs = list(self._programs)
        problems = out_of_reach([*programs, *self._served_programs()], tensors, whole=whole)
        if problems:
            raise errors.UpdateError(
                f"{self.name}: nothing was changed, because some weights cannot follow: {'; '.join(problems)}"
            )

    def _served_programs(self) -> list[LoadedProgram]:
        """Programs that ExecuTorch's own runtime has loaded while it was served this cache."""
        parts: dict[tuple[str, bytes, int], list[Any]] = {}
        for method, path, inode, *rest in _native.served_delegates(self._native):
            parts.setdefault((method, path, inode), []).append(rest)
        files: dict[tuple[bytes, int], ProgramFile | None] = {}
        found = []
        for (method, path, inode), delegates in parts.items():
            files[path, inode] = file = self._served.get((path, inode)) or _open_served(path, inode)
            own = {key for keys, others, _, _ in delegates for key in (*keys, *others)}
            same = {number for _, _, numbers, _ in delegates for number in numbers}
            same -= {number for _, _, _, numbers in delegates for number in numbers}
            name = f"a program with a method '{method}'" if file is None else file.path
            follows = functools.partial(self._is_shared_in, same)
            read = functools.partial(files.get, (path, inode))
            found.append(LoadedProgram(name, read, lambda: self.tensors, lambda: self._keys, follows, own))
        self._served = files  # without those that are gone
        return found

    def _is_shared_in(self, caches: set[int], key: str) -> bool:
        """Whether a key belongs to a shared working copy, of a cache in a set of ids."""
        owner: BlobCache | None = self
        while owner is not None and not owner._native.owns(key):
            owner = owner.base
        return owner is not None and owner.mode == "shared" and owner.id in caches

    def _changes(self, blobs: Mapping[str, Any], finite: bool) -> list[tuple[str, Any, _NativeLayout | None, bool]]:
        direct, logical = self.tensors.split(blobs)
        if finite:
            for key, data in direct.items():
                if as_bytes(data)[1] is not None and not steps.check_finite(steps.plain(data)):
                    raise errors.UpdateError(f"'{key}' has values that are not finite")
        changes = [self._change(key, data) for key, data in direct.items()]
        for key, array in self.tensors.resolve(logical, finite=finite).items():
            changes.append((key, array.reshape(-1).view(np.uint8).data, None, False))
        return changes

    def _change(self, key: str, data: Any) -> tuple[str, Any, _NativeLayout | None, bool]:
        self._check_known(key)
        if isinstance(data, bytes | bytearray | memoryview):
            return key, as_bytes(data)[0], None, False
        view, layout = as_bytes(data)
        if layout is None:
            return key, view, None, False
        own = self.get_tensor_layout(key)
        if own is None and layout.scalar_type == ScalarType.BYTE and len(layout.sizes) == 1:
            return key, view, None, False  # as `numpy` and `torch` show opaque bytes
        if own is None:
            raise errors.LayoutError(f"{self.name}: key {key!r} is opaque bytes, the new data is {layout}")
        if layout != own and (layout.scalar_type, layout.sizes) == (own.scalar_type, own.sizes):
            array = to_numpy(view, layout)
            view = np.ascontiguousarray(array.transpose(own.dim_order)).reshape(-1).view(np.uint8).data
            layout = own
        return key, view, _native_layout(layout), True


class Transaction:
    """Changes that wait for their commit; see `BlobCache.transaction`.

    `transaction[name] = data` takes what `BlobCache.update` takes, checks it against the blob or tensor and copies it. A
    name that is set twice has the last data. Tensors of the model are laid out when all are there, at the commit.
    """

    def __init__(self, cache: BlobCache) -> None:
        self._cache = cache
        self._changes: dict[str, tuple[str, Any, _NativeLayout | None, bool]] = {}
        self._logical: dict[str, Any] = {}

    def __setitem__(self, key: str, data: Any) -> None:
        cache = self._cache
        cache._check_key(key)
        if key in cache.tensors:
            cache.tensors.split({key: data})
            self._logical[key] = cache.tensors.copy(key, data)
            return
        change = cache._change(key, data)
        expected = len(cache.get_data(key))
        if change[3] and _layout(change[2]) != cache.layout(key):
            raise errors.LayoutError(
                f"{cache.name}: key {key!r} is {cache.layout(key)}, the new data is {_layout(change[2])}"
            )
        if len(change[1]) != expected:
            raise errors.LayoutError(
                f"{cache.name}: key {key!r} has {expected} bytes, the new data has {len(change[1])}"
            )
        self._changes[key] = (key, bytes(change[1]), change[2], change[3])

    def update(self, blobs: Mapping[str, Any]) -> None:
        """Set several keys."""
        _check_by_name(blobs)
        for key, data in blobs.items():
            self[key] = data

    def __len__(self) -> int:
        return len(self._changes) + len(self._logical)

    def __repr__(self) -> str:
        return f"<Transaction on {self._cache.name}: {len(self):,} changes>"

    def commit(self) -> int:
        """Commit what was collected, and begin anew. Leaving the block does it."""
        changes, self._changes = list(self._changes.values()), {}
        logical, self._logical = self._logical, {}
        return int(self._cache._native.update(changes + self._cache._changes(logical, False)))


@contextmanager
def serving(cache: BlobCache) -> Iterator[None]:
    """Let methods that ExecuTorch's own runtime loads in this block, in this thread, run on a cache.

    Delegates that were lowered with `BlobStorePartitioner` hold the cache and follow its commits for as long as the
    method lives. Constants that no delegate took are read from the map that ExecuTorch makes of its data file: they
    follow as well if that file is the cache's shared working copy (on Linux), and stay as they are otherwise::

        make_working_copy("model.ptd", "live.ptd")
        cache = BlobCache("live.ptd", "shared")
        with serving(cache):
            method = Runtime.get().load_program("model.pte", data_path="live.ptd").load_method("forward")

    Where they would stay, a strict `update_state_dict` is refused. Each delegate looks for commits when it is its turn,
    so if one happens while a method with several delegates runs, the later ones may be a generation ahead: commit
    between two calls. With `Program` that cannot happen.

    Raises:
        UnsupportedDataError: `cache` is not a cache.
    """
    check_cache(cache, "what is served")
    scope = _native.CacheScope(cache._native)
    scope.enter()
    try:
        yield
    finally:
        scope.leave()


@dataclass(frozen=True)
class DelegateStats:
    """What the delegates of this process did.

    Attributes:
        handles: delegates that are loaded.
        inits: how often an inner backend was initialized, at loading or because weights changed.
        names: versions of blobs in use.
    """

    handles: int
    inits: int
    names: int


def delegate_stats() -> DelegateStats:
    """Counts as they are now."""
    return DelegateStats(**_native.delegate_stats())


def delegate_failure() -> str | None:
    """Why a delegate failed last on this thread, once; None if none did.

    For callers of ExecuTorch's own runtime, which gives a number only. Errors of `Program` and `Method` say it.
    """
    reason = _native.take_delegate_failure()
    return None if reason is None else reason.decode(errors="backslashreplace")


def make_working_copy(paths: Paths, target: str | os.PathLike[str]) -> int:
    """Write the blobs of some `.ptd` files to one file that `BlobCache(target, "shared")` can be opened on.

    Unlike in other files, each key has bytes of its own there, also where two are equal, because processes that share
    the file may change one and not the other.

    Returns:
        The size of the file in bytes.

    Raises:
        FileAccessError, InvalidFileError, IntegrityError: a file cannot be opened or trusted.
        KeyConflictError: two files contradict each other.
        OutputPathError: the target is one of the files, or a file that is no .ptd.
    """
    files, target = as_paths(paths), as_path(target)
    refuse_inputs([target], files)
    store = BlobStore()
    for path in files:
        store.merge(open_ptd(path))
    entries = [
        Entry(entry.key, entry.data, entry.digest, number, entry.alignment, entry.layout)
        for number, entry in enumerate(store.entries())
    ]
    with Staging() as staging, staging.open(target, kind=Format.PTD) as file:
        return write_ptd(file, entries, {})


@dataclass(frozen=True)
class ValueInfo:
    """What a method takes or gives at one position.

    Attributes:
        kind: "tensor", "int", "float", "bool", "str", "none", or "other".
        layout: of a tensor; where a size may vary, the largest.
        name: as recorded in the program, often empty.
    """

    kind: str
    layout: TensorLayout | None
    name: str


class Method:
    """A method that is ready to run: `method(*inputs)` gives its outputs as a list.

    It holds what it runs on, also when its `Program` is gone. Memory goes with the last of both.

    Inputs are torch tensors or arrays; the outputs are tensors if any input is one, else arrays, in memory of their
    own. Inputs are read where they lie, if their order of dimensions and the program's memory plan allow it and they are
    writable, so a method that changes an input may change the caller's. Calls from several threads take turns, and
    release the interpreter; different methods run at the same time. A call sees one generation of the cache.

    Calling it raises:
        InputError: the inputs do not fit: their number, kind, dtype or shape.
        ExecutionError: the method failed.
    """

    def __init__(self, native: Any, path: Path, loaded: LoadedProgram) -> None:
        # not the Program, which keeps its methods: a cycle would hold weights until the garbage collector runs
        self._native = native
        self._loaded = loaded  # for the cache to know of it
        self.path = path
        self.name: str = native.name
        self._run = native.__call__
        self._run_first = native.call_first

    def __call__(self, *inputs: Any) -> list[Any]:
        return self._run(*inputs)  # type: ignore[no-any-return]

    def call_first(self, count: int, *inputs: Any) -> list[Any]:
        """As a call, but only the first `count` outputs are copied and returned."""
        return self._run_first(_index(count, "the number of outputs"), *inputs)  # type: ignore[no-any-return]

    def output_memory(self, index: int) -> torch.Tensor:
        """A tensor over the memory that the method writes an output to, always the same.

        It can be used before the first call: an output that is a parameter then has its initial value, any other is
        zero. The tensor keeps the memory alive. It may be written to; nothing orders that with calls from other
        threads.

        Raises:
            InputError: the output is not a tensor.
            UnsupportedOperationError: the program has no planned memory for it.
        """
        return self._native.output_memory(_index(index, "the number of an output"))  # type: ignore[no-any-return]

    def state_memory(self) -> dict[str, torch.Tensor]:
        """As `output_memory`, the named tensors that the method keeps in memory of its own: its mutable buffers, and
        parameters that were exported with `external_mutable_weights`."""
        return self._native.state_memory()  # type: ignore[no-any-return]

    @property
    def inputs(self) -> tuple[ValueInfo, ...]:
        """What it takes."""
        return _infos(self._native.inputs())

    @property
    def outputs(self) -> tuple[ValueInfo, ...]:
        """What it gives."""
        return _infos(self._native.outputs())

    def __repr__(self) -> str:
        return f"<Method {self.name!r} of {self.path}>"


def _loaded(native: Any, path: Path, cache: BlobCache) -> LoadedProgram:
    """What a program's cache, and those below it, know of it for as long as it or a method of it is there."""
    loaded = LoadedProgram(
        path,
        lambda: ProgramFile(path, memoryview(native.file())),
        lambda: cache.tensors,
        lambda: cache._keys,
    )
    below: BlobCache | None = cache
    with _programs_lock:
        while below is not None:
            below._programs.add(loaded)
            below = below.base
    return loaded


class Program:
    """A .pte on a cache.

    Blobs are looked for in the cache first and then among what the program embeds, so an embedded blob is overridden
    by one with its key.

    Args:
        path: the program.
        cache: where its weights are. It may serve any number of programs; they all see its commits.
        data: data files to open a cache on, private to this program; if `cache` is given too, on top of that.

    Attributes:
        path: the program, as given.
        cache: the cache that it runs on.
        method_names: its methods.

    Raises:
        FileAccessError, InvalidFileError: the program cannot be opened, or is malformed.
        KeyNotFoundError: the cache lacks tensors that it takes; all are named.
        LayoutError: the cache has a tensor in another shape or type.
        UnsupportedDataError: `cache` is not a cache.
        As `BlobCache` for `data`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        cache: BlobCache | None = None,
        *,
        data: Paths = (),
    ) -> None:
        self.path = as_path(path)
        files = as_paths(data)
        if cache is not None:
            check_cache(cache, "cache")
        self.cache = BlobCache(files, base=cache) if files or cache is None else cache
        self._native: Any = _native.Program.load(_native_path(path), self.cache._native)
        self.method_names: tuple[str, ...] = tuple(self._native.methods)
        self._methods: dict[str, Method] = {}
        self._loaded = _loaded(self._native, self.path, self.cache)

    def method(self, name: str = "forward") -> Method:
        """The method, loaded when it is first asked for, and kept.

        Raises:
            MethodNotFoundError: there is no such method; those that are there are named.
            MissingBackendError: a delegate's backend is not in this process.
            KeyNotFoundError: a delegate takes a blob that is nowhere.
            ProgramError: ExecuTorch cannot load it.
        """
        found = self._methods.get(self._name(name))
        if found is None:
            found = self._methods.setdefault(name, self.load_method(name))
        return found

    def load_method(self, name: str = "forward") -> Method:
        """As `method`, but a new one each time, so that several threads can run it at once."""
        return Method(self._native.load_method(self._name(name)), self.path, self._loaded)

    def _name(self, name: str) -> str:
        if not _is_text(name):
            names = ", ".join(map(repr, self.method_names))
            raise errors.MethodNotFoundError(f"{self.path}: no method {name!r}; there are {names}")
        return name

    def __getitem__(self, name: str) -> Method:
        return self.method(name)

    def inputs(self, method: str = "forward") -> tuple[ValueInfo, ...]:
        """What a method takes, without loading it."""
        return _infos(self._native.inputs(self._name(method)))

    def outputs(self, method: str = "forward") -> tuple[ValueInfo, ...]:
        """What a method gives, without loading it."""
        return _infos(self._native.outputs(self._name(method)))

    def external_keys(self, method: str = "forward") -> tuple[str, ...]:
        """Keys of the tensors that a method takes from data files; blobs of its delegates are not among them."""
        return tuple(self._native.needs(self._name(method)))

    def backends(self, method: str = "forward") -> tuple[str, ...]:
        """The backends that parts of a method are delegated to."""
        return tuple(self._native.backends(self._name(method)))

    def __repr__(self) -> str:
        return f"<Program {self.path}: {', '.join(self.method_names)}>"

    def __enter__(self) -> Program:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._methods.clear()


def _infos(native: list[tuple[str, _NativeLayout | None, str]]) -> tuple[ValueInfo, ...]:
    return tuple(ValueInfo(kind, _layout(layout), name) for kind, layout, name in native)
