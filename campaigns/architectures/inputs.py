"""Inputs for the `forward` of any model of transformers, of the shapes that its configuration asks for."""

import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["inputs_for"]

_LENGTH = 8
_ABOUT_IMAGES = ("image_grid_thw", "image_sizes", "spatial_shapes", "pixel_attention_mask")
_MELS = (
    *("num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel"),
    *("num_mels", "feature_size", "input_dim"),
)


def inputs_for(model: Any) -> Iterator[dict[str, Any]]:
    """Inputs to try, one after another: of which shape pictures or sound are, depends on the architecture."""
    torch.manual_seed(0)
    parameters = inspect.signature(model.forward).parameters
    main = model.main_input_name
    wanted = [main] if isinstance(main, str) else list(main)
    wanted += [name for name, one in parameters.items() if one.default is one.empty and one.kind != one.VAR_KEYWORD]
    if {"input_ids", "pixel_values"} <= {*parameters}:
        yield from _with_image(model, [*wanted, "input_ids", "pixel_values"], parameters)
    yield from _products(model.config, wanted, parameters)
    if "input_ids" in parameters and "input_ids" not in wanted:
        yield from _products(model.config, [*wanted, "input_ids"], parameters)


def _products(config: Any, wanted: list[str], parameters: Any) -> Iterator[dict[str, Any]]:
    names = list(dict.fromkeys(name for name in wanted if name in parameters))
    for values in itertools.product(*(_values(config, name) for name in names)):
        inputs = dict(zip(names, values, strict=True))
        if "input_ids" in inputs and "attention_mask" in parameters:
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        if "decoder_input_ids" in parameters:
            inputs["decoder_input_ids"] = _tokens()[:, :4].clone()
        yield inputs


def _with_image(model: Any, wanted: list[str], parameters: Any) -> Iterator[dict[str, Any]]:
    """With an image, for whose features there are tokens among the others where a model puts them in the place of such."""
    config = model.config
    token = getattr(config, "image_token_id", None) or getattr(config, "image_token_index", None)
    needed = [name for name in _ABOUT_IMAGES if name in parameters]
    for inputs in _products(config, [*wanted, *needed], parameters):
        if token is not None and hasattr(model, "get_image_features"):
            try:
                count = _features(model, {name: inputs[name] for name in ("pixel_values", *needed)})
            except Exception:  # noqa: S112
                continue
            ids = torch.cat([_tokens()[:, :4], torch.full((1, count), token), _tokens()[:, 4:]], dim=1)
            inputs |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        yield inputs


def _features(model: Any, image: dict[str, torch.Tensor]) -> int:
    """How many vectors a model makes of an image."""
    with torch.no_grad():
        found = model.get_image_features(**image)
    found = getattr(found, "pooler_output", found)
    return sum(one.numel() // one.shape[-1] for one in (found if isinstance(found, list | tuple) else [found]))


def _tokens() -> torch.Tensor:
    return (torch.arange(_LENGTH) * 7 % 70 + 3)[None]


def _inside(config: Any, name: str, default: Any) -> Any:
    """A field of the configuration, or of one inside of it."""
    inner = [getattr(config, part, None) for part in getattr(config, "sub_configs", None) or {}]
    found = [getattr(one, name, None) for one in (config, *inner) if one is not None]
    return next((one for one in found if one is not None), default)


def _values(config: Any, name: str) -> list[torch.Tensor]:
    """What an input can be, by its name."""
    side = 2 * _inside(config, "spatial_merge_size", 2)
    for pattern, made in _MADE.items():
        if re.fullmatch(pattern, name):
            return made(config, side)
    width = _inside(config, "hidden_size", 32)
    shapes = [(1, _LENGTH, width), (1, width), (1, width, _LENGTH)]
    return [*_random(shapes), _patches(config, side)]


def _random(shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    return [torch.randn(shape) for shape in shapes]


def _sound(config: Any, _: int) -> list[torch.Tensor]:
    return _random([(1, 1600), (1, 1, 1600), (1, _inside(config, "max_length", 64), _mels(config)), (1, 16000)])


def _spectra(config: Any, _: int) -> list[torch.Tensor]:
    mels, positions = _mels(config), _inside(config, "max_source_positions", None) or 32
    return _random([(1, mels, 2 * positions), (1, 64, mels), (1, _inside(config, "max_length", 64), mels)])


def _mels(config: Any) -> int:
    return next((found for found in (_inside(config, field, None) for field in _MELS) if isinstance(found, int)), 16)


def _series(config: Any, _: int) -> list[torch.Tensor]:
    length = _inside(config, "context_length", 64)
    return _random([(1, length), (1, length, _inside(config, "num_input_channels", 1))])


def _patches(config: Any, side: int) -> torch.Tensor:
    """An image as rows of patches."""
    patch, frames = _inside(config, "patch_size", 8), _inside(config, "temporal_patch_size", 1)
    channels = _inside(config, "in_channels", None) or _inside(config, "num_channels", 3)
    return torch.randn(side * side, channels * frames * patch * patch)


def _pictures(config: Any, side: int) -> list[torch.Tensor]:
    channels, size = _inside(config, "num_channels", 3), _inside(config, "image_size", 32)
    height, width = (size, size) if isinstance(size, int) else tuple(size)[:2]
    picture = (channels, height, width)
    shapes = [(1, *picture), (1, _inside(config, "num_frames", 4), *picture), (1, 1, *picture)]
    return [*_random(shapes), _patches(config, side), _patches(config, side)[None]]


_MADE: dict[str, Callable[[Any, int], list[torch.Tensor]]] = {
    r"\w*input_ids|input|token_index": lambda config, side: [_tokens()],
    r"pixel_values\w*": _pictures,
    "input_features|audio_mel|spectrogram": _spectra,
    "input_values|audio_values|waveform": _sound,
    "past_values": _series,
    "bbox": lambda config, side: [torch.arange(4 * _LENGTH).reshape(1, _LENGTH, 4)],
    r"\w*grid_thw": lambda config, side: [torch.tensor([[1, side, side]])],
    "spatial_shapes": lambda config, side: [torch.tensor([[side, side]])],
    "image_sizes": lambda config, side: [torch.tensor([list(_pictures(config, side)[0].shape[-2:])])],
    "pixel_attention_mask": lambda config, side: [torch.ones(1, side * side, dtype=torch.long)],
    r"\w*mask": lambda config, side: [torch.ones(1, _LENGTH, dtype=torch.long)],
}
"""What to make of a configuration and the number of patches in a row, by the name of the input."""
