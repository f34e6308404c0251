"""A backend that nothing is known of: the one of docs/backends.md, which goes on reading its payload."""

import gc
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.schemas.payload import Payload as FbPayload
from torch import nn
from typer.testing import CliRunner

from blobstore import save_file
from blobstore.cli.app import app
from blobstore.core.formats import payload
from blobstore.core.formats.payload import Constant, split, wrap
from blobstore.core.formats.ptd.reader import open_ptd
from blobstore.errors import BlobStoreError, InvalidFileError, LayoutError, UnsupportedOperationError, UpdateError
from blobstore.lowering import plugin
from blobstore.lowering.export import lower, quiet
from blobstore.lowering.holes import HolesLowering
from blobstore.lowering.inner import Lowered
from blobstore.programs import dedup_programs, save_programs
from blobstore.reporting import FindingKind, report
from blobstore.runtime import BlobCache, Program, delegate_stats
from blobstore.runtime.executorch import DataEntry
from tests.lowering.live import BlobStorePartitioner, lower_through, write
from tests.lowering.toy import Scale, toy

with quiet():
    from executorch.exir._serialize._named_data_store import NamedDataStore, NamedDataStoreOutput
    from executorch.exir.backend.backend_details import BackendDetails, PreprocessResult
    from executorch.exir.backend.partitioner import DelegationSpec

SIZE = 300


@pytest.fixture(autouse=True)
def inners(monkeypatch: pytest.MonkeyPatch) -> None:
    """The partitioner registers what it wraps; no other test sees it."""
    monkeypatch.setattr(plugin, "_inners", dict(plugin._inners))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`toy.pte` with its data, `model.ptd`."""
    folder = tmp_path_factory.mktemp("toy")
    save_programs({"toy": lowered()}, folder)
    return folder


def lowered(tag: Any = "model", partitioner: Any = None) -> Any:
    inner = toy().ToyPartitioner() if partitioner is None else partitioner
    return lower(
        {"forward": (Scale(SIZE).eval(), (torch.ones(SIZE),))},
        partitioners=lambda: [BlobStorePartitioner(inner, tag=tag)],
    )


def weight(value: float) -> torch.Tensor:
    return torch.arange(SIZE, dtype=torch.float32) + value


@pytest.mark.long
def test_updates(files: Path) -> None:
    """Each call has one generation; handles of old ones go (U1)."""
    cache = BlobCache(files / "model.ptd")
    methods = [Program(files / "toy.pte", cache).method() for _ in range(3)]
    one = torch.ones(SIZE)
    original = Scale(SIZE).weight
    gc.collect()  # what other tests left
    handles = delegate_stats().handles
    for value in range(5):
        cache.update({"weight": weight(value)})
        assert all(torch.equal(method(one), weight(value)) for method in methods)
    with pytest.raises(LayoutError):
        cache.update({"weight": torch.ones(SIZE + 1)})
    assert torch.equal(methods[0](one), weight(4))
    cache.revert()
    assert all(torch.equal(method(one), original) for method in methods)
    assert delegate_stats().handles == handles
    del methods
    gc.collect()
    assert delegate_stats().handles == handles - 3


def test_the_weight_is_in_the_data_file_only(files: Path) -> None:
    """The program has a hole instead (R1)."""
    raw = Scale(SIZE).weight.detach().numpy().tobytes()
    assert raw not in (files / "toy.pte").read_bytes()
    data = open_ptd(files / "model.ptd")
    (key,) = [key for key in data if key.startswith("weight@")]
    assert bytes(data.get_data(key)) == raw


def test_weights_that_stay_in_the_program(tmp_path: Path) -> None:
    """Without a tag, the holes are filled from the program itself (D3)."""
    path = write(lowered(tag=None), tmp_path)
    assert not list(tmp_path.glob("*.ptd"))
    out = Program(path).method()(torch.ones(SIZE))
    assert torch.equal(out, Scale(SIZE).weight)


# ---- payloads of others


def described(data: bytes) -> tuple[int, bytes]:
    """Where the description of a payload begins in a program, and the description."""
    end = data.rindex(payload.MAGIC)
    (length,) = struct.unpack_from("<Q", data, end - 8)
    return end - 8 - length, data[end - 8 - length : end - 8]


def fields(body: bytes) -> dict[str, tuple[int, int]]:
    """Where numbers of the description lie in it, and their sizes."""
    table = FbPayload.Payload.GetRootAs(body, 0)
    constant = table.Constants(0)
    assert constant is not None

    def scalar(of: Any, slot: int, size: int) -> tuple[int, int]:
        return of._tab.Pos + of._tab.Offset(4 + 2 * slot), size

    holes = constant._tab.Vector(constant._tab.Offset(4 + 2 * 6))
    return {
        "version": scalar(table, 0, 4),
        "size": scalar(table, 2, 8),
        "digest": (table._tab.Vector(table._tab.Offset(4 + 2 * 4)), 8),
        "filled": scalar(table, 5, 8),
        "nbytes": scalar(constant, 1, 8),
        "hole": (holes, 8),
        "count": (holes - 4, 4),
    }


HUGE = (1 << 64) - 1
HOSTILE = {
    "hole outside": {"hole": 5},
    "hole far outside": {"hole": HUGE - 100},
    "hole at the end of numbers": {"hole": HUGE},
    "larger": {"filled": 4 * SIZE + 5},
    "smaller": {"filled": 4 * SIZE + 3},
    "huge": {"filled": HUGE},
    "empty": {"nbytes": 0},
    "shorter": {"nbytes": 4 * SIZE - 4},
    "wraps around": {"nbytes": HUGE - 2},
    "wraps around in all": {"nbytes": HUGE - 3, "filled": 0},
    "no holes": {"count": 0},
    "many holes": {"count": 9},
    "very many holes": {"count": (1 << 32) - 1},
    "holes without the size of all": {"filled": 0},
    "another version": {"version": 2},
    "another digest": {"digest": 0},
    "longer payload": {"size": 8},
    "huge payload": {"size": HUGE},
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_payloads(files: Path, tmp_path: Path, case: str) -> None:
    """Holes outside, overlapping or of wrong sizes are refused, before the backend sees anything (B5)."""
    data = bytearray((files / "toy.pte").read_bytes())
    start, body = described(bytes(data))
    for name, value in HOSTILE[case].items():
        at, size = fields(body)[name]
        data[start + at : start + at + size] = value.to_bytes(size, "little")
    (tmp_path / "toy.pte").write_bytes(data)
    inits = delegate_stats().inits
    with pytest.raises(InvalidFileError):
        Program(tmp_path / "toy.pte", BlobCache(files / "model.ptd")).method()
    assert delegate_stats().inits == inits
    end = data.rindex(payload.MAGIC) + len(payload.MAGIC)
    with pytest.raises(InvalidFileError):
        split(data[start - 16 : end])


def test_overlapping_holes() -> None:
    """They are refused when a payload is written, and when it is read (B5)."""
    for holes in ((0, 3), (1, 1), (7,), (-1,)):
        with pytest.raises(ValueError, match="overlap or leave the payload"):
            wrap(bytes(10), "Toy", [Constant("weight@0123456789abcdef", 4, 0, (), holes=holes)])
    good = bytearray(wrap(bytes(range(12)), "Toy", [Constant("weight@0123456789abcdef", 4, 0, (), holes=(1, 6))]))
    assert split(good)[0] == bytes([0, 5, 10, 11])
    start, body = described(bytes(good))
    at, size = fields(body)["hole"]
    good[start + at : start + at + size] = (4).to_bytes(size, "little")
    with pytest.raises(InvalidFileError, match="overlap"):
        split(good)


def test_damaged_payloads(files: Path, tmp_path: Path) -> None:
    """Damage is an error of the library, or what runs has the size that was meant (B5)."""
    whole = (files / "toy.pte").read_bytes()
    start, body = described(whole)
    cache = BlobCache(files / "model.ptd")
    rng = np.random.default_rng(0)
    for _ in range(300):
        bad = bytearray(whole)
        for at in rng.integers(start - 16, start + len(body) + 16, size=3):
            bad[at] ^= int(rng.integers(1, 256))
        (tmp_path / "bad.pte").write_bytes(bad)
        try:
            out = Program(tmp_path / "bad.pte", cache).method()(torch.ones(SIZE))[0]
        except BlobStoreError:
            continue
        assert out.shape == (SIZE,)


def test_data_of_another_size(files: Path, tmp_path: Path) -> None:
    """A blob that does not fit its hole is an error, before the backend sees anything (B5)."""
    from blobstore.core.store import BlobStore

    store = BlobStore()
    data = open_ptd(files / "model.ptd")
    for key in data:
        store.add(key, bytes(data.get_data(key))[: -4 if key.startswith("weight@") else None])
    store.write_ptd(tmp_path / "short.ptd")
    with pytest.raises(LayoutError, match=r"weight@.* has 1196 bytes, the delegate takes 1200"):
        Program(files / "toy.pte", BlobCache(tmp_path / "short.ptd")).method()


# ---- backends that do something else


def delegating_to(backend_id: str) -> Any:
    class Elsewhere(toy().ToyPartitioner):  # type: ignore[name-defined,misc]
        def partition(self, program: Any) -> Any:
            result = super().partition(program)
            result.partition_tags = {"toy": DelegationSpec(backend_id, [])}
            return result

    return Elsewhere()


class KeepsNamedData(BackendDetails):
    """Under a key of its own."""

    @staticmethod
    def preprocess(program: Any, specs: Any) -> PreprocessResult:
        (tensor,) = program.state_dict.values()
        store = NamedDataStore()
        store.add_named_data("abc", tensor.detach().numpy().tobytes(), external_tag="own")
        return PreprocessResult(b"abc", data_store_output=store.get_named_data_store_output())


def test_named_data_passes_through(tmp_path: Path) -> None:
    """It is stored and requested under the backend's own key, however short; the weight is refused by name (R1, B3)."""
    manager = lowered(partitioner=delegating_to("KeepsNamedData"))
    save_programs({"own": manager}, tmp_path)
    data = open_ptd(tmp_path / "own.ptd")
    assert bytes(data.get_data("abc")) == Scale(SIZE).weight.detach().numpy().tobytes()
    program = (tmp_path / "own.pte").read_bytes()
    start, _ = described(program)
    inner, name, constants = split(program[start - 16 : program.rindex(payload.MAGIC) + 8])
    assert (inner[:3], name) == (b"abc", "KeepsNamedData")
    assert [(c.key, c.places, c.holes) for c in constants] == [("abc", (), ())]
    with pytest.raises(UpdateError, match="'weight' cannot be updated: its backend looks it up under a key of its own"):
        BlobCache(tmp_path / "own.ptd").update({"weight": weight(0)})


def test_what_others_lowered_is_reported(tmp_path: Path) -> None:
    """`dedup` and the report say that lowering through blobstore would share tensors in payloads (R1)."""
    module = Scale(2000).eval()
    program = lower({"forward": (module, (torch.ones(2000),))}, partitioners=lambda: [toy().ToyPartitioner()])
    path = write(program, tmp_path / "old")
    save_file({"weight": module.weight.detach(), "other": torch.ones(2000)}, tmp_path / "names.ptd")
    with open_ptd(tmp_path / "names.ptd") as names:
        (one,) = dedup_programs([path], tmp_path / "slim", names=names).programs
    assert (one.inside, one.inside_of) == (8000, ("ToyBackend",))
    assert (tmp_path / "slim/model.pte").exists()
    (one,) = dedup_programs([path], tmp_path / "again").programs
    assert (one.inside, one.inside_of) == (0, ())
    command = ["dedup", str(path), "-o", str(tmp_path / "third"), "--names", str(tmp_path / "names.ptd")]
    printed = CliRunner().invoke(app, command).output
    assert "8,000 bytes of these tensors inside payloads of ToyBackend; lowering through" in printed
    (found,) = [f for f in report([path, tmp_path / "names.ptd"]).findings if f.kind is FindingKind.CONTAINED]
    assert "BlobStorePartitioner" in found.advice


def test_backends_that_cannot_be_wrapped() -> None:
    """The message names the backend (W2)."""
    with pytest.raises(UnsupportedOperationError, match="cannot wrap backend 'NowhereBackend'; known backends:"):
        lowered(partitioner=delegating_to("NowhereBackend"))
    with pytest.raises(UnsupportedOperationError, match="its class was not imported"):
        HolesLowering("NowhereBackend").preprocess(None, [], None)  # type: ignore[arg-type]


class _Hostile:
    """In place of XNNPACK's lowering: a payload as it is given."""

    backend_id = "XnnpackBackend"

    def __init__(self, inner: bytes, constants: list[Constant], blobs: dict[str, bytes]) -> None:
        self.inner, self.constants, self.blobs = inner, constants, blobs

    def preprocess(self, program: Any, specs: Any, table: Any) -> Lowered:
        entries = {"model": {key: DataEntry(i, 16, None) for i, key in enumerate(self.blobs)}}
        store = NamedDataStoreOutput(list(self.blobs.values()), {}, entries)
        result = PreprocessResult(processed_bytes=self.inner, debug_handle_map=None, data_store_output=store)
        return Lowered(result, self.constants, [])


_TEXT = b"0123456789abcdef"
_KEY = "AAAA" + _TEXT.decode()
_FIRST_VERSION = "AAAA" + f"{1:016x}"  # the name that a process gives to the first constant with that key
HOSTILE_CONSTANTS = {
    "two names become one": (
        _TEXT,
        [Constant(_KEY, 4096, 0, (0,)), Constant(_FIRST_VERSION, 16, 1, ())],
        {_KEY: bytes(4096), _FIRST_VERSION: bytes(16)},
        "two constants have the name",
    ),
    "a key in a payload with holes": (
        bytes(16) + _TEXT,
        [Constant("weight@0123456789abcdef", 16, 0, (), holes=(0,)), Constant(_KEY, 16, 1, (16,))],
        {"weight@0123456789abcdef": bytes(16), _KEY: bytes(16)},
        "has keys in it|where the description says|has holes",
    ),
    "a key twice": (
        bytes(64),
        [Constant(_KEY, 16, i, (), holes=(32 * i, 32 * i + 16)) for i in range(2)],
        {_KEY: bytes(16)},
        "occurs twice",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("case", HOSTILE_CONSTANTS)
def test_constants_that_would_meet(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are refused when they are written and read, and no process that loads them is harmed (B5)."""
    inner, constants, blobs, reason = HOSTILE_CONSTANTS[case]
    if case != "two names become one":  # which depends on what else the process has loaded
        with pytest.raises(ValueError, match=reason):
            wrap(inner, "XnnpackBackend", constants)
    with monkeypatch.context() as patch:
        patch.setitem(plugin._inners, "XnnpackBackend", _Hostile(inner, constants, blobs))
        patch.setattr(payload, "_check_holes", lambda *_: None)
        program = lower_through({"forward": (nn.Linear(4, 4).eval(), (torch.ones(2, 4),))}, tmp_path)
        data = wrap(inner, "XnnpackBackend", constants)
    if case != "two names become one":
        with pytest.raises(InvalidFileError, match=reason):
            split(data)
    code = "import sys; from blobstore.runtime import *; Program(sys.argv[1], BlobCache(sys.argv[2])).method()"
    command = [sys.executable, "-W", "ignore", "-c", code, program, tmp_path / "model.ptd"]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    assert done.returncode == 1, (done.returncode, done.stderr)
    assert re.search(reason, done.stderr), done.stderr
