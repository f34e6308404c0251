"""Alignments of ExecuTorch's files, and the arithmetic with them; all in bytes."""

from __future__ import annotations

from blobstore.core.constants import SEGMENT_ALIGNMENT

__all__ = ["PAGE", "SEGMENT_ALIGNMENT", "TENSOR_ALIGNMENT", "align_up", "alignment_of"]

TENSOR_ALIGNMENT = 16
"""ExecuTorch aligns every constant of a .pte to this."""

PAGE = 4096
"""The largest alignment that an offset tells: it is a multiple of more by accident."""


def align_up(position: int, alignment: int) -> int:
    """The next multiple of `alignment`, or `position` itself if it is one."""
    return -(-position // alignment) * alignment


def alignment_of(position: int) -> int:
    """The largest power of two, up to a page, that divides `position`."""
    return min(position & -position, PAGE) if position else PAGE
