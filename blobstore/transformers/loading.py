"""Loading what `BlobStoreExporter` saved, on one cache, and generating with transformers' own loop."""

from __future__ import annotations

import copy
import inspect
import json
import os
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.exporters.base import EXPORT_MANIFEST_FILE, ExportedModel

from blobstore.core.errors import FileAccessError, InvalidFileError, UnsupportedOperationError
from blobstore.core.hub import local_folder
from blobstore.core.reprs import line, listed
from blobstore.runtime import BlobCache, PackedStore
from blobstore.transformers.exporter import FORMAT
from blobstore.transformers.runner import DATA_FILE, BlobStoreRunner

__all__ = ["StoredModel", "load"]

_CACHE_LENGTH = re.compile(r'\\"max_cache_len\\": (\d+)')
_STAGES = ("prefill", "decode")


def load(
    source: str | os.PathLike[str],
    *,
    cache: BlobCache | None = None,
    packed: PackedStore | str | os.PathLike[str] | None = None,
) -> StoredModel:
    """Load a model that was saved with `save_pretrained` after `BlobStoreExporter` exported it.

        model = load("exported")
        tokens = model.generate(input_ids, max_new_tokens=20)
        model.cache.update_state_dict(fine_tuned.state_dict())

    Args:
        source: the folder; or `user/name` or `user/name@revision` on the Hub, which stands for its folder in the local cache of
            `huggingface_hub`. Nothing is downloaded.
        cache: holds the weights; by default a new one on `model.ptd`. Several models can be on one cache.
        packed: as for `BlobCache`, if there is no `cache`.

    Raises:
        FileAccessError: the folder or one of its files is missing; the message says which.
        InvalidFileError: `export.json` is no list of programs of this exporter.
        Everything that `BlobCache` and `Program` raise.
    """
    folder = local_folder(source, [EXPORT_MANIFEST_FILE, DATA_FILE])
    needed = _programs(folder / EXPORT_MANIFEST_FILE)
    for name in [*needed, *([] if cache is not None else [DATA_FILE])]:
        _check_there(folder / name)
    if cache is None:
        cache = BlobCache(folder / DATA_FILE, packed=packed)
    return StoredModel(ExportedModel.from_pretrained(folder, local_files_only=True, cache=cache), cache, folder)


def _programs(manifest: Path) -> list[str]:
    try:
        found = json.loads(manifest.read_text(encoding="utf-8"))
        kind = found["export_format"]
        files = [str(one["file"]) for one in found["components"].values()]
    except OSError as error:
        raise FileAccessError(manifest, error) from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise InvalidFileError(manifest, f"not what transformers' exporters write: {error!r}") from None
    if kind != FORMAT:
        raise InvalidFileError(manifest, f"expected the format {FORMAT!r}, found {kind!r}")
    return files


def _check_there(path: Path) -> None:
    try:
        path.stat()
    except OSError as error:
        raise FileAccessError(path, error) from None


class StoredModel:
    """A model whose stages run on one cache.

    Attributes:
        exported: transformers' `ExportedModel`: its `components`, `runners` and `config`. A model of one stage can be called.
        cache: the weights, by the names of the checkpoint. Updates, merged adapters of PEFT and reverts work as on any
            `BlobCache`, and every stage uses them at its next call.
        folder: where it was loaded from.
    """

    def __init__(self, exported: ExportedModel, cache: BlobCache, folder: Path) -> None:
        self.exported = exported
        self.cache = cache
        self.folder = folder
        self._generator: Any = None

    @property
    def runners(self) -> dict[str, BlobStoreRunner]:
        """The stages by name. Each takes what the model's `forward` took when it was exported."""
        return self.exported.runners  # type: ignore[no-any-return]

    def __call__(self, **kwargs: Any) -> Any:
        """Run a model of one stage, as transformers' `ExportedModel` does."""
        return self.exported(**kwargs)

    def generate(self, inputs: torch.Tensor | None = None, **kwargs: Any) -> Any:
        """transformers' own `generate` with its arguments: its loop, its sampling, its key/value cache, and its stopping
        criteria call the stages `prefill` and `decode`.

        A key/value cache that is given as `cache` stays the caller's: both stages change it, and a second call goes on with it, if
        the stage `decode` takes as many tokens.

        Raises:
            UnsupportedOperationError: the model has no such stages, or has an encoder, which transformers does not export.
            InputError: a program was exported for other lengths; export with `dynamic_shapes` for several.
            Everything that transformers' `generate` raises.
        """
        if self._generator is None:
            self._generator = _generator(self)
        generator, generation = self._generator, self._generator.generation_config
        generator.calls = 0
        if kwargs.get("cache") is not None:  # the configuration would have generate make another one
            generator.generation_config = copy.deepcopy(generation)
            generator.generation_config.update(cache_implementation=None, max_cache_len=None)
        try:
            with torch.no_grad():
                return generator.generate(inputs, **kwargs)
        finally:
            generator.generation_config = generation

    def __repr__(self) -> str:
        return line("StoredModel", self.folder, listed(self.exported.components), self.cache.name)


def _generator(model: StoredModel) -> Any:
    """A model of transformers' own class without weights, whose `forward` calls the stages."""
    runners = model.runners
    if not set(_STAGES) <= set(runners) or model.exported.config.is_encoder_decoder:
        raise UnsupportedOperationError(
            f"{model.folder}: generate() needs the stages 'prefill' and 'decode' of a model without an encoder, found "
            f"{listed(runners)}; call the runners"
        )
    metadata = runners["prefill"].metadata
    architecture = getattr(transformers, metadata.architecture, None)
    if architecture is None:
        raise UnsupportedOperationError(f"{model.folder}: transformers has no class {metadata.architecture!r}")

    def forward(self: Any, **kwargs: Any) -> Any:
        stage = runners["decode" if self.calls or _is_filled(kwargs.get("cache")) else "prefill"]
        self.calls += 1
        return stage(**{name: value for name, value in kwargs.items() if name in stage.metadata.kwargs})

    own = {
        "forward": forward,
        "device": property(lambda self: torch.device("cpu")),
        "dtype": property(lambda self: runners["prefill"].dtype),
    }
    with torch.device("meta"):
        generator = type(architecture)(f"Stored{architecture.__name__}", (architecture,), own)(model.exported.config)
    forward.__signature__ = inspect.signature(architecture.forward)  # type: ignore[attr-defined]
    generator.eval()
    if model.exported.generation_config is not None:
        generator.generation_config = model.exported.generation_config
    lengths = [int(length) for length in _CACHE_LENGTH.findall(metadata.in_spec or "")]
    if lengths:  # a static cache has one length in all calls, which this is transformers' own way to say
        generator._previous_max_cache_length = max(lengths)
    return generator


def _is_filled(cache: Any) -> bool:
    length = getattr(cache, "get_seq_length", None)
    return length is not None and bool(length())
