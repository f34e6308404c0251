"""`blobstore fuse` (L4)."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from blobstore import open_ptd, save_file
from blobstore.core.formats.pte.program import read_program
from tests.helpers import models
from tests.helpers.terminal import printed


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.chdir(tmp_path)
    models.mlp(seed=0).write(tmp_path, "a")
    models.mlp(seed=1).write(tmp_path, "b")
    return functools.partial(printed, "fuse")


@pytest.mark.long
def test_two_programs(run: Any) -> None:
    """The methods with their names, in a table and in JSON."""
    output = run("a.pte", "b.pte", "-o", "one.pte", "--method", "b=short")
    assert "forward\ta.pte\tforward\t" in output
    assert "short\tb.pte\tforward\t" in output
    assert read_program("one.pte").methods == ["forward", "short"]
    found = json.loads(run("a.pte", "b.pte", "-o", "two.pte", "--method", "b:forward=short", "--json"))
    assert [(one["name"], one["program"]) for one in found["methods"]] == [("forward", "a.pte"), ("short", "b.pte")]
    assert found["bytes_after"] == Path("two.pte").stat().st_size
    run("a.pte", "b.pte", "-o", "three.pte", "--method", "b=")
    assert read_program("three.pte").methods == ["forward"]


def test_refusals_are_one_line(run: Any) -> None:
    output = run("a.pte", "b.pte", "-o", "one.pte", code=3)
    assert output.startswith("blobstore: b.pte: ")
    assert "give one of them another name" in output
    run("a.pte", "b.pte", "-o", "one.pte", "--method", "short", code=2)
    run("a.pte", "b.pte", "-o", "one.pte", "--method", "=short", code=2)
    assert "names none of the programs" in run("a.pte", "-o", "one.pte", "--method", "c=x", code=3)
    assert not Path("one.pte").exists()
    assert "Nothing was written" in run("a.pte", "-o", "one.pte", "--dry-run")
    assert not Path("one.pte").exists()


def test_programs_with_data_files(run: Any, tmp_path: Path) -> None:
    """Without its data file, a program is refused unless it may need one."""
    models.mlp(external=True).write(tmp_path / "e")
    (ptd,) = (tmp_path / "e").glob("*.ptd")
    save_file({"other": b"1"}, "m.ptd")
    assert "and no data file was given with the programs; " in run("e/model.pte", "-o", "one.pte", code=3)
    refused = run("e/model.pte", "m.ptd", "-o", "one.pte", code=3)
    assert "and none of the data files that were given has it: m.ptd; " in refused
    assert f"It needs data files for {len(open_ptd(ptd))} keys" in run(
        "e/model.pte", "-o", "one.pte", "--keep-external"
    )
    run("e/model.pte", ptd, "-o", "one.pte")
    assert not read_program("one.pte").externals
