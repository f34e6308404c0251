"""A release in a running program: a cache on its data files, and newer releases taken into it without loading again.

The cache maps the data files of the release that it was opened on. Blobs that a newer release replaces are committed to
it: memory is needed for these alone.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from blobstore.adapters.foundation import library
from blobstore.adapters.on_cache import native_tensors_of
from blobstore.core.disk.locks import Lock
from blobstore.core.errors import ClosedError, ReleaseError, UnsupportedDataError
from blobstore.core.formats.ptd.reader import PtdDataMap, open_ptd
from blobstore.core.memory.buffers import same_bytes
from blobstore.core.memory.mapped_file import as_path, named
from blobstore.core.reprs import count, line, listed
from blobstore.releases.device.installed import Installed
from blobstore.releases.index.index import File, Index
from blobstore.releases.index.needs import check_executorch
from blobstore.releases.index.overlay import replaceable
from blobstore.runtime import BlobCache, PackedStore

__all__ = ["Followed", "Release"]


@dataclass(frozen=True)
class Followed:
    """What `Release.follow` did.

    Attributes:
        version, sha256: of the release that is current in the folder.
        taken: whether the cache has its blobs: it had them already, or they were committed.
        keys: the keys whose blobs were committed.
        reasons: why it was not taken: programs that changed, keys, layouts, adapters that do not fit.
        files: what is new, changed or gone of adapters that the cache was not opened on, and of files other than
            programs and data, such as tokenizers. Nothing reads them again by itself: load such adapters again.
        generation: of the cache.
        adapters: the names of the release's adapters that were exchanged in the commit.
        unfit: the adapters that do not fit the newer foundation, by their paths: loaded ones, which keep it from being taken.
            And those of `Runners`, by their names: each of their requests fails from now on.
    """

    version: str
    sha256: str
    taken: bool
    keys: tuple[str, ...]
    reasons: tuple[str, ...]
    files: tuple[str, ...]
    generation: int
    adapters: tuple[str, ...] = ()
    unfit: tuple[str, ...] = ()

    def __repr__(self) -> str:
        changed = f"{count(len(self.keys), 'key')} changed" if self.taken else f"not taken: {listed(self.reasons, 1)}"
        return line("Followed", self.version, changed, f"generation {self.generation}")


class _Data:
    """The data files of one release, and for each key the file that has it."""

    def __init__(self, installed: Installed, index: Index, names: Sequence[str] | None) -> None:
        self._installed, self._index = installed, index
        possible = _named(index, "data", "adapter")
        if unknown := [name for name in names or () if name not in possible]:
            raise ReleaseError(
                f"{installed.folder}: {index.name} {index.version} has no data file {unknown[0]!r}; it has {sorted(possible)}"
            )
        wanted = _named(index, "data") if names is None else names
        self.maps = {name: open_ptd(installed.path(index.file(name).sha256)) for name in wanted}
        self.home: dict[str, PtdDataMap] = {}
        for name, data_map in self.maps.items():
            for key in data_map:
                known = self.home.setdefault(key, data_map)
                if known is not data_map and not self._same(key, known, self, data_map):
                    raise ReleaseError(
                        f"{installed.folder}: the key {key!r} of data file {name!r} has other contents in another data file; "
                        "open only one of them, with `data`"
                    )

    def same(self, key: str, other: _Data) -> bool:
        """Whether another release has the same bytes and layout under a key that both have.

        Raises:
            FileAccessError, IntegrityError: the list of parts of a release is gone or damaged.
        """
        one, two = self.home[key], other.home[key]
        return one.path == two.path or self._same(key, one, other, two)

    def _same(self, key: str, one: PtdDataMap, other: _Data, two: PtdDataMap) -> bool:
        if one.get_tensor_layout(key) != two.get_tensor_layout(key):
            return False
        digests = self._sha256(key, one), other._sha256(key, two)
        if None in digests:  # it is a part together with other bytes
            return same_bytes(one.get_data(key), two.get_data(key))
        return digests[0] == digests[1]

    def _sha256(self, key: str, data_map: PtdDataMap) -> str | None:
        """The digest of a blob that is a part of its file, by which the file was checked when it was installed."""
        return self._contents[data_map.path].get(data_map.byte_range(key))

    @cached_property
    def _contents(self) -> dict[Path, dict[tuple[int, int], str]]:
        """For each file, its parts: first byte, first byte behind it, SHA-256."""
        return {
            self._installed.path(file.sha256): {(one.offset, one.offset + one.size): one.sha256 for one in parts}
            for file, parts in self._installed.parts(self._index).of(self._index)
        }

    def cache(self, packed: PackedStore | str | os.PathLike[str] | None) -> BlobCache:
        """A cache with all blobs."""
        return BlobCache([data_map.path for data_map in self.maps.values()], packed=packed)


class Release:
    """The current release of a folder in a running program. `Release.open` makes one.

    While it is open, `gc` leaves the files of the release in their place. Its methods may be called from any thread.

    Attributes:
        directory: the folder of the device.
        name, version, sha256: of the release; the digest is that of its index.
        path: the folder with its files: programs, tokenizers.
        cache: a `BlobCache` on its data files, in mode "private". It belongs to the caller, too: programs run on it, and
            it can be changed. `BlobCache.revert` restores the files that it was opened on, not the release.
    """

    def __init__(self, directory: Path, names: Sequence[str] | None) -> None:
        self.directory = directory
        self._installed, self._names = Installed(directory), names
        self._turn, self._closed = threading.Lock(), False
        self._lock, view = _hold_current(self._installed)
        try:
            self._index = self._installed.index(view)
            check_executorch(self._index, None, str(directory))
            self._data = _Data(self._installed, self._index, names)
        except BaseException:
            self._lock.close()
            raise
        self._enter(view)
        self.cache: BlobCache

    def _enter(self, view: str) -> None:
        self.name, self.version, self.sha256 = self._index.name, self._index.version, view
        self.path = self._installed.view_path(view)

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str],
        *,
        data: Iterable[str] | None = None,
        packed: PackedStore | str | os.PathLike[str] | None = None,
    ) -> Release:
        """Open the current release of a folder.

        Args:
            directory: the folder of the device.
            data: names of the data files for the cache; by default all but adapters.
            packed: as in `BlobCache`.

        Raises:
            ReleaseError: no release is installed, it has no such data file, two data files have different contents under one
                key, or its programs need a newer ExecuTorch.
            FileAccessError, InvalidFileError, IntegrityError: files cannot be opened or trusted.
        """
        release = cls(as_path(directory), None if data is None else _names(data))
        try:
            release.cache = release._data.cache(packed)
        except BaseException:
            release._lock.close()
            raise
        return release

    def files(self) -> tuple[File, ...]:
        """The files in the folder `path`: programs, data, adapters and others, and which data files a program takes.

        As C++ and Java, also after `close`.
        """
        return self._index.files

    def follow(self, adapters: Literal["keep", "release"] = "keep") -> Followed:
        """Take the blobs of a newer release into the cache, in one commit, if another one was pulled into the folder.

        Programs on the cache go on: each call has all old weights or all new ones. Only blobs that differ between the two
        releases are committed, so other changes that were made to the cache stay. If more than blobs changed, nothing is
        committed, and the result says why; open the folder again then.

        Neither is anything committed if an adapter is loaded, on the cache or on one above it, that does not fit the newer
        foundation, or that does not record its own. Turn it off with `set_adapter_strength`, load another one, or keep this
        release; docs/releases.md says what an application can do for its users' adapters. While this blocks, so does
        `load_adapter` on the cache and on those above it.

        Args:
            adapters: which adapters programs run with afterwards. "keep": those that are loaded. "release": in place of a
                loaded adapter that is a file of the release, the file of that name in the newer release, in the same commit
                and with the same strength; other adapters stay.

        Raises:
            ClosedError: the release is closed.
            UnsupportedDataError: `adapters` is something else.
            UnsupportedOperationError: this thread reads the cache.
            As `open`, and as `BlobCache.update_blobs`. The cache is unchanged then.
        """
        if not isinstance(adapters, str) or adapters not in ("keep", "release"):
            raise UnsupportedDataError(f"adapters must be 'keep' or 'release', found {adapters!r}")
        with self._turn:
            if self._closed:
                raise ClosedError(f"{self.directory}: the release is closed")
            lock, sha256 = _hold_current(self._installed)
            try:
                if sha256 == self.sha256:
                    return Followed(self.version, sha256, True, (), (), (), self.cache.generation)
                index = self._installed.index(sha256)
                own = self._names or ()  # an adapter that was named is in the cache
                files = tuple(name for name in _differing(self._index, index, "adapter", "other") if name not in own)
                reasons = [f"the program {name!r} changed" for name in _differing(self._index, index, "program")]
                keys: Sequence[str] = ()
                exchanged: Sequence[str] = ()
                unfit: Sequence[str] = ()
                generation = self.cache.generation
                if not reasons:
                    keys, reasons, data = self._compare(index)
                if not reasons:
                    generation, keys, reasons, exchanged, unfit = self._commit(keys, data, index, sha256, adapters)
                if reasons:
                    return Followed(
                        index.version, sha256, False, (), tuple(reasons), files, generation, (), tuple(unfit)
                    )
                self._index, self._data = index, data
                self._lock, lock = lock, self._lock
                self._enter(sha256)
                files = tuple(name for name in files if name not in exchanged)
                done = Followed(index.version, sha256, True, tuple(keys), (), files, generation)
                return replace(done, adapters=tuple(exchanged), unfit=tuple(unfit))
            finally:
                lock.close()

    def _commit(self, keys: Sequence[str], data: _Data, index: Index, view: str, adapters: str) -> Any:
        """What the native module says: the generation, the keys, why nothing was committed, exchanged adapters, unfit ones."""
        held = [key for key in self.cache.dirty if key in self._data.home]
        return library().commit_release(
            native_tensors_of(self.cache),
            [(key, data.home[key].get_data(key)) for key in keys],
            [(key, self._data.home[key].get_data(key)) for key in held],
            adapters == "release",
            _adapter_paths(self._index, self.path),
            _adapter_paths(index, self._installed.view_path(view)),
        )

    def _compare(self, index: Index) -> tuple[tuple[str, ...], list[str], _Data]:
        """The keys whose blobs differ, what else differs, and the new data."""
        names = _named(index, "data", "adapter")
        if gone := [name for name in self._data.maps if name not in names]:
            return (), [f"the data file {name!r} is gone" for name in gone], self._data
        new = _Data(self._installed, index, self._names)
        if more := [name for name in new.maps if name not in self._data.maps]:
            return (), [f"the data file {name!r} is new" for name in more], new
        old_home, home = self._data.home, new.home
        keys = [key for key in home if key in old_home and not self._data.same(key, new)]
        fixed = [key for key in keys if not replaceable(old_home[key], home[key], key)]
        reasons = [f"the key {key!r} is gone" for key in old_home.keys() - home.keys()]
        reasons += [f"the key {key!r} is new" for key in home.keys() - old_home.keys()]
        reasons += [f"the key {key!r} has another layout, or describes other blobs" for key in fixed]
        return tuple(keys), sorted(reasons), new

    def close(self) -> None:
        """Close the cache, and let `gc` remove the release once it is no longer current. Programs keep their weights."""
        with self._turn:
            self._closed = True
            self.cache.close()
            self._lock.close()

    def __enter__(self) -> Release:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return line("Release", f"{self.name} {self.version} in {self.directory}", *self.cache._facts())


def _named(index: Index, *kinds: str) -> list[str]:
    """The names of files of some kinds."""
    return [file.name for file in index.files if file.kind in kinds]


def _adapter_paths(index: Index, folder: Path) -> list[tuple[str, bytes]]:
    """The names of a release's adapters, and their files."""
    return [(name, os.fsencode(folder / name)) for name in _named(index, "adapter")]


def _names(data: Any) -> list[str]:
    """The argument of a caller, as names of data files."""
    names: list[Any]
    try:
        names = [data] if isinstance(data, str | bytes) else list(data)
    except (TypeError, ValueError):
        names = [data]
    if isinstance(data, str) or not all(isinstance(name, str) for name in names):
        raise ReleaseError(f"expected names of data files, not {data!r}")
    return names


def _hold_current(installed: Installed) -> tuple[Lock, str]:
    """The current release, locked against `gc`."""
    while True:
        view = installed.view
        if view is None:
            raise ReleaseError(f"{installed.folder}: no release is installed here")
        lock = Lock()
        try:
            with named(installed.view_path(view)):
                lock.take(installed.view_path(view), shared=True, wait=True)
        except BaseException:
            lock.close()
            if installed.view == view:
                raise
            continue  # a newer one came, and gc removed this one
        if installed.view == view:
            return lock, view
        lock.close()


def _differing(old: Index, new: Index, *kinds: str) -> tuple[str, ...]:
    """The names of files of some kinds that are new, changed or gone."""
    one, other = ({file.name: file.sha256 for file in index.files if file.kind in kinds} for index in (old, new))
    return tuple(sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name)))
