"""Notes in a graph about its tensors, under the `custom` metadata of nodes, which later stages of lowering read.

Exporting, saving and decomposing a program keep that metadata.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from blobstore.core.memory.layout import ScalarType
from blobstore.logical.records import ModelTensor, Operation, Step
from blobstore.lowering.names import Fold, identity

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Node

__all__ = ["add_aliases", "aliases_of", "mark", "mark_aliases", "marks", "names_of_tensors"]

_MARK = "blobstore.names"
"""The key at an operator under which `restore_names` notes what the operator's tensors are."""

_ALIASES = "blobstore.aliases"
"""The key at a placeholder for all names of its tensor, each with whether a state dict has it. Decompositions drop all
names of a tied tensor but one from the state dict."""


def mark(node: Node, name: str, origin: Fold | str | None) -> None:
    """Note at an operator what one of its tensors is.

    Args:
        node: uses the tensor.
        name: of the tensor in the graph.
        origin: None for the model's own tensor; otherwise what it was folded of, or why it cannot be changed.
    """
    custom = node.meta.get("custom") or {}
    noted = json.loads(custom.get(_MARK, "{}"))
    if isinstance(origin, Fold):
        sources = [[source.name, int(source.scalar_type), source.sizes] for source in origin.sources]
        step = [int(origin.step.operation), origin.step.ints, origin.step.floats]
        noted[name] = {"name": origin.name, "sources": sources, "step": step}
    else:
        noted[name] = origin
    node.meta["custom"] = {**custom, _MARK: json.dumps(noted)}


def marks(nodes: Iterable[Node]) -> dict[str, Fold | str | None]:
    """What `mark` noted, by the name of the tensor in the graph."""
    by_name: dict[str, Fold | str | None] = {}
    for node in nodes:
        for name, value in json.loads((node.meta.get("custom") or {}).get(_MARK, "{}")).items():
            if isinstance(value, dict):
                sources = [
                    ModelTensor(source, ScalarType(kind), tuple(sizes)) for source, kind, sizes in value["sources"]
                ]
                operation, ints, floats = value["step"]
                step = Step(Operation(operation), tuple(ints), tuple(floats))
                by_name[name] = Fold(value["name"], tuple(sources), step)
            else:
                by_name[name] = value
    return by_name


def mark_aliases(program: ExportedProgram) -> None:
    """Note at each placeholder the other names of its tensor.

    Args:
        program: as `torch.export.export` returned it; only metadata of its nodes is added.
    """
    signature = program.graph_signature
    inputs = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    names_of = names_of_tensors(program)
    for node in program.graph.nodes:
        if node.op == "placeholder" and len(names := names_of.get(inputs.get(node.name, ""), ())) > 1:
            add_aliases(node, {name: name in program.state_dict for name in names})


def add_aliases(placeholder: Node, names: Mapping[str, bool]) -> None:
    """Put further names before those that a placeholder has noted, each with whether a state dict has it."""
    placeholder.meta["custom"] = {
        **placeholder.meta.get("custom", {}),
        _ALIASES: {**names, **aliases_of(placeholder)},
    }


def aliases_of(placeholder: Node) -> dict[str, bool]:
    """The names that a placeholder has noted, each with whether a state dict has it."""
    return dict((placeholder.meta.get("custom") or {}).get(_ALIASES, {}))


def names_of_tensors(program: ExportedProgram) -> dict[str, tuple[str, ...]]:
    """All names of each tensor of a program, by each of them."""
    groups: dict[tuple[object, ...], list[str]] = {}
    transient = {name: program.constants.get(name) for name in program.graph_signature.non_persistent_buffers}
    for name, tensor in {**program.state_dict, **transient}.items():
        if tensor is not None:
            groups.setdefault(identity(tensor), []).append(name)
    return {name: tuple(group) for group in groups.values() for name in group}
