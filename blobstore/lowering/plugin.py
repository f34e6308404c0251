"""The partitioner and the backend that lowering goes through; what they wrap is in a module of its own."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any, final

from executorch.exir._serialize._named_data_store import NamedDataStoreOutput
from executorch.exir._serialize.data_serializer import DataEntry
from executorch.exir.backend.backend_details import BackendDetails, CompileSpec, PreprocessResult
from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult
from torch.export import ExportedProgram

from blobstore.errors import KeyConflictError
from blobstore.lowering import methods, names, xnnpack
from blobstore.lowering.inner import InnerLowering
from blobstore.lowering.names import NameTable, Tag
from blobstore.lowering.payload import wrap
from blobstore.lowering.records import STATE, Record, Records, records_key

__all__ = ["BACKEND_ID", "BlobStoreBackend", "BlobStorePartitioner", "register_inner"]

BACKEND_ID = "BlobStoreBackend"
_TABLE_SPEC = "blobstore.table"

_inners: dict[str, InnerLowering] = {}


def register_inner(inner: InnerLowering) -> None:
    """Let `BlobStorePartitioner` wrap partitioners of another backend; docs/lowering.md says what it has to do."""
    _inners[inner.backend_id] = inner


register_inner(xnnpack.XnnpackLowering())


class BlobStorePartitioner(Partitioner):  # type: ignore[misc]
    """Partitions as another partitioner does, and has the parts lowered so that their weights can be changed by name.

    Args:
        inner: the partitioner of the backend that is to run the parts, with whatever options it has.
        tag: the data file that the weights go to, without a folder: a name, or a function from the name of a tensor to
            one. None, or a function that returns it, leaves the weight in the program.

    Raises:
        InvalidTagError: `tag` is not a plain file name; from a function's results, when the graph is partitioned.
    """

    def __init__(self, inner: Any, *, tag: Tag = "model") -> None:
        super().__init__()
        if not callable(tag):
            names.check(tag)
        self.inner = inner
        self.tag = tag

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        """As the inner partitioner, with the backend replaced.

        Raises:
            ValueError: nothing is known of the backend that the inner partitioner delegates to.
        """
        result = self.inner.partition(exported_program)
        for tag, spec in result.partition_tags.items():
            if spec.backend_id not in _inners:
                raise ValueError(f"cannot wrap backend {spec.backend_id}; known are {sorted(_inners)}")
            digest = names.keep(names.table_of(exported_program, spec.backend_id, self.tag))
            table_spec = CompileSpec(_TABLE_SPEC, digest)
            table_spec.program = weakref.ref(result.tagged_exported_program)  # for `preprocess_multimethod`
            result.partition_tags[tag] = DelegationSpec(BACKEND_ID, [*spec.compile_specs, table_spec])
        return result

    def ops_to_not_decompose(self, ep: ExportedProgram) -> Any:
        """The inner partitioner's."""
        return self.inner.ops_to_not_decompose(ep)

    def transform_for_pre_decomposition(self, exported_program: ExportedProgram) -> ExportedProgram:
        """The inner partitioner's; and the names of tied tensors are noted, which decompositions drop."""
        names.mark_aliases(exported_program)
        transformed: ExportedProgram = self.inner.transform_for_pre_decomposition(exported_program)
        return transformed

    @property
    def spec(self) -> Any:
        """The inner partitioner's."""
        return self.inner.spec


@final
class BlobStoreBackend(BackendDetails):  # type: ignore[misc]
    """Lowers with the inner backend, and adds what updates by name need. ExecuTorch finds it by its name."""

    @staticmethod
    def preprocess(edge_program: ExportedProgram, compile_specs: list[CompileSpec]) -> PreprocessResult:
        """Called by ExecuTorch for each part of a graph that is lowered alone."""
        return _lower(edge_program, compile_specs, names.find(bytes(_table_spec(compile_specs).value)))

    @classmethod
    def preprocess_multimethod(
        cls, edge_programs: dict[str, list[ExportedProgram]], compile_specs: dict[str, list[list[CompileSpec]]]
    ) -> dict[str, list[PreprocessResult]]:
        """Called by ExecuTorch with the parts of all methods that are lowered together."""
        found = {method: [_table_spec(specs) for specs in parts] for method, parts in compile_specs.items()}
        tables = methods.qualify(
            {method: specs[0].program() for method, specs in found.items()},
            {method: names.find(bytes(specs[0].value)) for method, specs in found.items()},
        )
        for spec in (spec for specs in found.values() for spec in specs):
            vars(spec).pop("program", None)  # specs stay with the lowered module, which can be pickled
        results: dict[str, list[PreprocessResult]] = {}
        for method, parts in edge_programs.items():
            results[method] = []
            for part, specs in zip(parts, compile_specs[method], strict=True):
                inner = names.find(bytes(_table_spec(specs).value)).inner
                results[method].append(_lower(part, specs, replace(tables[method], inner=inner)))
        _check_keys(results)
        return results


def _table_spec(specs: list[CompileSpec]) -> CompileSpec:
    return next(spec for spec in specs if spec.key == _TABLE_SPEC)


def _check_keys(results: dict[str, list[PreprocessResult]]) -> None:
    """Raise KeyConflictError if two methods need different contents under one key."""
    found: dict[str, tuple[str, bytes]] = {}
    for method, parts in results.items():
        for output in (part.data_store_output for part in parts):
            for entries in (output.pte_data, *output.external_data.values()):
                for key, entry in entries.items():
                    data = output.buffers[entry.buffer_index]
                    other, known = found.setdefault(key, (method, data))
                    if other != method and known != data:
                        raise KeyConflictError(
                            f"methods '{other}' and '{method}' have the same weights and store them differently, "
                            f"as '{key}': quantize both with the same scales, or lower them as programs of their own"
                        )


def _lower(program: ExportedProgram, compile_specs: list[CompileSpec], table: NameTable) -> PreprocessResult:
    specs = [spec for spec in compile_specs if spec.key != _TABLE_SPEC]
    lowered = _inners[table.inner].preprocess(program, specs, table)
    result = lowered.result
    no_weights = table.transient
    records = [
        replace(record, auxiliary=True) if no_weights.issuperset(source.name for source in record.sources) else record
        for record in lowered.records
    ]
    records += [Record("", 0, (source,), refusal=STATE, auxiliary=True) for source in table.state]
    _add_records(result.data_store_output, table, records)
    return PreprocessResult(
        processed_bytes=wrap(bytes(result.processed_bytes), table.inner, lowered.constants),
        debug_handle_map=result.debug_handle_map,
        data_store_output=result.data_store_output,
        _delegate_info_meta=result._delegate_info_meta,
    )


def _add_records(output: NamedDataStoreOutput, table: NameTable, records: list[Record]) -> None:
    """Put the records into the data files that hold their blobs; refusals go with the first of them."""
    covered = {source.name for record in records for source in record.sources}
    outside = tuple(source for source in table.sources.values() if source.name not in covered)
    files: dict[str | None, list[Record]] = {}
    tag_of = {key: tag for tag, entries in output.external_data.items() for key in entries}
    first = next(iter(output.external_data), None)
    for record in records:
        files.setdefault(tag_of.get(record.key) if record.key else first, []).append(record)
    for tag, kept in files.items():
        data = Records(table.inner, tuple(kept), outside).pack()
        entries = output.pte_data if tag is None else output.external_data[tag]
        entries[records_key(data)] = DataEntry(len(output.buffers), 16, None)
        output.buffers.append(data)
