"""Pruned weights: those of a base, but for some that are zero.

    prune:WIDTH:SIGN:LEAST   elements of WIDTH bytes, where the magnitude of a float, its bits without the sign as an
                             integer, is at least LEAST
    mask:WIDTH:SIGN          elements of which bits that are stored say whether they are kept, the first in the highest bit

All others are zero. With SIGN `z` these are plain zeros; with `s` they keep the sign of the base, as products with a mask of
zeros and ones do. The bits of a mask are the first bytes of what is stored for a blob.
"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

__all__ = ["check_pruning", "find_pruning", "is_pruned", "magnitudes", "mask_size", "prune"]

_STEP = re.compile(r"(?:mask:[24]:[zs]|prune:[24]:[zs]:(?:0|[1-9][0-9]{0,9}))", re.ASCII)
_WIDTHS = {"half": 2, "bfloat16": 2, "float": 4}
_STRIDE = 61  # of the elements that are looked at first
_SOME = 1 / 8  # of the elements; a mask takes a sixteenth of the bytes
_FEW = 1 / 32  # of the elements, which then differ; in a mask, each element takes a bit

_Elements = npt.NDArray[np.unsignedinteger]


def check_pruning(step: str) -> bool:
    """Whether this is a step that `prune` knows."""
    return _STEP.fullmatch(step) is not None


def mask_size(nbytes: int, step: str) -> int | None:
    """Bytes of the mask for weights of as many bytes; None if the step does not fit these."""
    kind, width, *_ = step.split(":")
    if nbytes % int(width):
        return None
    return -(-nbytes // int(width) // 8) if kind == "mask" else 0


def prune(base: memoryview, step: str, mask: memoryview) -> memoryview:
    """Weights of which some are zero; takes the memory of the result, and a byte for each.

    Args:
        base: the weights.
        step: a step that fits them.
        mask: as many bytes as `mask_size` says.
    """
    kind, width, sign, *least = step.split(":")
    weights = np.frombuffer(base, f"<u{width}")
    if kind == "mask":
        kept = np.unpackbits(np.frombuffer(mask, np.uint8), count=len(weights)).view(bool)
    else:
        kept = magnitudes(weights) >= min(int(least[0]), int(np.iinfo(weights.dtype).max))
    dropped = weights - magnitudes(weights) if sign == "s" else weights.dtype.type(0)
    return memoryview(np.where(kept, weights, dropped).view(np.uint8))  # type: ignore[arg-type]


def find_pruning(data: memoryview, base: memoryview, dtype: str) -> tuple[str, bytes] | None:
    """The step that makes the zeros of weights, or nearly, with its mask; None if they have few that a base lacks.

    Of equal magnitudes some may be zero, and a fine-tune of the base may have lost others than the base would have: few of
    them are left to a difference.

    Args:
        data: weights of which some are zero.
        base: as many bytes of others, in the same type.
        dtype: the type.
    """
    width = _WIDTHS.get(dtype)
    if width is None or len(data) != len(base) or len(data) % width:
        return None
    wanted, weights = np.frombuffer(data, f"<u{width}"), np.frombuffer(base, f"<u{width}")
    if not _has_other_zeros(magnitudes(wanted[::_STRIDE]) == 0, magnitudes(weights[::_STRIDE])):
        return None
    zeros, of_base = magnitudes(wanted) == 0, magnitudes(weights)
    if not _has_other_zeros(zeros, of_base):
        return None
    as_base = np.count_nonzero(wanted[zeros] == (weights - of_base)[zeros])
    sign = "s" if as_base > np.count_nonzero(wanted[zeros] == 0) else "z"
    number = np.count_nonzero(zeros)
    if number < len(zeros):
        least = np.partition(of_base, number)[number]
        if np.count_nonzero((of_base < least) != zeros) < _FEW * len(zeros):
            return f"prune:{width}:{sign}:{least}", b""
    return f"mask:{width}:{sign}", np.packbits(~zeros).tobytes()


def _has_other_zeros(zeros: npt.NDArray[np.bool_], of_base: _Elements) -> bool:
    return int(np.count_nonzero(zeros & (of_base != 0))) > _SOME * len(zeros)


def is_pruned(elements: _Elements) -> bool:
    """Whether as many weights are zero as where some were pruned."""
    return int(np.count_nonzero(magnitudes(elements) == 0)) > _SOME * len(elements)


def magnitudes(weights: _Elements) -> _Elements:
    """The bits of floats without their signs."""
    return weights & weights.dtype.type((1 << 8 * weights.itemsize - 1) - 1)
