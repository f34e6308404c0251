"""The partitioner and the backend that lowering goes through; what they wrap is in a module of its own."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, final

import torch
from executorch.exir._serialize._named_data_store import NamedDataStoreOutput
from executorch.exir._serialize.data_serializer import DataEntry
from executorch.exir.backend.backend_details import BackendDetails, CompileSpec, PreprocessResult
from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult
from torch.export import ExportedProgram

from blobstore.errors import KeyConflictError, UnsupportedDataError, UnsupportedOperationError
from blobstore.formats.payload import wrap
from blobstore.logical.records import STATE, Record, Records, records_key
from blobstore.lowering import methods, names, xnnpack
from blobstore.lowering.inner import InnerLowering
from blobstore.lowering.names import NameTable, Refusal, Tag

__all__ = ["BACKEND_ID", "BlobStoreBackend", "BlobStorePartitioner", "register_inner"]

BACKEND_ID = "BlobStoreBackend"
_TABLE_SPEC = "blobstore.table"
_BEARER_SPEC = "blobstore.bearer"

_inners: dict[str, InnerLowering] = {}


def register_inner(inner: InnerLowering) -> None:
    """Let `BlobStorePartitioner` wrap partitioners of another backend; docs/lowering.md says what it has to do.

    Raises:
        UnsupportedDataError: `inner` has no name of a backend, or no `preprocess`.
    """
    if not isinstance(getattr(inner, "backend_id", None), str) or not callable(getattr(inner, "preprocess", None)):
        raise UnsupportedDataError(f"expected an object with a backend_id and a preprocess(), found {inner!r}")
    _inners[inner.backend_id] = inner


register_inner(xnnpack.XnnpackLowering())


class BlobStorePartitioner(Partitioner):  # type: ignore[misc]
    """Partitions as another partitioner does, and has the parts lowered so that their weights can be changed by name.

    Args:
        inner: the partitioner of the backend that is to run the parts, with whatever options it has.
        tag: the data file that the weights go to, without a folder: a name, or a function from the name of a tensor to
            one. None, or a function that returns it, leaves the weight in the program.

    Raises:
        UnsupportedDataError: `inner` is not one partitioner.
        InvalidTagError: `tag` is not a plain file name; from a function's results, when the graph is partitioned.
    """

    def __init__(self, inner: Any, *, tag: Tag = "model") -> None:
        super().__init__()
        if isinstance(inner, list | tuple):
            raise UnsupportedDataError(
                f"a BlobStorePartitioner wraps one partitioner, found {len(inner)} of them; wrap each on its own: "
                "partitioner=[BlobStorePartitioner(a), BlobStorePartitioner(b)]"
            )
        if isinstance(inner, type):
            raise UnsupportedDataError(
                f"expected a partitioner, found the class {inner.__qualname__}; make one: call it"
            )
        if not isinstance(inner, Partitioner):
            raise UnsupportedDataError(f"expected a partitioner, found {inner!r}")
        if isinstance(inner, BlobStorePartitioner):
            raise UnsupportedDataError("this partitioner is wrapped in a BlobStorePartitioner already")
        if not callable(tag):
            names.check(tag)
        self.inner = inner
        self.tag = tag
        self._exported: dict[str, list[weakref.ref[torch.Tensor]]] = {}

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        """As the inner partitioner, with the backend replaced.

        Raises:
            UnsupportedOperationError: nothing is known of the backend that the inner partitioner delegates to.
        """
        result = self.inner.partition(exported_program)
        tables: dict[str, NameTable] = {}
        for tag, spec in result.partition_tags.items():
            inner = spec.backend_id
            if inner not in _inners:
                raise UnsupportedOperationError(f"cannot wrap backend {inner!r}; known are {sorted(_inners)}")
            if inner not in tables:
                table = names.table_of(result.tagged_exported_program, inner, self.tag)
                tables[inner] = replace(table, exported=self._exported)
                names.keep(tables[inner])
            table_spec = CompileSpec(_TABLE_SPEC, tables[inner].digest)
            table_spec.program = weakref.ref(result.tagged_exported_program)  # for `preprocess_multimethod`
            specs = [*spec.compile_specs, table_spec]
            if tag == (tables[inner].bearer or next(iter(result.partition_tags))):
                specs.append(CompileSpec(_BEARER_SPEC, b""))
            result.partition_tags[tag] = DelegationSpec(BACKEND_ID, specs)
        return result

    def ops_to_not_decompose(self, ep: ExportedProgram) -> Any:
        """The inner partitioner's."""
        return self.inner.ops_to_not_decompose(ep)

    def transform_for_pre_decomposition(self, exported_program: ExportedProgram) -> ExportedProgram:
        """The inner partitioner's. From here on, names are those of the tensors that the program has now; those of tied
        tensors, which decompositions drop, are noted."""
        for name, tensor in {**exported_program.constants, **exported_program.state_dict}.items():
            if isinstance(tensor, torch.Tensor):
                self._exported.setdefault(name, []).append(weakref.ref(tensor))
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
    spec = next((spec for spec in specs if spec.key == _TABLE_SPEC), None)
    if spec is None:
        raise UnsupportedOperationError(f"{BACKEND_ID} lowers what a BlobStorePartitioner partitioned, nothing else")
    return spec


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
    table = _refuse_changed(table, {**program.constants, **program.state_dict})
    bears = any(spec.key == _BEARER_SPEC for spec in compile_specs)
    specs = [spec for spec in compile_specs if spec.key not in {_TABLE_SPEC, _BEARER_SPEC}]
    lowered = _inners[table.inner].preprocess(program, specs, table)
    result = lowered.result
    _add_records(result.data_store_output, table, lowered.records, bears)
    return PreprocessResult(
        processed_bytes=wrap(bytes(result.processed_bytes), table.inner, lowered.constants),
        debug_handle_map=result.debug_handle_map,
        data_store_output=result.data_store_output,
        _delegate_info_meta=result._delegate_info_meta,
    )


def _refuse_changed(table: NameTable, tensors: Mapping[str, torch.Tensor]) -> NameTable:
    """The table, without the tensors that are not those that the program was exported with."""
    refused = {}
    for name, tensor in tensors.items():
        known = [other for ref in table.exported.get(name, ()) if (other := ref()) is not None]
        if known and name in table.sources and not any(methods.same_bits(tensor, other) for other in known):
            refused[name] = Refusal((table.sources[name],), "it was changed between exporting and partitioning")
    return replace(table, refused={**refused, **table.refused}) if refused else table


def _add_records(output: NamedDataStoreOutput, table: NameTable, records: list[Record], bears: bool) -> None:
    """Put the records into the data files that hold their blobs; refusals go with the first of them.

    What concerns the whole program, and not this delegate, is in one delegate's records only, that which `bears` it.
    """
    files: dict[str | None, list[Record]] = {}
    tag_of = {key: tag for tag, entries in output.external_data.items() for key in entries}
    first = next(iter(output.external_data), None)
    if bears:
        elsewhere = (Record("", 0, refusal.sources, refusal=refusal.reason) for refusal in table.refused.values())
        records = [*records, *(refusal for refusal in elsewhere if refusal not in records)]
        records += (Record("", 0, (source,), refusal=STATE, auxiliary=True) for source in table.state)
        files[first] = []
    for record in records:
        if all(source.name in table.transient or names.is_generated(source.name) for source in record.sources):
            record = replace(record, auxiliary=True)  # noqa: PLW2901
        files.setdefault(tag_of.get(record.key) if record.key else first, []).append(record)
    for tag, kept in files.items():
        transient = tuple(source.name for source in table.outside if source.name in table.transient)
        whole = (table.outside, table.shared, transient) if bears and tag == first else ()
        data = Records(table.inner, tuple(kept), *whole).pack()
        entries = output.pte_data if tag is None else output.external_data[tag]
        entries[records_key(data)] = DataEntry(len(output.buffers), 16, None)
        output.buffers.append(data)
