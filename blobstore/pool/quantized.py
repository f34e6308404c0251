"""Quantized weights as recipes: how their bytes follow from the weights in float32.

A recipe is `quant:RULE:GROUP:FORM`.

    RULE    which numbers there are, and how a group of weights gets its scale: the step between two numbers.
            127, 127.5, 7, 7.5      the greatest magnitude by this; numbers from -127 or -128 to 127, from -7 or -8 to 7
            128/127, 8/7            the same, but the least weight by 128 or 8 if that makes a larger step than the greatest
            127e, 127.5e            the same as without e, but no step is below 2^-12, as PT2E has it for XNNPACK
            255, 15                 the range of the weights and 0 by this, with a zero point; numbers from -128, from -8
            each with r at its end  weights are not divided by the step, but multiplied by its reciprocal
    GROUP   how many weights, one behind the other, have one scale: a channel, a row, a part of a row, or all.
    FORM    n: a number in a byte. o: with 128 added. l, h: two numbers of 4 bits in a byte, the first in the low or in the
            high half. L, H: with 8 added to each.

Quantizers differ in the last bit of a scale, and some move scales a little. So a recipe gives nearly the bytes, and differences to it the rest. It has to give the same bytes everywhere: it is made
of operations of IEEE 754 on single elements, in float32, and of maxima.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from blobstore.pool.distances import Numbers, unit

__all__ = ["BYTES", "check_rule", "find_rule", "likeness", "quantize", "quantized_size"]

BYTES = {"char", "byte"}
"""Types of quantized weights."""

_Floats = npt.NDArray[np.float32]
_Bytes = npt.NDArray[np.uint8]

_RULES = {  # the least and the greatest number
    "127": (-127, 127),
    "127.5": (-128, 127),
    "127e": (-127, 127),
    "127.5e": (-128, 127),
    "128/127": (-128, 127),
    "255": (-128, 127),
    "7": (-7, 7),
    "7.5": (-8, 7),
    "8/7": (-8, 7),
    "15": (-8, 7),
}
_BYTE_RULES, _NIBBLES = list(_RULES), [rule for rule, (_, greatest) in _RULES.items() if greatest == 7]
_RULES |= {f"{rule}r": numbers for rule, numbers in _RULES.items()}
_ZERO_POINTS = {"255", "15", "255r", "15r"}
_GROUPS = (32, 64, 128, 256)
_RECIPE = re.compile(r"quant:([0-9./]+e?r?):([1-9][0-9]{0,11}):([nolhLH])")
_PIECE = 1 << 18
_SAMPLED = 4096
_ALIKE, _ENOUGH = 0.5, 0.999  # of the numbers that are sampled
_LEAST = np.float32(np.finfo(np.float32).tiny)


def check_rule(recipe: str) -> bool:
    """Whether this is a recipe that `quantize` knows."""
    return (match := _RECIPE.fullmatch(recipe)) is not None and match[1] in _RULES


def quantized_size(nbytes: int, recipe: str) -> int | None:
    """How many bytes a recipe makes of weights of as many bytes; None if it does not fit these."""
    _, _, length, form = recipe.split(":")
    if nbytes % 4 or nbytes // 4 % int(length) or (form in "lhLH" and nbytes % 8):
        return None
    return nbytes // (4 if form in "no" else 8)


def quantize(base: memoryview, recipe: str) -> memoryview:
    """The bytes that a recipe makes of weights.

    Args:
        base: the weights, in float32, of a size that the recipe fits.
        recipe: any that `check_rule` accepts.
    """
    _, rule, length, form = recipe.split(":")
    weights = np.frombuffer(base, "<f4")
    numbers = np.empty(len(weights), np.int8)
    for start, stop, steps, zeros in _scaled(weights, rule, int(length)):
        numbers[start:stop] = _quantized(weights[start:stop].reshape(len(steps), -1), rule, steps, zeros).ravel()
    return memoryview(_formed(numbers.view(np.uint8), form))  # type: ignore[arg-type]


def find_rule(data: memoryview, base: memoryview, shape: str) -> tuple[str | None, float]:
    """A recipe that makes most of the bytes of quantized weights, and about which share of them; None if there is none.

    Args:
        data: the quantized weights.
        base: weights in float32, as many, or twice as many.
        shape: of `base`, "384,1536".
    """
    if len(data) < 2 or len(base) not in {4 * len(data), 8 * len(data)}:
        return None, 0.0
    weights, numbers = np.frombuffer(base, "<f4"), np.frombuffer(data, np.uint8)
    best, found = _ALIKE, None
    for group in _lengths(shape, len(weights)):
        if best > _ENOUGH:
            break
        in_byte = len(weights) // len(numbers)
        rules, forms = (_BYTE_RULES, "no") if in_byte == 1 else (_NIBBLES, "lhLH")
        share, rule, form = _most_equal(_tried(weights, numbers, group, rules, forms))
        if share > best:
            share, rule, form = _most_equal(_tried(weights, numbers, group, [f"{rule}r", rule], form))
            best, found = share, f"quant:{rule}:{group}:{form}"
    return found, best


def _most_equal(tried: Iterable[tuple[float, str, str]]) -> tuple[float, str, str]:
    """The first one with the largest share; behind one that makes all, none is tried."""
    best = (-1.0, "", "")
    for one in tried:
        if one[0] > best[0]:
            best = one
        if best[0] == 1:
            break
    return best


def _lengths(shape: str, count: int) -> list[int]:
    """How many weights may have one scale: a channel, a row, a part of a row, or all."""
    sizes = [int(size) for size in shape.split(",")] if shape else [1]
    lengths = dict.fromkeys((math.prod(sizes[1:]), sizes[-1], *_GROUPS, count))
    return [length for length in lengths if length > 0 and count % length == 0]


def _tried(
    weights: _Floats, numbers: _Bytes, group: int, rules: Sequence[str], forms: str
) -> Iterator[tuple[float, str, str]]:
    """The share of the bytes that each rule makes in each form, with groups of this length, judged by samples."""
    at = np.concatenate([np.arange(*ends) for ends in _samples(len(weights))])
    in_byte = len(weights) // len(numbers)
    wanted, sampled = numbers[at[::in_byte] // in_byte], weights[at, None]
    there, where = np.unique(at // group, return_inverse=True)
    groups = weights.reshape(-1, group)
    ends = _ends(groups if len(there) == len(groups) else groups[there])
    for rule in rules:
        steps, zeros = _steps(*ends, rule)
        made = _quantized(sampled, rule, steps[where], zeros[where]).ravel().view(np.uint8)
        for form in forms:
            yield float((_formed(made, form) == wanted).mean()), rule, form


def likeness(numbers: _Bytes, weights: Numbers) -> Numbers:
    """How well samples of quantized weights follow from samples of weights: 1 if they are proportional.

    Args:
        numbers: samples, each a row, of one number in a byte, or of two.
        weights: the same of several blobs, each a row that `unit` made, of which each number is one, or each second one.

    Returns:
        For each sample a row, with a column for each blob.
    """
    best: Numbers = np.max([unit(way) @ weights.T for way in meanings(numbers)], axis=0)
    return best


def meanings(numbers: _Bytes) -> list[npt.NDArray[np.float64]]:
    """What one number in each byte, or two, may stand for."""
    signed = numbers.view(np.int8).astype(np.float64)
    halves = [half.astype(np.float64) for half in (numbers & 15, numbers >> 4)]
    return [signed, np.where(signed < 0, signed + 256, signed), *halves, *((half + 8) % 16 for half in halves)]


def _samples(count: int) -> Sequence[tuple[int, int]]:
    """Some ranges of weights, of an even number each."""
    size = min(_SAMPLED, count) // 2 * 2
    return [(start, start + size) for start in ((count - size) * at // 3 // 2 * 2 for at in range(4))]


def _scaled(weights: _Floats, rule: str, group: int) -> Iterator[tuple[int, int, _Floats, _Floats]]:
    """Ranges of weights, of some groups or of a part of one, with their steps and zero points."""
    rows = max(_PIECE // group, 1)
    for first in range(0, len(weights), rows * group):
        block = weights[first : first + rows * group].reshape(-1, group)
        steps, zeros = _steps(*_ends(block), rule)
        if len(block) > 1:
            yield first, first + block.size, steps, zeros
        else:
            for start in range(first, first + group, _PIECE):
                yield start, min(start + _PIECE, first + group), steps, zeros


def _ends(groups: _Floats) -> tuple[_Floats, _Floats]:
    """The least and the greatest weight of each group, a row."""
    with np.errstate(all="ignore"):
        return groups.min(axis=1), groups.max(axis=1)


def _steps(least: _Floats, greatest: _Floats, rule: str) -> tuple[_Floats, _Floats]:
    """The step and the zero point of groups that have these ends."""
    with np.errstate(all="ignore"):
        zeros = np.zeros(len(least), np.float32)
        low = np.float32(_RULES[rule][0])
        if rule in _ZERO_POINTS:
            least, greatest = np.minimum(least, np.float32(0)), np.maximum(greatest, np.float32(0))
            steps = np.maximum((greatest - least) / np.float32(rule.rstrip("r")), _LEAST)
            zeros = np.nan_to_num(_clipped(low - np.rint(least / steps), rule))
        elif "/" in rule:
            below, above = map(np.float32, rule.rstrip("r").split("/"))
            steps = np.maximum(-least / below, greatest / above)
        else:
            steps = np.maximum(-least, greatest) / np.float32(rule.rstrip("er"))
            if "e" in rule:
                steps = np.maximum(steps, np.float32(2**-12))
        return np.maximum(steps, _LEAST), zeros


def _quantized(weights: _Floats, rule: str, steps: _Floats, zeros: _Floats) -> npt.NDArray[np.int8]:
    """Weights as numbers, a group or a part of one in a row."""
    with np.errstate(all="ignore"):
        numbers = weights * (np.float32(1) / steps)[:, None] if rule.endswith("r") else weights / steps[:, None]
        np.rint(numbers, out=numbers)
        if rule in _ZERO_POINTS:
            numbers += zeros[:, None]
        numbers[np.isnan(numbers)] = 0  # as a whole number, it could be any
        return _clipped(numbers, rule).astype(np.int8)


def _clipped(numbers: _Floats, rule: str) -> _Floats:
    """Numbers within those of a rule."""
    least, greatest = map(np.float32, _RULES[rule])
    return np.minimum(np.maximum(numbers, least), greatest)


def _formed(numbers: _Bytes, form: str) -> _Bytes:
    """Numbers as the bytes of a form."""
    if form in "no":
        return numbers if form == "n" else numbers ^ np.uint8(128)
    first, second = numbers[0::2] & np.uint8(15), numbers[1::2] & np.uint8(15)
    low, high = (first, second) if form in "lL" else (second, first)
    packed: _Bytes = low | high << np.uint8(4)
    return packed ^ np.uint8(0x88) if form in "LH" else packed
