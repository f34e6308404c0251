"""Tiny random models of the families that ExecuTorch's exporter knows, as transformers has them and as it takes them."""

import copy
import functools
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.helpers.models import quiet
from tests.llm import llama
from tests.llm.llama import FEED_FORWARD, PROJECTIONS

DIM, LAYERS, HEADS, KV_HEADS, HIDDEN, VOCAB = 64, 2, 4, 2, 96, 128
MODULES = [*PROJECTIONS.values(), *FEED_FORWARD.values()]
LLAMA = {
    **{f"self_attn.{hf}": f"attention.{own}" for own, hf in PROJECTIONS.items()},
    **{f"mlp.{hf}": f"feed_forward.{own}" for own, hf in FEED_FORWARD.items()},
    "self_attn.q_norm": "attention.q_norm_fn",
    "self_attn.k_norm": "attention.k_norm_fn",
    "input_layernorm": "attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "embed_tokens": "tok_embeddings",
    "lm_head": "output",
}


@dataclass(frozen=True)
class Family:
    """One family.

    Attributes:
        name: what transformers calls it: `<name>Config` and `<name>ForCausalLM`.
        model_class: what ExecuTorch's exporter calls it.
        config: more of transformers' configuration.
        params: more of ExecuTorch's `params.json`.
        head_dim: the size of a head.
        targets: the modules that PEFT adapts.
        as_transformers: whether ExecuTorch's eager model computes what transformers does. Otherwise that is the oracle.
    """

    name: str
    model_class: str
    config: Mapping[str, Any] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    head_dim: int = DIM // HEADS
    targets: Sequence[str] = tuple(MODULES)
    as_transformers: bool = True

    @property
    def hf_rope(self) -> bool:
        """Whether ExecuTorch's model rotates halves, so that rows stay where they are."""
        return bool(self.params.get("use_hf_rope"))


HF_ROPE = {"use_hf_rope": True}
FAMILIES = {
    "llama": Family("Llama", "llama3_2"),
    "qwen 2.5": Family("Qwen2", "qwen2_5_0_5b", params={**HF_ROPE, "attention_qkv_bias": True}),
    "qwen 3": Family(
        "Qwen3",
        "qwen3_0_6b",
        config={"head_dim": 32},
        params={**HF_ROPE, "use_qk_norm": True, "qk_norm_before_rope": True, "head_dim": 32},
        head_dim=32,
    ),
    "smollm2": Family("Llama", "smollm2", config={"tie_word_embeddings": True}),
    "phi 4": Family(
        "Phi3",
        "phi_4_mini",
        config={"pad_token_id": 0, "partial_rotary_factor": 0.75},
        params={**HF_ROPE, "partial_rotary_factor": 0.75},
        targets=("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    ),
    # These two have no class of their own in the exporter, and its model lacks what sets them apart from Llama: norms
    # behind the blocks, GELU, windows, and factors of embeddings, residuals, attention and logits.
    "gemma 3": Family(
        "Gemma3",
        "llama3_2",
        config={"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 512},
        params={**HF_ROPE, "use_qk_norm": True, "qk_norm_before_rope": True, "rms_norm_add_unit_offset": True},
        as_transformers=False,
    ),
    "granite": Family(
        "Granite",
        "llama3_2",
        config={"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0},
        params=HF_ROPE,
        as_transformers=False,
    ),
}


@functools.cache
def transformers_model(key: str, context: int) -> Any:
    """Random weights that let the model say something."""
    family = FAMILIES[key]
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        name = f"{family.name}TextConfig" if family.name == "Gemma3" else f"{family.name}Config"
        common = {
            "vocab_size": VOCAB,
            "hidden_size": DIM,
            "intermediate_size": HIDDEN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "max_position_embeddings": context,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "attn_implementation": "eager",
        }
        config = getattr(transformers, name)(**{**common, **family.config})
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = getattr(transformers, f"{family.name}ForCausalLM")(config).eval()
            for parameter_name, parameter in model.named_parameters():
                scale = (
                    1.0 if "embed" in parameter_name else (parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.1)
                )
                noise = torch.randn(parameter.shape) * scale
                parameter.data = noise if parameter.ndim > 1 else parameter.data + noise
            model.tie_weights()
        return model


def own_names(family: Family, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights, or an adapter of PEFT, under the names of ExecuTorch's checkpoints, with rows in its order."""
    made = {}
    for full, tensor in tensors.items():
        name = full.removeprefix("base_model.model.").removeprefix("model.")
        name = name.replace("lora_A", "lora_a").replace("lora_B", "lora_b")
        is_a = "lora_a" in name
        sizes = [HEADS * family.head_dim, KV_HEADS * family.head_dim, KV_HEADS * family.head_dim]
        parts = {name: tensor}
        if "qkv_proj" in name:
            rows = [tensor] * 3 if is_a else tensor.split(sizes)
            parts = {name.replace("qkv", part): some for part, some in zip("qkv", rows, strict=True)}
        elif "gate_up_proj" in name:
            rows = [tensor] * 2 if is_a else tensor.chunk(2)
            parts = {name.replace("gate_up", part): some for part, some in zip(("gate", "up"), rows, strict=True)}
        for part, rows_of_part in parts.items():
            own = part.replace("post_attention_layernorm", "unused_norm" if family.name == "Gemma3" else "ffn_norm")
            for hf, llama_name in LLAMA.items():
                own = own.replace(hf, llama_name)
            rotated = ("q_proj" in part or "k_proj" in part) and not is_a and not family.hf_rope
            made[own] = neighbours(rows_of_part, family.head_dim) if rotated else rows_of_part
    return {name: tensor.detach().clone().contiguous() for name, tensor in made.items()}


def neighbours(rows: Tensor, head_dim: int) -> Tensor:
    """Rows of q or k as Llama's own checkpoints have them: the inverse of what Hugging Face's conversion script does."""
    return rows.view(-1, 2, head_dim // 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def params_of(family: Family) -> dict[str, Any]:
    own = {"dim": DIM, "n_layers": LAYERS, "n_heads": HEADS, "n_kv_heads": KV_HEADS, "hidden_dim": HIDDEN}
    return {**own, "vocab_size": VOCAB, "norm_eps": 1e-5, "rope_theta": 10000.0, **family.params}


def write_model(folder: Path, key: str, context: int) -> None:
    """What the exporter takes: `params.json`, `model.pth` and `tokenizer.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "params.json").write_text(json.dumps(params_of(FAMILIES[key])))
    llama.make_tokenizer(VOCAB).save(str(folder / "tokenizer.json"))
    torch.save(own_weights(FAMILIES[key], transformers_model(key, context)), folder / "model.pth")


def own_weights(family: Family, model: Any) -> dict[str, Tensor]:
    """The checkpoint of a model of transformers, as ExecuTorch takes it."""
    weights = own_names(family, model.state_dict())
    weights.setdefault("output.weight", weights["tok_embeddings.weight"])
    return weights


def save_peft(
    folder: Path, key: str, context: int, seed: int, dtype: torch.dtype = torch.float32, **config: Any
) -> Any:
    """Have PEFT save a random adapter; returns its model."""
    family = FAMILIES[key]
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from peft import LoraConfig, get_peft_model

        options = {"r": 4, "lora_alpha": 6, "target_modules": list(family.targets), "task_type": "CAUSAL_LM", **config}
        model = get_peft_model(copy.deepcopy(transformers_model(key, context)), LoraConfig(**options)).eval()
        chance = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = (0.2 * torch.randn(parameter.shape, generator=chance)).to(dtype)
        model.save_pretrained(folder)
        return model


def executorch_model(family: Family, model: Any, context: int, **lora: Any) -> nn.Module:
    """ExecuTorch's eager model with the weights of one of transformers; `lora` are its arguments for branches, which are
    random then."""
    with quiet():
        from executorch.examples.models.llama.llama_transformer import construct_transformer
        from executorch.examples.models.llama.model_args import ModelArgs
    sizes = {"max_seq_len": context, "max_context_len": context, "generate_full_logits": True}
    module = construct_transformer(ModelArgs(**params_of(family), **sizes, **lora)).eval()
    missing, _ = module.load_state_dict(own_weights(family, model), strict=False)
    assert all("lora_" in name for name in missing)
    return module


def with_adapter(family: Family, model: Any, context: int, folder: Path) -> nn.Module:
    """The same with the adapter of a folder in its branches; of the rank that all modules have there."""
    from safetensors.torch import load_file

    config = json.loads((folder / "adapter_config.json").read_text())
    lora = {"r": config["r"], "lora_alpha": config["lora_alpha"], "target_modules": MODULES}
    module = executorch_model(family, model, context, **lora)
    module.load_state_dict(own_names(family, load_file(folder / "adapter_model.safetensors")), strict=False)
    return module


def logits_of(module: Any, ids: Sequence[int]) -> Tensor:
    """The logits behind the last token, of either model."""
    with torch.no_grad():
        made = module(torch.tensor([list(ids)]))
    logits: Tensor = made.logits if hasattr(made, "logits") else made[0] if isinstance(made, tuple) else made
    return logits.flatten()[-VOCAB:]


def generated_ids(module: Any, prompt: Sequence[int], tokens: int, tie: float = 1e-3) -> list[int]:
    """What eager PyTorch generates, always the likeliest token, until the first tie.

    Args:
        tie: two logits that are closer than this are one, as sums in another order may exchange them.
    """
    ids = list(prompt)
    while len(ids) < len(prompt) + tokens:
        logits = logits_of(module, ids)
        best, second = logits.topk(2).values
        if best - second < tie:
            break
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


def generated(module: Any, prompt: str, tokens: int) -> str:
    """The same as text, by the tokenizer of `write_model`."""
    tokenizer = llama.make_tokenizer(VOCAB)
    return str(tokenizer.decode(generated_ids(module, tokenizer.encode(prompt).ids, tokens)))
