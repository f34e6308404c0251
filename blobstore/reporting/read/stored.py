"""What a blob would take in a pool, judged by samples of its bytes; run by workers."""

from __future__ import annotations

from blobstore.core.memory.mapped_file import map_file
from blobstore.reporting.read.proofs import Spot

__all__ = ["stored_share"]

_RUNS, _RUN = 4, 1 << 14  # runs of elements that are looked at


def stored_share(spot: Spot, dtype: str, base: Spot | None = None, base_dtype: str = "") -> tuple[float, bool]:
    """About which share of its bytes a pool stores, and whether as what follows from a base or differs from it.

    Args:
        spot: a blob of a local file.
        dtype: of its elements, as in `Region.element_type`; empty for opaque bytes.
        base: a blob with as many elements, of the same type, or in float32 if this one is in half or bfloat16.
        base_dtype: of its elements.

    Raises:
        MissingDependencyError: nothing can be encoded without zstandard.
    """
    from blobstore.core.codec.choosing import choose
    from blobstore.core.codec.elements import cast, element

    own = _sampled(spot, element(dtype)[0])
    if base is None:
        return choose(own, dtype)[1], False
    other = _sampled(base, element(base_dtype)[0])
    if dtype != base_dtype:
        other = cast(other, dtype)
    if own == other:
        return 0.0, True
    encoding, share = choose(own, dtype, other)
    return share, encoding.startswith("near")


def _sampled(spot: Spot, width: int) -> memoryview:
    """Runs of elements from all over a blob, or all of a small one; the same ones of all blobs with as many elements."""
    view = map_file(spot.path)[spot.start : spot.stop]
    elements = len(view) // width
    if elements <= _RUNS * _RUN:
        return view
    starts = (run * (elements // _RUNS) * width for run in range(_RUNS))
    return memoryview(b"".join(view[start : start + _RUN * width] for start in starts))
