"""Every element type that ExecuTorch knows is read, moved, deduplicated and shown, also where nothing computes with it (R4)."""

from pathlib import Path

import numpy as np
import pytest
import torch
from executorch.exir import ExecutorchBackendConfig, to_edge_transform_and_lower

from blobstore import BlobStore, dedup_programs, errors, open_any, open_ptd
from blobstore.core.memory.dtypes import SAFETENSORS
from blobstore.core.memory.layout import ScalarType, TensorLayout
from blobstore.core.memory.tensors import in_dim_order
from blobstore.core.tools.convert import convert
from blobstore.reporting import report
from blobstore.reporting.model import FindingKind
from blobstore.runtime import BlobCache, Program, make_working_copy

SIZES, CHANNELS_LAST = (2, 3, 8, 8), (0, 2, 3, 1)


def blob(kind: ScalarType, salt: int = 0) -> bytes:
    nbytes = TensorLayout(kind, SIZES).nbytes
    return np.random.default_rng(int(kind) + salt).integers(0, 2, nbytes, np.uint8).tobytes()  # 0 and 1: also of bool


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a tensor of every type, channels last, and each again under a second key."""
    store = BlobStore()
    for kind in ScalarType:
        for key in (kind.name, f"{kind.name}.again"):
            store.add(key, blob(kind), layout=TensorLayout(kind, SIZES, CHANNELS_LAST))
    path = tmp_path_factory.mktemp("every") / "every.ptd"
    store.write_ptd(path)
    return path


def test_every_type_is_read_and_stored_once(every: Path) -> None:
    with open_ptd(every, verify=True) as data_map:
        cache = BlobCache(every)
        assert len(data_map.extents) == len(ScalarType)
        for kind in ScalarType:
            layout = TensorLayout(kind, SIZES, CHANNELS_LAST)
            for key in (kind.name, f"{kind.name}.again"):
                assert data_map.get_tensor_layout(key) == cache.get_tensor_layout(key) == layout
                assert bytes(data_map.get_data(key)) == bytes(cache.get_data(key)) == blob(kind)


class Rotary(torch.nn.Module):
    """A table as rotary embeddings have it, which the program only views."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.polar(torch.ones(4), torch.arange(4.0)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.view_as_real(self.table).flatten()


@pytest.mark.long
def test_a_program_with_a_complex_constant_runs(tmp_path: Path) -> None:
    """ExecuTorch writes it into a data file, from where it goes on (B1, R4)."""
    x = torch.randn(8)
    edge = to_edge_transform_and_lower(torch.export.export(Rotary().eval(), (x,)))
    made = edge.to_executorch(ExecutorchBackendConfig(external_constants=lambda node: "model"))
    with (tmp_path / "a.pte").open("wb") as file:
        made.write_to_file(file)
    made.write_tensor_data_to_file(str(tmp_path))
    slim = tmp_path / "slim"
    dedup_programs([tmp_path / "a.pte", tmp_path / "model.ptd"], slim)
    for program, data in ((tmp_path / "a.pte", tmp_path / "model.ptd"), (slim / "a.pte", slim / "shared.ptd")):
        cache = BlobCache(data)
        found = Program(program, cache).method()(x)
        torch.testing.assert_close(found, Rotary()(x), rtol=0, atol=0)
        (key,) = cache
        assert cache.torch(key).dtype == torch.complex64


def test_every_type_is_updated_and_saved(every: Path, tmp_path: Path) -> None:
    """Bytes of the tensor's own layout are new contents of it, whatever its type (U1)."""
    make_working_copy(every, tmp_path / "work.ptd")
    cache = BlobCache(tmp_path / "work.ptd", "shared")
    with cache.transaction() as update:
        for kind in ScalarType:
            update[kind.name] = blob(kind, salt=100)
    cache.save(tmp_path / "saved.ptd")
    with open_ptd(tmp_path / "saved.ptd", verify=True) as saved:
        for kind in ScalarType:
            assert bytes(saved.get_data(kind.name)) == blob(kind, salt=100)
            assert bytes(saved.get_data(f"{kind.name}.again")) == blob(kind)


def test_every_type_is_reported(tmp_path: Path) -> None:
    """Values repeated, and the same elements in another order in memory, are found for elements of any width (B2)."""
    store = BlobStore()
    for kind in ScalarType:
        layout = TensorLayout(kind, SIZES, CHANNELS_LAST)
        store.add(f"{kind.name}.last", blob(kind), layout=layout)
        contiguous = in_dim_order(memoryview(blob(kind)), layout)
        store.add(f"{kind.name}.first", contiguous, layout=TensorLayout(kind, SIZES))
        element = np.arange(1, kind.itemsize + 1, dtype=np.uint8)
        many = TensorLayout(kind, (997 + int(kind),))
        store.add(f"{kind.name}.same", np.tile(element, many.sizes[0]).tobytes(), layout=many)
    store.write_ptd(tmp_path / "all.ptd")
    found = report([tmp_path / "all.ptd"])
    assert not found.problems
    named: dict[FindingKind, set[str]] = {}
    for finding in found.findings:
        for f, r in finding.places:
            named.setdefault(finding.kind, set()).update(found.files[f].regions[r].keys)
    assert {f"{kind.name}.same" for kind in ScalarType} <= named[FindingKind.CONSTANT]
    ordered = [kind for kind in ScalarType if kind.itemsize <= 8]
    assert {f"{kind.name}.{order}" for kind in ordered for order in ("first", "last")} <= named[
        FindingKind.OTHER_LAYOUT
    ]


@pytest.mark.parametrize("kind", ScalarType, ids=lambda kind: kind.name)
def test_every_type_is_converted_or_refused_by_name(kind: ScalarType, tmp_path: Path) -> None:
    store = BlobStore()
    store.add("w", blob(kind), layout=TensorLayout(kind, SIZES))
    store.write_ptd(tmp_path / "a.ptd")
    if kind not in SAFETENSORS.values():
        with pytest.raises(
            errors.UnsupportedDataError, match=f"'w' is {kind.name.lower()}.* a .safetensors cannot name"
        ):
            convert(tmp_path / "a.ptd", tmp_path / "a.safetensors")
        return
    convert(tmp_path / "a.ptd", tmp_path / "a.safetensors")
    convert(tmp_path / "a.safetensors", tmp_path / "b.ptd")
    with open_any(tmp_path / "b.ptd") as back:
        assert (bytes(back.get_data("w")), back.get_tensor_layout("w")) == (blob(kind), TensorLayout(kind, SIZES))
