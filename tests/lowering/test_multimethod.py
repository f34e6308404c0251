"""Backends that share weights between methods by themselves, when they lower all of them together (R1, B3)."""

import ctypes
import hashlib
import importlib.util
import os
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from blobstore.core.formats.ptd.reader import open_ptd
from blobstore.errors import UnsupportedOperationError, UpdateError
from blobstore.lowering import plugin
from blobstore.lowering.export import lower, quiet
from blobstore.programs import save_programs
from blobstore.runtime import BlobCache, Program
from tests.helpers import native_build
from tests.lowering.live import BlobStorePartitioner
from tests.lowering.toy import Scale

with quiet():
    from executorch.exir._serialize._named_data_store import NamedDataStore
    from executorch.exir.backend.backend_details import BackendDetails, PreprocessResult
    from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult
    from executorch.exir.backend.utils import tag_constant_data
    from executorch.exir.dialects._ops import ops

SIZE = 300
WEIGHT = Scale(SIZE).weight.detach()
X = torch.arange(SIZE, dtype=torch.float32)


def raw(program: Any) -> bytes:
    (tensor,) = program.state_dict.values()
    return bytes(tensor.detach().numpy().tobytes())


class SharesWeights(BackendDetails):
    """Alone, a part has its weight in the payload; together, parts have it once, in named data. The C++ half reads that."""

    calls: ClassVar[list[dict[str, int]]] = []

    @staticmethod
    def preprocess(program: Any, specs: Any) -> PreprocessResult:
        return PreprocessResult(raw(program))

    @classmethod
    def preprocess_multimethod(cls, edge_programs: Any, compile_specs: Any) -> Any:
        assert all(not specs for parts in compile_specs.values() for specs in parts), "only the partitioner's own"
        cls.calls.append({method: len(parts) for method, parts in edge_programs.items()})
        return {method: [cls.shared(raw(part)) for part in parts] for method, parts in edge_programs.items()}

    @staticmethod
    def shared(weight: bytes) -> PreprocessResult:
        key = hashlib.sha256(weight).hexdigest()
        store = NamedDataStore()
        store.add_named_data(key, weight, external_tag="shared")
        return PreprocessResult(key.encode(), data_store_output=store.get_named_data_store_output())


class SharesNothing(BackendDetails):
    """It has ExecuTorch's function for several methods, and lowers each part alone there."""

    @staticmethod
    def preprocess(program: Any, specs: Any) -> PreprocessResult:
        return PreprocessResult(b"TOY1" + raw(program))

    @classmethod
    def preprocess_multimethod(cls, edge_programs: Any, compile_specs: Any) -> Any:
        return super().preprocess_multimethod(edge_programs, compile_specs)


class SharesPayloads(BackendDetails):
    """One payload for all methods, and no other way to lower."""

    @classmethod
    def preprocess_multimethod(cls, edge_programs: Any, compile_specs: Any) -> Any:
        whole = b"".join(raw(part) for parts in edge_programs.values() for part in parts)
        return {method: [PreprocessResult(whole)] * len(parts) for method, parts in edge_programs.items()}


class Forgets(BackendDetails):
    """A part of the last method."""

    @classmethod
    def preprocess_multimethod(cls, edge_programs: Any, compile_specs: Any) -> Any:
        results = {method: [PreprocessResult(b"x")] * len(parts) for method, parts in edge_programs.items()}
        return {**results, list(results)[-1]: []}


class Through(Partitioner):  # type: ignore[misc]
    """Products go to a backend."""

    def __init__(self, backend_id: str) -> None:
        super().__init__()
        self.backend_id = backend_id

    def partition(self, program: Any) -> PartitionResult:
        (product,) = [node for node in program.graph.nodes if node.target == ops.edge.aten.mul.Tensor]
        product.meta["delegation_tag"] = "part"
        tag_constant_data(program)
        return PartitionResult(program, {"part": DelegationSpec(self.backend_id, [])})


@pytest.fixture(autouse=True)
def inners(monkeypatch: pytest.MonkeyPatch) -> None:
    """The partitioner registers what it wraps; no other test sees it."""
    monkeypatch.setattr(plugin, "_inners", dict(plugin._inners))
    SharesWeights.calls.clear()


def saved(backend_id: str, folder: Path) -> Path:
    """A program of two methods with one weight."""
    module = Scale(SIZE).eval()
    manager = lower(
        {"prefill": (module, (X,)), "decode": (module, (X,))},
        partitioners=lambda: [BlobStorePartitioner(Through(backend_id), tag="model")],
    )
    save_programs({"both": manager}, folder)
    return folder / "both.pte"


def occurrences(folder: Path) -> dict[str, int]:
    """How often each file has the weight."""
    weight = WEIGHT.numpy().tobytes()
    return {path.name: count for path in folder.iterdir() if (count := path.read_bytes().count(weight))}


@pytest.mark.long
def test_the_backends_own_sharing_stays(tmp_path: Path) -> None:
    """The weight of two methods is there once, under the backend's key, and both run (R1)."""
    native_build.need()
    path = saved("SharesWeights", tmp_path)
    assert SharesWeights.calls == [{"prefill": 1, "decode": 1}]
    assert occurrences(tmp_path) == {"shared.ptd": 1}
    assert hashlib.sha256(WEIGHT.numpy().tobytes()).hexdigest() in open_ptd(tmp_path / "shared.ptd")
    spec = importlib.util.find_spec("executorch")
    assert spec and spec.submodule_search_locations
    executorch = Path(next(iter(spec.submodule_search_locations)))
    native_build.run(
        *(os.environ.get("CXX", "c++"), "-std=c++17", "-shared", "-fPIC", "-DC10_USING_CUSTOM_GENERATED_MACROS"),
        *("-DET_EVENT_TRACER_ENABLED", f"-I{executorch}/include"),
        f"-I{executorch}/include/executorch/runtime/core/portable_type/c10",
        *(Path(__file__).with_name("shared_weights.cpp"), f"-L{executorch}/lib", "-lexecutorch"),
        *("-o", tmp_path / "shared_weights.so"),
    )
    ctypes.CDLL(str(tmp_path / "shared_weights.so"))
    cache = BlobCache(list(tmp_path.glob("*.ptd")))
    program = Program(path, cache)
    for method in ("prefill", "decode"):
        assert torch.equal(program.method(method)(X), X * WEIGHT)
    with pytest.raises(UpdateError, match="'weight' cannot be updated: its backend lowers the methods together"):
        cache.update({"weight": WEIGHT})


@pytest.mark.long
def test_without_sharing_of_its_own_weights_change_by_name(tmp_path: Path) -> None:
    """The weight leaves both payloads, as if the backend had no function for several methods (R1, U1)."""
    saved("SharesNothing", tmp_path)
    assert occurrences(tmp_path) == {"model.ptd": 1}
    assert [key for key in open_ptd(tmp_path / "model.ptd") if key.startswith("weight@")]


def test_payloads_that_differ_from_those_of_parts_alone_are_kept(tmp_path: Path) -> None:
    """Also of a backend that cannot lower a part alone (B3)."""
    path = saved("SharesPayloads", tmp_path)
    assert (WEIGHT.numpy().tobytes() * 2) in path.read_bytes() and set(occurrences(tmp_path)) == {"both.pte"}


def test_results_for_other_parts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedOperationError, match="'Forgets': its preprocess_multimethod.. returned results for"):
        saved("Forgets", tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_part_alone_needs_a_way_to_lower_it() -> None:
    """The message names the backend."""
    from blobstore.lowering.holes import HolesLowering

    with pytest.raises(UnsupportedOperationError, match="'SharesPayloads' has no preprocess"):
        HolesLowering("SharesPayloads").preprocess(None, [], None)  # type: ignore[arg-type]
