"""Recipes: how the bytes of a blob follow from those of its base, in steps of which each makes the same bytes everywhere.

    widen:TYPE              the values in float32 of weights in bfloat16 or half
    cast:TYPE               the nearest values in bfloat16 or half of weights in float32
    scale:GROUP             weights in float32, each group times a factor that is stored: `scaled`
    slice:START:LENGTH:STRIDE:ROWS    some rows or columns: `slices`
    layout:SIZES:ORDER      the elements in another order: `layouts`
    quant:RULE:GROUP:FORM   quantized weights: `quantized`
    float8:TYPE:RULE:GROUP  weights in float8: `float8`
    gguf:TYPE               blocks of quantized weights, as in files of gguf: `blocks`
    prune:..., mask:...     weights of which some are zero: `pruned`

Steps follow each other with a `+`, each kind at most once. They come from tables that anybody may have changed: whether
they fit is known before memory is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from blobstore.core.codec.elements import cast, widen
from blobstore.pool.blocks import BLOCKS, blocked, blocked_size
from blobstore.pool.float8 import FLOAT8, check_float8, find_float8, float8, float8_size
from blobstore.pool.layouts import layout_size, parse_layout, rearrange
from blobstore.pool.pruned import check_pruning, mask_size, prune
from blobstore.pool.quantized import check_rule, find_rule, quantize, quantized_size
from blobstore.pool.scaled import check_scale, factors_size, find_factors, scale
from blobstore.pool.slices import parse_slice

__all__ = ["OPEN_FLOAT8", "QUANT", "SCALE", "derive", "find_steps", "made_size", "needed_of_base", "split_steps"]

QUANT, SCALE = "quant", "scale"
OPEN_FLOAT8 = {name: f"float8:{name}" for name in FLOAT8}
"""Stand for steps that are not known yet."""

_T = TypeVar("_T")

_NARROW = ("bfloat16", "half")
_NONE = memoryview(b"")


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


def needed_of_base(encoding: str) -> range | None:
    """The bytes of a base that are needed for a blob in an encoding; None if that is all of them."""
    part = parse_slice(encoding.partition("+")[0])
    return None if part is None else range(part.start, part.stop)


def derive(base: memoryview, steps: Sequence[str], size: int, factors: memoryview = _NONE) -> memoryview | None:
    """The bytes that steps make of a base; None if they do not make as many as they should.

    Takes the memory of the result, and if there are several steps, that of what one of them makes.

    Args:
        base: the bytes of the base.
        steps: as `split_steps` gives them.
        size: how many bytes there should be.
        factors: as many bytes as `made_size` says, of factors or a mask.
    """
    if made_size(len(base), steps) != (size, len(factors)):
        return None
    for step in steps:
        base = _kind(step).make(base, step, factors)
    return base


def made_size(nbytes: int, steps: Sequence[str]) -> tuple[int, int] | None:
    """How many bytes steps make of as many bytes, and how many bytes of factors or a mask they need; None if they do not fit."""
    size, factors = nbytes, 0
    for step in steps:
        kind = _kind(step)
        made, own = kind.size(size, step), kind.stored(size, step) or 0
        if made is None or (own and factors):  # one step has them
            return None
        size, factors = made, factors + own
    return size, factors


def _check(step: str) -> bool:
    kind = _KINDS.get(step.partition(":")[0])
    return kind is not None and kind.check(step)


def _kind(step: str) -> _Kind:
    return _KINDS[step.partition(":")[0]]


class _Kind(NamedTuple):
    """A kind of steps.

    Attributes:
        check: whether a text is one.
        size: how many bytes it makes of as many; None if it does not fit.
        make: these bytes, of a base and factors that fit.
        stored: how many bytes of factors or a mask it needs beside the base.
    """

    check: Callable[[str], bool]
    size: Callable[[int, str], int | None]
    make: Callable[[memoryview, str, memoryview], memoryview]
    stored: Callable[[int, str], int | None] = lambda size, step: 0


def _type_of(step: str) -> str:
    return step.partition(":")[2]


def _parsed(parse: Callable[[str], _T | None], step: str) -> _T:
    found = parse(step)
    assert found is not None  # noqa: S101 - `_check` said so
    return found


def _sliced_size(size: int, step: str) -> int | None:
    part = _parsed(parse_slice, step)
    return part.size if part.stop <= size else None


_PRUNED = _Kind(check_pruning, lambda size, step: None if mask_size(size, step) is None else size, prune, mask_size)

_KINDS = {
    "widen": _Kind(
        lambda step: _type_of(step) in _NARROW,
        lambda size, _: 2 * size if size % 2 == 0 else None,
        lambda base, step, _: widen(base, _type_of(step)),
    ),
    "cast": _Kind(
        lambda step: _type_of(step) in _NARROW,
        lambda size, _: size // 2 if size % 4 == 0 else None,
        lambda base, step, _: cast(base, _type_of(step)),
    ),
    SCALE: _Kind(
        check_scale,
        lambda size, step: size if factors_size(size, step) else None,
        lambda base, _, factors: scale(base, factors),
        factors_size,
    ),
    "slice": _Kind(
        lambda step: parse_slice(step) is not None,
        _sliced_size,
        lambda base, step, _: _parsed(parse_slice, step).taken(base),
    ),
    "layout": _Kind(
        lambda step: parse_layout(step) is not None,
        lambda size, step: layout_size(size, _parsed(parse_layout, step)),
        lambda base, step, _: rearrange(base, _parsed(parse_layout, step)),
    ),
    QUANT: _Kind(check_rule, quantized_size, lambda base, step, _: quantize(base, step)),
    "float8": _Kind(check_float8, float8_size, lambda base, step, _: float8(base, step)),
    "gguf": _Kind(
        lambda step: _type_of(step) in BLOCKS,
        lambda size, step: blocked_size(size, _type_of(step)),
        lambda base, step, _: blocked(base, _type_of(step)),
    ),
    "prune": _PRUNED,
    "mask": _PRUNED,
}


def find_steps(
    data: memoryview, base: memoryview, steps: Sequence[str], shape: str
) -> tuple[tuple[str, ...], bytes] | None:
    """Steps in which nothing is left open, and their factors; None if they make nothing like the data.

    Args:
        data: what should be made.
        base: of what; it has a size that fits.
        steps: those that are known, of which the last may be a layout; one that is open stands before that.
        shape: of the base, as it lies in memory, "384,1536".
    """
    opens = [at for at, step in enumerate(steps) if step in _FIND]
    if not opens:
        return tuple(steps), b""
    before, layouts = tuple(steps[: opens[0]]), tuple(steps[opens[0] + 1 :])
    for step in before:
        base = _kind(step).make(base, step, _NONE)
    layout = parse_layout(layouts[0]) if layouts else None
    # what is made by channel lies together in the base, or in the other layout
    arranged = data if layout is None else rearrange(data, layout.inverse())
    tries: list[tuple[tuple[str, ...], memoryview, memoryview, str, tuple[str, ...]]] = [
        ((), base, arranged, shape, layouts)
    ]
    if layout is not None:
        tries.append((layouts, rearrange(base, layout), data, layout.shape_of_result(shape), ()))
    find = _FIND[steps[opens[0]]]
    best: tuple[tuple[str, ...], bytes] | None = None
    most = 0.0
    for first, weights, wanted, sizes, then in tries:
        found = find(wanted, weights, sizes)
        if found is not None and found[2] > most:
            best, most = ((*before, *first, found[0], *then), found[1]), found[2]
    return (before + layouts, b"") if best is None and steps[opens[0]] == SCALE else best


def _find_rule(data: memoryview, weights: memoryview, shape: str) -> tuple[str, bytes, float] | None:
    rule, alike = find_rule(data, weights, shape)
    return None if rule is None else (rule, b"", alike)


def _find_scale(data: memoryview, weights: memoryview, shape: str) -> tuple[str, bytes, float] | None:
    group = math.prod(int(size) for size in shape.split(",")[1:])
    found = find_factors(data, weights, group)
    return None if found is None else (f"{SCALE}:{group}", found[0], found[1])


def _find_float8(name: str, data: memoryview, weights: memoryview, shape: str) -> tuple[str, bytes, float] | None:
    found = find_float8(data, weights, name, shape)
    return None if found is None else (found[0], b"", found[1])


_Find = Callable[[memoryview, memoryview, str], tuple[str, bytes, float] | None]

_FIND: dict[str, _Find] = {
    QUANT: _find_rule,
    SCALE: _find_scale,
    **{step: partial(_find_float8, name) for name, step in OPEN_FLOAT8.items()},
}
"""How what is open is found: a step, its factors, and about which share of the bytes they make."""
