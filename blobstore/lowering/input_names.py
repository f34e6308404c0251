"""The names of a method's inputs, which ExecuTorch has a place for and leaves empty."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import GraphModule

__all__ = ["NamingInputs", "input_names"]


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


class NamingInputs:
    """A memory planning pass, `inner`, that also records the names of inputs, where the graph has its tensors for the last
    time.

    The name is the `fully_qualified_name` of the tensor, which `TensorInfo::name()` returns in ExecuTorch.
    """

    def __init__(self, inner: Any, names: tuple[str, ...]) -> None:
        self._inner = inner
        self._names = names

    def run(self, graph_module: GraphModule, signature: Any = None) -> Any:
        """Called by `to_executorch()`; returns what the inner pass does."""
        from blobstore.runtime.executorch import ExtraTensorInfo, TensorSpec

        nodes = {node.name: node for node in graph_module.graph.nodes if node.op == "placeholder"}
        for placed, name in zip(signature.user_inputs if signature is not None else (), self._names, strict=False):
            node = nodes.get(placed) if isinstance(placed, str) else None  # a number stands there itself
            spec = None if node is None else node.meta.get("spec")
            if isinstance(spec, TensorSpec) and spec.extra_tensor_info is None:
                spec.extra_tensor_info = ExtraTensorInfo(fully_qualified_name=name)
        run = getattr(self._inner, "run", None)
        return run(graph_module, signature) if run is not None else self._inner(graph_module)

    @property
    def enable_non_cpu_memory_planning(self) -> bool:
        return bool(getattr(self._inner, "enable_non_cpu_memory_planning", False))

    @enable_non_cpu_memory_planning.setter
    def enable_non_cpu_memory_planning(self, value: bool) -> None:
        if hasattr(self._inner, "enable_non_cpu_memory_planning"):
            self._inner.enable_non_cpu_memory_planning = value
