"""What an inner backend must provide so that its weights can be changed by name; see `blobstore.lowering.xnnpack`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from blobstore.core.formats.payload import Constant
    from blobstore.logical.records import Record
    from blobstore.lowering.tables import NameTable
    from blobstore.runtime.executorch import CompileSpec, PreprocessResult

__all__ = ["InnerLowering", "Lowered", "Subgraph"]


@dataclass(frozen=True)
class Lowered:
    """A subgraph, lowered by an inner backend.

    Attributes:
        result: what its `preprocess` returned, with readable keys instead of its own, also in the payload.
        constants: the blobs that the payload asks for, each once for every way in which operators pack it. At run time the
            last 16 bytes of each key are replaced, everywhere in the payload.
        records: how each blob is made from the model's tensors, and which tensors cannot be changed.
    """

    result: PreprocessResult
    constants: list[Constant]
    records: list[Record]


@dataclass(frozen=True)
class Subgraph:
    """A subgraph that an inner backend lowers.

    Attributes:
        program: the subgraph.
        specs: what the inner partitioner gave it.
        table: the names of the tensors, and the data files that they go to.
    """

    program: ExportedProgram
    specs: list[CompileSpec]
    table: NameTable


class InnerLowering(Protocol):
    """The ahead-of-time half of an inner backend.

    It may also have a method `preprocess_multimethod(parts)`, for backends that share something between the subgraphs that they
    lower together. It gets all subgraphs of the backend, a `dict` of lists of `Subgraph` by method, and returns a `Lowered` for
    each of them in the same form, or None: then `preprocess` lowers each of them alone.

    Attributes:
        backend_id: the backend's name in ExecuTorch.
    """

    backend_id: str

    def preprocess(self, program: ExportedProgram, specs: list[CompileSpec], table: NameTable) -> Lowered:
        """Lower a subgraph.

        Args:
            program: the subgraph.
            specs: what the inner partitioner gave it.
            table: the names of the tensors, and the data files that they go to.
        """
        ...
