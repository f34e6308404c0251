"""A zoo as an application ships it, in small: architectures and files as there, with random weights and small widths.

speech/LANGUAGE/{duration,prosody,decoder}.pte    nine languages, whose voice is part of the networks
transcription/{encoder,decoder}.pte               and both in whisper.pte, which newer applications take
chat/{float32,8da4w,int8}.pte                     one text model in three forms
chat/{…}.pte                                      six fine-tunes of it
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from blobstore.lowering.export import lower, quiet
from examples.decoder import Decoder, DecoderConfig

__all__ = ["FORMS", "LANGUAGES", "TUNED", "inputs_of", "write_chat", "write_zoo"]

LANGUAGES = ("en-us", "en-gb", "es", "fr", "hi", "it", "ja", "pt-br", "zh")
FORMS = ("float32", "8da4w", "int8")
TUNED = ("cook", "coach", "guide", "lawyer", "poet", "teacher")
"""The first four have merged adapters of rank 4 on the projections of queries and values; in the others every weight moved."""

_SOUNDS, _VOICE, _WIDTH, _TEXT = 178, 64, 192, 96
_FRAMES, _BINS = 200, 80


class _Layer(nn.Module):
    """A transformer's layer; with `memory`, it also looks at what another network made."""

    def __init__(self, width: int, heads: int = 4, *, crossed: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.mix = nn.ModuleList(nn.Linear(width, width) for _ in range(4 * (1 + crossed)))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 + crossed))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attend(self, which: int, x: Tensor, memory: Tensor) -> Tensor:
        query, key, value, out = list(self.mix)[4 * which : 4 * which + 4]

        def split(y: Tensor) -> Tensor:
            return y.view(1, -1, self.heads, y.shape[-1] // self.heads).transpose(1, 2)

        scores = split(query(x)) @ split(key(memory)).transpose(2, 3) * (x.shape[-1] // self.heads) ** -0.5
        mixed = torch.softmax(scores, -1) @ split(value(memory))
        return out(mixed.transpose(1, 2).reshape(1, -1, x.shape[-1]))  # type: ignore[no-any-return]

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        y = self.norms[0](x)
        x = x + self.attend(0, y, y)
        if memory is not None:
            x = x + self.attend(1, self.norms[2](x), memory)
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))  # type: ignore[no-any-return]


class _Styled(nn.Module):
    """A convolution whose output is scaled and moved by the voice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.style = nn.Conv1d(width, width, 5, padding=2), nn.Linear(_VOICE, 2 * width)

    def forward(self, x: Tensor, voice: Tensor) -> Tensor:
        scale, shift = self.style(voice).unsqueeze(-1).chunk(2, 1)
        return x + functional.leaky_relu(self.conv(x) * (1 + scale) + shift, 0.2)


class _Duration(nn.Module):
    """How long each sound lasts."""

    def __init__(self) -> None:
        super().__init__()
        self.sounds = nn.Embedding(_SOUNDS, _WIDTH)
        self.blocks = nn.ModuleList(_Styled(_WIDTH) for _ in range(2))
        self.out = nn.Linear(_WIDTH, 50)

    def forward(self, sounds: Tensor) -> Tensor:
        x = self.sounds(sounds).transpose(1, 2)
        for block in self.blocks:
            x = block(x, self.get_buffer("voice"))
        return self.out(x.transpose(1, 2))  # type: ignore[no-any-return]


class _Prosody(nn.Module):
    """Pitch and loudness of each frame."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Styled(_WIDTH) for _ in range(3))
        self.out = nn.Conv1d(_WIDTH, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.get_buffer("voice"))
        return self.out(x)  # type: ignore[no-any-return]


class _Vocoder(nn.Module):
    """The sound itself, as frames of a spectrum at four times the rate."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(_WIDTH + 2, 2 * _WIDTH, 7, padding=3)
        self.blocks = nn.ModuleList(_Styled(2 * _WIDTH) for _ in range(3))
        self.out = nn.Conv1d(2 * _WIDTH, 2 * _BINS, 7, padding=3)

    def forward(self, x: Tensor, prosody: Tensor) -> Tensor:
        x = self.first(torch.cat((x, prosody), 1))
        for i, block in enumerate(self.blocks):
            x = block(x, self.get_buffer("voice"))
            if i < 2:
                x = functional.interpolate(x, scale_factor=2.0, mode="nearest")
        return self.out(x)  # type: ignore[no-any-return]


_SPEECH: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "duration": (_Duration, (torch.zeros(1, _TEXT, dtype=torch.int64),)),
    "prosody": (_Prosody, (torch.zeros(1, _WIDTH, _TEXT),)),
    "decoder": (_Vocoder, (torch.zeros(1, _WIDTH, _TEXT), torch.zeros(1, 2, _TEXT))),
}


class _Listener(nn.Module):
    """Whisper's encoder: two convolutions over a spectrogram, then layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(_BINS, _WIDTH, 3, padding=1)
        self.second = nn.Conv1d(_WIDTH, _WIDTH, 3, stride=2, padding=1)
        self.places = nn.Parameter(torch.zeros(1, _FRAMES // 2, _WIDTH))
        self.layers = nn.ModuleList(_Layer(_WIDTH) for _ in range(2))

    def forward(self, sound: Tensor) -> Tensor:
        x = functional.gelu(self.second(functional.gelu(self.first(sound)))).transpose(1, 2) + self.places
        for layer in self.layers:
            x = layer(x)
        return x


class _Writer(nn.Module):
    """Whisper's decoder: layers that look at the sound; the table of words is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4096, _WIDTH)
        self.layers = nn.ModuleList(_Layer(_WIDTH, crossed=True) for _ in range(2))
        self.norm = nn.LayerNorm(_WIDTH)

    def forward(self, words: Tensor, sound: Tensor) -> Tensor:
        x = self.words(words)
        for layer in self.layers:
            x = layer(x, sound)
        return functional.linear(self.norm(x), self.words.weight)


def write_zoo(folder: Path) -> Iterator[Path]:
    """Lower all programs into a folder, as many at a time as there are cores; the path of each when it is there."""
    jobs: list[tuple[Callable[..., Path], tuple[Any, ...]]] = []
    for language, name in itertools.product(LANGUAGES, _SPEECH):
        jobs.append((_write_speech, (folder / "speech" / language / f"{name}.pte", language, name)))
    for name in ("encoder", "decoder", "whisper"):
        jobs.append((_write_transcription, (folder / "transcription" / f"{name}.pte", name)))
    for form in (*FORMS, *TUNED):
        jobs.append((write_chat, (folder / "chat" / f"{form}.pte", form)))
    # a process of torch has threads that a fork would not have
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), context, initializer=_prepare) as workers:
        for done in as_completed(workers.submit(work, *arguments) for work, arguments in jobs):
            yield done.result()


def _prepare() -> None:
    """A process for each core, and none of them looks for garbage in the modules of torch."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)


def _write_speech(path: Path, language: str, name: str) -> Path:
    make, inputs = _SPEECH[name]
    network = _seeded(make(), list(_SPEECH).index(name))
    generator = torch.Generator().manual_seed(LANGUAGES.index(language))
    network.register_buffer("voice", torch.randn(1, _VOICE, generator=generator))
    return _write(path, network, inputs)


def inputs_of(path: Path) -> tuple[Tensor, ...]:
    """Inputs for a program of a language, or of the text model."""
    if path.stem in _SPEECH:
        return _SPEECH[path.stem][1]
    cache = torch.zeros(DecoderConfig().cache_shape)
    return torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), cache, cache.clone()


def _write_transcription(path: Path, name: str) -> Path:
    listener, writer = _seeded(_Listener(), 10), _seeded(_Writer(), 11)
    words = torch.zeros(1, 8, dtype=torch.int64), torch.zeros(1, _FRAMES // 2, _WIDTH)
    methods: dict[str, tuple[nn.Module, tuple[Tensor, ...]]] = {
        "encoder": (listener, (torch.zeros(1, _BINS, _FRAMES),)),
        "decoder": (writer, words),
    }
    return _write(path, methods) if name == "whisper" else _write(path, *methods[name])


def write_chat(path: Path, form: str, again: int = 0) -> Path:
    """The text model in one of its forms, or a fine-tune; a higher number is that of a later training."""
    model = Decoder(DecoderConfig(vocabulary=4096)).eval()
    if form in TUNED:
        _fine_tune(model, form, again)
    elif form != "float32":
        _quantize(model, form)
    return _write(path, model, model.example(1))


def _seeded(network: nn.Module, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter[0].numel() ** -0.5, generator=generator)
    return network.eval()


def _fine_tune(model: Decoder, name: str, again: int) -> None:
    number = TUNED.index(name)
    generator = torch.Generator().manual_seed(100 + number)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if number < 4 and (".wq." in key or ".wv." in key):
                down = torch.randn(4, weight.shape[1], generator=generator)
                up = torch.randn(weight.shape[0], 4, generator=generator)
                weight.add_(2e-3 * up @ down)
            elif number >= 4:
                weight.mul_(1 + 1e-3 * torch.randn(weight.shape, generator=generator))
        generator.manual_seed(1000 + number)
        for _ in range(again):
            for key, weight in model.named_parameters():
                if ".wq." in key:
                    weight.mul_(1 + 1e-3 * torch.randn(weight.shape, generator=generator))


def _quantize(model: Decoder, form: str) -> None:
    """As recipes for phones do it: activations at run time, weights in groups of 32, or in rows of 8 bits."""
    with quiet():
        from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
        from torchao.quantization.granularity import Granularity, PerAxis, PerGroup

        bits, group = (torch.int4, PerGroup(32)) if form == "8da4w" else (torch.int8, PerAxis(0))
        granularity: Granularity = group
        quantize_(model, Int8DynamicActivationIntxWeightConfig(weight_dtype=bits, weight_granularity=granularity))


def _write(path: Path, model: Any, inputs: tuple[Tensor, ...] | None = None) -> Path:
    """Lower through ExecuTorch's own XNNPACK partitioner, as any user does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        lower(model, inputs).write_to_file(file)
    return path
