"""Names of modules in PEFT's files and in programs, and the order of rows that the rotary embedding of a program needs.

PEFT names the modules of Hugging Face's model. A program has these names, or those of Llama's own checkpoints, which
ExecuTorch's exporter takes.

Names alone do not make a Llama: Hugging Face rotates the two halves of a head against each other, Llama's own code
neighbouring elements. So the rows of q and k lie in another order in its checkpoints, unless the program rotates as
Hugging Face does (`use_hf_rope` in the exporter's params.json). The tests compare both with eager models.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import numpy.typing as npt

from blobstore.core.errors import AdapterError, KeyNotFoundError, LayoutError

__all__ = ["PREFIX", "Names", "are_heads", "fused_parts", "hf_name", "is_rotated", "llama_name"]
__all__ += ["rotary_head_dim", "rows_as_hf", "rows_as_llama"]

PREFIX = "base_model.model."
"""What PEFT puts before the names of the base model."""

_LLAMA = {
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}
_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Modules of Hugging Face's models whose rows are those of several, such as Phi's, one after the other."""
_HF = {llama: hf for hf, llama in _LLAMA.items()}
_IN_LAYER = re.compile(r"(?:model\.)?(layers\.\d+)\.(\w+\.\w+)", re.ASCII)
_WRAPPERS = 16  # names of modules that an exporter puts before those of the model
_LAYER = re.compile(r"(?:^|\.)\d+\.", re.ASCII)
_ROTATED = re.compile(r"(?:.*\.)?layers\.\d+\.attention\.w[qk]", re.ASCII)


class Names:
    """The modules of a program, to find those that PEFT means.

    Args:
        modules: their names.
        what: the program's files, for messages.
    """

    def __init__(self, modules: Collection[str], what: str) -> None:
        self._modules = set(modules)
        self._what = what
        self._ends: dict[str, list[str]] = {}  # modules by each end of their names
        for module in sorted(self._modules):
            for match in itertools.islice(re.finditer(r"\.", module), _WRAPPERS):
                self._ends.setdefault(module[match.end() :], []).append(module)

    def find(self, name: str) -> str:
        """The module of a program that PEFT calls `name`, without its prefix.

        The name itself counts first, also with PEFT's prefix, then the one without the leading `model.`, then Llama's. If
        it has the number of a layer, it may stand behind names of modules that the exporter wrapped around the model.

        Raises:
            KeyNotFoundError: no tensor fits.
            AdapterError: there are several.
        """
        found = self._look_up(name)
        if found is None:
            listed = " or ".join(map(repr, self._forms(name)))
            raise KeyNotFoundError(f"module '{name}' is not in {self._what}, which has no {listed}")
        return found

    def has(self, name: str) -> bool:
        """Whether `find` finds a module, or several."""
        try:
            return self._look_up(name) is not None
        except AdapterError:
            return True

    @staticmethod
    def _forms(name: str) -> list[str]:
        return list(dict.fromkeys([name, PREFIX + name, name.removeprefix("model."), llama_name(name)]))

    def _look_up(self, name: str) -> str | None:
        for form in self._forms(name):
            if form in self._modules:
                return form
            ends = self._ends.get(form, []) if _LAYER.search(form) else []
            if len(ends) > 1:
                raise AdapterError(
                    f"module '{name}' may be any of {', '.join(map(repr, ends))} in {self._what}; use names= (--names)"
                )
            if ends:
                return ends[0]
        return None


def fused_parts(name: str) -> tuple[str, ...]:
    """The modules that a fused one consists of, in the order of their rows; none for another module."""
    before, dot, last = name.rpartition(".")
    return tuple(f"{before}{dot}{part}" for part in _FUSED.get(last, ()))


def llama_name(name: str) -> str:
    """What Llama's checkpoints call a module of Hugging Face's model; the same name if they have no other."""
    if name == "lm_head":
        return "output"
    match = _IN_LAYER.fullmatch(name)
    return f"{match[1]}.{_LLAMA[match[2]]}" if match and match[2] in _LLAMA else name


def hf_name(name: str) -> str:
    """What Hugging Face's model calls a module with a name of Llama's checkpoints. Other names stay the same."""
    if name == "output":
        return "lm_head"
    match = _IN_LAYER.fullmatch(name)
    return f"model.{match[1]}.{_HF[match[2]]}" if match and match[2] in _HF else name


def is_rotated(module: str) -> bool:
    """Whether a module of a program makes the q or k of a Llama, so that the order of its rows matters."""
    return _ROTATED.fullmatch(module) is not None


def rotary_head_dim(
    source: object,
    module: str,
    name: str,
    rows: int,
    size_of_head: Callable[[], int | None],
    what: object,
) -> int:
    """The size of a head if the rows of a module, called `name` by PEFT, are reordered, else 0.

    `size_of_head` is called for q and k only; it returns what `params_head_dim` does, or None if that is not known.

    Raises:
        AdapterError: the order is not known.
        LayoutError: the rows are no heads of this size.
    """
    if not is_rotated(module) or not name.endswith(("q_proj", "k_proj")):
        return 0
    size = size_of_head()
    if size is None:
        raise AdapterError(
            f"{source}: the rows of module '{module}' lie in another order if the program rotates neighbouring elements, and "
            f"{what} does not show whether it does; give the params.json of its export as params= (--params)"
        )
    if size and not are_heads(rows, size):
        raise LayoutError(f"{source}: module '{name}' has {rows} rows, which are no heads of {size}")
    return size


def are_heads(rows: int, head_dim: int) -> bool:
    """Whether rows can be reordered as heads of this size."""
    return rows > 0 and rows % head_dim == 0


def rows_as_llama(rows: npt.NDArray[Any], head_dim: int) -> npt.NDArray[Any]:
    """Rows in Hugging Face's order (for each head: first halves, second halves) as neighbours, for Llama's own code."""
    return np.ascontiguousarray(rows.reshape(-1, 2, head_dim // 2, rows.shape[1]).swapaxes(1, 2)).reshape(rows.shape)


def rows_as_hf(rows: npt.NDArray[Any], head_dim: int) -> npt.NDArray[Any]:
    """The reverse of `rows_as_llama`."""
    return np.ascontiguousarray(rows.reshape(-1, head_dim // 2, 2, rows.shape[1]).swapaxes(1, 2)).reshape(rows.shape)
