"""What a graph gets before its memory is planned, where it has its tensors for the last time."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import GraphModule

__all__ = ["Planning", "input_names"]


def input_names(module: nn.Module, exported: ExportedProgram) -> tuple[str, ...]:
    """The parameters of a module's `forward`, one for each input of the method.

    Nothing, if an argument is a list or the like, so that it became several inputs; or if a parameter or buffer of the
    module has one of the names, by which ExecuTorch's `get_attribute` would then find the input.
    """
    parameters = inspect.signature(module.forward).parameters.values()
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [parameter.name for parameter in parameters if parameter.kind in named]
    arguments, _ = exported.example_inputs or ((), {})
    inputs = exported.graph_signature.user_inputs
    names = names[: len(inputs)]
    if (
        len(inputs) != len(arguments)
        or len(names) < len(inputs)
        or set(names) & {*exported.state_dict, *exported.constants}
    ):
        return ()
    return tuple(names)


class Planning:
    """A memory planning pass, `inner`, before which inputs get their names, for which ExecuTorch has a place and leaves it empty:
    the `fully_qualified_name` that `TensorInfo::name()` returns. And views of constants in data files are kept apart from these.
    """

    def __init__(self, inner: Any, names: tuple[str, ...]) -> None:
        self._inner = inner
        self._names = names

    def run(self, graph_module: GraphModule, signature: Any = None) -> Any:
        """Called by `to_executorch()`; returns what the inner pass does."""
        self._name_inputs(graph_module, signature)
        _keep_views_apart(graph_module)
        run = getattr(self._inner, "run", None)
        return run(graph_module, signature) if run is not None else self._inner(graph_module)

    def _name_inputs(self, graph_module: GraphModule, signature: Any) -> None:
        from blobstore.runtime.executorch import ExtraTensorInfo, TensorSpec

        nodes = {node.name: node for node in graph_module.graph.nodes if node.op == "placeholder"}
        for placed, name in zip(signature.user_inputs if signature is not None else (), self._names, strict=False):
            node = nodes.get(placed) if isinstance(placed, str) else None  # a number stands there itself
            spec = None if node is None else node.meta.get("spec")
            if isinstance(spec, TensorSpec) and spec.extra_tensor_info is None:
                spec.extra_tensor_info = ExtraTensorInfo(fully_qualified_name=name)

    @property
    def enable_non_cpu_memory_planning(self) -> bool:
        return bool(getattr(self._inner, "enable_non_cpu_memory_planning", False))

    @enable_non_cpu_memory_planning.setter
    def enable_non_cpu_memory_planning(self, value: bool) -> None:
        if hasattr(self._inner, "enable_non_cpu_memory_planning"):
            self._inner.enable_non_cpu_memory_planning = value


def _keep_views_apart(graph_module: GraphModule) -> None:
    """Describe views of constants in data files as tensors without memory, which `et_view` gives that of the constant at runtime.

    ExecuTorch 1.5.1 takes them for the constant in another shape, which its data file does not have. Planning leaves views out.
    """
    from blobstore.runtime.executorch import TensorSpec, view

    for node in graph_module.graph.nodes:
        if node.target is view and node.args[0].meta.get("constant_tag") is not None:
            node.meta["spec"] = TensorSpec.from_tensor(node.meta["val"])
