"""Hypothesis strategies for the inputs of a store."""

from __future__ import annotations

from blobstore.core.errors import MissingDependencyError
from blobstore.core.memory.layout import ScalarType, TensorLayout

try:
    from hypothesis import strategies as st
except ImportError as error:
    raise MissingDependencyError("strategies need hypothesis: pip install hypothesis") from error

__all__ = ["alignments", "keys", "layouts", "tags", "tensors"]

_TEXT = st.characters(exclude_categories=["Cs"], exclude_characters="\0")

keys = st.text(_TEXT, min_size=1, max_size=20) | st.from_regex(r"(layers\.[0-9]\.)?(weight|bias)", fullmatch=True)
"""Keys, readable and arbitrary ones."""

tags = st.none() | st.sampled_from(["foundation", "adapter", "adapter.ptd", "Ünï code"])
"""Tags, and None. Two of them name the same file only if they are equal or differ in the ending .ptd."""

alignments = st.sampled_from([1, 2, 3, 8, 16, 48, 64, 128, 200, 4096])
"""Alignments; not only powers of two."""


@st.composite
def layouts(draw: st.DrawFn, *, max_rank: int = 5, max_size: int = 4) -> TensorLayout:
    """Small layouts of every scalar type and every order of dimensions."""
    sizes = draw(st.lists(st.integers(0, max_size), max_size=max_rank))
    order = draw(st.permutations(range(len(sizes))))
    return TensorLayout(draw(st.sampled_from(ScalarType)), tuple(sizes), tuple(order))


@st.composite
def tensors(draw: st.DrawFn) -> tuple[bytes, TensorLayout | None]:
    """Bytes with their layout, or opaque bytes with None; from few patterns, so that duplicates are frequent."""
    layout = draw(st.none() | layouts())
    nbytes = draw(st.integers(0, 300)) if layout is None else layout.nbytes
    pattern = draw(st.sampled_from([b"\0", b"\x01\x02\x03", b"blob", bytes(range(251))]))
    return (pattern * (nbytes // len(pattern) + 1))[:nbytes], layout
