"""Tiny Llamas of Hugging Face and of ExecuTorch, and adapters that PEFT saved for them."""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.helpers.models import quiet
from tests.llm.llama import FEED_FORWARD, PROJECTIONS

HEAD_DIM, RANK = 8, 4
TARGETS = [*PROJECTIONS.values(), *FEED_FORWARD.values()]
LLAMA = {
    **{f"self_attn.{hf}": f"attention.{llama}" for llama, hf in PROJECTIONS.items()},
    **{f"mlp.{hf}": f"feed_forward.{llama}" for llama, hf in FEED_FORWARD.items()},
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "embed_tokens": "tok_embeddings",
    "lm_head": "output",
}
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


@functools.cache
def hf_llama() -> Any:
    """Hugging Face's model, with random weights."""
    with quiet():
        from transformers import LlamaConfig, LlamaForCausalLM
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()


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
    """The model that PEFT makes of an adapter and a copy of `base`, or of `hf_llama()`."""
    with peft() as library:
        return library.PeftModel.from_pretrained(copy.deepcopy(base or hf_llama()), folder).eval().float()


def peft_scales(model: Any) -> dict[str, float]:
    """The scale of each of PEFT's own layers."""
    layers = {name: layer for name, layer in model.named_modules() if hasattr(layer, "lora_A")}
    return {name.removeprefix("base_model.model."): layer.scaling["default"] for name, layer in layers.items()}


def save_peft(
    folder: Path, base: Any = None, *, seed: int = 1, dtype: torch.dtype = torch.float32, **config: Any
) -> Tensor:
    """Have PEFT save a random adapter of `base`, or of `hf_llama()`; return the logits that the model computes with it."""
    with peft() as library:
        options = {"r": RANK, "lora_alpha": 6, "target_modules": TARGETS, "task_type": "CAUSAL_LM", **config}
        model = library.get_peft_model(copy.deepcopy(base or hf_llama()), library.LoraConfig(**options)).eval()
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                values = 0.3 * torch.randn(parameter.shape, generator=generator)
                parameter.data = values.to(dtype)
        model.save_pretrained(folder)
        return hf_logits(model.float())


def llama_names(name: str) -> str:
    """The name in Llama's checkpoints of a tensor of Hugging Face's model."""
    name = name.removeprefix("model.")
    for hf, llama in LLAMA.items():
        name = name.replace(hf, llama)
    return name


def neighbours(rows: Tensor) -> Tensor:
    """Rows of q or k as Llama's own checkpoints have them; the inverse of what Hugging Face's conversion script does."""
    heads = rows.shape[0] // HEAD_DIM
    return rows.view(heads, 2, HEAD_DIM // 2, -1).transpose(1, 2).reshape(rows.shape)


def executorch_llama(*, hf_rope: bool, rank: int = RANK, alpha: float = 6, targets: Any = TARGETS) -> nn.Module:
    """ExecuTorch's model with the weights of `hf_llama`, and branches for an adapter whose tensors are random."""
    with quiet():
        from executorch.examples.models.llama.llama_transformer import construct_transformer
        from executorch.examples.models.llama.model_args import ModelArgs
    arguments = ModelArgs(
        dim=32,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        vocab_size=32,
        hidden_dim=48,
        norm_eps=hf_llama().config.rms_norm_eps,
        max_seq_len=32,
        max_context_len=32,
        use_hf_rope=hf_rope,
        generate_full_logits=True,
        r=rank,
        lora_alpha=alpha,
        target_modules=list(targets),
    )
    with torch.random.fork_rng():
        torch.manual_seed(5)
        module = construct_transformer(arguments).eval()
    state = {}
    for name, tensor in hf_llama().state_dict().items():
        rotated = "q_proj" in name or "k_proj" in name
        state[llama_names(name)] = neighbours(tensor) if rotated and not hf_rope else tensor
    missing, unexpected = module.load_state_dict(state, strict=False)
    assert not unexpected
    assert all("lora_" in name for name in missing)
    return module
