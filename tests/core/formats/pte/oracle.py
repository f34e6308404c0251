"""ExecuTorch's own code as the oracle: data files and programs that the code under test did not write."""

import functools
import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from blobstore.lowering.export import quiet
from tests.helpers.schemas import EXECUTORCH_SCHEMA, flatc

with quiet():
    from executorch.exir import schema
    from executorch.exir._serialize import _program
    from executorch.exir._serialize._flatbuffer_program import _program_to_flatbuffer
    from executorch.exir._serialize._named_data_store import NamedDataStore
    from executorch.exir._serialize.data_serializer import DataPayload
    from executorch.exir.scalar_type import ScalarType
    from executorch.exir.tensor_layout import TensorLayout
    from executorch.extension.flat_tensor.serialize.serialize import FlatTensorSerializer


def check_same(
    stock_run: Any,
    model: Any,
    path: Path,
    names: Mapping[str, str] | None = None,
    *,
    data: Any = None,
    before: Any = None,
) -> None:
    """The stock runtime, with full verification, computes the same bits with a program as with the one before.

    Args:
        model: a `Lowered`, with the inputs of its methods.
        names: what methods are called in the program, if not as before.
        data: the data file of the program.
        before: the program before, if it is not the model's.
    """
    for method in model.methods:
        old = stock_run(before or model.pte, model.inputs(method), method=method)
        new = stock_run(path, model.inputs(method), data_path=data, method=(names or {}).get(method, method))
        for left, right in zip(old, new, strict=True):
            assert left.dtype == right.dtype
            assert left.equal(right)


def write_ptd(path: Path, entries: Iterable[tuple[Any, ...]]) -> Path:
    """Let ExecuTorch write a .ptd from (key, bytes, layout or None), each with its alignment behind it if not 16."""
    store = NamedDataStore()
    for key, data, layout, *alignment in entries:
        theirs = layout and TensorLayout(
            scalar_type=ScalarType(int(layout.scalar_type)), sizes=list(layout.sizes), dim_order=list(layout.dim_order)
        )
        store.add_named_data(key, data, *(alignment or [16]), external_tag="x", tensor_layout=theirs)
    output = store.get_named_data_store_output()
    payload = DataPayload(buffers=output.buffers, named_data=output.external_data["x"])
    path.write_bytes(bytes(FlatTensorSerializer().serialize(payload)))
    return path


def deserialize(pte: bytes) -> _program.PTEFile:
    """A program as ExecuTorch's Python reads it."""
    return _program.deserialize_pte_binary(pte)


def with_inline_data(pte: bytes) -> bytes:
    """The program in the form of old versions: constants and delegates' payloads inside the flatbuffer."""
    file = deserialize(pte)
    assert not file.mutable_data
    assert not file.named_data
    return bytes(_program_to_flatbuffer(file.program).data)


def split(pte: bytes) -> tuple[bytes, bytes]:
    """The flatbuffer of a program, without its extended header, and its segments."""
    header = _program._get_extended_header(pte)
    if header is None:
        return pte, b""
    root = int.from_bytes(pte[:4], "little") - 32
    flatbuffer = root.to_bytes(4, "little") + pte[4:8] + pte[40 : header.program_size]
    return flatbuffer, pte[header.segment_base_offset :]


def join(flatbuffer: bytes, segments: bytes, tail: bytes = b"") -> bytes:
    """The reverse of `split`; `tail` makes the extended header longer, as a later version might."""
    length = 32 + len(tail)
    assert length % 16 == 0
    size = len(flatbuffer) + length
    base = size + -size % 128
    header = _program._ExtendedHeader(
        program_size=size, segment_base_offset=base, segment_data_size=len(segments)
    ).to_bytes()
    header = header[:4] + length.to_bytes(4, "little") + header[8:] + tail
    program = _program._insert_flatbuffer_header(flatbuffer, r"ET12", header)
    return program + bytes(base - size) + segments


def to_json(flatbuffer: bytes, fbs: Path = EXECUTORCH_SCHEMA) -> dict[str, Any]:
    """Decode with flatc."""
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "program.bin"
        binary.write_bytes(flatbuffer)
        flatc(
            "--json", "--strict-json", "--raw-binary", "-o", folder, "-I", EXECUTORCH_SCHEMA.parent, fbs, "--", binary
        )
        return json.loads((Path(folder) / "program.json").read_text())


def from_json(program: dict[str, Any], fbs: Path = EXECUTORCH_SCHEMA) -> bytes:
    """Encode with flatc."""
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "program.json"
        text.write_text(json.dumps(program))
        flatc("--binary", "-o", folder, "-I", EXECUTORCH_SCHEMA.parent, fbs, text)
        return next(path for path in Path(folder).iterdir() if path.suffix != ".json").read_bytes()


def tensor(index: int, sizes: list[int], *, state: bool = False, name: str | None = None, **fields: Any) -> Any:
    """A tensor value of ExecuTorch's own schema."""
    values = {
        "scalar_type": ScalarType.FLOAT,
        "storage_offset": 0,
        "sizes": sizes,
        "dim_order": list(range(len(sizes))),
        "requires_grad": False,
        "layout": 0,
        "data_buffer_idx": index,
        "allocation_info": schema.AllocationDetails(1, 0, 0) if state else None,
        "shape_dynamism": schema.TensorShapeDynamism.STATIC,
        "extra_tensor_info": None if name is None else schema.ExtraTensorInfo(fully_qualified_name=name),
    }
    return schema.EValue(schema.Tensor(**{**values, **fields}))


def serialize(
    tensors: list[Any],
    constants: list[bytes],
    states: list[bytes] | None = None,
    named: dict[str, bytes] | None = None,
    payload: bytes | None = b"payload",
) -> bytes:
    """Let ExecuTorch write a program with one method that does nothing with its values."""
    delegates = []
    if payload is not None:
        reference = schema.BackendDelegateDataReference(schema.DataLocation.INLINE, 0)
        delegates.append(schema.BackendDelegate("SomeBackend", reference, []))
    plan = schema.ExecutionPlan(
        name="forward",
        container_meta_type=schema.ContainerMetadata("", ""),
        values=tensors,
        inputs=[],
        outputs=[],
        chains=[],
        operators=[],
        delegates=delegates,
        non_const_buffer_sizes=[0, 1 << 20],
    )
    program = schema.Program(
        version=0,
        execution_plan=[plan],
        constant_buffer=[schema.Buffer(b""), *map(schema.Buffer, constants)],
        backend_delegate_data=[] if payload is None else [schema.BackendDelegateInlineData(payload)],
        segments=[],
        constant_segment=schema.SubsegmentOffsets(0, []),
    )
    store = NamedDataStore()
    for key, data in (named or {}).items():
        store.add_named_data(key, data, alignment=16)
    file = _program.PTEFile(
        program=program,
        mutable_data=None if states is None else [schema.Buffer(b""), *map(schema.Buffer, states)],
        named_data=store.get_named_data_store_output(),
    )
    return bytes(_program.serialize_pte_binary(file, extract_delegate_segments=True))


@functools.cache
def one_of_everything() -> bytes:
    """A small program with constants, initial state, named data and a payload."""
    return serialize(
        [
            tensor(1, [2, 3]),
            tensor(1, [6]),
            tensor(2, [5], name="bias"),
            tensor(1, [4], state=True),
            tensor(2, [2], state=True, name="cache"),
            schema.EValue(schema.Int(3)),
        ],
        [bytes(range(24)), bytes(range(100, 120))],
        [bytes(range(16)), bytes(range(50, 58))],
        {"first": b"named data", "second": b"more named data", "again": b"named data"},
    )
