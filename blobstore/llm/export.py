"""ExecuTorch's `export_llm`, through `BlobStorePartitioner`: the same configuration, with weights in files of their own."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from blobstore.adapters import AdapterTags
from blobstore.core.constants import SCALE_KEY
from blobstore.core.disk.kinds import Format
from blobstore.core.disk.staging import Staging
from blobstore.core.errors import UnsupportedDataError, UnsupportedOperationError
from blobstore.core.store import check_tag
from blobstore.llm.names import checkpoint_names, restore_checkpoint_names
from blobstore.llm.room import ROOM, add_room, zeros_for
from blobstore.lowering import BlobStorePartitioner, restore_names
from blobstore.lowering.names import Tag
from blobstore.lowering.save import save_program
from blobstore.runtime.executorch import LlmConfig, LLMEdgeManager, LoRALinear, convert_weights, export_llama_lib

__all__ = ["export_llm"]

_lock = threading.Lock()


def export_llm(config: LlmConfig, *, room: Mapping[str, Any] | None = None) -> Path:
    """Export a language model as ExecuTorch's `export_llm` does, so that its weights can be changed by name.

    The program goes to the place that `export_llm` gives it, the weights to data files in `export.output_dir`. Other
    programs that were exported to these files keep their weights, and share those that are equal.

    Args:
        config: what `export_llm` takes. Weights of LoRA adapters, which have `lora_a` or `lora_b` in their names, go to
            `export.lora_weights_file`, and all others to `export.foundation_weights_file`, each with or without `.ptd`.
            Left out, these are `<program>_lora.ptd` and `foundation.ptd`. If both are the same, so is the file. The
            object is not changed.
        room: room for adapters, in place of one in `base.lora_config`: `{"r": 64, "modules": ["q_proj", "v_proj"]}` lets the
            program take adapters of PEFT of at most this rank at these modules, which may also be the fused ones of Phi.
            Until then it computes what the checkpoint alone does. The program multiplies with 1; with `alpha`, which is
            optional, with alpha / r.

    Returns:
        The path of the program.

    Raises:
        UnsupportedDataError: `config` is not an `LlmConfig`, or `room` is something else.
        UnsupportedOperationError: it enables another backend than XNNPACK, or none, so that no weights could be changed; or
            there is both room and an adapter, or a module of `room` can have no adapter in ExecuTorch's models.
        InvalidTagError: the name of a data file is not a plain file name.
        KeyConflictError: another program in the folder uses other contents of a weight in one of the data files.
        FileAccessError, OutputPathError: as for `save_programs`.
        MissingDependencyError: the installed ExecuTorch has another exporter.
        Everything that ExecuTorch's exporter raises.
    """
    if not isinstance(config, LlmConfig):
        raise UnsupportedDataError(f"expected an LlmConfig, found a {type(config).__qualname__}")
    config = copy.deepcopy(config)
    _check_backend(config)
    if room is not None:
        add_room(config, room)
    tag = _tag(config)
    if config.export.output_name:
        _check_place(_place(config.export.output_name, config.export.output_dir))
    config.export.foundation_weights_file = config.export.lora_weights_file = None  # ours instead of the exporter's
    with _wrapped(tag), _with_room(config):
        return Path(export_llama_lib.export_llama(config))


def _check_backend(config: LlmConfig) -> None:
    """Check that XNNPACK and nothing else is enabled."""
    backends = vars(config.backend)
    others = sorted(
        name for name, backend in backends.items() if getattr(backend, "enabled", False) and name != "xnnpack"
    )
    if others:
        raise UnsupportedOperationError(
            f"backend.{others[0]}.enabled: weights can only be changed in programs for XNNPACK; use ExecuTorch's own "
            "export_llm for other backends"
        )
    quantizes = config.quantization.pt2e_quantize is not None
    if not (config.backend.xnnpack.enabled or quantizes):
        raise UnsupportedOperationError("backend.xnnpack.enabled is false; set it to true")


def _place(name: str, folder: str) -> Path:
    """Where ExecuTorch's exporter writes a program of this name."""
    return Path(name if name.endswith(".pte") else f"{folder}/{name}.pte")


def _check_place(path: Path) -> None:
    """Check before the minutes of an export that its program can be written.

    Raises:
        FileAccessError, OutputPathError: it cannot.
    """
    with Staging(dry_run=True) as staging, staging.open(path, kind=Format.PTE):
        pass


def _tag(config: LlmConfig) -> Tag:
    """The data file of each weight.

    Raises:
        InvalidTagError: the name of a file is not a plain file name.
    """
    program = Path(config.export.output_name or config.base.model_class.value).name.removesuffix(".pte")
    foundation = config.export.foundation_weights_file or "foundation"
    adapter = config.export.lora_weights_file or f"{program}_lora"
    for name in (foundation, adapter):
        check_tag(name)
    foundation, adapter = foundation.removesuffix(".ptd"), adapter.removesuffix(".ptd")
    return foundation if foundation == adapter else AdapterTags(foundation, adapter)


@contextmanager
def _wrapped(tag: Tag) -> Iterator[None]:
    """Let ExecuTorch's exporter use the wrapped partitioners, and write the data files as given by `tag`."""
    stock = export_llama_lib.get_xnnpack_partitioner

    def partitioner(*args: Any, **kwargs: Any) -> BlobStorePartitioner:
        return BlobStorePartitioner(stock(*args, **kwargs), tag=tag)

    def manager(*args: Any, **kwargs: Any) -> _Manager:
        return _Manager(tag, *args, **kwargs)

    names = {"get_xnnpack_partitioner": partitioner, "LLMEdgeManager": manager}
    with _lock:
        kept = {name: getattr(export_llama_lib, name) for name in names}
        vars(export_llama_lib).update(names)
        try:
            yield
        finally:
            vars(export_llama_lib).update(kept)


@contextmanager
def _with_room(config: LlmConfig) -> Iterator[None]:
    """Let ExecuTorch's exporter load zeros in place of the adapter that `add_room` named."""
    stock = convert_weights.load_and_convert_unsloth_to_meta

    def load(checkpoint_path: str) -> Any:
        return zeros_for(config) if checkpoint_path == ROOM else stock(checkpoint_path)

    convert_weights.load_and_convert_unsloth_to_meta = load
    try:
        yield
    finally:
        convert_weights.load_and_convert_unsloth_to_meta = stock


class _Manager(LLMEdgeManager):  # type: ignore[misc]
    """Exports a model with the names of its checkpoint, and saves its weights to data files, by the `tag` of each."""

    def __init__(self, tag: Tag, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._file_of: Callable[[Any], str | None] = tag if callable(tag) else lambda node: tag
        self._names: dict[str, tuple[str, ...]] = {}
        self._scales: set[float] = set()

    def _export(self, module: Any = None) -> Any:
        """Export the model or, the second time, the graph that was made of it, which is the one that is lowered."""
        program = super()._export(module)
        if module is None:
            self._names = checkpoint_names(self.model, LoRALinear)
            self._scales = {one.alpha / one.rank for one in self.model.modules() if isinstance(one, LoRALinear)}
        else:
            restore_checkpoint_names(program, self._names)
        return program

    def pt2e_quantize(self, quantizers: Any) -> LLMEdgeManager:
        """Quantize the graph, and restore the names that quantizing its weights takes from them."""
        super().pt2e_quantize(quantizers)
        if quantizers:
            restore_names(self.pre_autograd_graph_module, self.model)
        return self

    def to_executorch(
        self, passes: Any = None, external_constants_tag: Any = None, share_mutable_buffers: bool = False
    ) -> LLMEdgeManager:
        """Lower to ExecuTorch's format, with all constants outside of delegates in the data files."""
        return super().to_executorch(passes, external_constants_tag or self._file_of, share_mutable_buffers)

    def save_to_pte(self, output_name: str) -> None:
        """Write the program and its data files. All are complete, or, after an error, as they were before.

        The adapter's file records what the program multiplies an adapter with, so that others can be scaled to it.
        """
        path = _place(output_name, self.output_dir)
        adapter, scales = self._file_of("lora_a_weight"), [repr(scale) for scale in self._scales]
        metadata = {f"{adapter}.ptd": {SCALE_KEY: scales[0]}} if adapter and len(scales) == 1 else {}
        save_program(self.export_program, path, self.output_dir, metadata=metadata)
        self._saved_pte_filename = str(path)
