"""Which tensors of several methods are one parameter, and the names of those that are not.

Methods of one module share their parameters by name. Methods of several modules, such as an encoder and a decoder, may
use one name for different parameters. The name of the method is then put in front of such a name, which often gives the
name in the module that contains both: `encoder.layer.weight`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from blobstore.core.errors import BlobStoreError, KeyConflictError
from blobstore.core.groups import Groups
from blobstore.logical.records import ModelTensor
from blobstore.lowering.marks import add_aliases
from blobstore.lowering.names import Fold, Refusal, identity, logical_name, same_bits
from blobstore.lowering.tables import NameTable

__all__ = ["check_constants", "qualify", "rename"]

_CONSTANTS = {InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR}


@dataclass(eq=False)
class _Parameter:
    """A parameter or constant of one method.

    Attributes:
        method: the method that has it.
        own: its name in the method's module.
        tensors: its tensors in the program, by their names there; a quantized parameter has several.
        names: all its names, the preferred one first; `qualify` changes them.
        known: whether the table names it. Otherwise exporting made up its name.
    """

    method: str
    own: str
    names: list[str]
    known: bool
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


def qualify(programs: Mapping[str, ExportedProgram], tables: Mapping[str, NameTable]) -> dict[str, NameTable]:
    """Give different parameters different names, in the tables and, for what no delegate takes, in the programs.

    Tensors of two methods are one parameter if they are the same memory. They are also one parameter if they have a name in
    common and equal contents, as in methods that were quantized separately and have copies. The exception is two methods
    that differ in another tensor with a common name: these are of different modules, where tensors that are equal now may
    differ later.

    Names of different parameters are replaced by `<method>.<name>`. A parameter that such methods share also gets these
    names.

    Raises:
        BlobStoreError: qualified names keep colliding, as with methods `a` and `a.a`.
    """
    parameters = [p for method in sorted(programs) for p in _parameters(method, programs[method], tables[method])]
    apart = _apart(parameters)
    classes = _classes(parameters, apart)
    # Each pass may make names that collide again, but not more often than there are methods.
    if all(_separate(classes) for _ in range(len(programs) + 1)):
        raise BlobStoreError(
            f"cannot find different names for the tensors of methods {', '.join(map(repr, programs))}; rename the methods"
        )
    _add_qualified(classes, apart)
    renamed: dict[str, dict[str, tuple[str, ...]]] = {method: {} for method in programs}
    for member, names in ((member, _all_names(members)) for members in classes for member in members):
        renamed[member.method] |= {tensor: _names_of(tensor, member, names) for tensor in member.tensors}
    for method, program in programs.items():
        rename(program, renamed[method])
    return {method: _rename_sources(tables[method], renamed[method]) for method in programs}


def check_constants(programs: Mapping[str, ExportedProgram], origin: str) -> None:
    """Raise KeyConflictError if two methods, as `to_executorch()` left them, have different external tensors of one name;
    ExecuTorch would keep one of them."""
    by_name: dict[str, tuple[str, torch.Tensor]] = {}
    for method, program in programs.items():
        for name, tensor in _external(program):
            other, first = by_name.setdefault(name, (method, tensor))
            if identity(first) != identity(tensor) and not same_bits(first, tensor):
                raise KeyConflictError(
                    f"{origin}: methods '{other}' and '{method}' have different tensors with the name '{name}', but a "
                    "data file can hold only one of them: export the methods from modules that use different names "
                    "(docs/howto/lowering.md)"
                )


def _external(program: ExportedProgram) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a program that go to data files, by name."""
    targets = {spec.arg.name: spec.target for spec in program.graph_signature.input_specs if spec.kind in _CONSTANTS}
    for node in program.graph_module.graph.nodes:
        if node.op == "placeholder" and node.meta.get("constant_tag"):
            name = targets.get(node.name)
            if name is not None and (tensor := _tensor(program, name)) is not None:
                yield name, tensor


def _parameters(method: str, program: ExportedProgram, table: NameTable) -> Iterable[_Parameter]:
    """The parameters of a program, without the buffers that the program changes itself."""
    changed = set(program.graph_signature.buffers_to_mutate.values())
    by_name: dict[str, _Parameter] = {}
    for spec in program.graph_signature.input_specs:
        name = spec.target
        if spec.kind not in _CONSTANTS or name is None or name in changed:
            continue
        tensor = _tensor(program, name)
        if tensor is None:
            continue
        own = logical_name(name)
        parameter = by_name.setdefault(own, _Parameter(method, own, [own], known=False))
        parameter.tensors[name] = tensor
        if (source := table.sources.get(name)) is not None:
            parameter.known = True
            parameter.names = list(dict.fromkeys((*parameter.names, *source.aliases)))
        if (whole := _tensor(program, own)) is not None:
            parameter.tensors[own] = whole  # the float weight of a quantized one
    return by_name.values()


def _tensor(program: ExportedProgram, name: str) -> torch.Tensor | None:
    tensor = program.state_dict.get(name, program.constants.get(name))
    return tensor if isinstance(tensor, torch.Tensor) else None


def _pairs(parameters: Iterable[_Parameter]) -> Iterable[tuple[_Parameter, _Parameter]]:
    """Pairs of parameters of two methods with a name or memory in common."""
    groups: dict[object, dict[_Parameter, None]] = {}
    for parameter in parameters:
        # Empty tensors have no memory that would say which parameter they are.
        for mark in (*parameter.names, *(identity(t) for t in parameter.tensors.values() if t.numel())):
            groups.setdefault(mark, {})[parameter] = None
    pairs = (pair for group in groups.values() for pair in combinations(group, 2))
    return dict.fromkeys(pair for pair in pairs if pair[0].method != pair[1].method)


def _apart(parameters: Iterable[_Parameter]) -> set[frozenset[str]]:
    """Pairs of methods that have different contents under one name."""
    return {
        frozenset((one.method, other.method))
        for one, other in _pairs(parameters)
        if one.known and other.known and not _is_same_memory(one, other) and not _is_equal(one, other)
    }


def _classes(parameters: list[_Parameter], apart: set[frozenset[str]]) -> list[list[_Parameter]]:
    """The parameters in lists of those that are one together, each in the order of `parameters`."""
    groups = Groups(parameters)
    first: dict[object, _Parameter] = {}
    for parameter in parameters:
        # A module may have two parameters on one memory, as after `load_state_dict(assign=True)`.
        for memory in (identity(tensor) for tensor in parameter.tensors.values() if tensor.numel()):
            groups.join((first.setdefault((parameter.method, memory), parameter), parameter))
    for one, other in _pairs(parameters):
        equal = frozenset((one.method, other.method)) not in apart and _is_equal(one, other)
        if equal or _is_same_memory(one, other):
            groups.join((one, other))
    return groups.members()


def _separate(classes: list[list[_Parameter]]) -> bool:
    """Qualify the names that several classes have. Returns whether there were any."""
    owners = _owners(classes)
    for members in classes:
        for member in members:
            member.names = [f"{member.method}.{n}" if len(owners[n]) > 1 else n for n in member.names]
    return any(len(numbers) > 1 for numbers in owners.values())


def _add_qualified(classes: list[list[_Parameter]], apart: set[frozenset[str]]) -> None:
    """Add qualified names to parameters that otherwise different methods share, unless other parameters have the names."""
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
    """Whether the tensors that both have are equal to the bit."""
    ours, theirs = (
        {_part(tensor, parameter.own): value for tensor, value in parameter.tensors.items()}
        for parameter in (one, other)
    )
    return all(same_bits(ours[part], theirs[part]) for part in ours.keys() & theirs.keys())


def _part(tensor: str, own: str) -> str:
    """The part of a parameter that a tensor of the program is, independent of the parameter's name."""
    return tensor.removeprefix(own) if tensor.startswith(own) else tensor.rpartition(".")[2]


def _all_names(members: Iterable[_Parameter]) -> tuple[str, ...]:
    """The names of one parameter in all methods, each once."""
    return tuple(dict.fromkeys(name for member in members for name in member.names))


def _names_of(tensor: str, member: _Parameter, names: tuple[str, ...]) -> tuple[str, ...]:
    """The new names of one tensor of a parameter, the preferred one first."""
    if tensor == member.own:
        return names
    if names[0].endswith(member.own):  # put `<method>.` before the names of its parts, too
        return (names[0].removesuffix(member.own) + tensor, *names[1:])
    return (f"{member.method}.{tensor}", *names[1:])


def rename(program: ExportedProgram, names: Mapping[str, tuple[str, ...]]) -> None:
    """Rename tensors of a program in place. The graph has names of its own, which stay.

    Args:
        program: the program.
        names: by the name in the program, all names of the tensor. The first one replaces the old name, and updates take
            the tensor under each of the others, too.
    """
    signature = program.graph_signature
    first = {old: new[0] for old, new in names.items()}
    aliases = {
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
        if node.op == "placeholder" and node.name in aliases:
            add_aliases(node, aliases[node.name])


def _rename_sources(table: NameTable, names: Mapping[str, tuple[str, ...]]) -> NameTable:
    """The table with new names for its sources, and with the same prefixes before the names of what was folded."""
    new = _NewNames(table, names)
    sources, renamed = new.sources, new.renamed
    called = {old.name: new.name for old, new in renamed.items()}
    folds = {tensor: new.fold(tensor, fold) for tensor, fold in table.folds.items()}
    refused = {tensor: Refusal(new.prefixed(tensor, *old.sources), old.reason) for tensor, old in table.refused.items()}
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


class _NewNames:
    """The sources of a table under their new names: `sources` by tensor, `renamed` by what they were."""

    def __init__(self, table: NameTable, names: Mapping[str, tuple[str, ...]]) -> None:
        self._names = names
        self.sources = {
            tensor: _renamed(old, tensor, names[tensor]) if tensor in names else old
            for tensor, old in table.sources.items()
        }
        self.renamed = {old: self.sources[tensor] for tensor, old in table.sources.items()}

    def prefixed(self, tensor: str, *sources: ModelTensor) -> tuple[ModelTensor, ...]:
        """What a tensor was folded from. What is no source of the table itself gets the prefix of the tensor."""
        new = self._names.get(tensor, (tensor,))[0]
        prefix = new.removesuffix(tensor) if new.endswith(tensor) else ""
        return tuple(self.renamed.get(old, replace(old, name=prefix + old.name)) for old in sources)

    def fold(self, tensor: str, fold: Fold) -> Fold:
        (named,) = self.prefixed(tensor, replace(fold.sources[0], name=fold.name))
        return Fold(named.name, self.prefixed(tensor, *fold.sources), fold.step)


def _renamed(source: ModelTensor, tensor: str, names: tuple[str, ...]) -> ModelTensor:
    """A source with new names; `tensor` is its old name in the program, `names` are the tensor's new ones."""
    name = names[0] if source.name == tensor else logical_name(names[0])
    aliases = (other for other in names if other not in {name, names[0]})
    return replace(source, name=name, aliases=tuple(dict.fromkeys(aliases)))
