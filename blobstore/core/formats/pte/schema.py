"""The tables of ET12 for the reader: every field in the order of its slot, as in `schema/program.fbs`.

It is the whole schema, not only the part that is used, so that every reference of a program can be verified and fields
that a later ExecuTorch added are recognized as unknown.
"""

from __future__ import annotations

import enum

from blobstore.core.formats.flatbuffer import (
    BOOL,
    F64,
    I8,
    I32,
    I64,
    STRING,
    U8,
    U32,
    U64,
    TableType,
    Union,
    Vector,
)

__all__ = [
    "DATA_REFERENCE",
    "DATA_SEGMENT",
    "NAMED_DATA",
    "PROGRAM",
    "SUBSEGMENT_OFFSETS",
    "DataLocation",
    "TensorDataLocation",
]


class TensorDataLocation(enum.IntEnum):
    """Values of ExtraTensorInfo.location."""

    SEGMENT = 0
    EXTERNAL = 1


class DataLocation(enum.IntEnum):
    """Values of BackendDelegateDataReference.location."""

    INLINE = 0
    SEGMENT = 1


_ALLOCATION_DETAILS = TableType("AllocationDetails", memory_id=U32, memory_offset_low=U32, memory_offset_high=U32)
EXTRA_TENSOR_INFO = TableType(
    "ExtraTensorInfo",
    mutable_data_segments_idx=U64,
    fully_qualified_name=STRING,
    location=I8,
    device_type=I8,
    device_index=I8,
)
TENSOR = TableType(
    "Tensor",
    scalar_type=I8,
    storage_offset=I32,
    sizes=Vector(I32),
    dim_order=Vector(U8),
    requires_grad=BOOL,
    data_buffer_idx=U32,
    allocation_info=_ALLOCATION_DETAILS,
    layout=I8,
    shape_dynamism=I8,
    extra_tensor_info=EXTRA_TENSOR_INFO,
)
_VALUES = [
    TableType("Null"),
    TableType("Int", int_val=I64),
    TableType("Bool", bool_val=BOOL),
    TableType("Double", double_val=F64),
    TENSOR,
    TableType("String", string_val=STRING),
    TableType("IntList", items=Vector(I64)),
    TableType("DoubleList", items=Vector(F64)),
    TableType("BoolList", items=Vector(BOOL)),
    TableType("TensorList", items=Vector(I32)),
    TableType("OptionalTensorList", items=Vector(I32)),
]
_EVALUE = TableType("EValue", val_type=U8, val=Union("val_type", _VALUES))
_CALLS = [
    TableType("KernelCall", op_index=I32, args=Vector(I32)),
    TableType("DelegateCall", delegate_index=I32, args=Vector(I32)),
    TableType("MoveCall", move_from=I32, move_to=I32),
    TableType("JumpFalseCall", cond_value_index=I32, destination_instruction=I32),
    TableType("FreeCall", value_index=I32),
]
_INSTRUCTION = TableType("Instruction", instr_args_type=U8, instr_args=Union("instr_args_type", _CALLS))
_FRAME = TableType("Frame", filename=STRING, lineno=I32, name=STRING, context=STRING)
_FRAME_LIST = TableType("FrameList", items=Vector(_FRAME))
_CHAIN = TableType(
    "Chain",
    inputs=Vector(I32),
    outputs=Vector(I32),
    instructions=Vector(_INSTRUCTION),
    stacktrace=Vector(_FRAME_LIST),
)
DATA_REFERENCE = TableType("BackendDelegateDataReference", location=I8, index=U32)
_COMPILE_SPEC = TableType("CompileSpec", key=STRING, value=Vector(U8))
_DELEGATE = TableType("BackendDelegate", id=STRING, processed=DATA_REFERENCE, compile_specs=Vector(_COMPILE_SPEC))
_CONTAINER_METADATA = TableType("ContainerMetadata", encoded_inp_str=STRING, encoded_out_str=STRING)
_OPERATOR = TableType("Operator", name=STRING, overload=STRING)
_NON_CONST_BUFFER_DEVICE = TableType("NonConstBufferDevice", buffer_idx=I32, device_type=I8, device_index=I8)
_EXECUTION_PLAN = TableType(
    "ExecutionPlan",
    name=STRING,
    container_meta_type=_CONTAINER_METADATA,
    values=Vector(_EVALUE),
    inputs=Vector(I32),
    outputs=Vector(I32),
    chains=Vector(_CHAIN),
    operators=Vector(_OPERATOR),
    delegates=Vector(_DELEGATE),
    non_const_buffer_sizes=Vector(I64),
    non_const_buffer_device=Vector(_NON_CONST_BUFFER_DEVICE),
)
_BUFFER = TableType("Buffer", storage=Vector(U8))
_INLINE_DATA = TableType("BackendDelegateInlineData", data=Vector(U8))
DATA_SEGMENT = TableType("DataSegment", offset=U64, size=U64)
SUBSEGMENT_OFFSETS = TableType("SubsegmentOffsets", segment_index=U32, offsets=Vector(U64))
NAMED_DATA = TableType("NamedData", key=STRING, segment_index=U32)
PROGRAM = TableType(
    "Program",
    version=U32,
    execution_plan=Vector(_EXECUTION_PLAN),
    constant_buffer=Vector(_BUFFER),
    backend_delegate_data=Vector(_INLINE_DATA),
    segments=Vector(DATA_SEGMENT),
    constant_segment=SUBSEGMENT_OFFSETS,
    mutable_data_segments=Vector(SUBSEGMENT_OFFSETS),
    named_data=Vector(NAMED_DATA),
)
