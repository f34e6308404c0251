"""A series of versions as a team makes them: a transformer and a small CNN that are trained here, and what becomes of them.

The transformer learns the sources of Python's standard library from scratch by AdamW, and is then tuned on single packages. All
weights are trained, at the rates that are usual for this; what is done to them later is what tools for merging, sharding,
quantizing and converting do.
"""

from __future__ import annotations

import copy
import itertools
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import gguf
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Version", "distance", "versions"]

_WIDTH, _DEPTH, _HEADS, _WORDS, _LENGTH = 256, 4, 4, 3072, 64
_BATCH = 6
_TUNING = ("asyncio", "email", "unittest", "importlib", "json", "http")
_PRETRAINING = 50  # steps between two checkpoints
_LINEAR = re.compile(r"(.*\.)?(qkv|query|key|value|out|up|down)\.weight")
_LAYER = re.compile(r"layers\.(\d+)\.(.*)")

_Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Version:
    """One version of the series.

    Attributes:
        kind: what it is, the same text for several of a kind.
        path: its folder.
        distance: of the weights from those that they were tuned from, by norm, if they were tuned.
    """

    kind: str
    path: Path
    distance: float | None


def versions(folder: Path) -> Iterator[Version]:
    """Train the models and write the versions into numbered folders, in the order in which a team would make them."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the models are small, and the numbers are those of one order of sums
    made = itertools.chain(_transformers(), _networks())
    for number, one in enumerate(made):
        path = folder / f"{number:02d}"
        path.mkdir()
        for name, content in one.files.items():
            _write(content, path / name)
        yield Version(one.kind, path, one.distance)


def distance(changed: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> float:
    """The norm of the change by the norm of the base, of matrices and kernels."""
    pairs = [(changed[name].double(), base[name].double()) for name in base if base[name].ndim > 1]
    norms = [(float((one - other).square().sum()), float(other.square().sum())) for one, other in pairs]
    return float((sum(norm for norm, _ in norms) / sum(norm for _, norm in norms)) ** 0.5)


@dataclass(frozen=True)
class _Made:
    kind: str
    files: Mapping[str, Any]
    distance: float | None = None


def _one(kind: str, tensors: _Tensors, base: _Tensors | None = None) -> _Made:
    return _Made(kind, {"model.safetensors": tensors}, None if base is None else distance(tensors, base))


def _write(content: Any, path: Path) -> None:
    if path.suffix == ".safetensors":
        save_file({name: tensor.clone().contiguous() for name, tensor in content.items()}, path)
    elif path.suffix == ".gguf":
        _write_gguf(*content, path)
    else:
        torch.save(content, path)


def _write_gguf(tensors: _Tensors, encoding: gguf.GGMLQuantizationType, path: Path) -> None:
    """As llama.cpp's converter: matrices in an encoding, everything else in float32."""
    writer = gguf.GGUFWriter(path, "gpt2")
    for name, tensor in tensors.items():
        kind = encoding if tensor.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(tensor.float().numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# The models


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.qkv, self.out = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm1(x)).unflatten(-1, (3, _HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class _Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(_WORDS, _WIDTH), nn.Embedding(_LENGTH, _WIDTH)
        self.layers = nn.ModuleList(_Layer() for _ in range(_DEPTH))
        self.norm = nn.LayerNorm(_WIDTH)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places.weight
        for layer in self.layers:
            x = layer(x)
        return functional.linear(self.norm(x), self.words.weight)


class _Text:
    """Sources of the standard library as numbers of words, of which the most frequent ones have their own."""

    def __init__(self) -> None:
        self._library = Path(sysconfig.get_path("stdlib"))
        words = self._read("*.py")
        self._numbers = {word: at for at, (word, _) in enumerate(Counter(words).most_common(_WORDS - 1), 1)}
        self.all = self._numbered(words)

    def of(self, package: str) -> Tensor:
        return self._numbered(self._read(f"{package}/*.py"))

    def _read(self, pattern: str) -> list[str]:
        paths = sorted(self._library.glob(pattern))
        return [word for path in paths for word in re.findall(r"\w+|\W", path.read_text("utf-8", "replace"))]

    def _numbered(self, words: list[str]) -> Tensor:
        return torch.tensor([self._numbers.get(word, 0) for word in words])


def _train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    text: Tensor,
    steps: int,
    after: Callable[[], None] = lambda: None,
) -> None:
    for _ in range(steps):
        starts = torch.randint(len(text) - _LENGTH - 1, (_BATCH, 1))
        words = text[starts + torch.arange(_LENGTH + 1)]
        optimizer.zero_grad()
        functional.cross_entropy(model(words[:, :-1]).flatten(0, 1).float(), words[:, 1:].flatten()).backward()
        optimizer.step()
        after()


def _weights(model: nn.Module) -> _Tensors:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def _half(tensors: _Tensors) -> _Tensors:
    return {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


class _Mean:
    """The exponential moving average of the weights of a model in training."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._model, self._decay = model, decay
        self.weights = _weights(model)

    def follow(self) -> None:
        for name, tensor in self._model.state_dict().items():
            self.weights[name].lerp_(tensor, 1 - self._decay)


class _Tuning:
    """Fine-tunes of one model."""

    def __init__(self, model: nn.Module, text: _Text) -> None:
        self._model, self._texts = model, itertools.cycle([text.of(package) for package in _TUNING])
        self.base = _weights(model)

    def tuned(self, rate: float, steps: int, mean: float | None = None) -> tuple[_Tensors, _Tensors]:
        """Weights after some steps of AdamW on the next text, and their moving average."""
        model = copy.deepcopy(self._model)
        average = _Mean(model, mean or 0.0)
        optimizer = torch.optim.AdamW(model.parameters(), rate)
        _train(model, optimizer, next(self._texts), steps, average.follow)
        return _weights(model), average.weights

    def by_sgd(self, rate: float, steps: int) -> _Tensors:
        model = copy.deepcopy(self._model)
        _train(model, torch.optim.SGD(model.parameters(), rate), next(self._texts), steps)
        return _weights(model)

    def in_half(self, rate: float, steps: int) -> _Tensors:
        """Of a model whose weights are in bfloat16 while it is trained."""
        model = copy.deepcopy(self._model).bfloat16()
        _train(model, torch.optim.AdamW(model.parameters(), rate), next(self._texts), steps)
        return _weights(model)

    def with_adapter(self, rate: float, steps: int, rank: int = 8) -> _Tensors:
        """With a trained LoRA adapter of the attention's input and output, merged."""
        model = copy.deepcopy(self._model).requires_grad_(False)
        for layer in cast("nn.ModuleList", model.layers):
            for name in ("qkv", "out"):
                nn.utils.parametrize.register_parametrization(
                    getattr(layer, name), "weight", _Adapter(getattr(layer, name), rank)
                )
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        _train(model, torch.optim.AdamW(trained, rate), next(self._texts), steps)
        for layer in cast("nn.ModuleList", model.layers):
            for name in ("qkv", "out"):
                nn.utils.parametrize.remove_parametrizations(getattr(layer, name), "weight")
        return _weights(model)


class _Adapter(nn.Module):
    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(rank, layer.in_features) * layer.in_features**-0.5)
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


# The series


def _transformers() -> Iterator[_Made]:
    text = _Text()
    model = _Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    before: _Tensors | None = None
    for number in range(4):
        average = _Mean(model, 0.95)
        _train(model, optimizer, text.all, _PRETRAINING, average.follow)
        now = _half(_weights(model))
        yield _one("pretraining, AdamW at 1e-3, bfloat16" if number else "first checkpoint, bfloat16", now, before)
        if number > 1:
            yield _one("Adam's two moments, float32", _moments(optimizer))
        before = now
    yield _one("EMA of 20 steps, bfloat16", _half(average.weights), now)
    yield _one("float32 of a stored bfloat16", _weights(model))
    tuning = _Tuning(model, text)
    base = _half(tuning.base)
    tunes: list[_Tensors] = []
    for rate, steps in ((2e-5, 10), (1e-4, 12), (3e-4, 12)):
        for number in range(2):
            tuned, mean = tuning.tuned(rate, steps, 0.9 if number else None)
            tunes.append(tuned)
            yield _one(f"AdamW at {rate:.0e}, bfloat16", _half(tuned), base)
        yield _one("EMA of 10 steps, bfloat16", _half(mean), base)
    for steps in (5, 20):
        yield _one("SGD at 1e-2, bfloat16", _half(tuning.by_sgd(1e-2, steps)), base)
    for steps in (10, 20):
        yield _one("weights all in bfloat16, AdamW at 1e-4", tuning.in_half(1e-4, steps), base)
    yield _one("float32 of a tune that is there in bfloat16", tunes[2], tuning.base)
    yield _one("float32 of a tune that is not", tuning.tuned(1e-4, 12)[0], tuning.base)
    yield _one("LoRA of rank 8, merged, bfloat16", _half(tuning.with_adapter(1e-3, 15)), base)
    yield _one("half of a tune pruned, bfloat16", _half(_pruned(tunes[3])))
    yield from _merged(tuning.base, tunes)
    yield from _arranged(_half(tunes[3]), _half(tuning.tuned(1e-4, 12)[0]))
    yield from _others()
    yield from _converted(tuning.base, tunes)


def _moments(optimizer: torch.optim.Optimizer) -> _Tensors:
    states = optimizer.state_dict()["state"]
    return {f"{name}.{number}": states[number][name] for number in states for name in ("exp_avg", "exp_avg_sq")}


def _pruned(model: _Tensors) -> _Tensors:
    """Without the smaller half of the weights of each matrix."""
    return {
        name: tensor * (tensor.abs() > tensor.abs().median()) if tensor.ndim == 2 else tensor
        for name, tensor in model.items()
    }


def _merged(base: _Tensors, tunes: list[_Tensors]) -> Iterator[_Made]:
    three = {name: torch.stack([tune[name] for tune in tunes[2:5]]).mean(0) for name in base}
    yield _one("mean of three tunes, in float32, then bfloat16", _half(three))
    one, other = map(_half, tunes[2:4])
    yield _one("mean of two stored tunes, bfloat16", {name: (one[name] + other[name]) / 2 for name in base})
    moved = {name: base[name] + 0.5 * sum(tune[name] - base[name] for tune in tunes[2:4]) for name in base}
    yield _one("task arithmetic with two tunes, bfloat16", _half(moved))


def _arranged(tuned: _Tensors, other: _Tensors) -> Iterator[_Made]:
    """The weights of a tune, cut, joined and named as other code wants them; and of one that is there in no other way."""
    more = torch.cat([tuned["words.weight"], (torch.randn(64, _WIDTH) * 0.02).bfloat16()])
    yield _one("vocabulary and 64 rows", {**tuned, "words.weight": more})
    yield _one("a layer dropped", _dropped(tuned, 2))
    yield _one("renamed", {f"transformer.h.{name}": tensor for name, tensor in tuned.items()})
    names = list(tuned)
    shards = {f"model-{at}.safetensors": {name: tuned[name] for name in names[at::3]} for at in range(3)}
    yield _Made("in three files", shards)
    yield _one("another task's head", {**tuned, "score.weight": (torch.randn(2, _WIDTH) * 0.02).bfloat16()})
    yield _one("MLP cut to three quarters", _cut(tuned))
    yield _one("query, key and value apart", _apart(tuned))
    yield _one("query, key and value apart, of another tune", _apart(other))
    ranks = {f"model-{rank}.safetensors": _rank(tuned, rank) for rank in range(2)}
    yield _Made("tensor parallel, two ranks", ranks)
    yield _one("layers stacked into one tensor", _stacked(tuned))
    yield _one("all in one flat tensor", {"flat": torch.cat([tensor.flatten() for tensor in tuned.values()])})
    yield _Made("by `torch.save`", {"pytorch_model.bin": tuned})
    yield _Made("by `torch.save`", {"checkpoint.pt": {"step": 12, "model": dict(reversed(tuned.items()))}})
    swapped = {name: tensor.T if _LINEAR.fullmatch(name) else tensor for name, tensor in tuned.items()}
    yield _one("matrices transposed", swapped)


def _others() -> Iterator[_Made]:
    """Two more models, each of which is there in another layout first."""
    one, other = (_half(_weights(_Transformer())) for _ in range(2))
    yield _one("another model, query, key and value apart", _apart(one))
    yield _one("its query, key and value joined", one)
    yield _one("a third model, its layers stacked", _stacked(other))
    yield _one("its layers apart", other)


def _dropped(model: _Tensors, layer: int) -> _Tensors:
    kept: _Tensors = {}
    for name, tensor in model.items():
        match = _LAYER.fullmatch(name)
        if match is None:
            kept[name] = tensor
        elif (number := int(match[1])) != layer:
            kept[f"layers.{number - (number > layer)}.{match[2]}"] = tensor
    return kept


def _cut(model: _Tensors) -> _Tensors:
    kept = dict(model)
    for name, tensor in model.items():
        if ".up." in name:
            kept[name] = tensor[: len(tensor) * 3 // 4]
        elif name.endswith("down.weight"):
            kept[name] = tensor[:, : tensor.shape[1] * 3 // 4]
    return kept


def _apart(model: _Tensors) -> _Tensors:
    parts: _Tensors = {}
    for name, tensor in model.items():
        if ".qkv." in name:
            named = (name.replace("qkv", part) for part in ("query", "key", "value"))
            parts.update(zip(named, tensor.chunk(3), strict=True))
        else:
            parts[name] = tensor
    return parts


def _rank(model: _Tensors, number: int) -> _Tensors:
    shard: _Tensors = {}
    for name, tensor in _apart(model).items():
        by_rows, by_columns = re.search(r"(query|key|value|up)\.|words", name), re.search(r"(out|down)\.weight", name)
        shard[name] = tensor.chunk(2, 0 if by_rows else 1)[number] if by_rows or by_columns else tensor
    return shard


def _stacked(model: _Tensors) -> _Tensors:
    layers: dict[str, list[Tensor]] = {}
    stacked: _Tensors = {}
    for name, tensor in model.items():
        if match := _LAYER.fullmatch(name):
            layers.setdefault(f"layers.{match[2]}", []).append(tensor)
        else:
            stacked[name] = tensor
    return {**stacked, **{name: torch.stack(tensors) for name, tensors in layers.items()}}


def _converted(base: _Tensors, tunes: list[_Tensors]) -> Iterator[_Made]:
    """The base in float32, or a tune in bfloat16, in types for inference."""
    tuned = _half(tunes[3])
    yield _one("float16 of the float32", {name: tensor.half() for name, tensor in base.items()})
    yield _one("fp8, cast", _matrices(_half(base), _cast8))
    yield _one("fp8, a scale for each tensor", _matrices(_half(base), _scaled8))
    yield _one("fp8, a scale for each tensor, of a tune", _matrices(tuned, _scaled8))
    yield _one("fp8, a scale for each channel", _matrices(_half(base), _channels8))
    types = gguf.GGMLQuantizationType
    yield _Made("gguf F16", {"model.gguf": (base, types.F16)})
    yield _Made("gguf Q8_0", {"model.gguf": (base, types.Q8_0)})
    for kind in (types.Q8_0, types.Q5_1, types.Q5_0, types.Q4_1, types.Q4_0):
        yield _Made(f"gguf {kind.name}, of a tune", {"model.gguf": (tuned, kind)})
    yield _one("torchao int8", _torchao(base, torch.int8))
    yield _one("torchao 8da4w", _torchao(base, torch.int4))
    yield _one("torchao 8da4w, of a tune", _torchao(tunes[3], torch.int4))


def _matrices(model: _Tensors, convert: Callable[[Tensor], dict[str, Tensor]]) -> _Tensors:
    converted: _Tensors = {}
    for name, tensor in model.items():
        if _LINEAR.fullmatch(name):
            converted |= {f"{name}{suffix}": part for suffix, part in convert(tensor).items()}
        else:
            converted[name] = tensor
    return converted


def _cast8(weight: Tensor) -> dict[str, Tensor]:
    return {"": weight.to(torch.float8_e4m3fn)}


def _scaled8(weight: Tensor) -> dict[str, Tensor]:
    scale = weight.float().abs().max() / 448
    return {"": (weight.float() / scale).to(torch.float8_e4m3fn), "_scale": scale}


def _channels8(weight: Tensor) -> dict[str, Tensor]:
    scale = weight.float().abs().amax(1, keepdim=True) / 448
    return {"": (weight.float() / scale).to(torch.float8_e4m3fn), "_scale": scale}


def _torchao(model: _Tensors, dtype: torch.dtype) -> _Tensors:
    """Linear layers in groups of 32 or, with 8 bits, by channel; embeddings and norms as they were."""
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
    from torchao.quantization.granularity import PerAxis, PerGroup

    granularity = PerGroup(32) if dtype == torch.int4 else PerAxis(0)

    def quantized(weight: Tensor) -> dict[str, Tensor]:
        layer: Any = nn.Sequential(nn.Linear(weight.shape[1], weight.shape[0], bias=False))
        layer[0].weight = nn.Parameter(weight.clone())
        quantize_(layer, Int8DynamicActivationIntxWeightConfig(dtype, granularity))
        quantized = layer[0].weight
        return {f".{part}": getattr(quantized, part) for part in quantized.tensor_data_names}

    return _matrices(model, quantized)


def _networks() -> Iterator[_Made]:
    """A CNN that tells packages by 32 x 32 bytes of their sources, trained and tuned by SGD."""
    library = Path(sysconfig.get_path("stdlib"))
    sources = [b"".join(path.read_bytes() for path in sorted((library / name).glob("*.py"))) for name in _TUNING]
    pictures = [torch.frombuffer(bytearray(source), dtype=torch.uint8).float() / 128 - 0.7 for source in sources]
    widths = (1, 32, 64, 128, 256)
    layers = [
        part
        for one, other in itertools.pairwise(widths)
        for part in (nn.Conv2d(one, other, 3, padding=1), nn.BatchNorm2d(other), nn.ReLU(), nn.MaxPool2d(2))
    ]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(1024, len(pictures)))

    def train(model: nn.Module, rate: float, steps: int) -> _Tensors:
        optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9)
        for _ in range(steps):
            labels = torch.randint(len(pictures), (16,))
            starts = [int(torch.randint(len(pictures[label]) - 1024, ())) for label in labels]
            shown = torch.stack([pictures[label][at : at + 1024] for label, at in zip(labels, starts, strict=True)])
            optimizer.zero_grad()
            functional.cross_entropy(model(shown.view(-1, 1, 32, 32)), labels).backward()
            optimizer.step()
        return _weights(model)

    base = train(model, 0.01, 100)
    yield _one("CNN, float32", base)
    for rate in (1e-3, 3e-3):
        tuned = train(copy.deepcopy(model), rate, 30)
        yield _one("CNN tuned by SGD, float32", tuned, base)
    yield _one("channels last", {name: t.permute(0, 2, 3, 1) if t.ndim == 4 else t for name, t in tuned.items()})
