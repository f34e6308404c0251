"""A release in a running program: a cache on its data files, and newer releases taken into it without loading again.

The cache maps the data files of the release that it was opened on. Blobs that a newer release replaces are committed to
it: memory is needed for these alone.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from blobstore.core.errors import ReleaseError, UnsupportedDataError
from blobstore.core.memory.mapped_file import as_path
from blobstore.core.reprs import count, line, listed
from blobstore.releases.device.installed import Installed
from blobstore.releases.index.index import File
from blobstore.releases.index.needs import check_executorch
from blobstore.runtime import BlobCache, PackedStore
from blobstore.runtime.native import is_utf8, native, native_path
from blobstore.runtime.packed import as_packed

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

    def __init__(self, directory: Path, names: list[str] | None, packed: PackedStore | None = None) -> None:
        self.directory = directory
        self._installed, self._turn = Installed(directory), threading.Lock()
        self._native: Any = native.Release.open(
            native_path(directory), names, None if packed is None else packed._native
        )
        try:
            self._enter(self._native.sha256)
            check_executorch(self._index, None, str(directory))
            if names is None:
                names = [file.name for file in self._index.files if file.kind == "data"]
            paths = [self._installed.path(self._index.file(name).sha256) for name in dict.fromkeys(names)]
            self.cache = BlobCache._around(self._native.cache, paths, packed)
        except BaseException:
            self._native.close()
            raise

    def _enter(self, view: str) -> None:
        self._index = self._installed.index(view)
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
        return cls(as_path(directory), None if data is None else _names(data), as_packed(packed))

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
            done: list[Any] = [
                tuple(one) if isinstance(one, list) else one for one in self._native.follow(adapters == "release")
            ]
            followed = Followed(*done)
            if followed.taken and followed.sha256 != self.sha256:
                self._enter(followed.sha256)
            return followed

    def close(self) -> None:
        """Close the cache, and let `gc` remove the release once it is no longer current. Programs keep their weights."""
        with self._turn:
            self.cache.close()
            self._native.close()

    def __enter__(self) -> Release:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return line("Release", f"{self.name} {self.version} in {self.directory}", *self.cache._facts())


def _names(data: Any) -> list[str]:
    """The argument of a caller, as names of data files."""
    names: list[Any]
    try:
        names = [data] if isinstance(data, str | bytes) else list(data)
    except (TypeError, ValueError):
        names = [data]
    if isinstance(data, str) or not all(isinstance(name, str) and is_utf8(name) for name in names):
        raise ReleaseError(f"expected names of data files, not {data!r}")
    return names
