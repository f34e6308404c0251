"""Layouts: the elements of a tensor in another order, as backends store them.

A recipe is `layout:SIZES:ORDER`, such as `layout:64,32,9:0,2,1` for the weights of 3 x 3 convolutions whose input channels
come last. SIZES are those of the base as it lies in memory; ORDER is that of its dimensions in the result. Dimensions that
stay together are one.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Layout", "layout_size", "layouts", "parse_layout", "rearrange"]

_RECIPE = re.compile(r"layout:([1-9][0-9]{0,14}(?:,[1-9][0-9]{0,14}){1,5}):([0-5](?:,[0-5]){1,5})")
_WIDTHS = {1, 2, 4, 8}
_MOST = 5
"""Dimensions of which all orders are tried: those of a convolution over space and time."""
_GROUPS = (2, 4, 8, 16, 32)
_TILE = 128  # elements; where rows and columns change places, caches hold as many of both


@dataclass(frozen=True)
class Layout:
    """An order of elements.

    Attributes:
        sizes: of the base, as it lies in memory.
        order: which of these dimensions is the first one of the result, and so on.
    """

    sizes: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def recipe(self) -> str:
        """As it is stored."""
        return f"layout:{','.join(map(str, self.sizes))}:{','.join(map(str, self.order))}"

    @property
    def is_trivial(self) -> bool:
        """Whether all elements stay where they are."""
        return self.order == tuple(range(len(self.order)))

    @property
    def result(self) -> tuple[int, ...]:
        """The sizes of the result."""
        return tuple(self.sizes[axis] for axis in self.order)

    def shape_of_result(self, shape: str) -> str:
        """The shape of the result, with the dimensions that are one here.

        Args:
            shape: of the base, "64,32,3,3"; dimensions that are not in it stay as they are.
        """
        left = [int(size) for size in shape.split(",")] if shape else []
        parts: list[list[int]] = []
        for size in self.sizes:
            own = [left.pop(0)] if left else []
            while left and math.prod(own) < size:
                own.append(left.pop(0))
            if math.prod(own) != size:
                left, own = [], [size]
            parts.append(own)
        return ",".join(str(size) for axis in self.order for size in parts[axis])

    def inverse(self) -> Layout:
        """The one that leads back."""
        return Layout(self.result, tuple(self.order.index(axis) for axis in range(len(self.order))))

    def places(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Where elements of the base are in the result.

        Args:
            positions: of elements of the base; below the product of its sizes.
        """
        indices = np.unravel_index(positions, self.sizes)
        placed: npt.NDArray[np.int64] = np.ravel_multi_index(tuple(indices[axis] for axis in self.order), self.result)
        return placed


def parse_layout(recipe: str) -> Layout | None:
    """The layout that a recipe names; None if it names none."""
    if (match := _RECIPE.fullmatch(recipe)) is None:
        return None
    layout = Layout(*(tuple(map(int, text.split(","))) for text in match.groups()))
    return layout if sorted(layout.order) == list(range(len(layout.sizes))) else None


def layout_size(nbytes: int, layout: Layout) -> int | None:
    """As many bytes, if they are elements of 1, 2, 4 or 8 bytes; otherwise None."""
    count = math.prod(layout.sizes)
    return nbytes if nbytes % count == 0 and nbytes // count in _WIDTHS else None


def rearrange(base: memoryview, layout: Layout) -> memoryview:
    """The elements of a base in another order; takes the memory of the result only."""
    width = len(base) // math.prod(layout.sizes)
    source = np.frombuffer(base, f"<u{width}").reshape(layout.sizes).transpose(layout.order)
    out = np.empty(layout.result, source.dtype)
    inner = layout.order.index(len(layout.order) - 1)  # the dimension of the result along which the base is read
    if inner == source.ndim - 1:
        out[...] = source
    else:
        for first in range(0, source.shape[inner], _TILE):
            rows = np.s_[(slice(None),) * inner + (slice(first, first + _TILE),)]
            for start in range(0, source.shape[-1], _TILE):
                columns = np.s_[..., start : start + _TILE]
                out[rows][columns] = source[rows][columns]
    return memoryview(out.reshape(-1).view(np.uint8))  # type: ignore[arg-type]


def layouts(shape: str, other: str) -> list[Layout]:
    """The layouts that may lead from one tensor to another, the one that changes nothing first.

    These are all orders of the dimensions, and that of transposed convolutions of several groups.

    Args:
        shape: of the base, as it lies in memory, "64,32,3,3"; empty if that is not known.
        other: of the other one, which counts if the first is not known.
    """
    known = shape or other
    if not known:
        return []
    return [*_from(known)] if shape else [layout.inverse() for layout in _from(known)]


def _from(shape: str) -> Iterator[Layout]:
    sizes = [int(size) for size in shape.split(",")]
    wide = [axis for axis, size in enumerate(sizes) if size > 1]
    orders = itertools.permutations(wide) if len(wide) <= _MOST else [tuple(wide)]
    possible = [(sizes, order) for order in orders]
    for groups in _GROUPS if 2 < len(sizes) <= _MOST else ():
        first, *rest = sizes
        if first % groups == 0:
            possible.append(([groups, first // groups, *rest], (0, 2, *range(3, len(sizes) + 1), 1)))
    yield from dict.fromkeys(_joined(*one) for one in possible)


def _joined(sizes: Sequence[int], order: Sequence[int]) -> Layout:
    """A layout in which dimensions that stay together are one, and none has the size 1."""
    wide = [axis for axis, size in enumerate(sizes) if size > 1]
    runs: list[list[int]] = []  # of dimensions that follow each other in both
    for axis in (wide.index(axis) for axis in order if sizes[axis] > 1):
        if runs and runs[-1][-1] == axis - 1:
            runs[-1].append(axis)
        else:
            runs.append([axis])
    ranks = sorted(runs)
    joined = tuple(math.prod(sizes[wide[axis]] for axis in run) for run in ranks)
    return Layout(joined or (1,), tuple(ranks.index(run) for run in runs) or (0,))
