"""What PEFT saves of an adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from blobstore.adapters.peft_names import rows_as_llama
from blobstore.core.memory.arrays import Plain

__all__ = ["PeftAdapter", "PeftPair"]


@dataclass(frozen=True)
class PeftPair:
    """The two tensors of a module in PEFT's files.

    Attributes:
        module: what Hugging Face's model calls the module.
        a, b: the tensors, of shapes (rank, in) and (out, rank).
        a_key, b_key: their keys in the file.
        scale: the factor of their product.
    """

    module: str
    a: Plain
    b: Plain
    a_key: str
    b_key: str
    scale: float

    @property
    def rank(self) -> int:
        """The rank."""
        return int(self.a[0].shape[0])

    def ordered(self, head_dim: int) -> Plain:
        """The second tensor with its rows as a program needs them.

        `head_dim` is the size of a head if the program rotates neighbouring elements and this is its q or k; otherwise 0.
        """
        return (rows_as_llama(self.b[0], head_dim), self.b[1]) if head_dim else self.b

    def part(self, first: int, rows: int) -> PeftPair:
        """The pair for some rows of the module."""
        return replace(self, b=(self.b[0][first : first + rows], self.b[1]))


@dataclass(frozen=True)
class PeftAdapter:
    """An adapter that was read.

    Attributes:
        pairs: in the order of the file. The arrays are views of the mapped file.
        scale: alpha / r, whatever single modules have.
        origin: the fields `base_model_name_or_path` and `task_type` of the configuration, if they are texts.
    """

    pairs: Sequence[PeftPair]
    scale: float
    origin: Mapping[str, str]
