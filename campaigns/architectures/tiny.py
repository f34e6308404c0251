"""Tiny models of every architecture that transformers has.

A configuration gets small numbers by the names of its fields. Where these do not fit each other, a few other numbers are
tried, and at last each field with its own value, until eager mode runs on one of the inputs of `inputs.py`.
"""

import copy
import json
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils import _pytree as trees
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from campaigns.architectures.inputs import accepted_inputs

__all__ = ["PartError", "architectures", "class_names", "tiny"]

_FIELDS = json.loads(Path(__file__).with_name("fields.json").read_text(encoding="utf-8"))
_NUMBERS = [(row, one["number"], re.compile("|".join(one["fields"]))) for row, one in _FIELDS["small"].items()]
"""Fields by their names, and numbers with which a model takes a few hundred kilobytes. Numbers never grow. Those of
`_FIELDS["optional"]` get one, too, if they have none; `_FIELDS["changes"]` are other numbers, which are tried in their order."""

_SECONDS, _LARGEST = 10, 40_000_000
"""Of processor time for all attempts; of parameters, because the defaults of many types fill the memory."""

_OWN: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("own.json").read_text(encoding="utf-8"))
"""What some types need beside that: by `config` fields of their configuration, by `class` another class of model, maybe of a
part of the configuration, and by `inputs` those of `forward`: each with its `values` (and their `dtype`), or with the `shape`
of random numbers or of what it is to `fill` it with; or several of them, as a list or by names; or a number as it is."""

_WIDTHS = r"hidden_sizes|_dims?$|^dims?$|^(?!in_|out_)\w*channels$|embed|out_features"

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
    errors: list[Exception] = []
    end = time.process_time() + _SECONDS
    own = _OWN.get(kind, {})
    for values in _configurations(CONFIG_MAPPING[kind], own.get("config", {})):
        if time.process_time() > end:
            break
        try:
            model = _model(kind, CONFIG_MAPPING[kind](**values))
            if "inputs" not in own:
                return model, accepted_inputs(model, end)
            inputs = trees.tree_map(
                _input, own["inputs"], is_leaf=lambda one: isinstance(one, dict) and bool({"values", "shape"} & {*one})
            )
            with torch.no_grad():
                copy.deepcopy(model)(**inputs)
            return model, inputs
        except Exception as error:
            errors.append(error)
    raise [*errors, LookupError("no attempt")][0]


def _input(one: Any) -> Any:
    if not isinstance(one, dict):
        return one
    if "values" in one:
        return torch.tensor(one["values"], dtype=getattr(torch, one.get("dtype", ""), None))
    return torch.full(one["shape"], one["fill"]) if "fill" in one else torch.randn(one["shape"])


def _model(kind: str, config: Any) -> Any:
    torch.manual_seed(0)
    lists = (*_ENCODER_DECODERS, *_DECODERS[::-1]) if getattr(config, "is_encoder_decoder", False) else _DECODERS
    own = [_OWN[kind]["class"]] if "class" in _OWN.get(kind, {}) else class_names(kind, *lists)
    classes = [attrgetter(name)(transformers) for name in own]
    cls = next((cls for cls in classes if cls.config_class is type(config)), classes[0])
    if "class" in _OWN.get(kind, {}):
        parts = (getattr(config, name) for name in config.sub_configs or {})
        config = next((part for part in parts if type(part) is cls.config_class), config)
    with suppress(RuntimeError), torch.device("meta"):  # some models cannot be made without numbers
        size = sum(tensor.numel() for tensor in cls(copy.deepcopy(config)).parameters())
        if size > _LARGEST:
            raise ValueError(f"the smallest model that was found has {size:,} parameters")
    model = cls(config).eval()
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
    try:
        usual = cls().to_dict()
    except Exception:  # a default of a part of it does not fit it
        usual = cls(**own).to_dict()
    for change in _FIELDS["changes"]:
        values = _merged(_small(cls, usual, change), own)
        if values not in seen:
            seen.append(values)
            yield values
    for left in seen[0]:  # a small number in a field that is no size; but never a hundred layers
        if _row(left)[0] not in ("layers", "vocabulary"):
            yield {name: value for name, value in seen[0].items() if name != left}


def _merged(values: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    both = {name: _merged(values[name], own[name]) for name in own if isinstance(values.get(name), dict)}
    return {**values, **own, **both}


def _small(cls: Any, fields: dict[str, Any], change: dict[str, int]) -> dict[str, Any]:
    values: dict[str, Any] = _per_layer(fields, change)
    if "rope" in change and "rope_parameters" in fields:
        values["rope_parameters"] = {**(fields["rope_parameters"] or {}), "mrope_section": [1, 1, 2]}  # of a head of 8
    specials = iter(range(95, 80, -1))
    for name, value in fields.items():
        if name in values or not _is_declared(cls, name):
            continue
        if isinstance(value, dict) and (inner := _inner(cls, name, value)) is not None:
            values[name] = _part(inner, value, change)
        elif (number := _number(name, value, change, specials)) is not None:
            values[name] = number
    return values | _stages(fields, values)


def _is_declared(cls: Any, name: str) -> bool:
    """Whether a field is not computed from others."""
    fields = getattr(cls, "__dataclass_fields__", {})
    return not fields or name in fields or name in (*cls.attribute_map.values(), "out_indices")


def _part(inner: Any, value: dict[str, Any], change: dict[str, int]) -> dict[str, Any]:
    """A configuration inside of another one, which may have its own values for fields. Backbones of timm have a fixed size, so
    a small one of transformers takes their place."""
    if inner.model_type == "timm_backbone":
        resnet = CONFIG_MAPPING["resnet"]
        chosen = {"model_type": "resnet", "out_indices": value.get("out_indices") or [1, 2, 3, 4]}
        return {**_small(resnet, resnet().to_dict(), change), **chosen}
    usual: dict[str, Any] = {}
    with suppress(ValueError):
        usual = inner().to_dict()
    values = {name: one for name, one in value.items() if one != usual.get(name) and _is_declared(inner, name)}
    values |= _small(inner, value, change)
    return {**values, "model_type": inner.model_type} if inner.model_type else values


def _stages(fields: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """As many layers as outputs that a backbone has, where it returns those of some of its layers."""
    wanted, layers = fields.get("out_indices"), values.get("num_hidden_layers")
    if not wanted or layers is None or max(wanted) <= layers:
        return {}
    chosen = [index + 1 for index in range(max(layers, len(wanted)))][-len(wanted) :]
    return {"num_hidden_layers": chosen[-1], "out_indices": chosen, "out_features": None}


def _inner(cls: Any, name: str, value: dict[str, Any]) -> Any:
    """The class of a configuration inside of another one."""
    inner = (cls.sub_configs or {}).get(name)
    if hasattr(inner, "to_dict"):
        return inner
    kind = value.get("model_type")
    return CONFIG_MAPPING[kind] if kind in CONFIG_MAPPING else None  # noqa: SIM401 (its `get` knows only what was used)


def _row(name: str) -> tuple[str | None, int]:
    return next(((row, usual) for row, usual, pattern in _NUMBERS if pattern.fullmatch(name)), (None, 0))


def _number(name: str, value: Any, change: dict[str, int], specials: Iterator[int]) -> Any:
    """The small value of a field; None if it stays as it is."""
    if isinstance(value, list | tuple) and value and all(type(one) is int for one in value):
        return _numbers(name, list(value), change)
    row, usual = _row(name)
    if type(value) is not int and not (value is None and (name in _FIELDS["optional"] or row in change)):
        return None
    if row is not None:
        small = change.get(row, usual)
        return small if value is None or value > small else None
    return next(specials) if re.search(r"_token_(id|index)$", name) and (value is None or value >= 80) else None


def _numbers(name: str, values: list[int], change: dict[str, int]) -> list[int] | None:
    """Small values for a list of numbers, one for each stage; the same for the same, whatever the list is."""
    if "head" in name:
        return [2] * len(values)
    if re.search("depth|layers", name) and name != "encode_proj_layers":
        return [min(one, change.get("layers", 1)) for one in values]
    if name == "image_size":
        return [change.get("image", 32)] * len(values)
    if re.search(_WIDTHS, name):
        return [value if value < 16 else max(8, value // 64 * 8) for value in values]
    return None


def _per_layer(fields: dict[str, Any], change: dict[str, int]) -> dict[str, Any]:
    """As many layers as there are different ones, for models with a list of what each of them is."""
    least = change.get("layers", 1)
    counts = [name for name in ("num_hidden_layers", "n_layer", "num_layers") if name in fields]
    count = fields[counts[0]] if counts else None
    texts = {name: value for name, value in fields.items() if isinstance(value, list) and {*map(type, value)} == {str}}
    if not (lists := {name: value for name, value in texts.items() if len(value) == count}):
        return {}
    rows = list(zip(*lists.values(), strict=True))
    chosen = [rows.index(row) for row in dict.fromkeys(rows)]
    chosen = (chosen * least)[: max(len(chosen), least)]
    found: dict[str, Any] = {name: len(chosen) for name in counts}
    found |= {name: [column[index] for index in chosen] for name, column in lists.items()}
    return found
