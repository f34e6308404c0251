"""Sets of models with known waste: files are written here byte by byte, not by the code under test."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import flatbuffers
import numpy as np
from safetensors.numpy import save
from tests.helpers.schemas.flat_tensor import DataSegment, FlatTensor, NamedData, TensorLayout

from blobstore.reporting import Finding, Report

SCALAR_TYPES = {"uint8": 0, "int8": 1, "int16": 2, "int32": 3, "int64": 4, "float16": 5, "float32": 6, "float64": 7}


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


def write_ptd(path: Path, tensors: Sequence[Tensor], alignment: int = 128) -> Path:
    """A .ptd as ExecuTorch lays it out, one segment a tensor, without the manifest that blobstore adds."""
    builder = flatbuffers.Builder(1024)
    entries = []
    for i, tensor in enumerate(tensors):
        key = builder.CreateString(tensor.key)
        layout = None
        if tensor.dtype is not None:
            sizes = builder.CreateNumpyVector(np.array(tensor.sizes, np.int32))
            order = builder.CreateNumpyVector(np.arange(len(tensor.sizes), dtype=np.uint8))
            TensorLayout.TensorLayoutStart(builder)
            scalar_type = 15 if tensor.dtype == "bfloat16" else SCALAR_TYPES[tensor.dtype]
            TensorLayout.TensorLayoutAddScalarType(builder, scalar_type)
            TensorLayout.TensorLayoutAddSizes(builder, sizes)
            TensorLayout.TensorLayoutAddDimOrder(builder, order)
            layout = TensorLayout.TensorLayoutEnd(builder)
        NamedData.NamedDataStart(builder)
        NamedData.NamedDataAddKey(builder, key)
        NamedData.NamedDataAddSegmentIndex(builder, i)
        if layout is not None:
            NamedData.NamedDataAddTensorLayout(builder, layout)
        entries.append(NamedData.NamedDataEnd(builder))
    offsets, position = [], 0
    for tensor in tensors:
        offsets.append(position)
        position += -(-len(tensor.raw) // alignment) * alignment
    segments = []
    for tensor, offset in zip(tensors, offsets, strict=True):
        DataSegment.DataSegmentStart(builder)
        DataSegment.DataSegmentAddOffset(builder, offset)
        DataSegment.DataSegmentAddSize(builder, len(tensor.raw))
        segments.append(DataSegment.DataSegmentEnd(builder))
    vectors = []
    for items, start in (
        (segments, FlatTensor.FlatTensorStartSegmentsVector),
        (entries, FlatTensor.FlatTensorStartNamedDataVector),
    ):
        start(builder, len(items))
        for item in reversed(items):
            builder.PrependUOffsetTRelative(item)
        vectors.append(builder.EndVector())
    FlatTensor.FlatTensorStart(builder)
    FlatTensor.FlatTensorAddSegments(builder, vectors[0])
    FlatTensor.FlatTensorAddNamedData(builder, vectors[1])
    builder.Finish(FlatTensor.FlatTensorEnd(builder), b"FT01")
    table = bytes(builder.Output())
    inserted = 48
    base = -(-(len(table) + inserted) // alignment) * alignment
    end = offsets[-1] + len(tensors[-1].raw) if tensors else 0
    header = struct.pack("<4sIQQQQ", b"FH01", 40, inserted, len(table), base, end)
    root = struct.unpack_from("<I", table)[0] + inserted
    body = bytearray(base + end)
    head = struct.pack("<I", root) + table[4:8] + header
    body[: len(head)] = head
    body[8 + inserted : 8 + inserted + len(table) - 8] = table[8:]
    for tensor, offset in zip(tensors, offsets, strict=True):
        body[base + offset : base + offset + len(tensor.raw)] = tensor.raw
    path.write_bytes(bytes(body))
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
        b = flatbuffers.Builder(1024)

        def vector(items: list[int]) -> int:
            b.StartVector(4, len(items), 4)
            for item in reversed(items):
                b.PrependUOffsetTRelative(item)
            return int(b.EndVector())

        def table(slots: int, fields: list[tuple[int, Any, Any, Any]]) -> int:
            b.StartObject(slots)
            for slot, add, value, default in fields:
                add(slot, value, default)
            return int(b.EndObject())

        payloads = list(self.payloads)
        keys = [key.encode() for key in self.named]
        if missing := [key for key in keys if not any(key in payload for payload in payloads)]:
            payloads.append(b"\0".join(missing))
        named_data = {**self.named, **self.application}
        delegates = []
        for i in range(len(payloads)):
            name = b.CreateString("OtherBackend")
            processed = table(2, [(0, b.PrependInt8Slot, 1, 0), (1, b.PrependUint32Slot, i, 0)])
            delegates.append(
                table(
                    3, [(0, b.PrependUOffsetTRelativeSlot, name, 0), (1, b.PrependUOffsetTRelativeSlot, processed, 0)]
                )
            )
        method = b.CreateString("forward")
        listed = vector(delegates)
        plan = table(10, [(0, b.PrependUOffsetTRelativeSlot, method, 0), (7, b.PrependUOffsetTRelativeSlot, listed, 0)])
        plans = vector([plan])
        offsets, position = [], 0
        stored = [*payloads, *named_data.values()]
        for payload in stored:
            offsets.append(position)
            position += -(-len(payload) // alignment) * alignment
        segments = vector(
            [
                table(2, [(0, b.PrependUint64Slot, offset, 0), (1, b.PrependUint64Slot, len(payload), 0)])
                for payload, offset in zip(stored, offsets, strict=True)
            ]
        )
        entries = []
        for i, key in enumerate(named_data, len(payloads)):
            text = b.CreateString(key)
            entries.append(table(2, [(0, b.PrependUOffsetTRelativeSlot, text, 0), (1, b.PrependUint32Slot, i, 0)]))
        named = vector(entries)
        fields = [(1, plans), (4, segments), (7, named)]
        root = table(8, [(slot, b.PrependUOffsetTRelativeSlot, value, 0) for slot, value in fields])
        b.Finish(root, b"ET12")
        flat = bytes(b.Output())
        size = len(flat) + 32
        base = -(-size // alignment) * alignment
        end = offsets[-1] + len(stored[-1]) if stored else 0
        header = struct.pack("<4sIQQQ", b"eh00", 32, size, base if end else 0, end)
        start = struct.unpack_from("<I", flat)[0] + 32
        body = bytearray(base + end)
        body[:size] = struct.pack("<I", start) + flat[4:8] + header + flat[8:]
        for payload, offset in zip(stored, offsets, strict=True):
            body[base + offset : base + offset + len(payload)] = payload
        path.write_bytes(bytes(body[: base + end] if end else body[:size]))
        return path


def found(report: Report) -> set[tuple[str, frozenset[str], int]]:
    """What a report found, to compare with what was planted: (kind, keys, bytes it saves alone)."""
    return {(finding.kind.value, keys(report, finding), finding.saves) for finding in report.findings}


def keys(report: Report, finding: Finding) -> frozenset[str]:
    """The keys that a finding is about, each with the name of its file."""
    return frozenset(f"{Path(path).name}:{key}" for path, key in report.names(finding))
