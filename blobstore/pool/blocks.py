"""gguf's quantized blocks as recipes: how their bytes follow from weights in float32, by the arithmetic that llama.cpp publishes.

A recipe is `gguf:TYPE`. A block has 32 weights: a step in float16, the least weight for types that end in _1, a fifth bit of
each number for those with five, and the numbers: whole bytes, or the first 16 in low halves and the others in high ones.
All is computed in float32, and each operation rounds. A processor that multiplies and adds at once finds another number in one
of 100,000 cases; these are in a difference.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["BLOCKS", "block_values", "blocked", "blocked_size"]

_WEIGHTS = 32
_PIECE = 1 << 18

_Floats = npt.NDArray[np.float32]
_Bytes = npt.NDArray[np.uint8]


class _BlockType(NamedTuple):
    """Of blocks.

    Attributes:
        bits: of a number.
        has_least: whether numbers count from the least weight of the block.
    """

    bits: int
    has_least: bool

    @property
    def size(self) -> int:
        """Bytes of a block."""
        return (4 if self.has_least else 2) + 4 * self.bits


BLOCKS = {
    "q4_0": _BlockType(4, has_least=False),
    "q4_1": _BlockType(4, has_least=True),
    "q5_0": _BlockType(5, has_least=False),
    "q5_1": _BlockType(5, has_least=True),
    "q8_0": _BlockType(8, has_least=False),
}
"""By the names that tables have for the types of tensors."""


def blocked_size(nbytes: int, name: str) -> int | None:
    """How many bytes blocks take, of weights of as many bytes; None if these are no whole blocks."""
    blocks, rest = divmod(nbytes, 4 * _WEIGHTS)
    return None if rest else blocks * BLOCKS[name].size


def blocked(base: memoryview, name: str) -> memoryview:
    """Weights in float32, of a size that fits, as blocks of a type."""
    weights, kind = np.frombuffer(base, "<f4").reshape(-1, _WEIGHTS), BLOCKS[name]
    made = np.empty((len(weights), kind.size), np.uint8)
    with np.errstate(all="ignore"):
        for start in range(0, len(weights), _PIECE // _WEIGHTS):
            piece = weights[start : start + _PIECE // _WEIGHTS]
            _write(made[start : start + len(piece)], piece, kind)
    return memoryview(made.reshape(-1))  # type: ignore[arg-type]


def _write(made: _Bytes, weights: _Floats, kind: _BlockType) -> None:
    head = 4 if kind.has_least else 2
    steps, numbers = _numbers(weights, kind)
    made[:, :2] = _halves(steps)
    if kind.has_least:
        made[:, 2:4] = _halves(_first(weights, weights.argmin(axis=1)))
    if kind.bits == 8:
        made[:, head:] = numbers
        return
    first, second = numbers[:, :16], numbers[:, 16:]
    if kind.bits == 5:
        made[:, head : head + 4] = np.packbits(numbers >> 4, axis=1, bitorder="little")
        head += 4
    made[:, head:] = (first & 15) | (second & 15) << 4


def _numbers(weights: _Floats, kind: _BlockType) -> tuple[_Floats, _Bytes]:
    """The step of each block, and its numbers."""
    if kind.bits == 8:
        steps = np.abs(weights).max(axis=1) / np.float32(127)
        scaled = weights * _inverse(steps)
        rounded = _truncated(scaled + np.copysign(np.float32(0.5), scaled))  # halves go away from 0
        return steps, np.clip(rounded, -128, 127).astype(np.int8).view(np.uint8)
    greatest = (1 << kind.bits) - 1
    if kind.has_least:
        least = weights.min(axis=1)
        steps, shifted, middle = (weights.max(axis=1) - least) / np.float32(greatest), weights - least[:, None], 0.5
    else:
        middle = (greatest + 1) / 2
        largest = _first(weights, np.abs(weights).argmax(axis=1))
        steps, shifted, middle = largest / np.float32(-middle), weights, middle + 0.5
    sums = shifted * _inverse(steps) + np.float32(middle)
    return steps, np.clip(_truncated(sums), 0, greatest).astype(np.uint8)


def _truncated(numbers: _Floats) -> _Floats:
    """Whole numbers in the place of others, and 0 in that of what is none."""
    np.trunc(numbers, out=numbers)
    numbers[np.isnan(numbers)] = 0
    return numbers


def _first(weights: _Floats, at: npt.NDArray[np.int64]) -> _Floats:
    """One weight of each block; of zeros, processors differ in which of two signs is that of a minimum."""
    return np.take_along_axis(weights, at[:, None], axis=1)[:, 0]


def _inverse(steps: _Floats) -> _Floats:
    """A factor for each block, 0 where the step is 0."""
    return np.where(steps == 0, np.float32(0), np.float32(1) / steps)[:, None]


def _halves(numbers: _Floats) -> _Bytes:
    """Numbers in float16, as bytes; of what is not a number, processors differ in the bits."""
    halves = np.where(np.isnan(numbers), np.uint16(0x7E00), numbers.astype("<f2").view("<u2"))
    return halves.astype("<u2").view(np.uint8).reshape(-1, 2)


def block_values(data: memoryview, name: str, positions: npt.NDArray[np.int64]) -> _Floats:
    """The weights that blocks stand for at these positions."""
    kind = BLOCKS[name]
    blocks = np.frombuffer(data, np.uint8).reshape(-1, kind.size)[positions // _WEIGHTS]
    at = positions % _WEIGHTS
    rows = np.arange(len(positions))
    steps = np.ascontiguousarray(blocks[:, :2]).view("<f2")[:, 0].astype(np.float32)
    head = 4 if kind.has_least else 2
    if kind.bits == 8:
        return steps * blocks[rows, head + at].view(np.int8)
    high: npt.NDArray[np.integer[Any]] = np.zeros(len(positions), np.uint8)
    if kind.bits == 5:
        high = blocks[rows, head + at // 8] >> (at % 8).astype(np.uint8) & 1
        head += 4
    low = blocks[rows, head + at % 16] >> (at // 16 * 4).astype(np.uint8) & 15
    numbers = (low | high << 4).astype(np.float32)
    if kind.has_least:
        return steps * numbers + np.ascontiguousarray(blocks[:, 2:4]).view("<f2")[:, 0].astype(np.float32)
    return steps * (numbers - np.float32(1 << (kind.bits - 1)))
