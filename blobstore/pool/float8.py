"""Weights in float8 as recipes: how their bytes follow from weights in float32.

A recipe is `float8:TYPE:RULE:GROUP`.

    TYPE    float8e4m3fn or float8e5m2; to the nearest of their numbers, and of two that are as near to the even one.
    RULE    what is done before: `1` nothing; `/` each weight is divided by its group's scale, the greatest magnitude divided by
            the largest number of the type; `*` each is multiplied by this number times the inverse of the greatest magnitude, as
            torch divides a number by a tensor.
    GROUP   how many weights, one behind the other, have one scale: a channel, a row, or all.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["FLOAT8", "check_float8", "find_float8", "float8", "float8_size", "float8_values"]

_Floats = npt.NDArray[np.float32]
_Bytes = npt.NDArray[np.uint8]

_PIECE = 1 << 18
_SAMPLED = 1 << 14
_RECIPE = re.compile(r"float8:(float8e4m3fn|float8e5m2):([1/*]):([1-9][0-9]{0,11})")


class _Float8Type(NamedTuple):
    """A type.

    Attributes:
        mantissa: bits behind the first one.
        least: the exponent of its least normal number.
        most: its largest number.
        overflow: the byte of what is larger.
        finite: the largest byte of a number.
    """

    mantissa: int
    least: int
    most: float
    overflow: int
    finite: int


FLOAT8 = {"float8e4m3fn": _Float8Type(3, -6, 448.0, 0x7E, 0x7E), "float8e5m2": _Float8Type(2, -14, 57344.0, 0x7C, 0x7B)}
"""By the names that tables have for the types of tensors."""


def check_float8(recipe: str) -> bool:
    """Whether this is a recipe that `float8` knows."""
    return _RECIPE.fullmatch(recipe) is not None


def float8_size(nbytes: int, recipe: str) -> int | None:
    """How many bytes a recipe makes of weights of as many bytes; None if it does not fit these."""
    group = int(recipe.rpartition(":")[2])
    return nbytes // 4 if nbytes % 4 == 0 and nbytes // 4 % group == 0 else None


def float8(base: memoryview, recipe: str) -> memoryview:
    """The bytes that a recipe makes of weights in float32, of a size that fits."""
    _, name, rule, group = recipe.split(":")
    weights = np.frombuffer(base, "<f4")
    made = np.empty(len(weights), np.uint8)
    for start, scaled in _scaled(weights, FLOAT8[name], rule, int(group)):
        made[start : start + len(scaled)] = _rounded(scaled, FLOAT8[name])
    return memoryview(made)  # type: ignore[arg-type]


def find_float8(data: memoryview, base: memoryview, name: str, shape: str) -> tuple[str, float] | None:
    """The recipe that makes most of the bytes of weights in float8, and about which share; None if none makes half of them.

    Args:
        data: the weights in a type of `name`.
        base: as many weights in float32.
        shape: of `base`, "384,1536".
    """
    weights, wanted = np.frombuffer(base, "<f4"), np.frombuffer(data, np.uint8)
    if len(weights) != len(wanted) or not len(wanted):
        return None
    sizes = [int(size) for size in shape.split(",")] if shape else [1]
    groups = dict.fromkeys((len(weights), math.prod(sizes[1:]), sizes[-1]))
    tries = [("1", 1), *((rule, group) for group in groups if group and len(weights) % group == 0 for rule in "/*")]
    best: tuple[str, float] | None = None
    step = max(len(weights) // _SAMPLED, 1)
    for rule, group in tries:
        made = [
            (_rounded(scaled[::step], FLOAT8[name]), wanted[start : start + len(scaled) : step])
            for start, scaled in _scaled(weights, FLOAT8[name], rule, group)
        ]
        share = sum(int((one == other).sum()) for one, other in made) / sum(len(one) for one, _ in made)
        if share > (best[1] if best else 0.5):
            best = f"float8:{name}:{rule}:{group}", share
    return best


def float8_values(data: memoryview, name: str, positions: npt.NDArray[np.int64]) -> _Floats:
    """The weights, without scales, at these positions; 0 for what is no number."""
    kind = FLOAT8[name]
    numbers = np.frombuffer(data, np.uint8)[positions]
    codes = (numbers & 127).astype(np.int32)
    exponents = np.maximum(codes >> kind.mantissa, 1)
    mantissas = codes - ((exponents - 1) << kind.mantissa)
    values = np.ldexp(mantissas.astype(np.float32), exponents - 1 + kind.least - kind.mantissa)
    return np.where(codes > kind.finite, np.float32(0), np.where(numbers > 127, -values, values)).astype(np.float32)


def _scaled(weights: _Floats, kind: _Float8Type, rule: str, group: int) -> Iterator[tuple[int, _Floats]]:
    """Weights piece by piece, as a rule makes them, each with the position of its first one."""
    with np.errstate(all="ignore"):
        if rule == "1":
            yield from ((start, weights[start : start + _PIECE]) for start in range(0, len(weights), _PIECE))
            return
        rows = max(_PIECE // group, 1)
        for start in range(0, len(weights), rows * group):
            block = weights[start : start + rows * group].reshape(-1, group)
            greatest, most = np.abs(block).max(axis=1, keepdims=True), np.float32(kind.most)
            made = block / (greatest / most) if rule == "/" else block * (np.float32(1) / greatest * most)
            yield start, np.copysign(made, block).ravel()  # processors differ in the sign of what is not a number


def _rounded(weights: _Floats, kind: _Float8Type) -> _Bytes:
    """Weights as the bytes of a type."""
    bits = np.ascontiguousarray(weights).view("<u4")
    magnitudes, dropped = bits & np.uint32(0x7FFFFFFF), 23 - kind.mantissa
    even = (magnitudes >> np.uint32(dropped)) & np.uint32(1)
    codes = (magnitudes + even + np.uint32((1 << dropped - 1) - 1)) >> np.uint32(dropped)
    codes -= np.uint32(126 + kind.least << kind.mantissa)
    # the sum with a number whose last bit is the least of the type has the smaller ones rounded
    unit = np.float32(2.0 ** (kind.least + dropped))
    with np.errstate(all="ignore"):
        small = (magnitudes.view("<f4") + unit).view("<u4") - unit.view("<u4")
    codes = np.where(magnitudes < np.uint32(127 + kind.least << 23), small, codes)
    codes = np.minimum(codes, np.uint32(kind.overflow))
    codes[magnitudes > np.uint32(0x7F800000)] = 0x7F
    made: _Bytes = (codes | bits >> np.uint32(31) << np.uint32(7)).astype(np.uint8)
    return made
