"""Files that `torch.save` and `torch.jit.save` wrote, taken apart without unpickling, and hostile ones (B5, S3)."""

import io
import os
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from safetensors.torch import save_file as save_safetensors

import blobstore
from blobstore.core.formats.opening import open_any
from blobstore.core.formats.torch_saved import TorchDataMap
from blobstore.core.tools.inspection import inspect_file
from blobstore.errors import InvalidFileError
from blobstore.pool import Pool
from blobstore.testing import Blob, NamedDataMapContract
from tests.core.formats.test_ptn import CHANGES, check_damaged, package
from tests.core.formats.test_safetensors import as_tensors


class TestTorchDataMap(NamedDataMapContract):
    blobs: Mapping[str, Blob] = {k: b for k, b in NamedDataMapContract.blobs.items() if b.layout}

    def plant(self, folder: Path) -> TorchDataMap:
        values = as_tensors(self.blobs)
        values["tied.weight"] = values["linear.weight"]
        torch.save(values, folder / "x.pt")
        return TorchDataMap(folder / "x.pt")


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    conv = torch.nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last)
    net = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.BatchNorm1d(16), conv)
    net.register_buffer("sixteen", torch.randn(40).half())
    return net.eval()


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("how", ["state dict", "module", "TorchScript"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensors_are_those_of_the_state_dict(tmp_path: Path, how: str) -> None:
    """Under its names, whatever of a model was saved."""
    net = model()
    if how == "TorchScript":
        torch.jit.save(torch.jit.script(net), tmp_path / "x.pt")
    else:
        torch.save(net if how == "module" else net.state_dict(), tmp_path / "x.pt")
    with open_any(tmp_path / "x.pt") as data:
        assert isinstance(data, TorchDataMap)
        assert set(data) == set(net.state_dict())
        for key, value in net.state_dict().items():
            found = data.torch(key)
            assert torch.equal(found, value) and found.stride() == value.stride(), key
    listed = inspect_file(tmp_path / "x.pt")
    counts = {kind: listed.parameters[kind] for kind in ("float", "half", "long")}
    assert sum(counts.values()) == sum(value.numel() for value in net.state_dict().values()) and counts["half"] == 40
    assert listed.format == "torch" and {blob.key for blob in listed.blobs} == set(net.state_dict())


def test_deeper_tensors_and_those_of_other_kinds(tmp_path: Path) -> None:
    """A training checkpoint; what is not one range of the file, or what a .ptd cannot name, is not among them."""
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    wide = torch.arange(20.0).reshape(4, 5)
    value = {
        "model": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "listed": [torch.ones(2, dtype=torch.float8_e4m3fn), torch.ones(2, dtype=torch.uint16)],
        "row": wide[1],
        "columns": wide[:, ::2],
        "conjugate": torch.ones(2, dtype=torch.complex64)[None].mH,
        "empty": torch.ones(0, 3),
        "scalar": torch.tensor(2.5),
    }
    torch.save(value, tmp_path / "x.pth")
    with open_any(tmp_path / "x.pth") as data:
        assert torch.equal(data.torch("optimizer.state.0.exp_avg"), optimizer.state_dict()["state"][0]["exp_avg"])
        assert torch.equal(data.torch("model.0.weight"), net.state_dict()["0.weight"])
        assert data.torch("listed.0").dtype == torch.float8_e4m3fn and data.torch("listed.1").tolist() == [1, 1]
        assert data.torch("row").tolist() == [5, 6, 7, 8, 9] and data.torch("scalar").item() == 2.5
        assert data.torch("empty").shape == (0, 3)
        assert not {"columns"} & set(data)
    (tmp_path / "alone.bin").write_bytes(saved(wide))
    assert torch.equal(open_any(tmp_path / "alone.bin").torch("0"), wide)


@pytest.mark.parametrize("length", [9, 25, 26, 27, 34, 80])
def test_a_file_under_any_name(tmp_path: Path, length: int) -> None:
    """torch writes the name of the file before the names inside, so these may be longer than what tells the format."""
    path = tmp_path / f"{('epoch=12-' * 9)[:length]}.ckpt"
    torch.save({"w": torch.ones(2)}, path)
    with open_any(path) as data:
        assert data.torch("w").tolist() == [1, 1]


def test_reading_needs_no_torch_and_runs_nothing(tmp_path: Path) -> None:
    class Runs:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path / 'ran'}",)

    (tmp_path / "x.pt").write_bytes(saved({"w": torch.ones(3), "x": Runs()}))
    code = f"""
import sys; sys.modules["torch"] = None
import blobstore
print(blobstore.open_any({str(tmp_path / "x.pt")!r})["w"].tolist(), len(blobstore.report([{str(tmp_path)!r}]).files))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[1.0, 1.0, 1.0] 1"
    assert not (tmp_path / "ran").exists()


@pytest.mark.long
def test_a_checkpoint_that_is_there_as_safetensors_costs_a_hundredth(tmp_path: Path) -> None:
    """And comes back to the byte; what torch wrote before 1.6 and compressed members do so, too."""
    values = {f"layers.{i}.weight": torch.randn(200, 500, generator=torch.manual_seed(i)) for i in range(12)}
    save_safetensors(values, tmp_path / "x.safetensors")
    files = {name: tmp_path / name for name in ("pytorch_model.bin", "old.pt", "deflated.pt")}
    torch.save(values, files["pytorch_model.bin"])
    torch.save(values, files["old.pt"], _use_new_zipfile_serialization=False)
    with zipfile.ZipFile(files["pytorch_model.bin"]) as zipped:
        members = {name: (zipped.read(name), zipfile.ZIP_DEFLATED) for name in zipped.namelist()}
    files["deflated.pt"].write_bytes(package(members))
    with Pool(tmp_path / "pool", create=True) as pool:
        pool.add(tmp_path / "x.safetensors", "m@1")
        added = pool.add(files["pytorch_model.bin"], "m@2")
        assert added.stored_bytes <= 0.01 * files["pytorch_model.bin"].stat().st_size
        assert set(pool.open("m@2")) == set(values)
        for number, path in enumerate(list(files.values())[1:], 3):
            pool.add(path, f"m@{number}")
        for number, path in enumerate(files.values(), 2):
            (written,) = pool.get(f"m@{number}", tmp_path / "out" / str(number))
            assert written.read_bytes() == path.read_bytes()


def test_the_report_finds_copies_and_leaves_other_files_alone(tmp_path: Path) -> None:
    """In a folder, `.bin` is an ending of many programs; a file that is named is reported on or refused."""
    weight = {"w": torch.randn(4000)}
    save_safetensors(weight, tmp_path / "x.safetensors")
    torch.save(weight, tmp_path / "pytorch_model.bin")
    torch.save(weight, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    (tmp_path / "tokens.bin").write_bytes(b"PK other")
    report = blobstore.report([tmp_path])
    assert {Path(file.path).name: file.format for file in report.files} == {
        "pytorch_model.bin": "torch",
        "x.safetensors": "safetensors",
    }
    assert report.problems == () and [finding.saves for finding in report.findings] == [16_000]
    (problem,) = blobstore.report([tmp_path / "old.pth"]).problems
    assert "not a zip of torch.save" in problem.reason


MARK, GLOBAL = b"(", b"ctorch._utils\n_rebuild_tensor_v2\n"
STORAGE = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ"


def tensor(
    sizes: bytes = b"(K\x04t", strides: bytes = b"(K\x01t", offset: bytes = b"K\x00", storage: bytes = STORAGE
) -> bytes:
    return GLOBAL + MARK + storage + offset + sizes + strides + b"\x89}tR"


HOSTILE = {
    "good": b"}X\x01\x00\x00\x00w" + tensor() + b"s.",
    "beyond its storage": b"}X\x01\x00\x00\x00w" + tensor(offset=b"K\x01") + b"s.",
    "negative": b"}X\x01\x00\x00\x00w" + tensor(offset=b"J\xff\xff\xff\xff") + b"s.",
    "huge": b"}X\x01\x00\x00\x00w" + tensor(sizes=b"(\x8a\x09" + b"\xff" * 8 + b"\x00t") + b"s.",
    "overlapping": b"}X\x01\x00\x00\x00w" + tensor(sizes=b"(K\x02K\x02t", strides=b"(K\x00K\x01t") + b"s.",
    "no such storage": b"}X\x01\x00\x00\x00w" + tensor(storage=STORAGE.replace(b"\x000X", b"\x009X")) + b"s.",
    "nested function": b")" + b"\x85" * 200_000 + b")R.",
    "nested storage": b"]" + b"q\x00]h\x00ah\x00a" * 60 + b"Q.",
    "itself": b"]q\x00h\x00a.",
    "names": b"}" + (b"q\x00X\x00\x04\x00\x00" + b"n" * 1024 + b"}") * 300 + b"s" * 300 + b".",
    "no end": b"}X\x01\x00\x00\x00w",
    "no pickle": b"\xff\xfe",
    "empty": b"",
    "an unknown operation": b"\x94\x93i.",
    "an item of a number": b"K\x01K\x02K\x03s.",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_pickle_leaves_its_storages_opaque(tmp_path: Path, name: str) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(package({"x/data.pkl": HOSTILE[name], "x/data/0": bytes(range(16))}))
    with open_any(path) as data:
        assert list(data) == (["w"] if name == "good" else [])
        assert [one.name for one in data.contents] == ([] if name == "good" else ["x/data/0"])  # type: ignore[attr-defined]
    assert not blobstore.report([path]).problems


def test_other_zips_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(package({"x/data/0": b"1"}))
    with pytest.raises(InvalidFileError, match=r"without data\.pkl"):
        open_any(tmp_path / "x.pt")
    (tmp_path / "y.bin").write_bytes(pickle.dumps({"w": 1}))
    with pytest.raises(InvalidFileError, match=r"y\.bin: not a zip, which torch\.save writes since torch 1\.6"):
        open_any(tmp_path / "y.bin")


DAMAGED = saved({"w": torch.ones(3), "deep": {"x": torch.ones(2, 2).half()}})


@given(CHANGES)
def test_any_damage_is_an_error_or_a_file_with_its_bytes(changes: list[tuple[int, int]]) -> None:
    check_damaged(TorchDataMap, DAMAGED, changes)
