"""Runs one exported program on a cache, for transformers' `ExportedModel`."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as trees
from transformers.exporters.exporter_dynamo import is_cache_object
from transformers.exporters.metadata import ExportMetadata, load_treespec
from transformers.exporters.runners.base import ModelRunner

from blobstore.core.errors import InputError
from blobstore.core.reprs import count, listed
from blobstore.lowering.save import save_program
from blobstore.runtime import BlobCache, Program

__all__ = ["DATA_FILE", "TAG", "BlobStoreRunner", "returned"]

TAG = "model"
"""What all weights are tagged with."""

DATA_FILE = f"{TAG}.ptd"
"""The data file that all stages of a model share."""

_RETURNED = re.compile(r"blobstore: input (\d+)")


def returned(index: int) -> str:
    """What `out_constants` has for an output that is input `index` of the program, which the program changes."""
    return f"blobstore: input {index}"


class BlobStoreRunner(ModelRunner):  # type: ignore[misc]
    """Runs a program as transformers' `ModelRunner` does, on a `BlobCache` that other programs can share.

        ExportedModel.from_pretrained("exported", cache=BlobCache("exported/model.ptd"))

    As in eager mode, a key/value cache that is given is the object that is returned, and its tensors are changed where they
    are, if they are contiguous. The caller owns it.

    Attributes:
        program: the program.
        cache: the cache that it runs on.
    """

    def __init__(self, program: Program, metadata: ExportMetadata) -> None:
        super().__init__(metadata)
        self.program = program
        self.cache: BlobCache = program.cache
        self.in_spec = load_treespec(metadata.in_spec)
        self._method = program.load_method()
        self._returned = {
            leaf: int(match[1])
            for leaf, value in metadata.out_constants
            if isinstance(value, str) and (match := _RETURNED.fullmatch(value))
        }
        self._own = self.out_spec.num_leaves - len(self.out_constants)  # behind the inputs that the program changes

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @classmethod
    def from_program(
        cls, program: Any, metadata: ExportMetadata, device: Any = None, *, cache: BlobCache | None = None
    ) -> BlobStoreRunner:
        """A runner for what an export returned, or for the path of what was saved.

        Args:
            program: see above.
            metadata: what the exporter recorded.
            device: not used; programs for XNNPACK run on the CPU.
            cache: holds the weights; by default one of this program's own, on the data file beside it.
        """
        if isinstance(program, Path):
            return cls(Program(program, cache or BlobCache(_beside(program))), metadata)
        with tempfile.TemporaryDirectory() as folder:  # what is mapped stays after its name is gone
            path = Path(folder, "model.pte")
            save_program(program, path, folder)
            return cls(Program(path, cache or BlobCache(_beside(path))), metadata)

    def __call__(self, share_inputs: bool = True, share_outputs: bool = False, **kwargs: Any) -> Any:
        """Run the program. Outputs are copies, or with `share_outputs` memory that the next call overwrites."""
        feed = [_value(leaf, share_inputs) for leaf in self._flat({**self.metadata.in_constants, **kwargs})]
        self.out_constants.update({leaf: feed[index] for leaf, index in self._returned.items()})
        result = self.unflatten(self._run(feed, share_outputs))
        self._give_back(result, kwargs)
        return result

    def _flat(self, kwargs: dict[str, Any]) -> list[Any]:
        """The leaves of all arguments, in the order in which the program takes them.

        A cache has settings beside its tensors, such as who made it. The program knows none of them, so only the number of
        tensors is compared here, and by the program their shapes.
        """
        spec = self.in_spec.child(1)
        leaves: list[Any] = []
        for name, wanted in zip(spec.context, spec.children(), strict=True):
            if name not in kwargs:
                raise InputError(
                    f"{self.program.path}: the argument {name!r} is missing; there are {listed(spec.context)}"
                )
            found = trees.tree_leaves(kwargs[name])
            if len(found) != wanted.num_leaves:
                raise InputError(
                    f"{self.program.path}: the argument {name!r} has {count(len(found), 'tensor')}, the program takes "
                    f"{wanted.num_leaves}"
                )
            leaves += found
        return leaves

    def _run(self, feed: list[Any], share_outputs: bool) -> list[Any]:
        """The outputs of a call without those that are changed inputs, which come first."""
        outputs = len(self._method.outputs)
        if outputs == self._own:
            return self._method.execute(*feed)
        self._method.call_first(0, *feed)
        own = [self._method.output_memory(index) for index in range(outputs - self._own, outputs)]
        return own if share_outputs else [output.clone() for output in own]

    def _give_back(self, result: Any, kwargs: dict[str, Any]) -> None:
        """Put each cache that was given in place of the equal one that was made of the outputs, in what the model returned."""
        for name, given in kwargs.items():
            made = result.get(name) if is_cache_object(given) and hasattr(result, "get") else None
            if type(made) is not type(given):
                continue
            if (theirs := _lengths(given)) != (ours := _lengths(made)):
                raise InputError(
                    f"{self.program.path}: the argument {name!r} has room for {listed(theirs)} tokens, the program for "
                    f"{listed(ours)}"
                )
            vars(given).update(vars(made))
            result[name] = given


def _lengths(cache: Any) -> list[str]:
    """How many tokens the layers of a static cache have room for."""
    lengths = (getattr(layer, "max_cache_len", None) for layer in getattr(cache, "layers", ()))
    return list(dict.fromkeys(str(length) for length in lengths if length is not None))


def _beside(program: Path) -> list[Path]:
    """The data file beside a program, if there is one: a program without weights has none."""
    data = program.with_name(DATA_FILE)
    return [data] if data.exists() else []


def _value(leaf: Any, share: bool) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.contiguous() if share else leaf.clone(memory_format=torch.contiguous_format)
    return None if isinstance(leaf, str) else leaf  # a constant of the program, whose place takes None
