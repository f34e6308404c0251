"""XNNPACK as an inner backend: how it names, lays out and combines constants.

XNNPACK's exporter names a constant after the sha256 of its bytes. `watch` wraps a few of its functions while its
`preprocess` runs for blobstore, so that each constant gets the name of the tensor that it was made from. `run` collects
what they see, `batch_norm` records the folds of batch normalizations, `steps` records and
proves how a constant is laid out, and `graph` reads what XNNPACK serializes.
"""

from __future__ import annotations

from torch.export import ExportedProgram

from blobstore.core.formats.delegate_keys import xnnpack_keys
from blobstore.core.formats.payload import VERSION_SIZE
from blobstore.lowering.inner import Lowered
from blobstore.lowering.tables import NameTable
from blobstore.lowering.xnnpack.graph import (
    bias_scales,
    constants_of_payload,
    groups_of_constants,
    packed_constants,
    uses_of_constants,
)
from blobstore.lowering.xnnpack.run import Run
from blobstore.lowering.xnnpack.watch import watched
from blobstore.runtime.executorch import CompileSpec, XnnpackBackend

__all__ = ["XnnpackLowering"]


class XnnpackLowering:
    """Lowers through `XnnpackBackend`."""

    backend_id = "XnnpackBackend"

    def preprocess(self, program: ExportedProgram, specs: list[CompileSpec], table: NameTable) -> Lowered:
        """Lower a part of a graph; see `InnerLowering`."""
        run = Run(table, program)
        with watched(run):
            result = XnnpackBackend.preprocess(program, specs)
        groups = groups_of_constants(run.graph)
        keys = xnnpack_keys(memoryview(result.processed_bytes))
        places = {index: end - VERSION_SIZE for index, (_, end) in enumerate(keys)}
        run.note_products(bias_scales(run.graph))
        constants = constants_of_payload(
            places, run.keys, groups, packed_constants(run.graph), uses_of_constants(run.graph)
        )
        return Lowered(result, constants, run.all_records(groups))
