"""Reading `.safetensors` files as data maps, and writing them, without the safetensors package and without a copy.

A file has 8 bytes with the length of a JSON header, the header, and the bytes of the tensors, which must follow each
other without a gap: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from blobstore.core.disk.kinds import Format
from blobstore.core.disk.staging import Staging
from blobstore.core.errors import InvalidFileError, LayoutError, UnsupportedDataError
from blobstore.core.formats.data_map import NamedDataMap
from blobstore.core.formats.file_map import FileMap
from blobstore.core.memory.dtypes import SAFETENSORS
from blobstore.core.memory.layout import MAX_RANK, TensorLayout, layout_nbytes
from blobstore.core.memory.mapped_file import read_pieces

__all__ = ["CheckpointDataMap", "SafetensorsDataMap", "parse_json", "write_safetensors"]

_MAX_HEADER = 100_000_000  # the limit of the safetensors package itself


class CheckpointDataMap(NamedDataMap):
    """The tensors of a checkpoint: of one .safetensors, or of several with an index.

    Attributes:
        path: the file, as given.
        metadata: its text.
        dtypes: the dtype of each tensor as the file spells it.
        shapes: the sizes of each tensor.
    """

    path: Path
    metadata: dict[str, str]
    dtypes: dict[str, str]
    shapes: dict[str, tuple[int, ...]]


class SafetensorsDataMap(FileMap, CheckpointDataMap):
    """The tensors of one .safetensors file.

    A tensor that a .ptd cannot describe (complex, sub-byte, or with a size above 2**31-1) is an opaque blob here.

    Args:
        path: the file.
        data: its bytes, if the caller has them already; then the file is not opened, and errors name `path`.

    Attributes:
        path: the file, as given.
        metadata: the text in the header's `__metadata__`.
        dtypes: the dtype of each tensor as the file spells it.
        shapes: the sizes of each tensor.

    Raises:
        FileAccessError: the file cannot be read.
        InvalidFileError: the file is malformed.
    """

    def __init__(self, path: str | os.PathLike[str], *, data: memoryview | None = None) -> None:
        super().__init__(path, data)
        self.metadata, self.dtypes, self.shapes = {}, {}, {}
        self._read()
        self._keys = list(self._ranges)

    def _fail(self, reason: str) -> InvalidFileError:
        return InvalidFileError(self.path, reason)

    def _read(self) -> None:
        data = self._data
        if len(data) < 8:
            raise self._fail(f"{len(data)} bytes are too few for a .safetensors")
        (length,) = struct.unpack_from("<Q", data)
        if length > min(len(data) - 8, _MAX_HEADER):
            raise self._fail(f"the header should have {length} bytes, the file has {len(data)}")
        header = self._header(data[8 : 8 + length])
        self.metadata = header.pop("__metadata__", {})
        self._check_texts(header)
        for key, info in header.items():
            self._add(key, info, 8 + length)
        self._check_coverage(8 + length)

    def _header(self, raw: memoryview) -> dict[str, Any]:
        header = parse_json(raw, self.path, "header")
        if not isinstance(header, dict):
            raise self._fail("the header is not a JSON object")
        return header

    def _check_texts(self, header: dict[str, Any]) -> None:
        metadata: Any = self.metadata
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise self._fail("__metadata__ must map str to str")
        for text in (*header, *metadata, *metadata.values()):
            try:
                text.encode()
            except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
                raise self._fail(f"{text!r} is not valid Unicode: {error.reason}") from None

    def _check_coverage(self, position: int) -> None:
        """Check that the tensors follow each other without a gap, from this position to the end of the file."""
        for (start, end), key in sorted((extent, key) for key, extent in self._ranges.items()):
            if start != position:
                raise self._fail(f"tensor {key!r} starts at byte {start}, expected {position}: a gap or an overlap")
            position = end
        if position != len(self._data):
            raise self._fail(f"the tensors end at byte {position}, the file has {len(self._data)} bytes")

    def _add(self, key: str, info: Any, base: int) -> None:
        try:
            dtype, sizes, (start, end) = info["dtype"], info["shape"], info["data_offsets"]
        except (TypeError, KeyError, ValueError):
            raise self._fail(f"tensor {key!r} lacks dtype, shape or a pair of data_offsets") from None
        numbers = [start, end, *sizes] if isinstance(sizes, list) else [None]
        if not isinstance(dtype, str) or not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
            raise self._fail(f"tensor {key!r} must have a str as dtype, and non-negative integers as shape and offsets")
        if not start <= end <= len(self._data) - base:
            raise self._fail(f"tensor {key!r} at {start}..{end} is not within the file")
        layout = None
        if dtype in SAFETENSORS:
            if len(sizes) > MAX_RANK:
                raise self._fail(f"tensor {key!r} has {len(sizes)} dimensions, at most {MAX_RANK} are possible")
            nbytes = layout_nbytes(SAFETENSORS[dtype], sizes)
            if nbytes != end - start:
                raise self._fail(f"tensor {key!r} is {dtype} {sizes} of {nbytes} bytes, but has {end - start}")
            with contextlib.suppress(LayoutError):  # a size above that of a .ptd's int32
                layout = TensorLayout(SAFETENSORS[dtype], tuple(sizes))
        self.dtypes[key] = dtype
        self.shapes[key] = tuple(sizes)
        self._ranges[key] = (base + start, base + end)
        self._layouts[key] = layout


def parse_json(raw: memoryview, path: Path, what: str) -> Any:
    """JSON text without a key twice in one object; InvalidFileError names the file and what of it is not such text."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) != len(pairs):
            counts = Counter(key for key, _ in pairs)
            twice = next(key for key, count in counts.items() if count > 1)
            raise InvalidFileError(path, f"key {twice!r} occurs twice")
        return fields

    try:
        return json.loads(str(raw, "utf-8"), object_pairs_hook=unique)
    except RecursionError:
        raise InvalidFileError(path, f"the {what} is nested too deeply") from None
    except InvalidFileError:
        raise
    except ValueError as error:
        raise InvalidFileError(path, f"the {what} is not JSON: {error}") from None


def write_safetensors(
    staging: Staging,
    path: Path,
    layouts: Mapping[str, TensorLayout],
    data: Callable[[str], memoryview],
    metadata: Mapping[str, str],
) -> int:
    """Write a .safetensors as one of the files of `staging`, each tensor straight from its memory; its size in bytes.

    The header lists the tensors in the given order. Their bytes are ordered by element size, largest first, so that each
    tensor starts at a multiple of its element size.

    Args:
        staging, path: where to write.
        layouts: contiguous layout by name; the scalar types are all in `memory.dtypes.SAFETENSORS`.
        data: returns the bytes of a tensor; called once for each.
        metadata: the text for `__metadata__`.

    Raises:
        UnsupportedDataError: a tensor is named `__metadata__`, which the format reserves.
        FileAccessError: a file that holds the tensors was truncated.
    """
    if "__metadata__" in layouts:
        raise UnsupportedDataError("a tensor of a .safetensors cannot have the key '__metadata__'")
    names = {scalar_type: name for name, scalar_type in SAFETENSORS.items()}
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    header |= dict.fromkeys(layouts)
    order = sorted(layouts, key=lambda key: -layouts[key].scalar_type.itemsize)
    position = 0
    for key in order:
        layout = layouts[key]
        extent = [position, position + layout.nbytes]
        header[key] = {"dtype": names[layout.scalar_type], "shape": layout.sizes, "data_offsets": extent}
        position += layout.nbytes
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    with staging.open(path, position, kind=Format.SAFETENSORS) as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        for key in order:
            for piece in read_pieces(data(key)):
                file.write(piece)
        return file.tell()
