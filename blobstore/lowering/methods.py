"""Which tensors of several methods are one parameter, and what the others are called.

Methods of one module share their parameters by name. Methods of several modules, such as an encoder and a decoder, may
use one name for different parameters. These get the name of their method in front, which is often what the module that
holds both calls them: `encoder.layer.weight`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from blobstore.errors import BlobStoreError, KeyConflictError
from blobstore.logical.records import Source
from blobstore.lowering.names import ALIASES, Fold, NameTable, Refusal, identity, logical_name

__all__ = ["check_constants", "qualify", "same_bits"]

_CONSTANTS = {InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR}


@dataclass(eq=False)
class _Parameter:
    """A parameter or constant of one method.

    Attributes:
        method: whose it is.
        own: its name in the method's module.
        tensors: what the program has of it, by the names there: a quantized parameter is several tensors.
        names: all its names, the one to call it first; they become qualified.
        known: the table names it. Otherwise its name was made up by exporting.
    """

    method: str
    own: str
    names: list[str]
    known: bool
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


def qualify(programs: Mapping[str, ExportedProgram], tables: Mapping[str, NameTable]) -> dict[str, NameTable]:
    """Give different parameters different names: in the tables, and in the programs for what no delegate takes.

    Tensors of two methods are one parameter if they are the same memory. So they are if they have a name in common and
    equal contents (methods that were quantized apart have copies), unless the two methods differ in another tensor that
    both have by name: then they are of different modules, and what is equal now need not stay so.

    Names of different parameters are replaced by `<method>.<name>`. A parameter that such methods share can be called by
    these names too.

    Args:
        programs: by method; they are changed in place.
        tables: what is known of their tensors.

    Returns:
        The tables with the new names.

    Raises:
        BlobStoreError: qualified names meet each other again and again, as in methods `a` and `a.a`.
    """
    parameters = [p for method in sorted(programs) for p in _parameters(method, programs[method], tables[method])]
    apart = _apart(parameters)
    classes = _classes(parameters, apart)
    for _ in range(len(programs) + 1):
        if not _separate(classes):
            break
    else:
        raise BlobStoreError(
            f"tensors of the methods {', '.join(map(repr, programs))} cannot be told apart by name; rename the methods"
        )
    _add_qualified(classes, apart)
    renamed: dict[str, dict[str, tuple[str, ...]]] = {method: {} for method in programs}
    for members in classes:
        names = tuple(dict.fromkeys(name for member in members for name in member.names))
        for member in members:
            for tensor in member.tensors:
                renamed[member.method][tensor] = _names_of(tensor, member, names)
    for method, program in programs.items():
        _rename(program, renamed[method])
    return {method: _rename_sources(tables[method], renamed[method]) for method in programs}


def check_constants(programs: Mapping[str, ExportedProgram], origin: str) -> None:
    """Refuse methods of which ExecuTorch would keep only one's constant in the data file.

    Args:
        programs: by method, as `to_executorch()` left them.
        origin: what messages call the program.

    Raises:
        KeyConflictError: two methods have different tensors outside under one name.
    """
    found: dict[str, tuple[str, torch.Tensor]] = {}
    for method, program in programs.items():
        targets = {
            spec.arg.name: spec.target for spec in program.graph_signature.input_specs if spec.kind in _CONSTANTS
        }
        for node in program.graph_module.graph.nodes:
            name = targets.get(node.name) if node.op == "placeholder" and node.meta.get("constant_tag") else None
            tensor = None if name is None else _tensor(program, name)
            if name is None or tensor is None:
                continue
            other, known = found.setdefault(name, (method, tensor))
            if identity(known) != identity(tensor) and not same_bits(known, tensor):
                raise KeyConflictError(
                    f"{origin}: methods '{other}' and '{method}' have different tensors by the name '{name}', and a data "
                    "file has one of a name: export them from modules that call them differently (docs/lowering.md)"
                )


def _parameters(method: str, program: ExportedProgram, table: NameTable) -> Iterable[_Parameter]:
    """What the tensors of a program belong to, but for the buffers that it changes itself."""
    changed = set(program.graph_signature.buffers_to_mutate.values())
    found: dict[str, _Parameter] = {}
    for spec in program.graph_signature.input_specs:
        name = spec.target
        if spec.kind not in _CONSTANTS or name is None or name in changed:
            continue
        tensor = _tensor(program, name)
        if tensor is None:
            continue
        own = logical_name(name)
        parameter = found.setdefault(own, _Parameter(method, own, [own], known=False))
        parameter.tensors[name] = tensor
        if (source := table.sources.get(name)) is not None:
            parameter.known = True
            parameter.names = list(dict.fromkeys((*parameter.names, *source.aliases)))
        if (whole := _tensor(program, own)) is not None:
            parameter.tensors[own] = whole  # the float weight of a quantized one
    return found.values()


def _tensor(program: ExportedProgram, name: str) -> torch.Tensor | None:
    tensor = program.state_dict.get(name, program.constants.get(name))
    return tensor if isinstance(tensor, torch.Tensor) else None


def _pairs(parameters: Iterable[_Parameter]) -> Iterable[tuple[_Parameter, _Parameter]]:
    """Parameters of two methods that have a name or memory in common."""
    groups: dict[object, dict[_Parameter, None]] = {}
    for parameter in parameters:
        for mark in (*parameter.names, *(identity(t) for t in parameter.tensors.values() if t.numel())):
            groups.setdefault(mark, {})[parameter] = None
    pairs = (pair for group in groups.values() for pair in combinations(group, 2))
    return dict.fromkeys(pair for pair in pairs if pair[0].method != pair[1].method)


def _apart(parameters: Iterable[_Parameter]) -> set[frozenset[str]]:
    """Pairs of methods that have different contents under a name."""
    return {
        frozenset((one.method, other.method))
        for one, other in _pairs(parameters)
        if one.known and other.known and not _is_same_memory(one, other) and not _is_equal(one, other)
    }


def _classes(parameters: list[_Parameter], apart: set[frozenset[str]]) -> list[list[_Parameter]]:
    """The parameters, those that are one together; each list begins with the first method's."""
    of = {parameter: [parameter] for parameter in parameters}
    for one, other in _pairs(parameters):
        equal = frozenset((one.method, other.method)) not in apart and _is_equal(one, other)
        if of[one] is not of[other] and (equal or _is_same_memory(one, other)):
            of[one] += of[other]
            for member in of[other]:
                of[member] = of[one]
    for members in of.values():
        members.sort(key=lambda member: member.method)
    return list({id(members): members for members in of.values()}.values())


def _separate(classes: list[list[_Parameter]]) -> bool:
    """Qualify the names that several classes have; whether there were any."""
    owners = _owners(classes)
    for members in classes:
        for member in members:
            member.names = [f"{member.method}.{n}" if len(owners[n]) > 1 else n for n in member.names]
    return any(len(numbers) > 1 for numbers in owners.values())


def _add_qualified(classes: list[list[_Parameter]], apart: set[frozenset[str]]) -> None:
    """Names by method for what methods share that differ otherwise, as far as nothing else is called so."""
    owners = _owners(classes)
    for members in classes:
        if any(frozenset((one.method, other.method)) in apart for one, other in combinations(members, 2)):
            for member in members:
                more = (f"{member.method}.{name}" for name in member.names)
                member.names = list(dict.fromkeys((*member.names, *(name for name in more if name not in owners))))


def _owners(classes: list[list[_Parameter]]) -> dict[str, set[int]]:
    owners: dict[str, set[int]] = {}
    for number, members in enumerate(classes):
        for member in members:
            for name in member.names:
                owners.setdefault(name, set()).add(number)
    return owners


def _is_same_memory(one: _Parameter, other: _Parameter) -> bool:
    ours = {identity(tensor) for tensor in one.tensors.values() if tensor.numel()}
    return any(identity(tensor) in ours for tensor in other.tensors.values())


def _is_equal(one: _Parameter, other: _Parameter) -> bool:
    """To the byte, in what both have."""
    ours, theirs = (
        {_part(tensor, parameter.own): value for tensor, value in parameter.tensors.items()}
        for parameter in (one, other)
    )
    return all(same_bits(ours[part], theirs[part]) for part in ours.keys() & theirs.keys())


def _part(tensor: str, own: str) -> str:
    """Which part of a parameter a tensor of the program is, whatever the parameter is called."""
    return tensor.removeprefix(own) if tensor.startswith(own) else tensor.rpartition(".")[2]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same numbers, to the bit, however they lie in memory."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    flat = (tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(*flat)


def _names_of(tensor: str, member: _Parameter, names: tuple[str, ...]) -> tuple[str, ...]:
    """The new names of one tensor of a parameter, the one to call it first."""
    if tensor == member.own:
        return names
    if names[0].endswith(member.own):  # `<method>.` before the names of its parts too
        return (names[0].removesuffix(member.own) + tensor, *names[1:])
    return (f"{member.method}.{tensor}", *names[1:])


def _rename(program: ExportedProgram, names: Mapping[str, tuple[str, ...]]) -> None:
    """Give tensors of a program other names, in place; the graph, which has names of its own, stays as it is."""
    signature = program.graph_signature
    first = {old: new[0] for old, new in names.items()}
    marks = {
        spec.arg.name: dict.fromkeys(names[spec.target], spec.persistent is not False)
        for spec in signature.input_specs
        if spec.kind in _CONSTANTS and len(names.get(spec.target, ())) > 1
    }
    signature.input_specs = [
        replace(spec, target=first.get(spec.target, spec.target)) if spec.kind in _CONSTANTS else spec
        for spec in signature.input_specs
    ]
    program._state_dict = {first.get(name, name): tensor for name, tensor in program.state_dict.items()}
    program._constants = {first.get(name, name): value for name, value in program.constants.items()}
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in marks:
            known = node.meta.setdefault("custom", {}).get(ALIASES, {})
            node.meta["custom"] = {**node.meta["custom"], ALIASES: {**marks[node.name], **known}}


def _rename_sources(table: NameTable, names: Mapping[str, tuple[str, ...]]) -> NameTable:
    """The table with other names for its sources, and, by the same prefix, for what a tensor was folded of."""
    sources = dict(table.sources)
    for tensor, old in table.sources.items():
        if (new := names.get(tensor)) is not None:
            name = new[0] if old.name == tensor else logical_name(new[0])
            sources[tensor] = replace(
                old, name=name, aliases=tuple(dict.fromkeys(n for n in new if n not in {name, new[0]}))
            )
    renamed = {old: sources[tensor] for tensor, old in table.sources.items()}
    called = {old.name: new.name for old, new in renamed.items()}

    def prefixed(tensor: str, old: Source) -> Source:
        new = names.get(tensor, (tensor,))[0]
        prefix = new.removesuffix(tensor) if new.endswith(tensor) else ""
        return renamed[old] if old in renamed else replace(old, name=prefix + old.name)

    folds = {
        tensor: Fold(
            prefixed(tensor, replace(fold.sources[0], name=fold.name)).name,
            tuple(prefixed(tensor, source) for source in fold.sources),
            fold.step,
        )
        for tensor, fold in table.folds.items()
    }
    refused = {
        tensor: Refusal(tuple(prefixed(tensor, source) for source in refusal.sources), refusal.reason)
        for tensor, refusal in table.refused.items()
    }
    tags = {**table.tags, **{source.name: table.tag(tensor) for tensor, source in sources.items()}}
    tags |= {fold.sources[0].name: table.tag(table.folds[tensor].sources[0].name) for tensor, fold in folds.items()}
    return replace(
        table,
        sources=sources,
        tags=tags,
        folds=folds,
        refused=refused,
        outside=tuple(renamed[source] for source in table.outside),
        shared=tuple(called[name] for name in table.shared),
        transient=frozenset(called.get(name, name) for name in table.transient),
    )
