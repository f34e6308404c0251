"""Every byte of a file: regions that follow each other without a gap and add up to its size."""

from __future__ import annotations

import bisect
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from blobstore.core.disk.kinds import TORCH_SUFFIXES, Format, by_content, pointer_error
from blobstore.core.errors import InvalidFileError, LayoutError
from blobstore.core.formats.alignment import PAGE, SEGMENT_ALIGNMENT
from blobstore.core.formats.flatbuffer import Span
from blobstore.core.formats.keys import KEY_PREFIX
from blobstore.core.formats.ptd.reader import PtdDataMap
from blobstore.core.formats.ptd.writer import MAX_ALIGNMENT
from blobstore.core.formats.pte.parts import TensorData
from blobstore.core.formats.pte.program import ProgramFile
from blobstore.core.formats.ptn import PtnDataMap
from blobstore.core.formats.safetensors import SafetensorsDataMap
from blobstore.core.formats.torch_saved import TorchDataMap
from blobstore.core.memory.layout import ScalarType, TensorLayout
from blobstore.core.programs.deployed import weights_among
from blobstore.core.regions.region import ALIGNMENT, Region, RegionKind
from blobstore.core.regions.source import CHUNK, RegionSource, is_url
from blobstore.core.requirements import needed

__all__ = ["SUFFIXES", "read_regions"]

SUFFIXES = (".pte", ".ptd", ".ptn", ".safetensors", ".gguf")
"""The files that a folder is searched for."""

_HEAD = 1 << 16
_SEARCHED_PAYLOAD = 1 << 18
_ASSUMED_PADDING = 4096
"""A gap of a remote file that is no longer than this is not read to see whether it is zeros."""


def read_regions(source: RegionSource) -> tuple[str, list[Region], int]:
    """The format of a file, its regions in the order of their bytes, and the alignment of `FileReport`.

    Raises:
        FileAccessError: reading failed.
        InvalidFileError: it is malformed, or of an unknown kind.
        MissingDependencyError: it is a .gguf, and the gguf package is not installed.
    """
    head = source.head(64)
    kind = by_content(source.path, head)
    if kind is Format.POINTER:
        raise pointer_error(source.path)
    if kind is Format.PTD:
        return "ptd", *_ptd(source)
    if kind is Format.PTE:
        return "pte", *_pte(source, head)
    if head[:4] == b"GGUF":
        return "gguf", _gguf(source), ALIGNMENT
    if kind is Format.PTN:
        return "ptn", _zip(source, PtnDataMap), ALIGNMENT
    if kind is Format.TORCH:
        return "torch", _zip(source, TorchDataMap), ALIGNMENT
    if kind is Format.SAFETENSORS or source.path.endswith(".safetensors"):
        return "safetensors", _safetensors(source), ALIGNMENT
    suffix = os.path.splitext(source.path)[1]  # noqa: PTH122 - also of URLs
    formats = "neither .pte, .ptd, .ptn, .safetensors, .gguf nor a file of torch.save"
    if suffix in TORCH_SUFFIXES:
        raise InvalidFileError(source.path, "not a zip of torch.save, as torch writes them since 1.6")
    claimed = f"it does not begin like a {suffix}" if suffix in SUFFIXES else f"{formats}: it begins with {head[:8]!r}"
    raise InvalidFileError(source.path, claimed)


@dataclass
class _Draft:
    """A region that the file's own tables claim."""

    kind: RegionKind
    start: int
    stop: int
    keys: list[str]
    methods: list[str]
    layout: TensorLayout | None = None
    dtype: str = ""
    recorded: str = ""
    exact: list[tuple[str, TensorLayout | None]] = field(default_factory=list)

    @property
    def own(self) -> list[tuple[str, TensorLayout | None]]:
        """Its keys, each with its layout."""
        return [(key, self.layout) for key in self.keys]

    def within(self, start: int, stop: int) -> _Draft:
        """What is left of it; a part has neither its type nor its digest."""
        keys, methods = [*self.keys], [*self.methods]
        if self.start < start:
            return _Draft(self.kind, start, stop, keys, methods)
        return _Draft(self.kind, self.start, stop, keys, methods, self.layout, self.dtype, self.recorded, self.own)


def _ptd(source: RegionSource) -> tuple[list[Region], int]:
    source.fill(0, _HEAD)
    data = source.structure()
    if len(data) >= 48:  # the header says where the segments are; the reader refuses a bad one
        base, nbytes = (int.from_bytes(data[at : at + 8], "little") for at in (32, 40))
        source.fill(_HEAD, min(base, source.size))
        source.fill(min(base + nbytes, source.size), source.size)  # the manifest
    data_map = PtdDataMap(source.path, data=data)
    drafts = [_Draft(RegionKind.UNREFERENCED, start, stop, [], []) for start, stop in data_map.extents]
    for key in data_map:
        layout = data_map.get_tensor_layout(key)
        kind = RegionKind.TENSOR if layout is not None else _kind_of_opaque(key)
        recorded = data_map.digest(key).xxh3_128.hex() if data_map.has_digests and kind.is_blob else ""
        drafts.append(_Draft(kind, *data_map.byte_range(key), [key], [], layout, recorded=recorded))
    if data_map.manifest_extent is not None:
        drafts.append(_Draft(RegionKind.STRUCTURE, *data_map.manifest_extent, ["manifest"], []))
    return _cover(source, drafts, data_map.head_size), _alignment(data_map)


def _alignment(data_map: PtdDataMap) -> int:
    """Where blobs of a file begin: at multiples of this."""
    if data_map.manifest_extent is None:
        return ALIGNMENT
    alignment = SEGMENT_ALIGNMENT
    for wanted in {data_map.alignment(key) for key in data_map}:
        if (multiple := math.lcm(alignment, max(wanted, 1))) <= MAX_ALIGNMENT:  # no writer goes beyond it
            alignment = multiple
    return alignment


def _kind_of_opaque(key: str) -> RegionKind:
    """What blobstore records for itself, such as how delegates' blobs are made, is no data of a model."""
    return RegionKind.STRUCTURE if key.startswith(KEY_PREFIX) else RegionKind.NAMED_DATA


def _pte(source: RegionSource, head: bytes) -> tuple[list[Region], int]:
    source.fill(0, int.from_bytes(head[16:24], "little") if head[8:12] == b"eh00" else source.size)
    program = ProgramFile(source.path, source.structure())
    drafts = [_tensor(tensor) for tensor in program.tensors]
    drafts += _named_data(program, is_remote=is_url(source.path))
    for payload in program.delegates:
        key = f"{payload.method}/{payload.backend}[{payload.index}]"
        drafts.append(_Draft(RegionKind.PAYLOAD, *payload.span, [key], [payload.method]))
    drafts += _unreferenced(program)
    # a rewrite that moved tensors out keeps every place of the rest to the alignment that it had before
    return _cover(source, drafts, program.program_size), PAGE if program.externals else ALIGNMENT


def _tensor(tensor: TensorData) -> _Draft:
    kind = RegionKind.CONSTANT if tensor.kind == "constant" else RegionKind.STATE
    names = list(dict.fromkeys(use.name for use in tensor.uses if use.name is not None))
    methods = list(dict.fromkeys(use.method for use in tensor.uses))
    layouts = [use.layout for use in tensor.uses if use.layout is not None]
    largest = max(layouts, key=lambda layout: layout.nbytes, default=None)
    if largest is not None and largest.nbytes != tensor.span.size:
        largest = None
    return _Draft(kind, *tensor.span, names or [_unnamed(tensor)], methods, largest)


def _named_data(program: ProgramFile, *, is_remote: bool) -> Iterator[_Draft]:
    users = _users(program)
    # of a remote file, payloads are not read
    weights = {blob.key for blob in program.named_data} if is_remote else weights_among(program)
    for blob in program.named_data:
        kind = _kind_of_opaque(blob.key) if blob.key in weights else RegionKind.METADATA
        yield _Draft(kind, *blob.span, [blob.key], users.get(blob.key, []))


def _unreferenced(program: ProgramFile) -> Iterator[_Draft]:
    """Constants and segments that nothing uses."""
    for index, span in enumerate(program.inline):
        if span is not None:
            yield _Draft(RegionKind.UNREFERENCED, *span, [f"constant[{index}]"], [])
    for segment in program.segments:
        if not segment.users:
            yield _Draft(RegionKind.UNREFERENCED, *segment.span, [], [])


def _users(program: ProgramFile) -> dict[str, list[str]]:
    """The methods whose delegates name a key in their payload, as XNNPACK's do; large payloads are not searched.

    Raises:
        InvalidFileError: methods and keys are crossed so often that listing them takes more than the file is worth.
    """
    keys = {blob.key.encode(): blob.key for blob in program.named_data}
    methods: dict[Span, dict[str, None]] = {}  # of each payload, which several delegates may have
    for payload in program.delegates:
        if payload.span.size <= _SEARCHED_PAYLOAD:
            methods.setdefault(payload.span, {})[payload.method] = None
    users: dict[str, dict[str, None]] = {}
    left = program.program_size + _SEARCHED_PAYLOAD
    for span, names in methods.items():
        # a flatbuffer string is preceded by its length, whose last byte is 0, and ends in a 0
        for text in {*bytes(program.data[slice(*span)]).split(b"\0")[1:-1]} & keys.keys():
            left -= len(names)
            if left < 0:
                raise program.fail("too many methods share too many keys")
            users.setdefault(keys[text], {}).update(names)
    return {key: list(names) for key, names in users.items()}


def _unnamed(tensor: TensorData) -> str:
    """A name for a tensor without one, since programs do not record names of constants."""
    group = f"{tensor.group}:" if tensor.group else ""
    return f"{tensor.kind}[{group}{tensor.index}]"


def _safetensors(source: RegionSource) -> list[Region]:
    source.fill(0, 8)
    data = source.structure()
    header = 8 + int.from_bytes(data[:8], "little")
    source.fill(8, min(header, source.size))
    data_map = SafetensorsDataMap(source.path, data=data)
    drafts = [
        _Draft(
            RegionKind.TENSOR,
            *data_map.byte_range(key),
            [key],
            [],
            data_map.get_tensor_layout(key),
            "" if data_map.get_tensor_layout(key) is not None else data_map.dtypes[key],
        )
        for key in data_map
    ]
    return _cover(source, drafts, header)


def _zip(source: RegionSource, reader: type[PtnDataMap] | type[TorchDataMap]) -> list[Region]:
    source.fill(0, source.size)
    package = reader(source.path, data=source.structure())
    drafts = [_Draft(RegionKind.NAMED_DATA, one.start, one.stop, [one.name], []) for one in package.contents]
    for key in package:
        layout = package.get_tensor_layout(key)
        dtype = package.dtype(key) if layout is None and isinstance(package, PtnDataMap) else ""
        drafts.append(_Draft(RegionKind.TENSOR, *package.byte_range(key), [key], [], layout, dtype))
    # what lies between is the zip's own: heads of members, the directory, the pickle
    structure = [_Draft(RegionKind.STRUCTURE, *extent, [], []) for extent in _between(drafts, source.size)]
    return _cover(source, [*drafts, *structure], 0)


def _between(drafts: Sequence[_Draft], size: int) -> Iterator[tuple[int, int]]:
    """The ranges of a file that nothing claims."""
    end = 0
    for draft in sorted(drafts, key=lambda draft: draft.start):
        if draft.start > end:
            yield end, draft.start
        end = max(end, draft.stop)
    if end < size:
        yield end, size


_GGML = {
    "F32": ScalarType.FLOAT,
    "F16": ScalarType.HALF,
    "BF16": ScalarType.BFLOAT16,
    "F64": ScalarType.DOUBLE,
    "I8": ScalarType.CHAR,
    "I16": ScalarType.SHORT,
    "I32": ScalarType.INT,
    "I64": ScalarType.LONG,
}


def _gguf(source: RegionSource) -> list[Region]:
    if not is_url(source.path):
        return _gguf_at(source.path, source)
    with tempfile.TemporaryDirectory() as folder:  # the package reads local files; only the head of this one is real
        copy = Path(folder) / "head.gguf"
        done = 0
        while True:
            with copy.open("ab") as file:
                file.truncate(done)
                for chunk in source.chunks(done, min(max(2 * done, 1 << 22), source.size)):
                    done += file.write(chunk)
                file.truncate(source.size)
            try:
                return _gguf_at(os.fspath(copy), source)
            except InvalidFileError:
                if done >= min(source.size, 1 << 30):
                    raise


def _gguf_at(path: str, source: RegionSource) -> list[Region]:
    """The regions of a file, of which at least the head is at a local path."""
    with needed("a .gguf needs the gguf package", "gguf"):
        from gguf import GGUFReader
    try:
        with np.errstate(all="ignore"):
            reader = GGUFReader(path)
    except (ValueError, KeyError, IndexError, TypeError, OverflowError, MemoryError) as error:
        raise InvalidFileError(source.path, f"not a well-formed .gguf: {error}") from None
    head = int(reader.data_offset)
    drafts = [_gguf_tensor(source, head, tensor, big_endian=reader.byte_order == "S") for tensor in reader.tensors]
    if reader.tensors:
        last = reader.tensors[-1].field
        head = int(last.offset) + sum(int(part.nbytes) for part in last.parts)
    return _cover(source, drafts, head)


def _gguf_tensor(source: RegionSource, data_offset: int, tensor: Any, *, big_endian: bool) -> _Draft:
    start, dtype = int(tensor.data_offset), tensor.tensor_type.name
    if big_endian and dtype != "I8":  # no layout of ours says so
        dtype = f"{dtype} (big-endian)"
    stop = start + int(tensor.n_bytes)
    if not data_offset <= start <= stop <= source.size:
        raise InvalidFileError(source.path, f"tensor {tensor.name!r} at {start}..{stop} is not within the file")
    if dtype not in _GGML:
        return _Draft(RegionKind.TENSOR, start, stop, [tensor.name], [], None, dtype)
    try:
        layout = TensorLayout(_GGML[dtype], tuple(int(n) for n in reversed(tensor.shape)))
    except LayoutError as error:
        raise InvalidFileError(source.path, f"tensor {tensor.name!r}: {error}") from None
    return _Draft(RegionKind.TENSOR, start, stop, [tensor.name], [], layout, "")


def _cover(source: RegionSource, drafts: Iterable[_Draft], structure: int) -> list[Region]:
    """All bytes of a file: what is claimed, and what lies between; the first `structure` bytes are the file's own.

    Where two claims overlap the earlier has the bytes; a claim inside another adds its keys to it.
    """
    order = {RegionKind.UNREFERENCED: 1, RegionKind.PAYLOAD: 0}
    ordered = sorted(drafts, key=lambda draft: (draft.start, -draft.stop, order.get(draft.kind, -1)))
    kept: list[_Draft] = []
    starts: list[int] = []
    position = 0
    for draft in ordered:
        start, stop = min(draft.start, source.size), min(draft.stop, source.size)
        if start == stop:
            continue
        if stop <= position:
            if draft.kind is not RegionKind.UNREFERENCED:
                home = kept[bisect.bisect_right(starts, start) - 1]
                home.keys += draft.keys
                home.methods += draft.methods
                home.exact += draft.own if (start, stop) == (home.start, home.stop) else ()
            continue
        kept.append(draft.within(position, stop))
        starts.append(kept[-1].start)
        position = stop
    regions: list[Region] = []
    position = 0
    for draft in kept:
        regions += _gap(source, position, draft.start, structure)
        regions.append(_region(draft))
        position = draft.stop
    regions += _gap(source, position, source.size, structure)
    return regions


def _region(draft: _Draft) -> Region:
    keys, methods = tuple(dict.fromkeys(draft.keys)), tuple(dict.fromkeys(draft.methods))
    place, exact = (draft.start, draft.stop), tuple(dict(draft.exact).items())
    return Region(draft.kind, *place, keys, methods, draft.layout, draft.dtype, recorded=draft.recorded, exact=exact)


def _gap(source: RegionSource, start: int, stop: int, structure: int) -> Sequence[Region]:
    """The regions of bytes that nothing claims."""
    regions = []
    if start < min(stop, structure):
        regions.append(Region(RegionKind.STRUCTURE, start, min(stop, structure)))
        start = min(stop, structure)
    if start < stop:
        local = not is_url(source.path)
        zeros = (not local and stop - start <= _ASSUMED_PADDING) or not any(
            np.frombuffer(chunk, np.uint8).any() for chunk in source.chunks(start, stop, CHUNK)
        )
        regions.append(Region(RegionKind.PADDING if zeros else RegionKind.UNREFERENCED, start, stop))
    return regions
