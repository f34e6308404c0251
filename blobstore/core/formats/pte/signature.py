"""What the methods of a program take and return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blobstore.core.memory.layout import TensorLayout, in_words
from blobstore.core.notebook import escape, table
from blobstore.core.reprs import fields_line, listed

if TYPE_CHECKING:  # the runtime needs the classes below, and reads no files
    from blobstore.core.formats.flatbuffer import Table
    from blobstore.core.formats.pte.program import ProgramFile

__all__ = ["Signature", "ValueInfo", "methods_table", "signatures", "values_table"]

_KINDS = {"Null": "none", "Int": "int", "Bool": "bool", "Double": "float", "Tensor": "tensor", "String": "str"}


@dataclass(frozen=True)
class ValueInfo:
    """One input or output of a method.

    Attributes:
        kind: "tensor", "int", "float", "bool", "str", "none", or "other".
        layout: that of a tensor, else None; a size that may vary is given as its largest value.
        name: of an input, if `blobstore.lowering.lower` lowered the program; otherwise, and of outputs, empty.
    """

    __repr__ = fields_line

    kind: str
    layout: TensorLayout | None
    name: str

    def __str__(self) -> str:
        """Such as "x: float[1, 8]"."""
        kind = self.kind if self.layout is None else str(self.layout)
        return f"{self.name}: {kind}" if self.name else kind


@dataclass(frozen=True)
class Signature:
    """A method, with its inputs and outputs in order, and the backends that parts of it are delegated to, each once."""

    name: str
    inputs: Sequence[ValueInfo]
    outputs: Sequence[ValueInfo]
    backends: Sequence[str]

    def __str__(self) -> str:
        """Such as "(x: float[1, 8]) -> float[1, 2]"; of many values the first are named."""
        return f"({listed(self.inputs)}) -> {listed(self.outputs) or 'nothing'}"


def methods_table(methods: Sequence[Signature]) -> str:
    """What a notebook shows of methods."""
    rows = (
        (method.name, escape(listed(method.inputs)), escape(listed(method.outputs)), ", ".join(method.backends))
        for method in methods
    )
    return table(("method", "inputs", "outputs", "delegated to"), rows, len(methods))


def values_table(method: Signature) -> str:
    """What a notebook shows of one method."""
    rows = [
        (f"{what} {number}", value.name, value.kind, "")
        if value.layout is None
        else (f"{what} {number}", value.name, *in_words(value.layout))
        for what, values in (("input", method.inputs), ("output", method.outputs))
        for number, value in enumerate(values)
    ]
    return table(("", "name", "dtype", "shape"), rows, len(rows), numbers=("shape",))


def signatures(program: ProgramFile) -> list[Signature]:
    """The methods of a program.

    Raises:
        InvalidFileError: the flatbuffer is damaged in a part that is read only here.
    """
    program.root.buffer.renew()
    methods = []
    for name, plan in zip(program.methods, program.root.tables("execution_plan"), strict=True):
        values = plan.tables("values")
        inputs, outputs = (
            [
                _value(program, f"method {name!r}, value {number}", values, number, named=part == "inputs")
                for number in plan.numbers(part)
            ]
            for part in ("inputs", "outputs")
        )
        backends = dict.fromkeys(delegate.backend for delegate in program.delegates if delegate.method == name)
        methods.append(Signature(name, inputs, outputs, list(backends)))
    return methods


def _value(program: ProgramFile, what: str, values: Sequence[Table], number: int, *, named: bool) -> ValueInfo:
    if not 0 <= number < len(values):
        raise program.fail(f"{what} is out of range, there are {len(values)}")
    value = values[number].union("val")
    kind = "none" if value is None else _KINDS.get(value.kind.name, "other")
    if value is None or kind != "tensor":
        return ValueInfo(kind, None, "")
    extra = value.table("extra_tensor_info") if named else None
    name = extra.string("fully_qualified_name") if extra is not None else None
    return ValueInfo(kind, program.layout_of(value, what), name or "")
