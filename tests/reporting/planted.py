"""Sets of models with known waste: files are written here byte by byte, not by the code under test."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import flatbuffers
import numpy as np
from safetensors.numpy import save

from blobstore.reporting import Finding, Report

SCALAR_TYPES = {
    "uint8": 0,
    "int8": 1,
    "int16": 2,
    "int32": 3,
    "int64": 4,
    "float16": 5,
    "float32": 6,
    "float64": 7,
    "bfloat16": 15,
}


@dataclass
class Tensor:
    """A tensor of a data file; `values` None keeps `raw` opaque."""

    key: str
    raw: bytes = field(repr=False)
    dtype: str | None
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, key: str, values: np.ndarray) -> Tensor:
        values = np.ascontiguousarray(values)
        return cls(key, values.tobytes(), str(values.dtype), values.shape)

    @classmethod
    def bfloat16(cls, key: str, values: np.ndarray) -> Tensor:
        """The upper halves of float32 values."""
        raw = np.ascontiguousarray(values, dtype=np.float32).view(np.uint16).reshape(-1, 2)[:, 1].tobytes()
        return cls(key, raw, "bfloat16", values.shape)

    @classmethod
    def opaque(cls, key: str, raw: bytes) -> Tensor:
        return cls(key, raw, None, ())


def write_safetensors(path: Path, tensors: Sequence[Tensor]) -> Path:
    """A .safetensors, by the package of that name as far as numpy goes."""
    if all(tensor.dtype not in {None, "bfloat16"} for tensor in tensors):
        arrays = {t.key: np.frombuffer(t.raw, t.dtype).reshape(t.sizes) for t in tensors}
        path.write_bytes(save(arrays))
        return path
    names = {"bfloat16": "BF16", "float32": "F32", "float16": "F16"}
    header, position = {}, 0
    for t in tensors:
        extent = [position, position + len(t.raw)]
        header[t.key] = {"dtype": names[str(t.dtype)], "shape": list(t.sizes), "data_offsets": extent}
        position += len(t.raw)
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    path.write_bytes(struct.pack("<Q", len(head)) + head + b"".join(t.raw for t in tensors))
    return path


class _Builder(flatbuffers.Builder):
    """Tables and vectors, by the numbers of their slots in the schema."""

    def vector(self, items: Sequence[int]) -> int:
        self.StartVector(4, len(items), 4)
        for item in reversed(items):
            self.PrependUOffsetTRelative(item)
        return int(self.EndVector())

    def table(self, slots: int, *fields: tuple[int, Callable[..., None], int]) -> int:
        """A table, of which some slots have values, each of a type."""
        self.StartObject(slots)
        for slot, add, value in fields:
            add(self, slot, value, 0)
        return int(self.EndObject())


_INT8, _UINT32, _UINT64 = _Builder.PrependInt8Slot, _Builder.PrependUint32Slot, _Builder.PrependUint64Slot
_OFFSET = _Builder.PrependUOffsetTRelativeSlot


def _aligned(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


def _segments(b: _Builder, blobs: Sequence[bytes], alignment: int) -> list[int]:
    """The tables of segments that follow each other."""
    tables, position = [], 0
    for blob in blobs:
        tables.append(b.table(2, (0, _UINT64, position), (1, _UINT64, len(blob))))
        position += _aligned(len(blob), alignment)
    return tables


def _with_blobs(head: bytes, blobs: Sequence[bytes], alignment: int) -> bytes:
    """A file with its segments."""
    data = bytearray(head)
    for blob in blobs:
        data += bytes(_aligned(len(data), alignment) - len(data)) + blob
    return bytes(data)


def write_ptd(path: Path, tensors: Sequence[Tensor], alignment: int = 128) -> Path:
    """A .ptd as ExecuTorch lays it out, one segment a tensor, without the manifest that blobstore adds."""
    b = _Builder(1024)
    entries = []
    for i, tensor in enumerate(tensors):
        fields = [(0, _OFFSET, b.CreateString(tensor.key)), (1, _UINT32, i)]
        if tensor.dtype is not None:
            sizes = b.CreateNumpyVector(np.array(tensor.sizes, np.int32))
            order = b.CreateNumpyVector(np.arange(len(tensor.sizes), dtype=np.uint8))
            scalar_type = SCALAR_TYPES[tensor.dtype]
            fields.append((2, _OFFSET, b.table(3, (0, _INT8, scalar_type), (1, _OFFSET, sizes), (2, _OFFSET, order))))
        entries.append(b.table(3, *fields))
    blobs = [tensor.raw for tensor in tensors]
    segments = _segments(b, blobs, alignment)
    b.Finish(b.table(3, (1, _OFFSET, b.vector(segments)), (2, _OFFSET, b.vector(entries))), b"FT01")
    table, inserted = bytes(b.Output()), 48
    base = _aligned(len(table) + inserted, alignment)
    end = sum(_aligned(len(blob), alignment) for blob in blobs[:-1]) + sum(map(len, blobs[-1:]))
    root = struct.unpack_from("<I", table)[0] + inserted
    header = struct.pack("<4sIQQQQ8x", b"FH01", 40, inserted, len(table), base, end)
    head = struct.pack("<I", root) + table[4:8] + header + table[8:]
    path.write_bytes(_with_blobs(head.ljust(base, b"\0"), blobs, alignment))
    return path


@dataclass
class Payload:
    """A program in the place of a delegate's: `forward` with payloads and named data, and nothing else.

    Attributes:
        payloads: of a delegate each. One more names the keys of `named` that none of them has.
        named: what delegates name.
        application: named data of the application.
    """

    payloads: list[bytes] = field(default_factory=list)
    named: dict[str, bytes] = field(default_factory=dict)
    application: dict[str, bytes] = field(default_factory=dict)

    def write(self, path: Path, alignment: int = 128) -> Path:
        """Write it as ET12: a flatbuffer with the payloads in segments behind it."""
        b = _Builder(1024)
        payloads = list(self.payloads)
        keys = [key.encode() for key in self.named]
        if missing := [key for key in keys if not any(key in payload for payload in payloads)]:
            payloads.append(b"\0".join(missing))
        named_data = {**self.named, **self.application}
        delegates = []
        for i in range(len(payloads)):
            name = b.CreateString("OtherBackend")
            processed = b.table(2, (0, _INT8, 1), (1, _UINT32, i))
            delegates.append(b.table(3, (0, _OFFSET, name), (1, _OFFSET, processed)))
        method = b.CreateString("forward")
        plans = b.vector([b.table(10, (0, _OFFSET, method), (7, _OFFSET, b.vector(delegates)))])
        blobs = [*payloads, *named_data.values()]
        segments = b.vector(_segments(b, blobs, alignment))
        names = [
            b.table(2, (0, _OFFSET, b.CreateString(key)), (1, _UINT32, i))
            for i, key in enumerate(named_data, len(payloads))
        ]
        b.Finish(b.table(8, (1, _OFFSET, plans), (4, _OFFSET, segments), (7, _OFFSET, b.vector(names))), b"ET12")
        flat = bytes(b.Output())
        size = len(flat) + 32
        end = sum(_aligned(len(blob), alignment) for blob in blobs[:-1]) + sum(map(len, blobs[-1:]))
        base = _aligned(size, alignment) if end else 0
        root = struct.unpack_from("<I", flat)[0] + 32
        head = struct.pack("<I", root) + flat[4:8] + struct.pack("<4sIQQQ", b"eh00", 32, size, base, end) + flat[8:]
        path.write_bytes(_with_blobs(head, blobs, alignment) if end else head)
        return path


def found(report: Report) -> set[tuple[str, frozenset[str], int]]:
    """What a report found, to compare with what was planted: (kind, keys, bytes it saves alone)."""
    return {(finding.kind.value, keys(report, finding), finding.saves) for finding in report.findings}


def keys(report: Report, finding: Finding) -> frozenset[str]:
    """The keys that a finding is about, each with the name of its file."""
    return frozenset(f"{Path(path).name}:{key}" for path, key in report.names(finding))
