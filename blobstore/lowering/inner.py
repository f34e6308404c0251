"""What a backend has to bring so that its weights can be changed by name; `blobstore.lowering.xnnpack` is the example."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from executorch.exir.backend.backend_details import CompileSpec, PreprocessResult
    from torch.export import ExportedProgram

    from blobstore.formats.payload import Constant
    from blobstore.logical.records import Record
    from blobstore.lowering.names import NameTable

__all__ = ["InnerLowering", "Lowered"]


@dataclass(frozen=True)
class Lowered:
    """One part of a graph, lowered by an inner backend.

    Attributes:
        result: what its preprocess() gave, with readable keys instead of its own, in the payload too.
        constants: the blobs that the payload asks for. The last 16 bytes of each key will be replaced.
        records: how each blob is made from the model's tensors, and which tensors cannot be changed.
    """

    result: PreprocessResult
    constants: list[Constant]
    records: list[Record]


class InnerLowering(Protocol):
    """Ahead-of-time half of an inner backend.

    Attributes:
        backend_id: under which name ExecuTorch knows it.
    """

    backend_id: str

    def preprocess(self, program: ExportedProgram, specs: list[CompileSpec], table: NameTable) -> Lowered:
        """Lower a part of a graph whose tensors are named in `table`."""
        ...
