"""Weights whose channels were each multiplied by a factor, as where a batch normalization was folded into a convolution.

A recipe is `scale:GROUP`: each GROUP of weights in float32, one behind the other, has a factor in float32. The factors are the
first bytes of what is stored for a blob.
"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

__all__ = ["check_scale", "factors_size", "find_factors", "scale"]

_RECIPE = re.compile(r"scale:([1-9][0-9]{0,11})", re.ASCII)
_PIECE = 1 << 16
_WORTH = 0.5  # of what the differences would be without factors

_Floats = npt.NDArray[np.float32]
_Doubles = npt.NDArray[np.float64]


def check_scale(recipe: str) -> bool:
    """Whether this is a recipe that `scale` knows."""
    return _RECIPE.fullmatch(recipe) is not None


def factors_size(nbytes: int, recipe: str) -> int | None:
    """Bytes of the factors for weights of as many bytes; None if the recipe does not fit these."""
    group = 4 * int(recipe.partition(":")[2])
    return nbytes // group * 4 if nbytes and nbytes % group == 0 else None


def scale(base: memoryview, factors: memoryview) -> memoryview:
    """Weights times factors; takes the memory of the result only.

    Args:
        base: weights in float32.
        factors: in float32; as many as `factors_size` says.
    """
    given = np.frombuffer(factors, "<f4")
    weights = np.frombuffer(base, "<f4").reshape(len(given), -1)
    with np.errstate(all="ignore"):
        made = weights * given[:, None]
    made[np.isnan(made)] = np.nan  # processors differ in its bits
    return memoryview(made.reshape(-1).view(np.uint8))


def find_factors(data: memoryview, base: memoryview, group: int) -> tuple[bytes, float] | None:
    """Factors with which weights become nearly, or exactly, others, and how near: 1 for the same. None if they gain little.

    Args:
        data: the others, in float32.
        base: the weights in float32, as many.
        group: how many have one factor.
    """
    if len(data) != len(base) or not base or len(base) % (4 * group):
        return None
    weights, wanted = (np.frombuffer(one, "<f4").reshape(-1, group) for one in (base, data))
    found = np.empty(len(weights), "<f4")
    without = remaining = 0.0
    rows = max(_PIECE // group, 1)
    with np.errstate(all="ignore"):
        for first in range(0, len(weights), rows):
            one, other = weights[first : first + rows], wanted[first : first + rows]
            found[first : first + rows] = factors = _factors(one, other)
            without += float(np.nansum(np.abs(other - one), dtype=np.float64))
            remaining += float(np.nansum(np.abs(other - one * factors[:, None]), dtype=np.float64))
    return (found.tobytes(), 1 - remaining / without) if remaining < _WORTH * without else None


def _factors(weights: _Floats, wanted: _Floats) -> _Floats:
    """The factor of each row: the one that makes all of it, or else the one with the least squares of what remains."""
    one, other = weights.astype(np.float64), wanted.astype(np.float64)
    # a product is rounded by less than half of the distance between two numbers
    half = np.abs(np.spacing(wanted)).astype(np.float64) / 2
    ends = np.stack([(other - half) / one, (other + half) / one])
    ends[:, one == 0] = np.nan  # any factor makes a zero
    least, most = np.fmax.reduce(ends.min(axis=0), axis=1), np.fmin.reduce(ends.max(axis=0), axis=1)
    squares: _Doubles = (one * other).sum(axis=1) / (one * one).sum(axis=1)
    middle = np.where(least <= most, (least + most) / 2, squares).astype(np.float32)
    possible = [middle, np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(-np.inf))]
    equal = np.stack([(weights * factor[:, None] == wanted).sum(axis=1) for factor in possible])
    best: _Floats = np.choose(equal.argmax(axis=0), possible)
    return np.nan_to_num(best, nan=1.0, posinf=1.0, neginf=1.0)
