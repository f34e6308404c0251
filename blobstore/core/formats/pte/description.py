"""Everything in a program but the bytes of its weights, as lines of text, to list and to compare."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping

from blobstore.core.formats.flatbuffer import STRING, U8, Kind, Scalar, Span, Table, TableType, Union, Vector
from blobstore.core.formats.pte.program import ProgramFile
from blobstore.core.memory.digest import digest

__all__ = ["describe"]

_SHORT = 32
"""Longer runs of bytes are described by their digest."""

_PLACES = {"data_buffer_idx", "mutable_data_segments_idx"}
"""Fields of a tensor that say where its bytes lie. They are left out, because the bytes themselves are described."""


def describe(program: ProgramFile) -> dict[str, list[str]]:
    """All parts of a program, each as one line for each element, with digests for bytes.

    Two programs with equal descriptions compute the same on equal named data, apart from fields that are unknown to this
    version (`ProgramFile.unknown`).

    Raises:
        InvalidFileError: the flatbuffer is damaged in a part that is read only here.
    """
    program.root.buffer.renew()

    @functools.cache  # a run of bytes may be that of many tensors
    def digest_of(span: Span) -> str:
        return str(digest(program.data[span.start : span.stop]))

    contents = {
        use.table.position: digest_of(Span(item.span.start, item.span.start + use.layout.nbytes))
        if use.layout is not None
        else digest_of(item.span)
        for item in program.tensors
        for use in item.uses
    }
    parts = {
        "version": [str(program.root.scalar("version"))],
        "methods": list(program.methods),
        "unused segments": [digest_of(segment.span) for segment in program.segments if not segment.users],
    }
    payloads = iter(program.delegates)
    named = Counter(program.methods)
    for number, plan in enumerate(program.root.tables("execution_plan")):
        name = program.methods[number]
        method = f"method {name}" if named[name] == 1 else f"method {name} ({number})"
        delegates = [
            f"{delegate.string('id')}, payload {digest_of(next(payloads).span)}, "
            + " ".join(_text(spec, contents) for spec in delegate.tables("compile_specs"))
            for delegate in plan.tables("delegates")
        ]
        described = _describe_method(plan, delegates, contents)
        parts |= {f"{method}: {part}": lines for part, lines in described.items()}
    return parts


def _describe_method(plan: Table, delegates: list[str], contents: Mapping[int, str]) -> dict[str, list[str]]:
    """The parts of one method, with the lines of its delegates."""
    operators = [_operator(table) for table in plan.tables("operators")]
    chains = plan.tables("chains")
    parts = {
        "operators": operators,
        "values": [_text(value.union("val") or value, contents) for value in plan.tables("values")],
        "inputs": [str(index) for index in plan.numbers("inputs")],
        "outputs": [str(index) for index in plan.numbers("outputs")],
        "delegates": delegates,
        "chains": [
            f"inputs {list(chain.numbers('inputs'))}, outputs {list(chain.numbers('outputs'))}" for chain in chains
        ],
    }
    for i, chain in enumerate(chains):
        of_chain = "" if len(chains) == 1 else f" of chain {i}"
        instructions = [_instruction(table, operators, contents) for table in chain.tables("instructions")]
        parts[f"instructions{of_chain}"] = instructions
        parts[f"stack traces{of_chain}"] = [_text(table, contents) for table in chain.tables("stacktrace")]
    parts["planned memory"] = [
        *map(str, plan.numbers("non_const_buffer_sizes")),
        *(_text(table, contents) for table in plan.tables("non_const_buffer_device")),
    ]
    container = plan.table("container_meta_type")
    parts["container"] = [] if container is None else [_text(container, contents)]
    return parts


def _operator(table: Table) -> str:
    name, overload = table.string("name"), table.string("overload")
    return f"{name}.{overload}" if overload else str(name)


def _instruction(table: Table, operators: list[str], contents: Mapping[int, str]) -> str:
    call = table.union("instr_args")
    if call is not None and call.kind.name == "KernelCall":
        index = call.scalar("op_index")
        operator = operators[index] if 0 <= index < len(operators) else f"operator {index}"
        return f"{operator}({', '.join(map(str, call.numbers('args')))})"
    return _text(table, contents)


def _text(table: Table, contents: Mapping[int, str]) -> str:
    """A table with all its fields, and a tensor with its bytes."""
    parts = [
        f"{field}={value}"
        for field in table.shape.present
        if field not in _PLACES and (value := _value(table, field, table.kind.fields[field], contents)) is not None
    ]
    if table.position in contents:
        parts.append(f"data={contents[table.position]}")
    return f"{table.kind.name}({', '.join(parts)})"


def _value(table: Table, field: str, kind: Kind, contents: Mapping[int, str]) -> str | None:
    """A field as text; None if it has its default value."""
    if isinstance(kind, Scalar):
        slot = table.slot(field)
        if not any(table.buffer.data[slot : slot + kind.width]):
            return None
        return repr(kind.format.unpack_from(table.buffer.data, slot)[0])
    if kind is STRING:
        return repr(table.string(field))
    if isinstance(kind, TableType):
        inner = table.table(field)
        return None if inner is None else _text(inner, contents)
    if isinstance(kind, Union):
        member = table.union(field)
        return None if member is None else _text(member, contents)
    if isinstance(kind, Vector):
        return "".join(_items(table, field, kind, contents))
    return None


def _items(table: Table, field: str, kind: Vector, contents: Mapping[int, str]) -> Iterator[str]:
    if isinstance(kind.of, TableType):
        yield f"[{', '.join(_text(item, contents) for item in table.tables(field))}]"
    elif kind.of is U8 and (span := table.span(field)) is not None and span.size > _SHORT:
        yield str(digest(table.buffer.data[span.start : span.stop]))
    else:
        yield str(list(table.numbers(field)))
