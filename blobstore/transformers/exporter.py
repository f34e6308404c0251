"""transformers' ExecuTorch exporter, through `BlobStorePartitioner`: the same arguments, with weights in one data file."""

from __future__ import annotations

import copy
import os
import shutil
import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from executorch.exir import ExecutorchBackendConfig
from torch import nn
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.fx import Node
from torch.utils._pytree import tree_structure
from transformers import GenerationConfig
from transformers.exporters import exporter_executorch as theirs
from transformers.exporters.auto import register_backend
from transformers.exporters.base import ExportedModel
from transformers.exporters.exporter_dynamo import DynamoExporter
from transformers.exporters.utils import patch_attributes

from blobstore.core.errors import UnsupportedOperationError
from blobstore.core.formats.pte.program import read_program
from blobstore.lowering import BlobStorePartitioner
from blobstore.lowering.methods import rename
from blobstore.lowering.planning import Planning
from blobstore.lowering.save import save_program
from blobstore.transformers.runner import DATA_FILE, TAG, BlobStoreRunner, returned

__all__ = ["FORMAT", "BlobStoreExporter"]

FORMAT = "executorch-blobstore"
"""The `export_format` in `export.json`. transformers knows it once this package is imported."""

_lock = threading.Lock()


class _Tracing(DynamoExporter):  # type: ignore[misc]
    """Stands between transformers' tracing and its lowering, in the order in which Python looks up methods."""

    _root: nn.Module | None = None

    def export_program(self, model: Any, sample_inputs: MutableMapping[str, Any], config: Any) -> tuple[Any, Any]:
        program, metadata = super().export_program(model, sample_inputs, config=config)
        if self._root is not None and self._root is not model:
            rename(program, _names_in(self._root, model))
        metadata.out_constants = [*metadata.out_constants, *_drop_returned(program)]
        self._inputs = tuple(program.graph_signature.user_inputs)
        return program, metadata


class BlobStoreExporter(theirs.ExecutorchExporter, _Tracing):  # type: ignore[misc]
    """transformers' `ExecutorchExporter` with the same arguments and configurations, but all stages of a model share one
    `model.ptd`, in which weights have the names of the checkpoint.

    What it returns is transformers' `ExportedModel`: it runs when it is called, and `save_pretrained` writes the programs, the
    data file, and the configurations. `ExportedModel.from_pretrained` and `blobstore.transformers.load` read them again.

    Only the backend `xnnpack` is supported, because weights can only be changed there. A static key/value cache is returned
    as the tensors that were given: a program that changes its inputs does not return copies of them.

    Raises, when something is exported:
        UnsupportedOperationError: the configuration is for another backend.
        Everything that transformers' exporter raises.
    """

    export_format = FORMAT

    def export_program(self, model: Any, sample_inputs: MutableMapping[str, Any], config: Any) -> tuple[Any, Any]:
        """Export one graph, as transformers does it, with our partitioner, and with constants in the data file."""
        if config.backend != "xnnpack":
            raise UnsupportedOperationError(
                f"backend {config.backend!r}: weights can only be changed in programs for XNNPACK; use transformers' own "
                "ExecutorchExporter for other backends"
            )
        patches: list[tuple[Any, str, Callable[[Any], Any]]] = [
            (theirs, "_BACKEND_PREPARE", lambda table: {**table, config.backend: _wrapped(table[config.backend])}),
            (theirs, "_get_backend_config", self._with_data_file),
        ]
        with _lock, patch_attributes(patches):
            program, metadata = super().export_program(model, sample_inputs, config=config)
        return program, metadata

    def _with_data_file(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def backend_config(config: Any) -> Any:
            made = original(config) or ExecutorchBackendConfig()
            planning = Planning(made.memory_planning_pass, tuple(map(str, self._inputs)))
            return replace(made, external_constants=lambda node: TAG, memory_planning_pass=planning)

        return backend_config

    def export(self, model: Any, sample_inputs: MutableMapping[str, Any], config: Any) -> ExportedModel:
        with self._named_as_in(model):
            return super().export(model, sample_inputs, config)

    def export_for_generation(
        self,
        model: Any,
        sample_inputs: MutableMapping[str, Any],
        config: Any,
        *,
        generation_config: GenerationConfig | None = None,
        multi_token_decode: bool = False,
    ) -> ExportedModel:
        """As transformers' own, with two differences. A static cache has room for all tokens that `generation_config` asks for,
        if it says nothing else; transformers' has room for two. And the configuration that is saved has the model's own settings,
        such as its end tokens, where `generation_config` says nothing, as in the model's `generate`."""
        with self._named_as_in(model):
            return super().export_for_generation(
                model,
                sample_inputs,
                config,
                generation_config=_complete(generation_config, model, sample_inputs),
                multi_token_decode=multi_token_decode,
            )

    @contextmanager
    def _named_as_in(self, model: Any) -> Iterator[None]:
        self._root = model
        try:
            yield
        finally:
            self._root = None

    @classmethod
    def save_program(cls, program: Any, path: str | os.PathLike[str]) -> None:
        """Write a program, and add its weights to the data file beside it. One that was loaded is copied with its data
        file, as it was saved."""
        path = Path(path)
        if isinstance(program, Path):
            for source, target in ((program, path), (program.with_name(DATA_FILE), path.with_name(DATA_FILE))):
                if source.exists() and not (target.exists() and target.samefile(source)):
                    shutil.copyfile(source, target)
        else:
            save_program(program, path, path.parent)

    @classmethod
    def load_program(cls, path: str | os.PathLike[str]) -> Path:
        """The path of the program, which is loaded on the cache that its runner gets.

        Raises:
            FileAccessError, InvalidFileError: it cannot be opened, or is no program.
        """
        read_program(path)
        return Path(path)

    @classmethod
    def program_files(cls, filename: str) -> list[str]:
        return [filename, DATA_FILE]


def _wrapped(prepare: Callable[..., Any]) -> Callable[..., Any]:
    """transformers' preparation for a backend, whose partitioners are wrapped."""

    def prepared(model: Any, sample_inputs: Any) -> tuple[Any, Any, list[BlobStorePartitioner]]:
        model, sample_inputs, partitioners = prepare(model, sample_inputs)
        return model, sample_inputs, [BlobStorePartitioner(one, tag=TAG) for one in partitioners]

    return prepared


def _complete(generation: GenerationConfig | None, model: Any, sample_inputs: Any) -> GenerationConfig | None:
    """The configuration with what the model's own has, and with room in a static cache for its `max_new_tokens`, which
    transformers replaces while it captures inputs."""
    if generation is None:
        return None
    generation = copy.deepcopy(generation)
    generation.update(**model.generation_config.to_dict(), defaults_only=True)
    tokens, count = sample_inputs.get("input_ids"), generation.max_new_tokens
    is_static = "static" in (generation.cache_implementation or "")
    if is_static and generation.max_cache_len is None and tokens is not None and count is not None:
        generation.max_cache_len = int(tokens.shape[-1]) + count
    return generation


def _names_in(root: nn.Module, part: nn.Module) -> dict[str, tuple[str, ...]]:
    """The names in the whole model of the tensors of a part of it, by their names in the part; preferred ones first."""
    whole: dict[int, list[str]] = {}
    for name, tensor in _tensors(root):
        whole.setdefault(id(tensor), []).append(name)
    names = {}
    for name, tensor in _tensors(part):
        known = whole.get(id(tensor), [name])
        own = [other for other in known if other == name or other.endswith(f".{name}")]
        names[name] = tuple(dict.fromkeys((*own, *known)))
    return names


def _tensors(module: nn.Module) -> Iterator[tuple[str, Any]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _drop_returned(program: ExportedProgram) -> list[list[Any]]:
    """Take outputs out of a program that are inputs, such as a static key/value cache, which the program changes where it
    is: these are the caller's tensors already.

    Returns:
        The place of each among the outputs that the model returns, and which input it is, as `out_constants` has them.
    """
    signature = program.graph_signature
    inputs = {name: index for index, name in enumerate(signature.user_inputs) if isinstance(name, str)}
    output = program.graph_module.graph.output_node()
    origins = [inputs.get(_origin(node).name) if isinstance(node, Node) else None for node in output.args[0]]
    dropped = {place: which for place, which in enumerate(origins) if which is not None}
    if not dropped or {spec.kind for spec in signature.output_specs} != {OutputKind.USER_OUTPUT}:
        return []
    kept = [place for place, which in enumerate(origins) if which is None]
    output.args = (tuple(output.args[0][place] for place in kept),)
    signature.output_specs = [signature.output_specs[place] for place in kept]
    structure = tree_structure((0,) * len(kept))
    program.module_call_graph[0].signature.out_spec = structure
    program.graph_module.recompile()
    return [[place, returned(which)] for place, which in dropped.items()]


def _origin(node: Node) -> Node:
    """The node whose tensor another one is, after operators that change it in place."""
    while node.op == "call_function" and isinstance(node.target, OpOverload):
        first = next(iter(node.target._schema.arguments), None)
        if first is None or first.alias_info is None or not first.alias_info.is_write:
            break
        (node,) = node.all_input_nodes[:1]
    return node


register_backend(BlobStoreExporter, BlobStoreRunner)
