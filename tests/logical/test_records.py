"""Records are read as they were written; damage and bombs are errors, and cost little (B5)."""

import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import flatbuffers
import numpy as np
import pytest
from tests.helpers.schemas.record import Record as FbRecord
from tests.helpers.schemas.record import Records as FbRecords
from tests.helpers.schemas.record import Source as FbSource
from tests.helpers.schemas.record import Step as FbStep

from blobstore.core.constants import RECORDS_IDENTIFIER
from blobstore.core.formats.data_map import NamedDataMap
from blobstore.core.memory.layout import ScalarType
from blobstore.errors import InvalidFileError
from blobstore.logical.records import ModelTensor, Operation, Record, Records, Step, is_propagated, records_key
from blobstore.runtime.tensors import LogicalTensors

WEIGHT = ModelTensor("layer.weight", ScalarType.FLOAT, (4, 3), ("head.weight", "größe"))
SCALES = ModelTensor("layer.weight.scale", ScalarType.BFLOAT16, (4,))
RECORDS = Records(
    "XnnpackBackend",
    (
        Record(
            "layer.weight@1234",
            12,
            (WEIGHT,),
            (
                Step(Operation.RESHAPE, (2, 6)),
                Step(Operation.QUANTIZE_TENSOR, (-3, -128, 127, 1), (0.1,)),
                Step(Operation.QUANTIZE_CHANNEL, (0, -128, 127, 1), names=("layer.weight.scale@5678",)),
            ),
            group=7,
        ),
        Record("layer.weight.scale@5678", 8, (SCALES,), auxiliary=True),
        Record("", 0, (WEIGHT, SCALES), refusal="it is not there"),
        Record("", 2**40, ()),
    ),
    outside=(ModelTensor("scalar", ScalarType.BOOL, ()),),
    shared=("layer.weight",),
    transient=("scalar",),
)


class OneBlob(NamedDataMap):
    """A data map with one blob."""

    name = "model.ptd"

    def __init__(self, key: str, data: bytes) -> None:
        self._key, self._data = key, data

    def _key_list(self) -> Sequence[str]:
        return [self._key]

    def _view(self, key: str) -> memoryview:
        return memoryview(self._data)

    def _layout(self, key: str) -> None:
        return None


def parse(data: bytes, key: str | None = None) -> LogicalTensors:
    """What the native library makes of a blob of records."""
    return LogicalTensors(OneBlob(records_key(data) if key is None else key, data))


def read(data: bytes) -> Records:
    """A blob of records as the code that flatc generated reads it."""
    table = FbRecords.Records.GetRootAs(data, 0)
    assert table.Version() == 0 and data[4:8] == RECORDS_IDENTIFIER
    return Records(
        table.Inner().decode(),
        tuple(_record(table.Records(i)) for i in range(table.RecordsLength())),
        tuple(_source(table.Outside(i)) for i in range(table.OutsideLength())),
        tuple(table.Shared(i).decode() for i in range(table.SharedLength())),
        tuple(table.Transient(i).decode() for i in range(table.TransientLength())),
    )


def _record(table: Any) -> Record:
    sources = tuple(_source(table.Sources(i)) for i in range(table.SourcesLength()))
    steps = tuple(_step(table.Steps(i)) for i in range(table.StepsLength()))
    texts = table.Key().decode(), table.Refusal().decode()
    return Record(texts[0], table.Nbytes(), sources, steps, table.Group(), texts[1], bool(table.Auxiliary()))


def _source(table: Any) -> ModelTensor:
    sizes = tuple(table.Sizes(i) for i in range(table.SizesLength()))
    aliases = tuple(table.Aliases(i).decode() for i in range(table.AliasesLength()))
    return ModelTensor(table.Name().decode(), ScalarType(table.ScalarType()), sizes, aliases)


def _step(table: Any) -> Step:
    ints = tuple(table.Ints(i) for i in range(table.IntsLength()))
    floats = tuple(table.Floats(i) for i in range(table.FloatsLength()))
    names = tuple(table.Names(i).decode() for i in range(table.NamesLength()))
    return Step(Operation(table.Operation()), ints, floats, names)


@pytest.mark.parametrize("records", [RECORDS, Records("", ())])
def test_what_is_written_is_read(records: Records) -> None:
    """Every field of every part; equal records give equal bytes."""
    data = records.pack()
    assert read(data) == records
    assert data == replace(records).pack()


def test_the_key_is_made_of_the_bytes() -> None:
    """Other records have another key; what is not records is not taken for them."""
    data, other = RECORDS.pack(), replace(RECORDS, shared=()).pack()
    assert records_key(data) == records_key(bytes(data)) != records_key(other)
    assert set(parse(data)) == {"layer.weight", "layer.weight.scale", "scalar"}
    assert len(parse(data, key="layer.weight")) == 0
    assert len(parse(b"")) == len(parse(bytes(len(data)))) == 0


def test_damaged_records() -> None:
    """With any byte changed they are read as other records or refused; cut, they are refused."""
    good = RECORDS.pack()
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(300):
        bad = bytearray(good)
        bad[rng.integers(8, len(bad))] ^= int(rng.integers(1, 256))
        try:
            parse(bytes(bad))
        except InvalidFileError:
            refused += 1
    assert refused
    for bad in (good[: len(good) // 2], good[:8]):
        with pytest.raises(InvalidFileError, match=r"^model\.ptd: the records of a delegate are damaged"):
            parse(bad)


def test_a_later_version_is_refused() -> None:
    builder = flatbuffers.Builder(64)
    FbRecords.Start(builder)
    FbRecords.AddVersion(builder, 1)
    builder.Finish(FbRecords.End(builder), file_identifier=RECORDS_IDENTIFIER)
    with pytest.raises(InvalidFileError, match="records have version 1, this blobstore reads up to 0"):
        parse(bytes(builder.Output()))


def bomb(kind: str, count: int) -> bytes:
    """A flatbuffer that refers to one part `count` times, `count` times over: a few kilobytes that stand for gigabytes."""
    builder = flatbuffers.Builder(1024)
    text = builder.CreateString("w" * count)

    def repeated(start: Callable[[flatbuffers.Builder, int], object], part: int, times: int = count) -> int:
        start(builder, times)
        for _ in range(times):
            builder.PrependUOffsetTRelative(part)
        return int(builder.EndVector())

    few = 3
    aliases = repeated(FbSource.StartAliasesVector, text) if kind == "aliases" else 0
    names = repeated(FbStep.StartNamesVector, text) if kind == "names" else 0
    FbSource.Start(builder)
    FbSource.AddName(builder, text)
    if aliases:
        FbSource.AddAliases(builder, aliases)
    FbSource.AddScalarType(builder, 6)
    source = FbSource.End(builder)
    FbStep.Start(builder)
    FbStep.AddOperation(builder, 1)
    if names:
        FbStep.AddNames(builder, names)
    step = FbStep.End(builder)
    sources = repeated(FbRecord.StartSourcesVector, source, count if kind == "sources" else few)
    steps = repeated(FbRecord.StartStepsVector, step, count if kind == "steps" else few)
    FbRecord.Start(builder)
    FbRecord.AddKey(builder, text)
    FbRecord.AddSources(builder, sources)
    FbRecord.AddSteps(builder, steps)
    record = FbRecord.End(builder)
    records = repeated(FbRecords.StartRecordsVector, record)
    outside = repeated(FbRecords.StartOutsideVector, source, count if kind == "outside" else few)
    shared = repeated(FbRecords.StartSharedVector, text, count if kind == "shared" else few)
    transient = repeated(FbRecords.StartTransientVector, text, count if kind == "transient" else few)
    FbRecords.Start(builder)
    FbRecords.AddRecords(builder, records)
    FbRecords.AddOutside(builder, outside)
    FbRecords.AddShared(builder, shared)
    FbRecords.AddTransient(builder, transient)
    builder.Finish(FbRecords.End(builder), file_identifier=RECORDS_IDENTIFIER)
    return bytes(builder.Output())


@pytest.mark.parametrize("count", [400, 20_000])
@pytest.mark.parametrize("kind", ["sources", "aliases", "steps", "names", "outside", "shared", "transient"])
def test_small_records_cost_little(kind: str, count: int) -> None:
    """Below 1 MB, at most 2 seconds and 300 MB; then an error (B5)."""
    data = bomb(kind, count)
    assert len(data) < 1 << 20
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(InvalidFileError, match="again and again|sources, at most"):
        parse(data)
    assert time.process_time() - started < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10


def test_names_of_tensors_that_were_computed_ahead() -> None:
    """ExecuTorch's constant_prop_pass() makes up such names."""
    assert is_propagated("_prop_tensor_constant0") and not is_propagated("layer.weight")
