"""Tiny models of every architecture that transformers has.

A configuration gets small numbers by the names of its fields. Where these do not fit each other, a few other numbers are
tried, and at last each field with its own value, until eager mode runs on one of the inputs of `inputs.py`.
"""

import re
import time
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from campaigns.architectures.inputs import inputs_for

__all__ = ["PartError", "architectures", "class_names", "tiny"]

_ROWS = r"""
vocabulary 96 (\w+_)?vocab_size
padding 0 pad_token_id
begin 1 bos_token_id
end 2 eos_token_id
chosen 1 num_experts_per_tok (num|n|topk)_group (num|n)_shared_experts first_k_dense_replace moe_top_?k
layers 1 n_layers? depth (\w+_)?num_(\w+_)?layers (en|de)coder_layers (\w+_)?(depth|layers) num_blocks
pairs 2 (\w+_)?num_key_value_heads num_kv_heads n_kv_heads
experts 2 (moe_)?(num|n)_(local_|routed_)?experts
heads 4 (\w+_)?(num_)?attention_heads (\w+_)?(num|n)_heads? linear_num_(key|value)_heads
head 8 (\w+_)?head_dim d_head resampler_dim_head kv_channels d_kv qk_\w+_dim rotary_dim index_topk linear_(key|value)_head_dim
patch 8 (\w+_)?patch_size
narrow 16 (\w+_)?lora_rank (shared_|moe_)+(expert_)?intermediate_size (\w+_)?state_size mamba_d_state ssm_state_size
narrow 16 hidden_size_per_layer_input resampler_\w*latents latent_query_num shared_expert_intermediate_size num_mel_bins max_\w*bins (\w+_)?query_tokens num_queries
wide 48 (\w+_)?intermediate_size (\w+_)?ffn_dim (\w+_)?mlp_dim d_ff ffn_hidden_size \w*feed_forward\w* dim_feedforward n_inner d_inner \w+_linear_units
positions 64 max_(\w+_)?position_embeddings n_positions max_(source|target)_positions n_ctx (max_)?context_length max_seq_len
image 32 image_size
width 32 (\w+_)?hidden_size d_model n_embd (\w+_)?dim (\w+_)?hidden_dim (\w+_)?embed(ding)?(_dim|_size|_proj_dim) (\w+_)?projection_dim
width 32 adapter_input_size model_dim classifier_proj_size word_embed_proj_dim output_dim codebook_size decoder_(embed|hidden)\w*_(dim|size)
frames 4 num_frames
"""
_NUMBERS = [
    (row, int(number), re.compile("|".join(f"(?:{name})" for name in names)))
    for row, number, *names in (line.split() for line in _ROWS.strip().split("\n"))
]
"""Fields by their names, and numbers with which a model takes a few hundred kilobytes. Numbers never grow."""

_SECONDS = 10
"""Of processor time for all attempts."""

_OPTIONAL = {"head_dim", "n_routed_experts", "num_experts_per_tok", "num_key_value_heads", "pad_token_id", "vocab_size"}
"""Fields that get a number, too, if they have none."""

_CHANGES: list[dict[str, int]] = [
    {},
    {"pairs": 4},
    {"layers": 2},
    {"rope": 1},
    {"pairs": 4, "layers": 2},
    {"image": 64},
    {"layers": 4},
    {"pairs": 4, "layers": 4},
    {"head": 16},
    {"image": 64, "patch": 16},
    {"image": 128},
    {"image": 224, "patch": 16},
    {"heads": 2},
    {"width": 64, "wide": 96},
]

_OWN: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global"], 1]]},
    "mobilenet_v2": {"depth_multiplier": 0.25},
    "swin": {"embed_dim": 16, "window_size": 2, "patch_size": 4},
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

_DECODERS = ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_MAPPING_NAMES")
_ENCODER_DECODERS = ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES")


class PartError(LookupError):
    """transformers' auto classes have no model of a type, which is the configuration of a part of another one."""


def architectures() -> list[str]:
    """All types of models that transformers' auto classes know."""
    return sorted(CONFIG_MAPPING_NAMES)


def class_names(kind: str, *first: str) -> list[str]:
    """The classes of a type in the auto classes, those in the lists that come first before the others."""
    lists = {name: names for name, names in vars(modeling_auto).items() if re.fullmatch(r"MODEL_\w+_NAMES", name)}
    found = (lists[name].get(kind) for name in dict.fromkeys((*first, *lists)))
    return [name if isinstance(name, str) else name[0] for name in found if name is not None]


def tiny(kind: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A tiny model of a type in evaluation mode, with random weights, and inputs that its `forward` takes.

    Raises:
        PartError: transformers has no model of this type.
        Exception: what the first attempt raised, if none works.
    """
    if not class_names(kind):
        raise PartError("transformers' auto classes have no model of this type")
    first: Exception | None = None
    end = time.process_time() + _SECONDS
    for values in _configurations(CONFIG_MAPPING[kind], _OWN.get(kind, {})):
        if time.process_time() > end:
            break
        try:
            model = _model(kind, CONFIG_MAPPING[kind](**values))
            for inputs in inputs_for(model):
                try:
                    with torch.no_grad():
                        model(**inputs)
                    return model, inputs
                except Exception as error:
                    first = first or error
        except Exception as error:
            first = first or error
    raise first or LookupError("no attempt")


def _model(kind: str, config: Any) -> Any:
    torch.manual_seed(0)
    lists = (*_ENCODER_DECODERS, *_DECODERS[::-1]) if getattr(config, "is_encoder_decoder", False) else _DECODERS
    model = getattr(transformers, class_names(kind, *lists)[0])(config).eval()
    with torch.no_grad():  # weights that are all 1 or 0 would hide an update that does not reach them
        for tensor in model.parameters():
            if tensor.is_floating_point():
                tensor.add_(torch.randn_like(tensor) * 0.05)
    for module in model.modules():  # also the parts of a model, which have configurations of their own
        if hasattr(getattr(module, "config", None), "use_cache"):
            module.config.use_cache = False
    return model


def _configurations(cls: Any, own: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Values for the fields of a configuration, each different from those before."""
    seen: list[dict[str, Any]] = []
    for change in _CHANGES:
        values = {**_small(cls, change), **own}
        if values not in seen:
            seen.append(values)
            yield values
    for left in seen[0]:  # a small number in a field that is no size; but never a hundred layers
        if _row(left) not in ("layers", "vocabulary"):
            yield {name: value for name, value in seen[0].items() if name != left}


def _small(cls: Any, change: dict[str, int]) -> dict[str, Any]:
    fields = cls().to_dict()
    values: dict[str, Any] = _per_layer(fields, change.get("layers", 1))
    if "rope" in change and "rope_parameters" in fields:
        values["rope_parameters"] = {**(fields["rope_parameters"] or {}), "mrope_section": [1, 1, 2]}  # of a head of 8
    specials = iter(range(95, 80, -1))
    for name, value in fields.items():
        if isinstance(value, dict) and (inner := _inner(cls, name, value)) is not None:
            values[name] = {**_small(inner, change), **({"model_type": inner.model_type} if inner.model_type else {})}
        elif name not in values and (number := _number(name, value, change, specials)) is not None:
            values[name] = number
    return values


def _inner(cls: Any, name: str, value: dict[str, Any]) -> Any:
    """The class of a configuration inside of another one."""
    inner = (cls.sub_configs or {}).get(name)
    if hasattr(inner, "to_dict"):
        return inner
    kind = value.get("model_type")
    return CONFIG_MAPPING[kind] if kind in CONFIG_MAPPING else None  # noqa: SIM401 (its `get` knows only what was used)


def _row(name: str) -> str | None:
    return next((row for row, _, pattern in _NUMBERS if pattern.fullmatch(name)), None)


def _number(name: str, value: Any, change: dict[str, int], specials: Iterator[int]) -> Any:
    """The small value of a field; None if it stays as it is."""
    if isinstance(value, list | tuple) and value and all(type(one) is int for one in value):
        return _numbers(name, list(value), change)
    if type(value) is not int and not (value is None and name in _OPTIONAL):
        return None
    for row, usual, pattern in _NUMBERS:
        if pattern.fullmatch(name):
            small = change.get(row, usual)
            return small if value is None or value > small else None
    return next(specials) if re.search(r"_token_(id|index)$", name) and (value or 0) >= 80 else None


def _numbers(name: str, values: list[int], change: dict[str, int]) -> list[int] | None:
    """Small values for a list of numbers, one for each stage."""
    if "head" in name:
        return [2] * len(values)
    if "depth" in name or "layers" in name:
        return [1] * len(values)
    if name == "image_size":
        return [change.get("image", 32)] * len(values)
    if re.search(r"hidden_sizes|_dims?$|^dims?$|channels$|embed_dims|embedding_size", name) and min(values) >= 16:
        return [max(8, 16 * value // min(values)) // 8 * 8 for value in values]
    return None


def _per_layer(fields: dict[str, Any], least: int) -> dict[str, Any]:
    """As many layers as there are different ones, for models with a list of what each of them is."""
    count = next((fields[name] for name in ("num_hidden_layers", "n_layer", "num_layers") if name in fields), None)
    lists = {
        name: value
        for name, value in fields.items()
        if isinstance(value, list) and len(value) == count and all(isinstance(one, str) for one in value)
    }
    if not lists or count is None:
        return {}
    different = list(dict.fromkeys(zip(*lists.values(), strict=True)))
    chosen = (different * least)[: max(len(different), least)]
    counts: dict[str, Any] = {
        name: len(chosen) for name in ("num_hidden_layers", "n_layer", "num_layers") if name in fields
    }
    return {**counts, **{name: list(column) for name, column in zip(lists, zip(*chosen, strict=True), strict=True)}}
