"""The parts of a program: tensors, offsets, named data, delegates and segments, each with its place in the file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from blobstore.core.formats.flatbuffer import Span, Table
from blobstore.core.memory.layout import TensorLayout

__all__ = [
    "DelegatePayload",
    "ExternalTensor",
    "NamedBlob",
    "Offsets",
    "Segment",
    "TensorData",
    "TensorUse",
]


@dataclass(frozen=True, eq=False)
class TensorUse:
    """A tensor value of a method that refers to stored bytes.

    Attributes:
        method: name of the method.
        value: index into the method's values.
        layout: scalar type, sizes and dim order; None if only a later ExecuTorch knows it, or if the tensor starts
            inside its bytes.
        name: the name that the program records for the tensor, if any.
        table: the Tensor table.
    """

    method: str
    value: int
    layout: TensorLayout | None
    name: str | None
    table: Table


@dataclass(frozen=True, eq=False)
class TensorData:
    """The bytes of a constant, or of the initial state of a mutable tensor.

    Attributes:
        kind: which of the two.
        group: index into `ProgramFile.offsets`; None when the bytes lie inside the flatbuffer.
        index: the tensor's data_buffer_idx.
        span: where the bytes lie in the file; as long as the largest tensor that refers to them.
        uses: all tensors that refer to them, in the order of the program.
    """

    kind: Literal["constant", "state"]
    group: int | None
    index: int
    span: Span
    uses: tuple[TensorUse, ...]

    def nbytes_of(self, uses: Iterable[TensorUse]) -> int:
        """Bytes that some of its uses need."""
        return max((self.span.size if use.layout is None else use.layout.nbytes for use in uses), default=0)

    def by_layout(self, least: int) -> dict[tuple[TensorLayout, str | None], list[TensorUse]]:
        """Its uses with a known layout of at least so many bytes, by layout and name."""
        uses: dict[tuple[TensorLayout, str | None], list[TensorUse]] = {}
        for use in self.uses:
            if use.layout is not None and use.layout.nbytes >= least:
                uses.setdefault((use.layout, use.name), []).append(use)
        return uses


@dataclass(frozen=True, eq=False)
class Offsets:
    """A segment that holds many tensors: the one of the constants, or one of initial states.

    Attributes:
        kind: what it holds.
        segment: index into `ProgramFile.segments`; -1 if there is no segment and nothing refers to it.
        values: offset of each tensor inside the segment.
        table: the SubsegmentOffsets table.
    """

    kind: Literal["constant", "state"]
    segment: int
    values: tuple[int, ...]
    table: Table

    def extent(self, index: int, segment_size: int) -> int:
        """Bytes from one entry to the next: the most that an entry can take, if no known tensor refers to it."""
        if index == 0:  # stands for "no data"
            return 0
        stop = self.values[index + 1] if index + 1 < len(self.values) else segment_size
        if stop < self.values[index]:
            stop = segment_size
        return stop - self.values[index]


@dataclass(frozen=True, eq=False)
class NamedBlob:
    """Opaque bytes that a delegate requests by key; `index` is that in Program.named_data."""

    key: str
    index: int
    segment: int
    span: Span
    table: Table


@dataclass(frozen=True, eq=False)
class DelegatePayload:
    """The result of a backend's preprocess; `segment` is None if it lies inside the flatbuffer."""

    method: str
    index: int
    backend: str
    segment: int | None
    span: Span


@dataclass(frozen=True, eq=False)
class ExternalTensor:
    """A tensor whose bytes are in a data file already."""

    key: str
    layout: TensorLayout | None
    mutable: bool
    use: TensorUse


@dataclass(frozen=True, eq=False)
class Segment:
    """A run of bytes behind the flatbuffer; `users` lists what refers to it, as far as this version knows."""

    index: int
    span: Span
    table: Table
    users: list[str] = field(default_factory=list)
