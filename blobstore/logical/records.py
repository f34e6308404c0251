"""Records: how the logical tensors of a model become the blobs that a delegate loads (`schema/record.fbs`).

Lowering writes them here; the native library reads them. A record never holds a weight, so two models that differ only in
their weights have the same records.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import xxhash

from blobstore.core.constants import RECORDS_IDENTIFIER, RECORDS_VERSION
from blobstore.core.formats.flatbuffer import BOOL, F64, I8, I64, STRING, U8, U32, U64, TableType, Vector
from blobstore.core.formats.keys import KEY_PREFIX
from blobstore.core.formats.table_builder import TableBuilder
from blobstore.core.memory.layout import ScalarType

__all__ = [
    "STATE",
    "ModelTensor",
    "Operation",
    "Record",
    "Records",
    "Step",
    "is_propagated",
    "records_key",
]


STATE = "it is not a weight but state, which the program keeps in its own memory and changes itself"
"""The refusal of a buffer that a method changes, such as a key/value cache."""


SOURCE = TableType("Source", name=STRING, aliases=Vector(STRING), scalar_type=I8, sizes=Vector(I64))
STEP = TableType("Step", operation=U8, ints=Vector(I64), floats=Vector(F64), names=Vector(STRING))
RECORD = TableType(
    "Record",
    key=STRING,
    nbytes=U64,
    sources=Vector(SOURCE),
    steps=Vector(STEP),
    group=U32,
    refusal=STRING,
    auxiliary=BOOL,
    product_of=STRING,
    factor=F64,
)
RECORDS = TableType(
    "Records",
    version=U32,
    inner=STRING,
    records=Vector(RECORD),
    outside=Vector(SOURCE),
    shared=Vector(STRING),
    transient=Vector(STRING),
)


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
class ModelTensor:
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
        product_of, factor: of scales that a bias is quantized with: the key of the scales of the weight beside it, and the
            scale of the activations; the blob holds their products in float32. Otherwise empty and 0.
    """

    key: str
    nbytes: int
    sources: tuple[ModelTensor, ...]
    steps: tuple[Step, ...] = ()
    group: int = 0
    refusal: str = ""
    auxiliary: bool = False
    product_of: str = ""
    factor: float = 0.0


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
    outside: tuple[ModelTensor, ...] = ()
    shared: tuple[str, ...] = ()
    transient: tuple[str, ...] = ()

    def pack(self) -> bytes:
        """The bytes of the blob."""
        builder = TableBuilder(1024)
        records = builder.references([_write_record(builder, record) for record in self.records])
        outside = builder.references([_write_source(builder, source) for source in self.outside])
        shared = builder.texts(self.shared)
        transient = builder.texts(self.transient)
        inner = builder.CreateString(self.inner)
        table = builder.table(
            RECORDS,
            version=RECORDS_VERSION,
            inner=inner,
            records=records,
            outside=outside,
            shared=shared,
            transient=transient,
        )
        return builder.finish(table, RECORDS_IDENTIFIER)


def records_key(data: bytes) -> str:
    """The key of a blob of records, which is made of the digest of its bytes."""
    return KEY_PREFIX + xxhash.xxh3_128_hexdigest(data)


def _write_record(builder: TableBuilder, record: Record) -> int:
    sources = builder.references([_write_source(builder, source) for source in record.sources])
    steps = builder.references([_write_step(builder, step) for step in record.steps])
    key, refusal = builder.CreateString(record.key), builder.CreateString(record.refusal)
    product_of = builder.CreateString(record.product_of) if record.product_of else None
    return builder.table(
        RECORD,
        key=key,
        nbytes=record.nbytes,
        sources=sources,
        steps=steps,
        group=record.group,
        refusal=refusal,
        auxiliary=record.auxiliary,
        product_of=product_of,
        factor=record.factor,
    )


def _write_source(builder: TableBuilder, source: ModelTensor) -> int:
    name = builder.CreateString(source.name)
    aliases = builder.texts(source.aliases)
    sizes = builder.numbers(I64, source.sizes)
    return builder.table(SOURCE, name=name, aliases=aliases, scalar_type=int(source.scalar_type), sizes=sizes)


def _write_step(builder: TableBuilder, step: Step) -> int:
    names = builder.texts(step.names)
    ints, floats = builder.numbers(I64, step.ints), builder.numbers(F64, step.floats)
    return builder.table(STEP, operation=int(step.operation), ints=ints, floats=floats, names=names)


def is_propagated(name: str) -> bool:
    """Whether `constant_prop_pass()` computed a tensor from others, which the program then lacks, by its name."""
    return "_prop_tensor_constant" in name
