"""What the names of tensors say: which belong to an adapter, and which two are a pair."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from blobstore.core.errors import InvalidTagError, UnsupportedDataError
from blobstore.core.reprs import fields_line, line, shorten
from blobstore.core.store import check_tag

__all__ = ["AdapterTags", "Pair", "is_lora", "node_form"]

_LORA = re.compile(r"(?:^|_)lora_[ab](?:_|$)")


def node_form(name: str) -> str:
    """The form of a tensor's name in graph nodes: lower case, with an underscore for all but letters and digits."""
    return re.sub(r"[^0-9a-z]", "_", name.lower())


def is_lora(name: str) -> bool:
    """Whether a name has a part `lora_a` or `lora_b`, in upper or lower case, with dots or in the form of nodes."""
    return _LORA.search(node_form(name)) is not None


class AdapterTags:
    """Assigns each tensor of a model to the data file of the foundation or to that of the adapter.

    The same object is used in both places of a lowering: `BlobStorePartitioner(..., tag=tags)` calls it with names of
    tensors, and `ExecutorchBackendConfig(external_constants=tags)` calls it with nodes.

        tags = AdapterTags()
        edge = to_edge_transform_and_lower(exported, partitioner=[BlobStorePartitioner(XnnpackPartitioner(), tag=tags)])
        program = edge.to_executorch(ExecutorchBackendConfig(external_constants=tags))
        program.write_tensor_data_to_file(".")  # foundation.ptd, adapter.ptd

    Args:
        foundation, adapter: the names of the files, without a folder; with or without `.ptd`.
        is_adapter: decides whether a tensor belongs to the adapter. It is called with the name in the form that both
            places know: lower case, with underscores for dots, such as `layers_0_lora_a_weight`. The default is
            `is_lora`.

    Raises:
        InvalidTagError: a name is not a plain file name, or both are the same.
    """

    def __init__(
        self,
        foundation: str = "foundation",
        adapter: str = "adapter",
        *,
        is_adapter: Callable[[str], bool] = is_lora,
    ) -> None:
        for tag in (foundation, adapter):
            check_tag(tag)
        self.foundation, self.adapter = foundation.removesuffix(".ptd"), adapter.removesuffix(".ptd")
        if self.foundation == self.adapter:
            raise InvalidTagError(f"the foundation and the adapter cannot both go to {self.foundation!r}")
        self._is_adapter = is_adapter

    def __call__(self, tensor: Any) -> str:
        """The file of a tensor, given its name or its node in a graph.

        Raises:
            UnsupportedDataError: the argument is neither.
        """
        name = tensor if isinstance(tensor, str) else getattr(tensor, "name", None)
        if not isinstance(name, str):
            raise UnsupportedDataError(f"expected a tensor's name or a node, found a {type(tensor).__qualname__}")
        if getattr(tensor, "op", "") == "placeholder":
            name = re.sub(r"^(p|b|c)_", "", name)  # the prefix that export gives parameters, buffers and constants
        return self.adapter if self._is_adapter(node_form(name)) else self.foundation

    def __repr__(self) -> str:
        return line("AdapterTags", "", f"{shorten(self.foundation)}.ptd", f"{shorten(self.adapter)}.ptd")


@dataclass(frozen=True)
class Pair:
    """The two tensors of an adapted module; its weight, of shape (out, in), becomes `W + scale * (b @ a)`.

    Attributes:
        module: the module's name.
        a, b: the names of the tensors, whose shapes are (rank, in) and (out, rank).
        rank, in_features, out_features: these sizes.
    """

    __repr__ = fields_line

    module: str
    a: str
    b: str
    rank: int
    in_features: int
    out_features: int
