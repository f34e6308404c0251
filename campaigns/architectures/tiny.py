"""Tiny models of every architecture that transformers has, and inputs for them."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

__all__ = ["architectures", "tiny"]

_LENGTH = 8
_FIELDS = """
32 hidden_size d_model n_embd dim embed_dim embedding_size hidden_dim word_embed_proj_dim emb_dim model_dim image_size
48 intermediate_size ffn_dim d_ff ffn_hidden_size encoder_ffn_dim decoder_ffn_dim feed_forward_hidden_size
2 num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers num_encoder_layers
4 num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads
2 num_key_value_heads num_local_experts num_experts n_routed_experts num_routed_experts eos_token_id
8 head_dim d_kv qk_rope_head_dim qk_nope_head_dim v_head_dim attention_head_dim patch_size
16 q_lora_rank kv_lora_rank moe_intermediate_size state_size shared_expert_intermediate_size num_mel_bins
1 num_experts_per_tok n_group topk_group first_k_dense_replace n_shared_experts bos_token_id
64 max_position_embeddings n_positions max_source_positions max_target_positions n_ctx
96 vocab_size
0 pad_token_id
"""
_SMALL = {
    name: int(number) for number, *names in (line.split() for line in _FIELDS.split("\n") if line) for name in names
}
"""The usual fields of configurations, and values for which a model takes a few hundred kilobytes."""

_OWN: dict[str, dict[str, Any]] = {
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1]},
    "mobilenet_v2": {"depth_multiplier": 0.25},
    "convnext": {"image_size": 64, "hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1]},
    "swin": {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 2, "patch_size": 4},
    "wav2vec2": {
        "conv_dim": [16, 16],
        "conv_stride": [4, 4],
        "conv_kernel": [8, 4],
        "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 8,
        "num_conv_pos_embedding_groups": 2,
    },
}
"""What some architectures need beside that."""

_HEADS = ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_MAPPING_NAMES", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES")


def architectures() -> list[str]:
    """All types of models that transformers' auto classes know."""
    return sorted(CONFIG_MAPPING_NAMES)


def tiny(kind: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A tiny model of a type in evaluation mode, with random weights, and inputs that its `forward` takes."""
    torch.manual_seed(0)
    model = _class(kind)(_config(CONFIG_MAPPING[kind], _OWN.get(kind, {}))).eval()
    with torch.no_grad():  # weights that are all 1 or 0 would hide an update that does not reach them
        for tensor in model.parameters():
            if tensor.is_floating_point():
                tensor.add_(torch.randn_like(tensor) * 0.05)
    for module in model.modules():  # also the parts of a model, which have configurations of their own
        if hasattr(getattr(module, "config", None), "use_cache"):
            module.config.use_cache = False
    return model, _inputs(model)


def _class(kind: str) -> Any:
    for mapping in _HEADS:
        name = getattr(modeling_auto, mapping).get(kind)
        if name is not None:
            return getattr(transformers, name if isinstance(name, str) else name[0])
    raise LookupError("transformers' auto classes have no model of this type")


def _config(cls: Any, own: dict[str, Any]) -> Any:
    """A configuration with small values for the fields that it has, and for those inside."""
    return cls(**_small(cls, own))


def _small(cls: Any, own: dict[str, Any]) -> dict[str, Any]:
    fields = cls().to_dict()
    values = {
        name: value for name, value in _SMALL.items() if isinstance(fields.get(name), int | None) and name in fields
    }
    for name, inner in (cls.sub_configs or {}).items():
        if isinstance(fields.get(name), dict) and hasattr(inner, "to_dict"):
            values[name] = _small(inner, {})
    return {**values, **own}


def _inputs(model: Any) -> dict[str, Any]:
    taken = inspect.signature(model.forward).parameters
    config = model.config
    tokens = torch.randint(3, 90, (1, _LENGTH))
    main = model.main_input_name
    channels, size = getattr(config, "num_channels", 3), getattr(config, "image_size", 32)
    height, width = (size, size) if isinstance(size, int) else size
    made = {
        "input_ids": tokens,
        "pixel_values": torch.randn(1, channels, height, width),
        "input_values": torch.randn(1, 800),
        "input_features": torch.randn(
            1, getattr(config, "num_mel_bins", 16), 2 * getattr(config, "max_source_positions", 32)
        ),
    }
    inputs: dict[str, Any] = {main: made[main]}
    if "input_ids" in taken and "pixel_values" in taken and main != "input_ids":
        inputs["input_ids"] = tokens
    if "input_ids" in inputs and "attention_mask" in taken:
        inputs["attention_mask"] = torch.ones_like(tokens)
    if "decoder_input_ids" in taken:
        inputs["decoder_input_ids"] = tokens[:, :4].clone()
    return inputs
