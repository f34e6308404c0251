"""The partitioner and the backend that lowering goes through. They wrap those of an inner backend, such as XNNPACK."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, final

import torch
from torch.export import ExportedProgram

from blobstore.core.constants import BACKEND_ID
from blobstore.core.errors import KeyConflictError, UnsupportedDataError, UnsupportedOperationError
from blobstore.core.formats.payload import wrap
from blobstore.core.reprs import line
from blobstore.logical.records import STATE, Record, Records, records_key
from blobstore.lowering import marks, methods, names, openvino, tables
from blobstore.lowering.holes import HolesLowering, find_backend
from blobstore.lowering.inner import InnerLowering, Lowered, Subgraph
from blobstore.lowering.names import Refusal, Tag
from blobstore.lowering.tables import NameTable
from blobstore.lowering.xnnpack import XnnpackLowering
from blobstore.runtime.executorch import (
    BackendDetails,
    CompileSpec,
    DataEntry,
    DelegationSpec,
    NamedDataStoreOutput,
    Partitioner,
    PartitionResult,
    PreprocessResult,
)

__all__ = ["BACKEND_ID", "BlobStoreBackend", "BlobStorePartitioner", "register_inner"]

_TABLE_SPEC = "blobstore.table"
_BEARER_SPEC = "blobstore.bearer"

_inners: dict[str, InnerLowering] = {}


def register_inner(inner: InnerLowering) -> None:
    """Let `BlobStorePartitioner` wrap partitioners of another backend.

    Args:
        inner: see `InnerLowering`, and docs/backends.md for what it must do. It replaces an earlier one of its backend.

    Raises:
        UnsupportedDataError: `inner` has no `backend_id` that is a string, or no `preprocess()`.
    """
    if not isinstance(getattr(inner, "backend_id", None), str) or not callable(getattr(inner, "preprocess", None)):
        raise UnsupportedDataError(f"expected an object with a backend_id and a preprocess(), found {inner!r}")
    _inners[inner.backend_id] = inner


register_inner(XnnpackLowering())
register_inner(HolesLowering(openvino.BACKEND_ID, openvino.comparable))


class BlobStorePartitioner(Partitioner):  # type: ignore[misc]
    """Partitions as another partitioner does; the parts are lowered so that their weights can be changed by name.

    Args:
        inner: the partitioner of the backend that will run the parts, with whatever options it has.
        tag: the data file for the weights, without a folder: a file name, or a function from the name of a tensor to a
            file name. None, also from the function, leaves a weight in the program.

    Raises:
        UnsupportedDataError: `inner` is not one partitioner.
        InvalidTagError: `tag` is not a plain file name. The results of a function are checked when the graph is
            partitioned.
    """

    def __init__(self, inner: Any, *, tag: Tag = "model") -> None:
        super().__init__()
        if isinstance(inner, list | tuple):
            raise UnsupportedDataError(
                f"a BlobStorePartitioner wraps one partitioner, found {len(inner)}; wrap each of them: "
                "partitioner=[BlobStorePartitioner(a), BlobStorePartitioner(b)]"
            )
        if isinstance(inner, type):
            raise UnsupportedDataError(
                f"expected a partitioner, found the class {inner.__qualname__}; pass an instance: {inner.__qualname__}()"
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
        """What the inner partitioner returns, with `BlobStoreBackend` as the backend.

        Raises:
            UnsupportedOperationError: no `InnerLowering` is registered for the backend that the inner partitioner
                delegates to, and no such backend was imported.
        """
        result = self.inner.partition(exported_program)
        tables_of: dict[str, NameTable] = {}
        for tag, spec in result.partition_tags.items():
            inner = spec.backend_id
            # Any backend can be searched for its constants, so no list of backends has to be kept.
            if inner not in _inners and find_backend(inner) is not None:
                register_inner(HolesLowering(inner))
            if inner not in _inners:
                raise UnsupportedOperationError(f"cannot wrap backend {inner!r}; known backends: {sorted(_inners)}")
            if inner not in tables_of:
                # One table for all parts of a backend: a tensor that two parts use has one name and one file.
                table = tables.table_of(result.tagged_exported_program, inner, self.tag)
                tables_of[inner] = replace(table, exported=self._exported)
                tables.keep(tables_of[inner])
            table_spec = CompileSpec(_TABLE_SPEC, tables_of[inner].digest)
            table_spec.program = weakref.ref(result.tagged_exported_program)  # for `preprocess_multimethod`
            # A spec is the only thing that ExecuTorch passes on from here to `preprocess`.
            specs = [*spec.compile_specs, table_spec]
            if tag == (tables_of[inner].bearer or next(iter(result.partition_tags))):
                specs.append(CompileSpec(_BEARER_SPEC, b""))
            result.partition_tags[tag] = DelegationSpec(BACKEND_ID, specs)
        return result

    def ops_to_not_decompose(self, ep: ExportedProgram) -> Any:
        """What the inner partitioner returns."""
        return self.inner.ops_to_not_decompose(ep)

    def transform_for_pre_decomposition(self, exported_program: ExportedProgram) -> ExportedProgram:
        """What the inner partitioner returns. Notes the names and tensors of the program as it was exported.

        Decompositions drop all names of a tied tensor but one, and passes may replace tensors.
        """
        for name, tensor in {**exported_program.constants, **exported_program.state_dict}.items():
            # Weak, because a partitioner may outlive the model by far.
            if isinstance(tensor, torch.Tensor):
                self._exported.setdefault(name, []).append(weakref.ref(tensor))
        marks.mark_aliases(exported_program)
        transformed: ExportedProgram = self.inner.transform_for_pre_decomposition(exported_program)
        return transformed

    @property
    def spec(self) -> Any:
        """The inner partitioner's `spec`."""
        return self.inner.spec

    def __repr__(self) -> str:
        tag = getattr(self.tag, "__name__", "a function") if callable(self.tag) else self.tag
        return line("BlobStorePartitioner", type(self.inner).__name__, f"tag {tag}")


@final
class BlobStoreBackend(BackendDetails):  # type: ignore[misc]
    """Lowers with the inner backend, and adds what updates by name need. ExecuTorch finds this class by its name."""

    @staticmethod
    def preprocess(edge_program: ExportedProgram, compile_specs: list[CompileSpec]) -> PreprocessResult:
        """Called by ExecuTorch for each part of a graph that is lowered alone."""
        part = _part(edge_program, compile_specs, tables.find(bytes(_table_spec(compile_specs).value)))
        return _finish(_lower(part), part.table, bears=_bears(compile_specs))

    @classmethod
    def preprocess_multimethod(
        cls, edge_programs: dict[str, list[ExportedProgram]], compile_specs: dict[str, list[list[CompileSpec]]]
    ) -> dict[str, list[PreprocessResult]]:
        """Called by ExecuTorch with the parts of all methods that are lowered together."""
        by_method = {method: [_table_spec(specs) for specs in parts] for method, parts in compile_specs.items()}
        qualified = methods.qualify(
            {method: specs[0].program() for method, specs in by_method.items()},
            {method: tables.find(bytes(specs[0].value)) for method, specs in by_method.items()},
        )
        for spec in (spec for specs in by_method.values() for spec in specs):
            vars(spec).pop("program", None)  # specs stay with the lowered module, which can be pickled
        parts = {
            method: [
                _part(
                    program, specs, replace(qualified[method], inner=tables.find(bytes(_table_spec(specs).value)).inner)
                )
                for program, specs in zip(programs, compile_specs[method], strict=True)
            ]
            for method, programs in edge_programs.items()
        }
        lowered = _lower_together(parts)
        results = {
            method: [
                _finish(one, part.table, bears=_bears(specs))
                for one, part, specs in zip(lowered[method], parts[method], compile_specs[method], strict=True)
            ]
            for method in parts
        }
        _check_keys(results)
        return results


def _table_spec(specs: list[CompileSpec]) -> CompileSpec:
    spec = next((spec for spec in specs if spec.key == _TABLE_SPEC), None)
    if spec is None:
        raise UnsupportedOperationError(f"{BACKEND_ID} lowers only what a BlobStorePartitioner partitioned")
    return spec


def _check_keys(results: dict[str, list[PreprocessResult]]) -> None:
    """Check that no two methods need different contents under one key; otherwise raise KeyConflictError."""
    by_key: dict[str, tuple[str, bytes]] = {}
    for method, part in ((method, part) for method, parts in results.items() for part in parts):
        for key, data in _stored(part.data_store_output):
            other, first = by_key.setdefault(key, (method, data))
            if other != method and first != data:
                raise KeyConflictError(
                    f"methods '{other}' and '{method}' store different bytes under the key '{key}': they quantize the same "
                    "weight differently. Quantize both with the same scales, or lower them as separate programs"
                )


def _stored(output: NamedDataStoreOutput) -> Iterator[tuple[str, bytes]]:
    """The contents of all keys, of a program and of data files."""
    for entries in (output.pte_data, *output.external_data.values()):
        for key, entry in entries.items():
            yield key, output.buffers[entry.buffer_index]


def _bears(compile_specs: list[CompileSpec]) -> bool:
    return any(spec.key == _BEARER_SPEC for spec in compile_specs)


def _part(program: ExportedProgram, compile_specs: list[CompileSpec], table: NameTable) -> Subgraph:
    specs = [spec for spec in compile_specs if spec.key not in {_TABLE_SPEC, _BEARER_SPEC}]
    return Subgraph(program, specs, _refuse_changed(table, {**program.constants, **program.state_dict}))


def _lower(part: Subgraph) -> Lowered:
    return _inners[part.table.inner].preprocess(part.program, part.specs, part.table)


def _lower_together(parts: Mapping[str, list[Subgraph]]) -> dict[str, list[Lowered]]:
    """Lower the parts of all methods. The parts of a backend that can share something between them are given to it
    together."""
    by_backend: dict[str, dict[str, list[Subgraph]]] = {}
    for method, of_method in parts.items():
        for part in of_method:
            by_backend.setdefault(part.table.inner, {}).setdefault(method, []).append(part)
    lowered: dict[int, Lowered] = {}
    for backend, own in sorted(by_backend.items()):
        together = getattr(_inners[backend], "preprocess_multimethod", _lower_alone)
        results = together(own) or _lower_alone(own)  # it returns None if sharing makes nothing else of them
        for method, of_method in own.items():
            lowered.update(zip(map(id, of_method), results[method], strict=True))
    return {method: [lowered[id(part)] for part in of_method] for method, of_method in parts.items()}


def _lower_alone(parts: Mapping[str, list[Subgraph]]) -> dict[str, list[Lowered]]:
    return {method: [_lower(part) for part in of_method] for method, of_method in parts.items()}


def _finish(lowered: Lowered, table: NameTable, *, bears: bool) -> PreprocessResult:
    """What ExecuTorch gets of a part: its payload in ours, and records."""
    result = lowered.result
    _add_records(result.data_store_output, table, lowered.records, bears)
    return replace(result, processed_bytes=wrap(bytes(result.processed_bytes), table.inner, lowered.constants))


def _refuse_changed(table: NameTable, tensors: Mapping[str, torch.Tensor]) -> NameTable:
    """The table, which then refuses tensors that differ from those that the program was exported with."""
    refused = {}
    for name, tensor in tensors.items():
        exported = [other for ref in table.exported.get(name, ()) if (other := ref()) is not None]
        if exported and name in table.sources and not any(names.same_bits(tensor, other) for other in exported):
            refused[name] = Refusal((table.sources[name],), "it was changed between exporting and partitioning")
    return replace(table, refused={**refused, **table.refused}) if refused else table


def _add_records(output: NamedDataStoreOutput, table: NameTable, records: list[Record], bears: bool) -> None:
    """Put the records into the data files that hold their blobs; refusals go to the first of these files.

    What concerns the whole program, and not this delegate, is only in the records of the one delegate that `bears` it.
    """
    first, files = _records_by_file(output, table, records, bears)
    for tag, kept in files.items():
        packed = Records(table.inner, tuple(kept))
        if bears and tag == first:
            transient = tuple(source.name for source in table.outside if source.name in table.transient)
            packed = replace(packed, outside=table.outside, shared=table.shared, transient=transient)
        data = packed.pack()
        entries = output.pte_data if tag is None else output.external_data.setdefault(tag, {})
        entries[records_key(data)] = DataEntry(len(output.buffers), 16, None)
        output.buffers.append(data)


def _records_by_file(
    output: NamedDataStoreOutput, table: NameTable, records: list[Record], bears: bool
) -> tuple[str | None, dict[str | None, list[Record]]]:
    """The first data file, and the records that go to each; None stands for the program."""
    # A cache reads the records in its files only, so they go where weights of this delegate are.
    first = next(iter(output.external_data), None)
    files: dict[str | None, list[Record]] = {}
    if bears:
        if first is None and (table.outside or table.shared):
            first = next(filter(None, map(table.tag, table.sources)), None)
        records = [*records, *_records_of_program(table, records)]
        files[first] = []
    tag_of = {key: tag for tag, entries in output.external_data.items() for key in entries}
    for record in records:
        if record.key:
            tag = tag_of.get(record.key)
        else:  # also if nothing of this delegate is in a data file, as a cache looks in no other place
            tag = first if first is not None else table.tag(record.sources[0].name)
        files.setdefault(tag, []).append(_with_auxiliary(record, table))
    return first, files


def _records_of_program(table: NameTable, records: list[Record]) -> Iterator[Record]:
    """Refusals of the tensors that no delegate could record, and of state."""
    for refusal in table.refused.values():
        record = Record("", 0, refusal.sources, refusal=refusal.reason)
        if record not in records:
            yield record
    for source in table.state:
        yield Record("", 0, (source,), refusal=STATE, auxiliary=True)


def _with_auxiliary(record: Record, table: NameTable) -> Record:
    """The record, marked as auxiliary if no state dict has any of its sources."""
    named = (source.name for source in record.sources)
    if all(name in table.transient or names.is_generated(name) for name in named):
        return replace(record, auxiliary=True)
    return record
