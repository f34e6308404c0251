"""A report that continues an earlier one is the report that is made from nothing."""

from __future__ import annotations

import io
import itertools
import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

import blobstore
from blobstore.reporting import cache as cache_module
from blobstore.reporting import making, survey
from blobstore.reporting.engine import Engine
from blobstore.reporting.json_output import to_json
from blobstore.reporting.terminal import print_report, print_summary
from tests.reporting.planted import Payload, Tensor, write_ptd, write_safetensors
from tests.reporting.test_planted import values
from tests.reporting.zoo import write_zoo

FOLDERS = ("a", "b", "b/c")
NAMES = ("m.ptd", "n.ptd", "m.safetensors", "n.safetensors", "p.pte", "q.pte")


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are remembered at once."""
    monkeypatch.setattr(cache_module, "_SETTLED_NS", 0)


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], dict[str, list[bytes]]]:
    """For each suffix some contents: two families in every relation, what belongs to none, and what is damaged."""
    folder = tmp_path_factory.mktemp("contents")
    made: dict[str, list[bytes]] = {".ptd": [], ".safetensors": [], ".pte": [b"nothing"]}
    for family in (1, 2):
        weight, half = values(family, 60, 50), values(family + 10, 60, 50).astype(np.float16)
        tuned = weight.copy()
        tuned[3, :7] += 1
        sets = [
            [Tensor.of("w", weight), Tensor.of("own", values(family + 20, 40, 40))],
            [Tensor.of("w", tuned), Tensor.of("zeros", np.zeros((60, 50), np.float32))],
            [Tensor.of("w", np.ascontiguousarray(weight.T)), Tensor.of("wide", half.astype(np.float32))],
            [Tensor.of("w", weight), Tensor.of("tied", weight), Tensor.of("half", half)],
            [Tensor.of(f"tensor.{'0' * 31}{family}", half)],
        ]
        for tensors in sets:
            made[".ptd"].append(write_ptd(folder / "x.ptd", tensors).read_bytes())
            made[".safetensors"].append(write_safetensors(folder / "x.safetensors", tensors).read_bytes())
        for payload in (b"head" + weight.tobytes(), b"other" + bytes([family]) * 400, half.tobytes()):
            made[".pte"].append(Payload([payload]).write(folder / "x.pte").read_bytes())
    made[".ptd"].append(made[".ptd"][0][:-1] + b"\xff")
    return lambda: made  # of which a failure does not print all bytes


STEP = st.tuples(st.sampled_from(FOLDERS), st.sampled_from(NAMES), st.one_of(st.none(), st.integers(0, 10)))


def apply(root: Path, step: tuple[str, str, int | None], contents: dict[str, list[bytes]]) -> None:
    """Write, replace or remove a file."""
    folder, name, which = step
    path = root / folder / name
    path.unlink(missing_ok=True)
    if which is not None:
        some = contents[path.suffix]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(some[which % len(some)])


def as_json(**options: object) -> str:
    return json.dumps(to_json(blobstore.report(["zoo"], **options)))  # type: ignore[arg-type]


def shown(print_it: Callable[[Console], None], width: int) -> str:
    text = io.StringIO()
    print_it(Console(file=text, width=width))
    return text.getvalue()


def check(cache: Path) -> None:
    fresh = blobstore.report(["zoo"])
    for width in (80, 10_000):
        short = making.summary(["zoo"], top=3, cache=cache)
        if fresh.files:
            continued = shown(lambda console: print_summary(short, console), width)  # noqa: B023
            assert continued == shown(lambda console: print_report(fresh, console, top=3), width)
        assert (short.total_bytes, short.total_saves) == (fresh.total_bytes, fresh.total_saves)
    assert as_json(cache=cache) == json.dumps(to_json(fresh))


@pytest.mark.slow
@pytest.mark.long
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(STEP, min_size=4, max_size=12),
    st.lists(st.lists(STEP, min_size=1, max_size=2), min_size=1, max_size=4),
    st.booleans(),
)
def test_after_any_changes_the_report_is_that_of_the_files(
    tmp_path_factory: pytest.TempPathFactory,
    contents: Callable[[], dict[str, list[bytes]]],
    first: list[tuple[str, str, int | None]],
    changes: list[list[tuple[str, str, int | None]]],
    is_short: bool,
) -> None:
    root = tmp_path_factory.mktemp("law")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        (root / "zoo").mkdir()
        for steps in [first, *changes]:
            for step in steps:
                apply(root / "zoo", step, contents())
            if is_short:  # either way of showing a report continues the other
                making.summary(["zoo"], top=3, cache=root / "cache")
            check(root / "cache")
        whole = as_json()
        patch.setattr(survey, "divide", lambda links: [list(range(len(links)))] if links else [])
        assert as_json() == whole  # what is in different parts has nothing to do with each other
    shutil.rmtree(root)


@pytest.fixture
def zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Twelve families of three checkpoints, which have nothing in common."""
    monkeypatch.chdir(tmp_path)
    for family, member in itertools.product(range(12), range(3)):
        tensors = [Tensor.of("shared", values(family, 40, 40)), Tensor.of("own", values(100 + 3 * family + member, 30))]
        (tmp_path / "zoo" / str(family)).mkdir(parents=True, exist_ok=True)
        write_safetensors(tmp_path / "zoo" / str(family) / f"{member}.safetensors", tensors)
    return tmp_path / "zoo"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The files that are loaded, whether the cache knows them or not."""
    files: list[str] = []
    scan = Engine.scan

    def noted(self: Engine, paths: Sequence[str]) -> object:
        files.extend(paths)
        return scan(self, paths)

    monkeypatch.setattr(Engine, "scan", noted)
    yield files


def test_only_the_part_of_a_file_that_changed_is_looked_at(zoo: Path, tmp_path: Path, read: list[str]) -> None:
    cache = tmp_path / "cache"
    making.summary(["zoo"], top=3, cache=cache)
    assert len(read) == 36
    read.clear()
    making.summary(["zoo"], top=3, cache=cache)
    assert not read
    write_safetensors(zoo / "3" / "1.safetensors", [Tensor.of("shared", values(7, 40, 40))])  # of another family now
    making.summary(["zoo"], top=3, cache=cache)
    assert {path.split("/")[1] for path in read} == {"3", "7"}
    read.clear()
    check(cache)
    (zoo / "5" / "0.safetensors").unlink()
    read.clear()
    making.summary(["zoo"], top=3, cache=cache)
    assert read == ["zoo/5/1.safetensors", "zoo/5/2.safetensors"]
    check(cache)


def test_a_program_that_appears_changes_what_data_files_beside_it_may_become(zoo: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 2)):
        tensors = [Tensor.of("big", values(900, 90, 90)), Tensor.of("own", values(seed, 40, 40))]
        write_ptd(zoo / f"{name}.ptd", tensors)
    cache = tmp_path / "cache"
    assert "blobstore delta zoo/a.ptd zoo/b.ptd" in as_json(cache=cache)
    Payload([b"a payload of nothing known"]).write(zoo / "program.pte")
    assert "blobstore delta zoo/a.ptd zoo/b.ptd" not in as_json(cache=cache)
    check(cache)


def test_a_checkpoint_that_appears_beside_gives_its_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "zoo").mkdir()
    weight = values(1, 60, 50)
    write_ptd(tmp_path / "zoo" / "a.ptd", [Tensor.of(f"tensor.{'0' * 32}", weight)])
    cache = tmp_path / "cache"
    assert "layer.weight" not in as_json(cache=cache)
    write_safetensors(tmp_path / "model.safetensors", [Tensor.of("layer.weight", weight)])
    assert "layer.weight" in as_json(cache=cache)
    check(cache)


def test_shards_in_another_order_are_in_another_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of shards is in a file of its own, the index."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "zoo").mkdir()
    for name in ("a", "b"):
        write_safetensors(tmp_path / "zoo" / f"{name}.safetensors", [Tensor.of(name, values(1, 60, 50))])
    cache, index = tmp_path / "cache", tmp_path / "zoo" / "model.safetensors.index.json"
    for order in ("ab", "ba"):
        index.write_text(json.dumps({"weight_map": {name: f"{name}.safetensors" for name in order}}))
        given = ["zoo/model.safetensors.index.json"]
        reports = [to_json(blobstore.report(given, cache=where)) for where in (cache, None)]
        assert reports[0] == reports[1]


def damage(path: Path, table: str) -> None:
    with sqlite3.connect(path) as base:
        base.execute(f"UPDATE {table} SET body = substr(body, 1, length(body) - 2) || 'xx'")  # noqa: S608


@pytest.mark.parametrize("table", ["parts", "part_findings", "part_tokens"])
def test_damaged_parts_are_made_again(zoo: Path, tmp_path: Path, table: str) -> None:
    cache = tmp_path / "cache"
    making.summary(["zoo"], top=3, cache=cache)
    damage(cache, table)
    write_safetensors(zoo / "3" / "1.safetensors", [Tensor.of("shared", values(7, 40, 40))])
    check(cache)


def test_another_process_that_was_faster_is_not_overwritten(
    zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: list[str]
) -> None:
    cache = tmp_path / "cache"
    keep = survey.Survey._keep

    def late(self: survey.Survey, snapshot: object) -> None:
        monkeypatch.setattr(survey.Survey, "_keep", keep)
        making.summary(["zoo"], top=3, cache=cache)
        keep(self, snapshot)  # type: ignore[arg-type]

    monkeypatch.setattr(survey.Survey, "_keep", late)
    making.summary(["zoo"], top=3, cache=cache)
    with sqlite3.connect(cache) as base:
        assert base.execute("SELECT count(*), max(number) FROM parts").fetchone() == (12, 11)
    read.clear()
    making.summary(["zoo"], top=3, cache=cache)
    assert not read


def test_only_the_last_reports_are_kept(zoo: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for family in range(12):
        making.summary([zoo / str(family)], top=3, cache=cache)
        making.summary([zoo / str(family)], top=3, exact_only=True, cache=cache)
    with sqlite3.connect(cache) as base:
        assert base.execute("SELECT count(*), count(DISTINCT scope) FROM parts").fetchone() == (16, 16)


@pytest.mark.long
def test_parts_of_a_zoo_give_what_all_files_together_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_zoo(tmp_path / "zoo", files=40)
    in_parts = as_json()
    monkeypatch.setattr(survey, "divide", lambda links: [list(range(len(links)))])
    assert as_json() == in_parts
