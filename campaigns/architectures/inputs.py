"""Inputs for the `forward` of any model of transformers, of the shapes that its configuration asks for."""

import copy
import inspect
import itertools
import linecache
import re
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch

__all__ = ["accepted_inputs"]

_LENGTH = 8
_ABOUT_IMAGES = ("pixel_values", "image_grid_thw", "image_sizes", "spatial_shapes", "pixel_attention_mask")
_MELS = "num_mel_bins feature_projection_input_dim input_feat_per_channel input_feat_size num_mels feature_size input_dim input_size"
_OTHER_WAYS = r"inputs_embeds|\w*labels|\w*_embeds?|past_key_values|\w*head_mask|position_ids|output_\w+|return_\w+"


def accepted_inputs(model: Any, end: float) -> dict[str, Any]:
    """The first inputs with which eager mode runs: of which shape pictures or sound are, depends on the architecture.

    They begin as what `forward` requires, together with an image and tokens if it takes both. They grow by its arguments that
    an error is about: which its message names, or the line that raised it. `end` is the processor time at which this ends.
    """
    torch.manual_seed(0)
    rounds = _beginnings(model)
    errors: list[Exception] = []
    for names in rounds:
        for inputs in _products(model, names):
            try:
                with torch.no_grad():
                    copy.deepcopy(model)(**inputs)  # it may keep what it computed of its weights
                return inputs
            except Exception as error:
                errors.append(error)
            more = _mentioned(errors[-1], {*_parameters(model)} - {*inputs})
            if {*names, *more} not in map(set, rounds):
                rounds.append([*names, *more])
            if time.process_time() > end:
                raise errors[0]
    raise [*errors, LookupError("no inputs")][0]


def _beginnings(model: Any) -> list[list[str]]:
    parameters, main = _parameters(model), model.main_input_name
    mains = [main] if isinstance(main, str) else main
    required = [name for name, one in parameters.items() if one.default is one.empty or name in mains]
    both = ["input_ids", "pixel_values"]
    return [list(dict.fromkeys([*required, *both])), required] if {*both} <= {*parameters} else [required]


def _parameters(model: Any) -> dict[str, inspect.Parameter]:
    """The arguments of `forward` that are required, or tensors that are not given in the place of others."""
    found = inspect.signature(model.forward).parameters.items()
    some = {name: one for name, one in found if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)}
    others = {name for name, one in some.items() if re.fullmatch(_OTHER_WAYS, name) or "bool" in str(one.annotation)}
    return {name: one for name, one in some.items() if one.default is one.empty or name not in others}


def _mentioned(error: Exception, names: set[str]) -> list[str]:
    """Those that the message is about, or the innermost line of a model with any; arguments of calls change their names."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "transformers/models" in frame.filename]
    words = {*re.findall(r"\w+", str(error))}
    for frame in reversed(frames):
        if words & names:
            break
        text = "".join(linecache.getlines(frame.filename)[(frame.lineno or 1) - 1 : frame.end_lineno])
        words |= {outer for inner, outer in re.findall(r"(\w+)=(\w+)", text) if inner in words}
        words |= {*re.findall(r"\w+", frame.line or "")}
    return sorted(words & names)


def _products(model: Any, names: list[str]) -> Iterator[dict[str, Any]]:
    parameters = _parameters(model)
    names = [*names, *(_ABOUT_IMAGES if {"input_ids", "pixel_values"} <= {*names} else ()), "decoder_input_ids"]
    names = [name for name in dict.fromkeys(names) if name in parameters]
    masks = [name for name in names if name.endswith("mask") and name not in _ABOUT_IMAGES]
    others = [name for name in names if name not in masks]
    for values in itertools.product(*(_values(model.config, name, parameters) for name in others)):
        with suppress(Exception):  # raised where a model cannot take an image of this shape
            inputs = _with_tokens(model, dict(zip(others, values, strict=True)))
            inputs = {name: one for name, one in inputs.items() if name in parameters}
            for chosen in itertools.product(_masks(values), repeat=len(masks)):
                yield {**inputs, **dict(zip(masks, chosen, strict=True))}


def _with_tokens(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """With what belongs to tokens, and as many as an image has features, if a model puts these in the place of tokens."""
    if "input_ids" not in inputs:
        return inputs
    ids = inputs["input_ids"]
    token = _inside(model.config, "image_token_id", None) or _inside(model.config, "image_token_index", None)
    if "pixel_values" in inputs and token is not None and hasattr(model, "get_image_features"):
        with torch.no_grad():
            found = model.get_image_features(**{name: inputs[name] for name in inputs if name in _ABOUT_IMAGES})
        found = getattr(found, "pooler_output", found)
        count = sum(one.numel() // one.shape[-1] for one in (found if isinstance(found, list | tuple) else [found]))
        ids = torch.cat([_tokens()[:, :4], torch.full((1, count), token), _tokens()[:, 4:]], dim=1)
    of_image = torch.where(ids == (-1 if token is None else token), 1, 0)
    kinds = dict.fromkeys(("mm_token_type_ids", "moe_mm_token_type_ids"), of_image)
    return {**inputs, "input_ids": ids, "attention_mask": torch.ones_like(ids), **kinds}


def _masks(inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Of a row for each sample of one of the inputs, or for each of its points."""
    rows = [(1, length) for one in inputs for length in one.shape[1:]]
    rows += [(1, *one.shape[-2:]) for one in inputs if one.ndim > 3]
    return [torch.ones(shape, dtype=dtype) for dtype in (torch.long, torch.bool) for shape in dict.fromkeys(rows)]


def _tokens() -> torch.Tensor:
    return (torch.arange(_LENGTH) * 7 % 30 + 3)[None]


def _inside(config: Any, name: str, default: Any) -> Any:
    """A field of the configuration, or of one inside of it; of numbers for sides or stages, if one is asked for, the first."""
    inner = [getattr(config, part, None) for part in getattr(config, "sub_configs", None) or {}]
    values = [getattr(one, name, None) for one in (config, *inner) if one is not None]
    found = next((one for one in values if one is not None), default)
    return found[0] if type(default) is int and isinstance(found, list | tuple) else found


def _values(config: Any, name: str, parameters: Any) -> list[torch.Tensor]:
    """What an input can be, by its name."""
    side = 2 * _inside(config, "spatial_merge_size", 2)
    for pattern, made in _MADE.items():
        if re.fullmatch(pattern, name):
            return made(config, side)
    if "LongTensor" in str(parameters[name].annotation):
        return [_tokens(), _tokens()[0]]
    width = _inside(config, "hidden_size", 32)
    shapes = [(1, _LENGTH, width), (1, width), (1, width, _LENGTH)]
    return [*_random(shapes), _patches(config, side)]


def _random(shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    return [torch.randn(shape) for shape in shapes]


def _sound(config: Any, _: int) -> list[torch.Tensor]:
    return _random([(1, 1920), (1, 1, 1920), (1, _inside(config, "max_length", 64), _mels(config)), (1, 19200)])


def _spectra(config: Any, _: int) -> list[torch.Tensor]:
    mels, positions = _mels(config), _inside(config, "max_source_positions", None) or 32
    lengths = (64, _inside(config, "max_length", 64))
    return _random([(1, mels, 2 * positions), *((1, length, mels) for length in lengths), (1, 1, 64, mels)])


def _mels(config: Any) -> int:
    found = [_inside(config, field, None) for field in _MELS.split()]
    return next((one for one in found if isinstance(one, int)), 16)


def _codes(config: Any, _: int) -> list[torch.Tensor]:
    """Tokens, also those of several books: a row or a column for each of them."""
    tokens, fields = _tokens()[:, :4], ("num_codebooks", "num_channels", "audio_channels")
    books = next((found for field in fields if (found := _inside(config, field, None))), 1)
    of_books = [tokens.repeat(books, 1), tokens[..., None].repeat(1, 1, books), tokens[:, None].repeat(1, books, 1)]
    return [tokens, *of_books[: 3 * (books > 1)]]


def _patches(config: Any, side: int) -> torch.Tensor:
    """An image as rows of patches."""
    patch, frames = _inside(config, "patch_size", 8), _inside(config, "temporal_patch_size", 1)
    channels = _inside(config, "num_channels", None) or _inside(config, "in_channels", 3)
    return torch.randn(side * side, channels * frames * patch * patch)


def _pictures(config: Any, side: int) -> list[torch.Tensor]:
    channels, size = _inside(config, "num_channels", 3), _inside(config, "image_size", 32)
    picture = (channels, size, size)
    patch, rows = _inside(config, "patch_size", 8), _patches(config, side)
    shapes = [(1, *picture), *((1, count, *picture) for count in (_inside(config, "num_frames", 4), 1, 2))]
    found = [rows, rows[None], *_random([*shapes, (len(rows), channels, patch, patch)])]
    return found if _inside(config, "temporal_patch_size", None) else found[2:] + found[:2]


_MADE: dict[str, Callable[[Any, int], list[torch.Tensor]]] = {
    "decoder_input_ids": _codes,
    r"\w*input_ids|input|token_index": lambda config, side: [_tokens(), *_codes(config, side)[1:]],
    r"pixel_values\w*": _pictures,
    "input_features|audio_mel|spectrogram": _spectra,
    "input_values|audio_values|waveform": _sound,
    r"\w*grid_thw": lambda config, side: [torch.tensor([[1, side, side]])],
    "spatial_shapes|target_sizes": lambda config, side: [torch.tensor([[side, side]])],
    "image_sizes": lambda config, side: [torch.tensor([list(_pictures(config, side)[0].shape[-2:])])],
    "pixel_attention_mask": lambda config, side: [torch.ones(1, side * side, dtype=torch.long)],
}
"""What to make of a configuration and the number of patches in a row, by the name of the input."""
