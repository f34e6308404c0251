"""Tiny models of Hugging Face and of ExecuTorch, and adapters that PEFT saved for them."""

import contextlib
import copy
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.helpers.models import quiet
from tests.llm import families
from tests.llm.families import DIM, FAMILIES, HEADS, HF_ROPE, KV_HEADS, MODULES

RANK, CONTEXT = 4, 32
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
PARAMS = {"dim": DIM, "n_heads": HEADS, "n_kv_heads": KV_HEADS}
NEIGHBOURS = FAMILIES["llama"]
HALVES = replace(NEIGHBOURS, params=HF_ROPE)


def hf_model(key: str = "llama") -> Any:
    """Hugging Face's model, with random weights."""
    return families.transformers_model(key, CONTEXT)


def hf_logits(module: Any) -> Tensor:
    """The logits of Hugging Face's model."""
    with torch.no_grad():
        return module(TOKENS).logits


@contextlib.contextmanager
def peft() -> Iterator[Any]:
    """The package, without what it prints and warns of."""
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import peft

        yield peft


def peft_model(folder: Path, base: Any = None) -> Any:
    """The model that PEFT makes of an adapter and a copy of `base`, or of `hf_model()`."""
    with peft() as library:
        return library.PeftModel.from_pretrained(copy.deepcopy(base or hf_model()), folder).eval().float()


def peft_scales(model: Any) -> dict[str, float]:
    """The scale of each of PEFT's own layers."""
    layers = {name: layer for name, layer in model.named_modules() if hasattr(layer, "lora_A")}
    return {name.removeprefix("base_model.model."): layer.scaling["default"] for name, layer in layers.items()}


def save_peft(folder: Path, key: str = "llama", *, seed: int = 1, **config: Any) -> Tensor:
    """Have PEFT save a random adapter of `hf_model`; return the logits that the model computes with it."""
    return hf_logits(families.save_peft(folder, key, CONTEXT, seed, **config).float())


def own_names(tensors: Any, *, hf_rope: bool) -> dict[str, Tensor]:
    """Weights under the names of Llama's own checkpoints, with the rows of q and k as Hugging Face has them, or as those."""
    return families.own_names(HALVES if hf_rope else NEIGHBOURS, tensors)


def executorch_llama(*, hf_rope: bool, rank: int = RANK, alpha: float = 6, targets: Any = MODULES) -> nn.Module:
    """ExecuTorch's model with the weights of `hf_model`, and branches for an adapter whose tensors are random."""
    lora = {"r": rank, "lora_alpha": alpha, "target_modules": list(targets)}
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return families.executorch_model(HALVES if hf_rope else NEIGHBOURS, hf_model(), CONTEXT, **lora)
