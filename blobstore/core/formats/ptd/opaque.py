"""Opaque bytes among tensors.

ExecuTorch's readers follow the layout of a key without looking whether it has one, so a key without a layout ends the
process that asks for it. Therefore opaque bytes are written with the layout of a tensor of bytes, and the manifest
lists their keys, which the readers here give no layout; see docs/format.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from blobstore.core.formats.ptd.manifest import ManifestError
from blobstore.core.memory.layout import MAX_SIZE, ScalarType, TensorLayout

__all__ = ["hide_stand_ins", "stand_ins"]


def stand_ins(layouts: Sequence[TensorLayout | None], sizes: Sequence[int]) -> list[TensorLayout | None]:
    """The layouts to write: opaque bytes get that of a tensor of bytes, unless they are more than one size can count."""
    known: dict[int, TensorLayout] = {}
    return [_bytes(size, known) if layout is None else layout for layout, size in zip(layouts, sizes, strict=True)]


def _bytes(size: int, known: dict[int, TensorLayout]) -> TensorLayout | None:
    if size not in known and size <= MAX_SIZE:
        known[size] = TensorLayout(ScalarType.BYTE, (size,))
    return known.get(size)


def hide_stand_ins(
    opaque: npt.NDArray[np.uint32],
    keys: Sequence[str],
    layouts: list[TensorLayout | None],
    sizes: npt.NDArray[np.int64],
) -> None:
    """Replace the layouts of opaque bytes, whose indices the manifest lists, by None.

    Raises:
        ManifestError: an index is out of range or does not ascend, or its key has another layout.
    """
    before = -1
    for at in opaque.tolist():
        if at >= len(keys):
            raise ManifestError(f"the manifest is malformed: it lists key {at} as opaque, there are {len(keys)}")
        if at <= before:
            raise ManifestError("the manifest is malformed: the opaque keys do not ascend")
        layout = layouts[at]
        if layout is None or layout.scalar_type is not ScalarType.BYTE or len(layout.sizes) != 1:
            raise ManifestError(
                f"the manifest is malformed: it lists {keys[at]!r} as opaque: expected the layout byte[{sizes[at]}], "
                f"found {'none' if layout is None else layout}"
            )
        layouts[at] = None
        before = at
