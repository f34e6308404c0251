"""Which tensors belong to an adapter, which two are a pair, and which weight they adapt: all of it by their names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blobstore.errors import AdapterError, BlobStoreError, InvalidTagError, LayoutError, UnsupportedDataError
from blobstore.store import check_tag

__all__ = ["AdapterTags", "Pair", "find_pairs", "is_lora", "node_form", "weight_names"]

_LORA = re.compile(r"(?:^|_)lora_[ab](?:_|$)")
_HALF = re.compile(r"(?P<module>(?:.*\.)?)lora_(?P<half>[ab])(?P<rest>(?:\..*)?)", re.IGNORECASE)
_PEFT = "base_model.model."


def node_form(name: str) -> str:
    """A tensor's name as nodes have it: lower case, with underscores for all but letters and digits."""
    return re.sub(r"[^0-9a-z]", "_", name.lower())


def is_lora(name: str) -> bool:
    """Whether a name has a part `lora_a` or `lora_b`, in either case; dotted, or as nodes have it."""
    return _LORA.search(node_form(name)) is not None


class AdapterTags:
    """Sends each tensor of a model to the file of the foundation or to that of the adapter.

    One object is used in both places of a lowering: `BlobStorePartitioner(..., tag=tags)`, which calls it with the names
    of tensors, and `ExecutorchBackendConfig(external_constants=tags)`, which calls it with nodes.

        tags = AdapterTags()
        edge = to_edge_transform_and_lower(exported, partitioner=[BlobStorePartitioner(XnnpackPartitioner(), tag=tags)])
        program = edge.to_executorch(ExecutorchBackendConfig(external_constants=tags))
        program.write_tensor_data_to_file(".")  # foundation.ptd, adapter.ptd

    Args:
        foundation, adapter: the files, without a folder; with or without `.ptd`.
        is_adapter: whether a tensor is the adapter's. It is called with the name in the one form that both places know:
            lower case, with underscores for dots, such as `layers_0_lora_a_weight`. Left out, `is_lora`.

    Raises:
        InvalidTagError: a file name is none, or the two are the same.
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
        """The file of a tensor: of its name, or of a node of a graph.

        Raises:
            UnsupportedDataError: it is neither.
        """
        name = tensor if isinstance(tensor, str) else getattr(tensor, "name", None)
        if not isinstance(name, str):
            raise UnsupportedDataError(f"expected a tensor's name or a node, found a {type(tensor).__qualname__}")
        if getattr(tensor, "op", "") == "placeholder":
            name = re.sub(r"^(p|b|c)_", "", name)  # what export puts before parameters, buffers and constants
        return self.adapter if self._is_adapter(node_form(name)) else self.foundation

    def __repr__(self) -> str:
        return f"<AdapterTags: {self.foundation}.ptd, {self.adapter}.ptd>"


@dataclass(frozen=True)
class Pair:
    """The two tensors of one adapted module; the weight of shape (out, in) becomes `W + scale * (b @ a)`.

    Attributes:
        module: the module's name.
        a, b: names of the tensors, of shapes (rank, in) and (out, rank).
        rank, in_features, out_features: their sizes.
    """

    module: str
    a: str
    b: str
    rank: int
    in_features: int
    out_features: int


def find_pairs(tensors: Mapping[str, Sequence[int]], origin: str) -> tuple[list[Pair], list[BlobStoreError]]:
    """The pairs among tensors, and what is wrong with the rest.

    Args:
        tensors: name to shape; those that are not LoRA's are passed over.
        origin: what messages call the file.

    Returns:
        The pairs in the order of their modules, and an AdapterError or LayoutError for each that is none.
    """
    halves: dict[tuple[str, str], dict[str, str]] = {}
    for name in tensors:
        if match := _HALF.fullmatch(name):
            both = halves.setdefault((match["module"].removesuffix("."), match["rest"]), {})
            both[match["half"].lower()] = name
    pairs: dict[str, Pair] = {}
    problems: list[BlobStoreError] = []
    for (module, _), both in sorted(halves.items()):
        if len(both) == 1:
            (half, name) = next(iter(both.items()))
            other = "lora_b" if half == "a" else "lora_a"
            problems.append(AdapterError(f"{origin}: '{name}' has no {other} beside it"))
            continue
        a, b = tuple(tensors[both["a"]]), tuple(tensors[both["b"]])
        if len(a) != 2 or len(b) != 2:
            problems.append(
                LayoutError(f"{origin}: '{both['a']}' {list(a)} and '{both['b']}' {list(b)} are not two matrices")
            )
        elif a[0] != b[1]:
            problems.append(
                LayoutError(f"{origin}: '{both['a']}' {list(a)} has rank {a[0]}, '{both['b']}' {list(b)} rank {b[1]}")
            )
        elif module in pairs:
            problems.append(
                AdapterError(f"{origin}: module '{module}' has two pairs, by '{pairs[module].a}' and '{both['a']}'")
            )
        else:
            pairs[module] = Pair(module, both["a"], both["b"], a[0], a[1], b[0])
    return list(pairs.values()), problems


def weight_names(module: str) -> list[str]:
    """What the weight of an adapted module may be called: as a plain layer, or wrapped by one with an adapter."""
    modules = [module]
    if module.startswith(_PEFT):
        modules.append(module.removeprefix(_PEFT))
    return [
        f"{path}{part}weight"
        for path in (f"{m}." if m else "" for m in modules)
        for part in ("", "base.", "base_layer.")
    ]
