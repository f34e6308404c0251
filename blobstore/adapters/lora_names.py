"""What the names of tensors say: which belong to an adapter, which two are a pair, and which weight a pair adapts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blobstore.errors import AdapterError, BlobStoreError, InvalidTagError, LayoutError, UnsupportedDataError
from blobstore.store import check_tag

__all__ = [
    "AdapterTags",
    "Pair",
    "find_pairs",
    "is_lora",
    "no_adapter",
    "node_form",
    "quoted",
    "raise_first",
    "weight_names",
]

_LORA = re.compile(r"(?:^|_)lora_[ab](?:_|$)")
_HALF = re.compile(r"(?P<module>(?:.*\.)?)lora_(?P<half>[ab])(?P<rest>(?:\..*)?)", re.IGNORECASE)
_PEFT = "base_model.model."


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
        return f"<AdapterTags: {self.foundation}.ptd, {self.adapter}.ptd>"


@dataclass(frozen=True)
class Pair:
    """The two tensors of an adapted module; its weight, of shape (out, in), becomes `W + scale * (b @ a)`.

    Attributes:
        module: the module's name.
        a, b: the names of the tensors, whose shapes are (rank, in) and (out, rank).
        rank, in_features, out_features: these sizes.
    """

    module: str
    a: str
    b: str
    rank: int
    in_features: int
    out_features: int


def find_pairs(tensors: Mapping[str, Sequence[int]], origin: str) -> tuple[list[Pair], list[BlobStoreError]]:
    """Match the LoRA tensors with each other.

    Args:
        tensors: maps names to shapes; tensors that are not LoRA's are ignored.
        origin: the file as messages name it.

    Returns:
        The pairs in the order of their modules, and an AdapterError or LayoutError for each module without a valid
        pair.
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
                LayoutError(f"{origin}: '{both['a']}' {list(a)} and '{both['b']}' {list(b)} must both be matrices")
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


def no_adapter(origin: object) -> AdapterError:
    """The error for tensors without any LoRA tensor among them."""
    return AdapterError(f"{origin}: not an adapter: no tensor has a part lora_a or lora_b in its name")


def raise_first(problems: Iterable[BlobStoreError]) -> None:
    """Raise the first problem, if there is one."""
    for problem in problems:
        raise problem


def weight_names(module: str) -> list[str]:
    """The names that the weight of an adapted module may have: as a plain layer, or wrapped in one with an adapter."""
    modules = [module]
    if module.startswith(_PEFT):
        modules.append(module.removeprefix(_PEFT))
    return [
        f"{path}{part}weight"
        for path in (f"{m}." if m else "" for m in modules)
        for part in ("", "base.", "base_layer.")
    ]


def quoted(names: Iterable[str]) -> str:
    """Names for a message, in alphabetical order."""
    return ", ".join(f"'{name}'" for name in sorted(names))
