"""A small Llama with tied embeddings, whose table kernels look up and a delegate multiplies with; its weights are random."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Decoder", "DecoderConfig"]


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
