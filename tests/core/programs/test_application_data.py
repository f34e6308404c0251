"""What an application keeps in `Program.named_data`, such as a chat template, stays in its program through every command."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from executorch.exir._serialize._program import serialize_pte_binary

import blobstore
from blobstore import dedup_programs, open_ptd, report
from blobstore.core.formats.pte.program import read_program
from blobstore.core.programs.fuse import fuse_programs
from blobstore.errors import KeyConflictError, KeyNotFoundError, UnsupportedDataError
from blobstore.runtime import BlobCache, Program
from tests.core.formats.pte import oracle
from tests.core.programs.test_programs import with_named_data
from tests.helpers import models
from tests.reporting.planted import Payload

TEMPLATE, NAME = "metadata.tokenizer.chat_template", "metadata.general.name"


def kept(path: Path) -> dict[str, bytes]:
    """The named data of a program, as ExecuTorch's Python reads it, without XNNPACK's, whose keys are digests."""
    data = oracle.deserialize(path.read_bytes()).named_data
    entries = {} if data is None else data.pte_data
    return {key: bytes(data.buffers[one.buffer_index]) for key, one in entries.items() if len(key) != 64}


@pytest.fixture
def programs(tmp_path: Path) -> dict[str, dict[str, bytes]]:
    """Two models with equal weights, `a.pte` and `b.pte`, and what an application keeps in each."""
    every = {}
    for name in "ab":
        every[name] = {TEMPLATE: name.encode() * 5000, NAME: f"model {name}".encode(), "same": b"in both" * 300}
        pte = models.mlp(delegated=True).pte
        for key, data in every[name].items():
            pte = with_named_data(pte, key, data)
        (tmp_path / f"{name}.pte").write_bytes(pte)
    return every


@pytest.mark.parametrize("keep_small", [0, 100])
@pytest.mark.parametrize("how", [{}, {"append": True}, {"prune": True}])
def test_deduplicated(
    programs: dict[str, dict[str, bytes]],
    tmp_path: Path,
    stock_run: Callable[..., Any],
    how: dict[str, bool],
    keep_small: int,
) -> None:
    """Also where its size and its bytes invite to move it; values that differ are no conflict (R2, R5)."""
    inputs = models.mlp(delegated=True).inputs()
    before = stock_run(tmp_path / "a.pte", inputs)
    slim = tmp_path / "slim"
    for name in programs:
        dedup_programs(tmp_path / f"{name}.pte", slim, keep_small=keep_small, **how)
    dedup_programs([tmp_path / "a.pte", tmp_path / "b.pte"], slim, keep_small=keep_small, **how)
    with open_ptd(slim / "shared.ptd") as data_map:
        assert data_map and not set(data_map) & {TEMPLATE, NAME, "same"}
    for name, data in programs.items():
        assert kept(slim / f"{name}.pte") == data
        after = stock_run(slim / f"{name}.pte", inputs, data_path=slim / "shared.ptd")
        assert torch.equal(before[0], after[0])
        ours = Program(slim / f"{name}.pte", BlobCache(slim / "shared.ptd")).method()(inputs[0].numpy())
        np.testing.assert_allclose(ours, before[0], rtol=1e-5)


@pytest.mark.long
def test_an_application_finds_it(programs: dict[str, dict[str, bytes]], tmp_path: Path, module_runner: Any) -> None:
    """Through `Program::get_named_data_map`, which knows no data file."""
    dedup_programs([tmp_path / "a.pte", tmp_path / "b.pte"], tmp_path / "slim")
    fuse_programs([tmp_path / "slim/a.pte", tmp_path / "slim/shared.ptd"], tmp_path / "one.pte")
    for path, name in ((tmp_path / "slim/a.pte", "a"), (tmp_path / "slim/b.pte", "b"), (tmp_path / "one.pte", "a")):
        for key, data in programs[name].items():
            assert module_runner.named_data(path, [tmp_path / "slim/shared.ptd"], key) == data


@pytest.mark.parametrize("backend", ["XnnpackBackend", "UnknownBackend"])
@pytest.mark.parametrize("form", [b"\x04\0\0\0name\0", b'{"key": "name"}', b"name\nother"])
def test_of_backends_that_are_not_known(tmp_path: Path, backend: str, form: bytes) -> None:
    """What a payload names leaves the program, and nothing else; as text of a flatbuffer it is found in every payload."""
    named = {"name": b"weights" * 99, "own": b"the application's"}
    file = oracle.deserialize(oracle.serialize([], [], named=named, payload=form))
    file.program.execution_plan[0].delegates[0].id = backend
    (tmp_path / "a.pte").write_bytes(bytes(serialize_pte_binary(file, extract_delegate_segments=True)))
    dedup_programs(tmp_path / "a.pte", tmp_path / "slim")
    found = backend == "UnknownBackend" or form.endswith(b"\0")
    assert set(kept(tmp_path / "slim/a.pte")) == ({"own"} if found else {"own", "name"})


def test_a_key_that_another_programs_delegate_looks_up(tmp_path: Path, stock_run: Callable[..., Any]) -> None:
    """The runtime refuses a key that it finds in two places, so equal bytes move, and others are a conflict (R2)."""
    model = models.mlp(delegated=True)
    (tmp_path / "a.pte").write_bytes(with_named_data(model.pte, "key", b"x" * 300))
    (tmp_path / "b.pte").write_bytes(with_named_data(model.pte, "key", b"x" * 300, delegated=True))
    (tmp_path / "c.pte").write_bytes(with_named_data(model.pte, "key", b"y" * 300))
    for order in ("ab", "ba"):
        slim = tmp_path / order
        dedup_programs([tmp_path / f"{name}.pte" for name in order], slim)
        for name in order:
            assert not kept(slim / f"{name}.pte")
            stock_run(slim / f"{name}.pte", model.inputs(), data_path=slim / "shared.ptd")
    with pytest.raises(KeyConflictError, match=r"c\.pte.*no delegate of this program looks for the key"):
        dedup_programs([tmp_path / "b.pte", tmp_path / "c.pte"], tmp_path / "bc")
    with pytest.raises(KeyConflictError, match=r"c\.pte.*no delegate of this program looks for the key"):
        dedup_programs(tmp_path / "c.pte", tmp_path / "ab")


def test_fused(programs: dict[str, dict[str, bytes]], tmp_path: Path, stock_run: Callable[..., Any]) -> None:
    """One program has each key once: only values that differ are refused, with ways out (R2)."""
    a, b, one = (tmp_path / f"{name}.pte" for name in ("a", "b", "one"))
    methods = {"b": "other"}
    with pytest.raises(KeyConflictError, match=rf"b\.pte: the key '{TEMPLATE}' .* than in \S*a\.pte.*--named-data"):
        fuse_programs([a, b], one, methods=methods)
    renamed = {f"b:{TEMPLATE}": "", f"{b}:{NAME}": "other.name"}
    fuse_programs([a, b], one, methods=methods, named_data=renamed)
    assert kept(one) == {**programs["a"], "other.name": programs["b"][NAME]}
    inputs = models.mlp(delegated=True).inputs()
    for method in ("forward", "other"):
        assert torch.equal(stock_run(one, inputs, method=method)[0], stock_run(a, inputs)[0])
    fuse_programs(one, tmp_path / "only.pte", methods={"one:forward": ""})
    assert kept(tmp_path / "only.pte") == kept(one)


def test_renamed_by_mistake(programs: dict[str, dict[str, bytes]], tmp_path: Path) -> None:
    a = tmp_path / "a.pte"
    weights = next(blob.key for blob in read_program(a).named_data if len(blob.key) == 64)
    for named_data, error, message in (
        ({f"a:{weights}": "x"}, UnsupportedDataError, r"a\.pte: a delegate looks for the key"),
        ({"a:nothing": "x"}, KeyNotFoundError, "'a:nothing' names named data of 0"),
        ({"c:same": "x"}, KeyNotFoundError, "'c:same' names named data of 0"),
        ({f"a:{NAME}": "same"}, KeyConflictError, "the key 'same' has other bytes"),
        ({f"a:{NAME}": weights}, KeyConflictError, f"the key '{weights}' has other bytes"),
        ({f"a:{NAME}": "\0"}, blobstore.errors.InvalidKeyError, "NUL"),
        ([], UnsupportedDataError, "expected named_data as a mapping"),
    ):
        with pytest.raises(error, match=message):
            fuse_programs(a, tmp_path / "one.pte", named_data=named_data)  # type: ignore[arg-type]
    assert not (tmp_path / "one.pte").exists()


def test_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stays is no saving, and two models with other values share a data file by one command."""
    monkeypatch.chdir(tmp_path)
    weights = np.random.default_rng(0).bytes(20_000)
    for name in "ab":
        own = {TEMPLATE: name.encode() * 9000, "same": np.random.default_rng(1).bytes(9000)}
        Payload([f"key\n{name}".encode()], {"key": weights}, own).write(Path(f"{name}.pte"))
    found = report(["a.pte", "b.pte"], cache=None)
    regions = {key: region for region in found.files[0].regions for key in region.keys}
    assert {regions[key].kind.value for key in (TEMPLATE, "same")} == {"metadata"}
    assert found.total_saves == len(weights)
    assert list(found.commands) == ["blobstore dedup a.pte b.pte -o slim"]
    dedup_programs(["a.pte", "b.pte"], "slim")
    slim = sum(path.stat().st_size for path in Path("slim").iterdir())
    assert abs(found.total_bytes - found.total_saves - slim) < 2000
