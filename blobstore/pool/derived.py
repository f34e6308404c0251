"""Recipes: how the bytes of a blob follow from those of its base, in steps of which each makes the same bytes everywhere.

    widen:TYPE              the values in float32 of weights in bfloat16 or half
    cast:TYPE               the nearest values in bfloat16 or half of weights in float32
    layout:SIZES:ORDER      the elements in another order: `layouts`
    quant:RULE:GROUP:FORM   quantized weights: `quantized`

Steps follow each other with a `+`, each kind at most once. They come from tables that anybody may have changed: whether
they fit is known before memory is taken.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from blobstore.pool.layouts import layout_size, parse_layout, rearrange
from blobstore.pool.quantized import check_rule, find_rule, quantize, quantized_size

__all__ = ["QUANT", "cast", "derive", "find_steps", "made_size", "split_steps", "widen"]

QUANT = "quant"
"""Stands for a step of quantization that is not known yet."""

_NARROW = ("bfloat16", "half")


def split_steps(encoding: str) -> tuple[tuple[str, ...], str]:
    """The steps with which an encoding begins, and what follows them; that is not looked at.

    Steps that are not known are not steps, nor is a second one of a kind.
    """
    parts = encoding.split("+")
    steps: list[str] = []
    for part in parts:
        kind = part.partition(":")[0]
        if any(step.partition(":")[0] == kind for step in steps) or not _check(part):
            break
        steps.append(part)
    return tuple(steps), "+".join(parts[len(steps) :])


def derive(base: memoryview, steps: Sequence[str], size: int) -> memoryview | None:
    """The bytes that steps make of a base; None if they do not make as many as they should.

    Takes the memory of the result, and if there are several steps, that of what one of them makes.

    Args:
        base: the bytes of the base.
        steps: as `split_steps` gives them.
        size: how many bytes there should be.
    """
    if made_size(len(base), steps) != size:
        return None
    for step in steps:
        base = _made(base, step)
    return base


def made_size(nbytes: int, steps: Sequence[str]) -> int | None:
    """How many bytes steps make of as many bytes; None if they do not fit these.

    Args:
        nbytes: of the base.
        steps: as `split_steps` gives them.
    """
    size: int | None = nbytes
    for step in steps:
        if size is None:
            break
        kind = step.partition(":")[0]
        if kind == "widen":
            size = 2 * size if size % 2 == 0 else None
        elif kind == "cast":
            size = size // 2 if size % 4 == 0 else None
        elif (layout := parse_layout(step)) is not None:
            size = layout_size(size, layout)
        else:
            size = quantized_size(size, step)
    return size


def _check(step: str) -> bool:
    kind, _, rest = step.partition(":")
    return rest in _NARROW if kind in {"widen", "cast"} else check_rule(step) or parse_layout(step) is not None


def _made(base: memoryview, step: str) -> memoryview:
    """What a step makes of bytes whose size fits."""
    kind, _, rest = step.partition(":")
    if kind == "widen":
        return widen(base, rest)
    if kind == "cast":
        return cast(base, rest)
    layout = parse_layout(step)
    return rearrange(base, layout) if layout is not None else quantize(base, step)


def find_steps(data: memoryview, base: memoryview, steps: Sequence[str], shape: str) -> tuple[str, ...] | None:
    """Steps in which `QUANT` is what makes most of the bytes of quantized weights; None if nothing does.

    Args:
        data: what should be made.
        base: of what; it has a size that fits.
        steps: with or without `QUANT`, which a layout may follow.
        shape: of the base, as it lies in memory, "384,1536".
    """
    if QUANT not in steps:
        return tuple(steps)
    at = steps.index(QUANT)
    before, layouts = tuple(steps[:at]), tuple(steps[at + 1 :])
    for step in before:
        base = _made(base, step)
    if not layouts:
        rule, _ = find_rule(data, base, shape)
        return None if rule is None else (*before, rule)
    if (layout := parse_layout(layouts[0])) is None:
        return None
    # a group of weights lies together in the base, or in the other layout: that of what is made by channel
    first, alike = find_rule(rearrange(data, layout.inverse()), base, shape)
    second, more_alike = find_rule(data, rearrange(base, layout), layout.shape_of_result(shape))
    if second is not None and (first is None or more_alike > alike):
        return (*before, *layouts, second)
    return None if first is None else (*before, first, *layouts)


def cast(data: memoryview, dtype: str) -> memoryview:
    """Elements in float32 as the nearest ones in bfloat16 or float16; those in between go to the even one.

    Args:
        data: the elements.
        dtype: "bfloat16" or "half".
    """
    elements = np.frombuffer(data[: len(data) // 4 * 4], "<u4")
    if dtype == "half":
        with np.errstate(all="ignore"):
            return memoryview(elements.view("<f4").astype("<f2").view(np.uint8))  # type: ignore[arg-type]
    rounded = (elements >> np.uint32(16)) & np.uint32(1)
    rounded += elements
    rounded += np.uint32(0x7FFF)
    rounded >>= np.uint32(16)
    return memoryview(rounded.astype("<u2").view(np.uint8))  # type: ignore[arg-type]


def widen(data: memoryview, dtype: str) -> memoryview:
    """Elements in bfloat16 or float16 in float32; of what is not a number, all bits are kept.

    Args:
        data: the elements.
        dtype: "bfloat16" or "half".
    """
    elements = np.frombuffer(data[: len(data) // 2 * 2], "<u2")
    wide = _of_halves()[elements] if dtype == "half" else elements.astype("<u4") << np.uint32(16)
    return memoryview(wide.view(np.uint8))  # type: ignore[arg-type]


@functools.cache
def _of_halves() -> npt.NDArray[np.uint32]:
    """The bits in float32 of all numbers in float16: processors differ in what is not a number."""
    halves = np.arange(1 << 16, dtype=np.uint32)
    exponents, fractions = halves >> 10 & 31, halves & 1023
    with np.errstate(all="ignore"):
        magnitudes = np.where(
            exponents == 0,
            (fractions.astype(np.float32) * np.float32(2**-24)).view(np.uint32),
            exponents + 112 << 23 | fractions << 13,
        )
    magnitudes = np.where(exponents == 31, 0x7F800000 | fractions << 13, magnitudes)
    signed: npt.NDArray[np.uint32] = (magnitudes | halves >> 15 << 31).astype("<u4")
    return signed
