"""A token through transformers' exporter and ours: what a large key/value cache costs."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, StaticCache
from transformers.exporters.base import ExportedModel
from transformers.exporters.configs import ExecutorchConfig
from transformers.exporters.exporter_executorch import ExecutorchExporter

from benchmarks.harness import Row, in_own_process, mib, ratio_row, side_by_side
from blobstore.lowering import quiet
from blobstore.runtime import BlobCache
from blobstore.transformers import BlobStoreExporter

TITLE = "A model of transformers with a static key/value cache"
_LENGTH = 2048
_CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=256,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=8,
    num_key_value_heads=8,
    max_position_embeddings=_LENGTH,
)
_PROMPT = torch.tensor([[5, 6, 7, 8]])


def rows(folder: Path) -> Iterator[Row]:
    """Measure everything; `folder` is for files."""
    with quiet():
        in_own_process(_write, folder)  # an application does not export
        theirs = ExportedModel.from_pretrained(folder / "theirs")
        ours = ExportedModel.from_pretrained(folder / "ours", cache=BlobCache(folder / "ours/model.ptd"))
        steps = [_Decoding(ours), _Decoding(theirs)]
        assert torch.allclose(steps[0]().logits, steps[1]().logits, rtol=1e-4, atol=1e-5)
        new = [step.new_memory() for step in steps]
        times = side_by_side(*steps, rounds=31, clock=time.process_time)
    size = mib(2 * _LENGTH * _CONFIG.hidden_size * 4, 0)
    yield Row(
        f"memory that a token makes anew, with a key/value cache of {size}",
        f"{new[0]:,} bytes against {new[1]:,} with transformers' runner",
        "the logits",
        new[0] == _CONFIG.vocab_size * 4,
    )
    yield ratio_row("its processor time, against transformers' runner", *times, at_most=1.05)


def _write(folder: Path) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(_CONFIG).eval()
    generation = GenerationConfig(
        cache_implementation="static", max_cache_len=_LENGTH, max_new_tokens=8, do_sample=False
    )
    inputs = {"input_ids": _PROMPT, "attention_mask": torch.ones_like(_PROMPT)}
    with quiet():
        for name, exporter in (("theirs", ExecutorchExporter()), ("ours", BlobStoreExporter())):
            exporter.export_for_generation(
                copy.deepcopy(model), inputs, ExecutorchConfig(), generation_config=generation
            ).save_pretrained(folder / name)


class _Decoding:
    """Decodes the token behind the prompt, on the cache that the last call returned."""

    def __init__(self, model: ExportedModel) -> None:
        self.decode = model.runners["decode"]
        at = torch.tensor([[_PROMPT.shape[1]]])
        given = StaticCache(config=_CONFIG, max_cache_len=_LENGTH)
        position = torch.arange(_PROMPT.shape[1])[None]
        self.cache = model.runners["prefill"](input_ids=_PROMPT, position_ids=position, cache=given).cache
        mask = (torch.arange(_LENGTH) <= at)[None, None]
        self.inputs = {"input_ids": torch.tensor([[9]]), "attention_mask": mask, "position_ids": at}

    def __call__(self) -> Any:
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(_PROMPT.shape[1])  # so that each call does the same
        out = self.decode(**self.inputs, cache=self.cache)
        self.cache = out.cache
        return out

    def new_memory(self) -> int:
        """The bytes of what a call returns that is not the caller's already."""
        known = {tensor.data_ptr() for tensor in tree_leaves(self.cache)}
        return sum(tensor.nbytes for tensor in tree_leaves(self()) if tensor.data_ptr() not in known)
