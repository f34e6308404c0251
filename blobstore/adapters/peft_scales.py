"""One scale for a whole adapter, and the factors of the modules that have another one.

The file of an adapter has one scale, PEFT's modules may have their own. What a module needs besides goes into its `lora_b`.
Multiplying by a power of two rounds nothing; other factors, such as 1.5, round nothing if float32 has room for the product,
as for numbers of float16 and bfloat16. Everything else would be rounded, which only the user can allow.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable

import numpy as np

from blobstore.core.memory.arrays import Plain, same_tensors
from blobstore.core.memory.layout import ScalarType
from blobstore.core.memory.tensors import Array

__all__ = ["common_scale", "divided", "is_factor", "multiplied", "same_scale"]

_MOST_EXPONENT = 1000  # of a factor, so that its reciprocal is a float too
_SHORT = 1 << 16  # a factor with a numerator below this is taken as exact; products with numbers of float32 fit float64


def common_scale(scales: Iterable[float]) -> tuple[float, dict[float, float]]:
    """The scale that most modules have, and for each scale the factor that makes up for it; 0 where there is none, because
    one of two scales is 0 or the quotient is out of range. Quotients that differ from a short fraction only because alpha /
    r was rounded are that fraction."""
    counted = Counter(scales)
    common = counted.most_common(1)[0][0]
    return common, {scale: _factor(scale, common) for scale in counted}


def same_scale(one: float, other: float) -> bool:
    """Whether two scales are equal but for the rounding of alpha and of alpha / r.

    Not every float is a quotient with every rank: no alpha divided by 3 is the 1.6 that 8 / 5 is. The nearest quotient is at
    most one unit in the last place away, so two of them are at most two apart.
    """
    return math.isclose(one, other, rel_tol=4 * sys.float_info.epsilon)


def is_factor(number: object) -> bool:
    """Whether a value may be a factor: a number that is not too large, and not too close to 0."""
    return (
        isinstance(number, int | float)
        and type(number) is not bool
        and 2**-_MOST_EXPONENT <= abs(number) <= 2**_MOST_EXPONENT
    )


def _factor(scale: float, common: float) -> float:
    if scale == common:
        return 1.0
    quotient = scale / common if common else 0.0
    if not math.isfinite(quotient) or not is_factor(quotient):
        return 0.0
    mantissa, exponent = math.frexp(quotient)
    short = round(mantissa * _SHORT) / _SHORT
    return math.ldexp(short, exponent) if same_scale(mantissa, short) else quotient


def multiplied(tensor: Plain, factor: float, *, rounded: bool) -> Plain | None:
    """A tensor times a factor, in its own dtype or, if that rounds, in float32.

    Args:
        tensor: floats.
        factor: as `common_scale` returns it.
        rounded: whether numbers may be rounded.

    Returns:
        None if numbers would be rounded, and that is not allowed.
    """
    if factor == 1:
        return tensor
    product = _calculated(tensor[0], tensor[1], factor)
    kinds = [tensor[1], *([ScalarType.FLOAT] if tensor[1] in (ScalarType.HALF, ScalarType.BFLOAT16) else [])]
    for kind in kinds:
        made = _cast(product, kind)
        if _is_exact(made, factor, tensor):
            return made
    return made if rounded else None


def divided(tensor: Plain, factor: float) -> Plain | None:
    """A tensor divided by a factor, in its dtype; None if numbers would be rounded."""
    if factor == 1:
        return tensor
    made = _cast(_calculated(tensor[0], tensor[1], factor, divide=True), tensor[1])
    return made if _is_exact(tensor, factor, made) else None


def _is_exact(product: Plain, factor: float, tensor: Plain) -> bool:
    """Whether a product is a tensor times a factor without rounding."""
    wide = _calculated(tensor[0], tensor[1], factor)
    if tensor[1] is ScalarType.DOUBLE:  # only an exponent changes
        back = _calculated(wide[0], wide[1], factor, divide=True)
        return abs(math.frexp(factor)[0]) == 0.5 and same_tensors(product, wide) and same_tensors(back, tensor)
    return (math.frexp(factor)[0] * _SHORT).is_integer() and same_tensors(_cast(product, ScalarType.DOUBLE), wide)


def _calculated(array: Array, kind: ScalarType, factor: float, *, divide: bool = False) -> Plain:
    """The product or the quotient in float64."""
    wide = _cast((array, kind), ScalarType.DOUBLE)[0]
    with np.errstate(all="ignore"):
        return (wide / np.float64(factor) if divide else wide * np.float64(factor)), ScalarType.DOUBLE


def _cast(tensor: Plain, kind: ScalarType) -> Plain:
    from blobstore.logical.steps import cast  # here, because it imports the native module

    with np.errstate(all="ignore"):
        return cast(tensor, kind)
