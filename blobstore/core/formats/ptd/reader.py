"""A .ptd as a data map: the file is mapped, checked once (`bounds.py`), and then looked up."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from blobstore.core.disk.progress import Progress, check_progress
from blobstore.core.errors import IntegrityError, InvalidFileError, LayoutError
from blobstore.core.formats.file_map import FileMap
from blobstore.core.formats.pickling import by_path
from blobstore.core.formats.ptd.bounds import read_contents
from blobstore.core.formats.ptd.columns import ColumnsError
from blobstore.core.formats.ptd.header import PtdHeaderError
from blobstore.core.formats.ptd.manifest import ManifestError
from blobstore.core.memory.digest import Digest, digest
from blobstore.core.memory.layout import TensorLayout
from blobstore.core.memory.mapped_file import check_length, give_back
from blobstore.core.memory.tensors import bytes_of

__all__ = ["PtdDataMap", "open_ptd"]


class PtdDataMap(FileMap):
    """The blobs of one .ptd file, mapped and read without a copy.

    Keys are in the order of the file. `open_ptd` says what is checked when.

    Args:
        path: the file.
        data: the bytes, if the caller has them already; then the file is not opened, and errors name `path`.

    Attributes:
        path: the file, as given.
        metadata: the text that was stored with the file.
        has_digests: whether the file has a manifest, so that `verify` can detect damage.
    """

    def __init__(self, path: str | os.PathLike[str], *, data: memoryview | None = None) -> None:
        super().__init__(path, None if data is None else bytes_of(data))
        try:
            contents = read_contents(self._data)
        except (PtdHeaderError, ColumnsError, LayoutError) as error:
            raise InvalidFileError(self.path, str(error)) from None
        except ManifestError as error:
            raise IntegrityError(self.path, str(error)) from None
        self._contents = contents
        self._digests: dict[int, Digest] = {}
        self._keys = contents.keys
        self._index = dict(zip(contents.keys, itertools.count()))
        self.metadata: Mapping[str, str] = contents.manifest.metadata if contents.manifest else {}
        self.has_digests = contents.manifest is not None

    def _view(self, key: str) -> memoryview:
        segment = self._contents.segment_index[self._index[key]]
        return self._data[self._contents.starts[segment] : self._contents.ends[segment]]

    def _layout(self, key: str) -> TensorLayout | None:
        return self._contents.layouts[self._index[key]]

    def get_tensor_layout(self, key: str) -> TensorLayout | None:
        # the same as in the base class with fewer calls: a listing of a large file spends most of its time here
        try:
            return self._contents.layouts[self._index[key]]
        except (KeyError, TypeError, ValueError):  # not hashable, or memory that was released
            return super().get_tensor_layout(key)

    def alignment(self, key: str) -> int:
        self.get_tensor_layout(key)
        return int(self._contents.manifest.alignments[self._index[key]]) if self._contents.manifest else 1

    def digest(self, key: str) -> Digest:
        data = self.get_data(key)
        segment = self._contents.segment_index[self._index[key]]
        if self._contents.manifest is None:
            if segment not in self._digests:  # several keys may share it
                self._digests[segment] = digest(data)
                give_back(data)
            return self._digests[segment]
        return Digest(len(data), self._contents.manifest.segments[segment].tobytes())

    def segment_of(self, key: str) -> int:
        """Index of the segment that holds a blob: keys with the same index share their bytes."""
        self.get_tensor_layout(key)
        return self._contents.segment_index[self._index[key]]

    def byte_range(self, key: str) -> tuple[int, int]:
        """Where a blob lies in the file: first byte, and first byte behind it."""
        segment = self.segment_of(key)
        return self._contents.starts[segment], self._contents.ends[segment]

    @property
    def extents(self) -> list[tuple[int, int]]:
        """Where each segment lies in the file, with or without a key: first byte, and first byte behind it."""
        return list(zip(self._contents.starts, self._contents.ends, strict=True))

    @property
    def manifest_extent(self) -> tuple[int, int] | None:
        """Where the manifest lies in the file: first byte, and first byte behind it; None without a manifest."""
        return (self._contents.header.segment_end, len(self._data)) if self._contents.manifest else None

    @property
    def head_size(self) -> int:
        """Bytes of the header and the table of contents, from the start of the file."""
        return self._contents.header.flatbuffer_end

    def verify(self, *, progress: Progress | None = None) -> bool:
        """Hash all blobs and compare them with the digests in the file.

        Args:
            progress: called after every blob.

        Returns:
            True if everything was compared; False if the file has no digests, so that nothing could be compared.

        Raises:
            IntegrityError: a blob or the padding between blobs is damaged; the message names the keys.
            FileAccessError: the file was truncated since it was opened.
        """
        self._check_open()
        check_progress(progress)
        check_length(self._data)
        contents = self._contents
        if contents.manifest is None:
            return False
        position = contents.header.segment_base
        for segment in np.argsort(np.array(contents.starts, np.int64), kind="stable").tolist():
            start, end = contents.starts[segment], contents.ends[segment]
            self._check_padding(position, start)
            position = max(position, end)
            expected = contents.manifest.segments[segment].tobytes()
            if (found := digest(self._data[start:end]).xxh3_128) != expected:
                keys = [key for key in contents.keys if contents.segment_index[self._index[key]] == segment]
                raise IntegrityError(
                    self.path,
                    f"the bytes of {', '.join(map(repr, keys)) or f'segment {segment}'} are damaged: expected xxh3-128 "
                    f"{expected.hex()}, found {found.hex()}",
                )
            if progress:
                progress(f"verifying {self.path.name}", end, len(self._data))
        self._check_padding(position, contents.header.segment_end)
        return True

    def _check_padding(self, start: int, end: int) -> None:
        if np.frombuffer(self._data[start:end], np.uint8).any():
            raise IntegrityError(self.path, f"the padding before byte {end} is not zero")

    def __reduce__(self) -> Any:
        """Pickled by path: see `blobstore.core.formats.pickling`."""
        self._check_open()
        recorded = self._data[self._contents.header.segment_end :] if self._contents.manifest else None
        return by_path(self, open_ptd, self._data, recorded)

    def close(self) -> None:
        super().close()
        self._index = {}


def open_ptd(path: str | os.PathLike[str], *, verify: bool = False) -> PtdDataMap:
    """Map a .ptd, written by this library or another one.

    Opening checks the structure: every offset, size, index, key and layout, and for a file with a manifest the digest
    of everything before the blobs. The blobs themselves are not read; `verify` checks them.

    Args:
        path: the file.
        verify: also compare all blobs with their digests.

    Returns:
        The data map, which is a context manager. Its views stay valid after it is closed.

    Raises:
        FileAccessError: the file cannot be read.
        InvalidFileError: the file is malformed.
        IntegrityError: the file is damaged.
    """
    data_map = PtdDataMap(path)
    if verify:
        data_map.verify()
    return data_map
