"""Records: how the logical tensors of a model become the blobs that a delegate loads (`schema/record.fbs`).

Lowering writes them here; the native library reads them. A record never holds a weight, so two models that differ only in
their weights have the same records.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import flatbuffers
import xxhash

from blobstore.core._generated.record import Record as FbRecord
from blobstore.core._generated.record import Records as FbRecords
from blobstore.core._generated.record import Source as FbSource
from blobstore.core._generated.record import Step as FbStep
from blobstore.core.formats.keys import KEY_PREFIX
from blobstore.core.memory.layout import ScalarType

__all__ = [
    "FILE_IDENTIFIER",
    "STATE",
    "Operation",
    "Record",
    "Records",
    "Source",
    "Step",
    "is_propagated",
    "records_key",
]

FILE_IDENTIFIER = b"BR01"
VERSION = 0

STATE = "it is not a weight but state, which the program keeps in its own memory and changes itself"
"""The refusal of a buffer that a method changes, such as a key/value cache."""


class Operation(enum.IntEnum):
    """What a step does; `runtime_bindings/src/logical/steps.h` describes the arguments of each."""

    RESHAPE = 1
    CAST = 2
    QUANTIZE_TENSOR = 3
    QUANTIZE_CHANNEL = 4
    QUANTIZE_GROUP = 5
    SWAP_IN_OUT = 6
    CHANNELS_LAST = 7
    PACK_INT4 = 8
    FOLD_CONV_WEIGHT = 9
    FOLD_CONV_BIAS = 10
    FOLD_LINEAR_WEIGHT = 11
    FOLD_LINEAR_BIAS = 12
    NORM_WEIGHT = 13
    NORM_BIAS = 14


@dataclass(frozen=True)
class Source:
    """A tensor of the model.

    Attributes:
        name: its fully qualified name.
        scalar_type, sizes: its dtype and shape in the model.
        aliases: other names of the same tensor.
    """

    name: str
    scalar_type: ScalarType
    sizes: tuple[int, ...]
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Step:
    """One operation on the way from tensors to bytes."""

    operation: Operation
    ints: tuple[int, ...] = ()
    floats: tuple[float, ...] = ()
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Record:
    """How one blob is made; or, with a `refusal`, tensors that cannot be changed.

    Attributes:
        key: the blob's key; empty with a refusal.
        nbytes: the blob's size in bytes.
        sources: the tensors that the first step takes.
        steps: from the sources to the blob.
        group: blobs of one delegate with the same number are packed together.
        refusal: why the sources cannot be changed.
        auxiliary: whether no state dict has the sources: scales, which come with quantization, buffers that are not
            persistent, and state.
    """

    key: str
    nbytes: int
    sources: tuple[Source, ...]
    steps: tuple[Step, ...] = ()
    group: int = 0
    refusal: str = ""
    auxiliary: bool = False


@dataclass(frozen=True)
class Records:
    """The records of one delegate.

    Attributes:
        inner: the backend whose layouts they describe.
        records: one for each blob, and refusals.
        outside: tensors of the program that no delegate has.
        shared: names of tensors that a delegate has and the program itself uses, too.
        transient: names of those `outside` that no state dict has: buffers that are not persistent.
    """

    inner: str
    records: tuple[Record, ...]
    outside: tuple[Source, ...] = ()
    shared: tuple[str, ...] = ()
    transient: tuple[str, ...] = ()

    def pack(self) -> bytes:
        """The bytes of the blob."""
        builder = flatbuffers.Builder(1024)
        tables = [_pack_record(builder, record) for record in self.records]
        records = _vector(builder, FbRecords.StartRecordsVector, tables)
        outside = _vector(builder, FbRecords.StartOutsideVector, [_pack_source(builder, s) for s in self.outside])
        shared = _texts(builder, FbRecords.StartSharedVector, self.shared)
        transient = _texts(builder, FbRecords.StartTransientVector, self.transient)
        inner = builder.CreateString(self.inner)
        FbRecords.Start(builder)
        FbRecords.AddVersion(builder, VERSION)
        FbRecords.AddInner(builder, inner)
        FbRecords.AddRecords(builder, records)
        FbRecords.AddOutside(builder, outside)
        FbRecords.AddShared(builder, shared)
        FbRecords.AddTransient(builder, transient)
        builder.Finish(FbRecords.End(builder), file_identifier=FILE_IDENTIFIER)
        return bytes(builder.Output())


def records_key(data: bytes) -> str:
    """The key of a blob of records, which is made of the digest of its bytes."""
    return KEY_PREFIX + xxhash.xxh3_128_hexdigest(data)


def _pack_record(builder: flatbuffers.Builder, record: Record) -> int:
    sources = _vector(builder, FbRecord.StartSourcesVector, [_pack_source(builder, s) for s in record.sources])
    steps = _vector(builder, FbRecord.StartStepsVector, [_pack_step(builder, step) for step in record.steps])
    key, refusal = builder.CreateString(record.key), builder.CreateString(record.refusal)
    FbRecord.Start(builder)
    FbRecord.AddKey(builder, key)
    FbRecord.AddNbytes(builder, record.nbytes)
    FbRecord.AddSources(builder, sources)
    FbRecord.AddSteps(builder, steps)
    FbRecord.AddGroup(builder, record.group)
    FbRecord.AddRefusal(builder, refusal)
    FbRecord.AddAuxiliary(builder, record.auxiliary)
    end: int = FbRecord.End(builder)
    return end


def _pack_source(builder: flatbuffers.Builder, source: Source) -> int:
    name = builder.CreateString(source.name)
    aliases = _texts(builder, FbSource.StartAliasesVector, source.aliases)
    sizes = _numbers(builder, FbSource.StartSizesVector, builder.PrependInt64, source.sizes)
    FbSource.Start(builder)
    FbSource.AddName(builder, name)
    FbSource.AddAliases(builder, aliases)
    FbSource.AddScalarType(builder, int(source.scalar_type))
    FbSource.AddSizes(builder, sizes)
    end: int = FbSource.End(builder)
    return end


def _pack_step(builder: flatbuffers.Builder, step: Step) -> int:
    names = _texts(builder, FbStep.StartNamesVector, step.names)
    ints = _numbers(builder, FbStep.StartIntsVector, builder.PrependInt64, step.ints)
    floats = _numbers(builder, FbStep.StartFloatsVector, builder.PrependFloat64, step.floats)
    FbStep.Start(builder)
    FbStep.AddOperation(builder, int(step.operation))
    FbStep.AddInts(builder, ints)
    FbStep.AddFloats(builder, floats)
    FbStep.AddNames(builder, names)
    end: int = FbStep.End(builder)
    return end


def _texts(builder: flatbuffers.Builder, start: object, texts: Sequence[str]) -> int:
    return _vector(builder, start, [builder.CreateString(text) for text in texts])


def _vector(builder: flatbuffers.Builder, start: object, offsets: Sequence[int]) -> int:
    return _numbers(builder, start, builder.PrependUOffsetTRelative, offsets)


def _numbers(builder: flatbuffers.Builder, start: object, prepend: object, numbers: Iterable[float]) -> int:
    values = list(numbers)
    start(builder, len(values))  # type: ignore[operator]
    for value in reversed(values):
        prepend(value)  # type: ignore[operator]
    end: int = builder.EndVector()
    return end


def is_propagated(name: str) -> bool:
    """Whether `constant_prop_pass()` computed a tensor from others, which the program then lacks, by its name."""
    return "_prop_tensor_constant" in name
