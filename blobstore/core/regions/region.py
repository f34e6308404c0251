"""A run of bytes of a file, and what it is. All sizes are in bytes."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field

from blobstore.core.memory.layout import TensorLayout, in_words
from blobstore.core.reprs import fields_line

__all__ = ["ALIGNMENT", "Region", "RegionKind"]

ALIGNMENT = 16
"""What tensors need; ExecuTorch's own default for them."""


class RegionKind(str, enum.Enum):
    """What a run of bytes in a file is."""

    TENSOR = "tensor"  # of a data file
    CONSTANT = "constant"  # of a program
    STATE = "state"  # what a mutable tensor of a program starts with
    NAMED_DATA = "named_data"  # opaque bytes under a key
    METADATA = "metadata"  # ... in a program, which no delegate looks up: an application's own, which stay there
    PAYLOAD = "payload"  # what a backend made of its part of a program
    STRUCTURE = "structure"  # headers, flatbuffers, tables of contents, and what blobstore records for itself
    PADDING = "padding"  # zeros between two things
    UNREFERENCED = "unreferenced"  # not zeros, and nothing refers to it

    @property
    def is_blob(self) -> bool:
        """Whether it is content that could be shared."""
        return self in _BLOBS


_BLOBS = {RegionKind.TENSOR, RegionKind.CONSTANT, RegionKind.STATE, RegionKind.NAMED_DATA, RegionKind.PAYLOAD}


@dataclass(frozen=True)
class Region:
    """A run of bytes of a file, `start` to `stop` exclusive.

    Attributes:
        kind: what it is.
        keys: all names under which it is found in its file; several when a tied weight is stored once.
        methods: the methods of a program that use it.
        layout: how it is a tensor; None for opaque bytes that no tensor is known to equal.
        dtype: the element type where the format has one that `layout` cannot express (GGUF's quantized types).
        digest: xxh3-128 in hexadecimal; empty for what is not a blob.
        tensor: the name of these bytes in a checkpoint, or in another file of the report; empty if they have none there,
            or if `keys` holds a name already.
        recorded: the digest that the file records for these bytes, until they were compared with it; empty afterwards,
            and if it records none.
        exact: those of `keys` of which these are all the bytes, each with its own layout: equal bytes may be several tensors.
            Only the reader of the file has them.
    """

    __repr__ = fields_line

    kind: RegionKind
    start: int
    stop: int
    keys: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    layout: TensorLayout | None = None
    dtype: str = ""
    digest: str = ""
    tensor: str = ""
    recorded: str = ""
    exact: tuple[tuple[str, TensorLayout | None], ...] = field(default=(), compare=False, repr=False)

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.stop - self.start

    @property
    def name(self) -> str:
        """Its name in a checkpoint, its first key, or else what it is."""
        return self.tensor or (self.keys[0] if self.keys else self.kind.value)

    @property
    def elements(self) -> int:
        """How many elements it has; 0 for opaque bytes."""
        return 0 if self.layout is None else math.prod(self.layout.sizes)

    @property
    def element_type(self) -> str:
        """Its dtype in lower case, such as "float"; empty for opaque bytes."""
        return in_words(self.layout)[0] if self.layout is not None else self.dtype.lower()

    @property
    def shape(self) -> str:
        """Its sizes, such as "384 x 1536", and its dim order if the dimensions are permuted; empty for opaque bytes."""
        return "" if self.layout is None else in_words(self.layout)[1]
