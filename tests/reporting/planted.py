"""Sets of models with known waste: files are written by ExecuTorch's own code and by safetensors, not by the code under
test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from blobstore.lowering.export import quiet
from blobstore.reporting import Finding, Report
from tests.core.formats.pte import oracle
from tests.cpp.module_runner import TYPES

with quiet():
    from executorch.exir._serialize.data_serializer import DataEntry, DataPayload
    from executorch.extension.flat_tensor.serialize.serialize import FlatTensorConfig, FlatTensorSerializer

SCALAR_TYPES = {**TYPES, "bfloat16": 15}


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
    """A .safetensors, by the package of that name."""
    arrays = {t.key: torch.frombuffer(bytearray(t.raw), dtype=getattr(torch, str(t.dtype))) for t in tensors}
    save_file({t.key: arrays[t.key].reshape(t.sizes) for t in tensors}, path)
    return path


def write_ptd(path: Path, tensors: Sequence[Tensor], alignment: int = 128) -> Path:
    """A .ptd of ExecuTorch, one segment a tensor, without the manifest that blobstore adds."""
    entries = {}
    for number, tensor in enumerate(tensors):
        order = list(range(len(tensor.sizes)))
        scalar_type = None if tensor.dtype is None else oracle.ScalarType(SCALAR_TYPES[tensor.dtype])
        layout = scalar_type and oracle.TensorLayout(scalar_type, list(tensor.sizes), order)
        entries[tensor.key] = DataEntry(number, 1, layout)
    payload = DataPayload([tensor.raw for tensor in tensors], entries)
    config = FlatTensorConfig(segment_alignment=alignment)
    path.write_bytes(bytes(FlatTensorSerializer(config).serialize(payload)))
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

    def write(self, path: Path) -> Path:
        """Write it with each payload and each blob in a segment of its own, also where two are equal."""
        payloads = list(self.payloads)
        keys = [key.encode() for key in self.named]
        if missing := [key for key in keys if not any(key in payload for payload in payloads)]:
            payloads.append(b"\0".join(missing))
        named = {**self.named, **self.application}
        program = oracle.deserialize(oracle.serialize([], [], payload=None)).program
        first, data = len(program.segments), b""
        for blob in (*payloads, *named.values()):
            data += bytes(-len(data) % 128)
            program.segments.append(oracle.schema.DataSegment(len(data), len(blob)))
            data += blob
        for number in range(first, first + len(payloads)):
            place = oracle.schema.BackendDelegateDataReference(oracle.schema.DataLocation.SEGMENT, number)
            program.execution_plan[0].delegates.append(oracle.schema.BackendDelegate("OtherBackend", place, []))
        numbers = range(first + len(payloads), len(program.segments))
        program.named_data = [oracle.schema.NamedData(*place) for place in zip(named, numbers, strict=True)]
        flat = bytes(oracle._program_to_flatbuffer(program).data)
        path.write_bytes(oracle.join(flat, data) if data else flat)
        return path


def found(report: Report) -> set[tuple[str, frozenset[str], int]]:
    """What a report found, to compare with what was planted: (kind, keys, bytes it saves alone)."""
    return {(finding.kind.value, keys(report, finding), finding.saves) for finding in report.findings}


def keys(report: Report, finding: Finding) -> frozenset[str]:
    """The keys that a finding is about, each with the name of its file."""
    return frozenset(f"{Path(path).name}:{key}" for path, key in report.names(finding))
