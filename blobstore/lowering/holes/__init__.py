"""Any backend whose payload contains constants as inner backend: they go to the data file, and leave holes.

Nothing is known of the backend but its `preprocess`. `probes` makes other values for the constants, `encodings` lists
the forms in which a constant may lie in a payload, and `search` finds them there and proves, by lowering again, that
these places and nothing else follow the constants. At run time the delegate fills the holes before the backend sees
the payload.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from inspect import getattr_static

from torch.export import ExportedProgram

from blobstore.core.errors import UnsupportedOperationError
from blobstore.core.formats.payload import Constant
from blobstore.core.memory.dtypes import FLOATS
from blobstore.logical.records import Record
from blobstore.lowering.holes.encodings import stored
from blobstore.lowering.holes.probes import with_values
from blobstore.lowering.holes.search import Payload, Search
from blobstore.lowering.inner import Lowered, Subgraph
from blobstore.lowering.names import scalar_type
from blobstore.lowering.origins import TensorOrigin, TensorOrigins, blob_key
from blobstore.lowering.tables import NameTable
from blobstore.runtime.executorch import BackendDetails, CompileSpec, DataEntry, NamedDataStoreOutput, PreprocessResult

__all__ = ["HolesLowering", "find_backend"]

_NAMED_DATA = (
    "its backend looks it up under a key of its own; to change it by name, the backend needs a lowering of its own"
)
_TOGETHER = (
    "its backend lowers the methods together, and shares their weights in its own way; to change it by name, the backend "
    "needs a lowering of its own"
)


class HolesLowering:
    """Lowers through a backend that keeps constants in its payload.

    Args:
        backend_id: the backend's name in ExecuTorch.
        comparable: returns, of a payload, what is equal whenever the constants are. To be given if a payload also has
            parts that differ each time that the backend lowers, such as names with a counter in them.
    """

    def __init__(self, backend_id: str, comparable: Callable[[bytes], object] = bytes) -> None:
        self.backend_id = backend_id
        self._comparable = comparable

    def preprocess(self, program: ExportedProgram, specs: list[CompileSpec], table: NameTable) -> Lowered:
        """Lower a part of a graph; see `InnerLowering`.

        Raises:
            UnsupportedOperationError: the backend was not imported, or lowers only several parts together.
        """
        backend = self._backend()
        if backend.preprocess is BackendDetails.preprocess:
            raise UnsupportedOperationError(f"backend {self.backend_id!r} has no preprocess() for one part alone")
        origins = TensorOrigins(table, program)
        floats = {name: origin for name, origin in _origins(origins).items() if _is_float(origin)}

        def lower(values: Payload.Values) -> Payload:
            return Payload(backend.preprocess(with_values(program, values), list(specs)))

        search = Search(lower, {name: origin.tensors[0] for name, origin in floats.items()}, self._comparable)
        payload = search.run()
        constants: dict[str, Constant] = {}
        records: list[Record] = []
        blobs: list[tuple[str, bytes, str | None]] = []
        for name, place in search.found.items():
            origin = floats[name]
            steps = (*origin.steps, *place.steps)
            key = blob_key(origin.name, origin.sources, steps)
            data = stored(origin.tensors[0], place.steps)
            constants[key] = Constant(key, len(data), len(constants), (), packed=True, holes=place.places)
            records.append(Record(key, len(data), origin.sources, steps, group=constants[key].group))
            blobs.append((key, data, table.tag(origin.sources[0].name)))
        for name, reason in search.refused.items():
            origins.refuse(floats[name].sources, reason)
        output, own = _named_data(payload.result, blobs, len(constants))
        missing = _NAMED_DATA if own else f"it is not in the payload of {self.backend_id} as a tensor of floats"
        result = replace(payload.result, processed_bytes=payload.data, data_store_output=output)
        return Lowered(result, [*constants.values(), *own], origins.records_of(records, missing))

    def preprocess_multimethod(self, parts: Mapping[str, list[Subgraph]]) -> dict[str, list[Lowered]] | None:
        """Lower all parts with the backend's own `preprocess_multimethod`, if it has one and that makes something else of
        them than `preprocess`; see `InnerLowering`.

        What it makes stays as it is, so that the backend's own sharing between parts does. Nothing of it changes by name.

        Raises:
            UnsupportedOperationError: the backend was not imported, or returns results for other parts.
        """
        backend = self._backend()
        if not _shares(backend):
            return None
        results = backend.preprocess_multimethod(
            {method: [with_values(part.program, {}) for part in of_method] for method, of_method in parts.items()},
            {method: [list(part.specs) for part in of_method] for method, of_method in parts.items()},
        )
        if {method: len(of_method) for method, of_method in results.items()} != {
            method: len(of_method) for method, of_method in parts.items()
        }:
            raise UnsupportedOperationError(
                f"backend {self.backend_id!r}: its preprocess_multimethod() returned results for other parts than it got"
            )
        if self._are_alone(backend, parts, results):
            return None
        return {
            method: [_kept(part, result) for part, result in zip(of_method, results[method], strict=True)]
            for method, of_method in parts.items()
        }

    def _are_alone(
        self,
        backend: type[BackendDetails],
        parts: Mapping[str, list[Subgraph]],
        results: Mapping[str, list[PreprocessResult]],
    ) -> bool:
        """Whether results are those of `preprocess`, so that the parts share nothing."""
        if backend.preprocess is BackendDetails.preprocess:
            return False
        together = {method: [Payload(result) for result in of_method] for method, of_method in results.items()}
        if any(payload.has_named_data for of_method in together.values() for payload in of_method):
            return False
        for method, of_method in parts.items():
            for part, payload in zip(of_method, together[method], strict=True):
                alone = Payload(backend.preprocess(with_values(part.program, {}), list(part.specs)))
                if alone.has_named_data or self._comparable(alone.data) != self._comparable(payload.data):
                    return False
        return True

    def _backend(self) -> type[BackendDetails]:
        backend = find_backend(self.backend_id)
        if backend is None:
            raise UnsupportedOperationError(f"cannot wrap backend {self.backend_id!r}: its class was not imported")
        return backend


def _kept(part: Subgraph, result: PreprocessResult) -> Lowered:
    """A part as its backend lowered it together with others."""
    output, own = _named_data(result, [], 0)
    kept = replace(result, data_store_output=output)
    return Lowered(kept, own, TensorOrigins(part.table, part.program).records_of([], _TOGETHER))


def find_backend(backend_id: str) -> type[BackendDetails] | None:
    """The ahead-of-time half of a backend, which ExecuTorch finds in the same way: by the name of its class.

    None if it has none of ExecuTorch's two ways to lower.
    """
    backends = (c for c in BackendDetails.__subclasses__() if c.__name__ == backend_id)
    return next((c for c in backends if c.preprocess is not BackendDetails.preprocess or _shares(c)), None)


def _shares(backend: type[BackendDetails]) -> bool:
    """Whether a backend lowers the parts of all methods together."""
    own, inherited = (getattr_static(one, "preprocess_multimethod") for one in (backend, BackendDetails))
    return own is not inherited


def _origins(origins: TensorOrigins) -> dict[str, TensorOrigin]:
    by_name = {name: origins.origin(name) for name in origins.used}
    return {name: origin for name, origin in by_name.items() if origin is not None}


def _is_float(origin: TensorOrigin) -> bool:
    """Whether a tensor is one of floats, and was not quantized from another."""
    kind = scalar_type(origin.tensors[0].dtype)
    return (
        kind in FLOATS and (origin.done > 0 or kind == origin.sources[0].scalar_type) and origin.tensors[0].numel() > 0
    )


def _named_data(
    result: PreprocessResult, blobs: list[tuple[str, bytes, str | None]], group: int
) -> tuple[NamedDataStoreOutput, list[Constant]]:
    """The backend's own named data with ours, and the constants that stand for the backend's own."""
    given = result.data_store_output or NamedDataStoreOutput([], {}, {})
    output = NamedDataStoreOutput(
        list(given.buffers), dict(given.pte_data), {tag: dict(entries) for tag, entries in given.external_data.items()}
    )
    own = {
        key: Constant(key, len(output.buffers[entry.buffer_index]), group + number, ())
        for number, (key, entry) in enumerate(
            entry for entries in (output.pte_data, *output.external_data.values()) for entry in entries.items()
        )
    }
    for key, data, tag in blobs:
        entries = output.pte_data if tag is None else output.external_data.setdefault(tag, {})
        entries[key] = DataEntry(len(output.buffers), 16, None)
        output.buffers.append(data)
    return output, list(own.values())
