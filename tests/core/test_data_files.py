"""`dedup` of data files: what became of their keys, in the files, in the result and on the terminal (R1, U1)."""

import json
from pathlib import Path

import numpy as np
import pytest

import blobstore
from blobstore.errors import KeyConflictError
from blobstore.programs import DedupResult, dedup_programs
from tests.helpers.terminal import printed as run
from tests.reporting.planted import Payload

W, V, Z = (np.random.default_rng(seed).standard_normal((40, 50)).astype(np.float32) for seed in range(3))


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`a` and `b` are equal, `other-keys` has their bytes under other keys, and `other-bytes` other bytes under their keys."""
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        blobstore.save_file({"w": W, "v": V}, f"{name}.ptd")
    blobstore.save_file({"x": W, "y": V}, "other-keys.ptd", metadata={"author": "somebody"})
    blobstore.save_file({"w": Z, "v": V}, "other-bytes.ptd")
    return tmp_path


def described(result: DedupResult) -> dict[str, list[tuple[str, str, str | None, str | None]]]:
    return {
        one.source.name: [
            (key.key, key.path.name, key.merged_with and key.merged_with.name, key.same_as) for key in one.keys
        ]
        for one in result.data_inputs
    }


def contents(path: Path) -> dict[str, bytes]:
    with blobstore.open_ptd(path) as data_map:
        return {key: data_map.bytes(key) for key in data_map}


def test_equal_files_become_one(files: Path) -> None:
    result = dedup_programs(["a.ptd", "b.ptd"], "out")
    assert described(result) == {
        "a.ptd": [("w", "shared.ptd", None, None), ("v", "shared.ptd", None, None)],
        "b.ptd": [("w", "shared.ptd", "a.ptd", None), ("v", "shared.ptd", "a.ptd", None)],
    }
    assert contents(files / "out" / "shared.ptd") == {"w": W.tobytes(), "v": V.tobytes()}
    loaded = blobstore.load_file("out/shared.ptd")
    assert {key: np.asarray(value).tobytes() for key, value in loaded.items()} == contents(files / "a.ptd")


def test_equal_bytes_under_other_keys_have_all_keys(files: Path) -> None:
    result = dedup_programs(["a.ptd", "other-keys.ptd"], "out")
    assert described(result)["other-keys.ptd"] == [("x", "shared.ptd", None, "w"), ("y", "shared.ptd", None, "v")]
    assert result.data_inputs[1].lost_metadata == ("author",)
    assert contents(files / "out" / "shared.ptd") == {
        key: data.tobytes() for key, data in {"w": W, "v": V, "x": W, "y": V}.items()
    }
    assert (files / "out" / "shared.ptd").stat().st_size < 1.1 * (files / "a.ptd").stat().st_size


def test_a_second_run_says_what_was_there(files: Path) -> None:
    first = dedup_programs(["a.ptd"], "out")
    assert described(first)["a.ptd"][0] == ("w", "shared.ptd", None, None)
    again = dedup_programs(["b.ptd", "other-keys.ptd"], "out")
    assert described(again)["b.ptd"] == [
        ("w", "shared.ptd", "shared.ptd", None),
        ("v", "shared.ptd", "shared.ptd", None),
    ]
    assert described(again)["other-keys.ptd"][0] == ("x", "shared.ptd", None, "w")
    replaced = dedup_programs(["other-bytes.ptd"], "out")
    assert replaced.replaced_keys == ["w"] and described(replaced)["other-bytes.ptd"] == [
        ("w", "shared.ptd", None, None),
        ("v", "shared.ptd", "shared.ptd", None),
    ]


def test_one_key_with_two_contents_is_refused_with_both_files(files: Path) -> None:
    with pytest.raises(
        KeyConflictError, match=r"^other-bytes\.ptd: key 'w' has other bytes than in a\.ptd; a data file"
    ):
        dedup_programs(["a.ptd", "other-bytes.ptd"], "out")
    blobstore.save_file({"w": Z, "v": Z}, "neither.ptd")
    with pytest.raises(
        KeyConflictError, match=r"than in a\.ptd, and so has 1 more key; .* blobstore delta a\.ptd neither\.ptd"
    ):
        dedup_programs(["a.ptd", "neither.ptd"], "out")
    blobstore.save_file({"w": W.T, "v": V}, "layout.ptd")
    with pytest.raises(KeyConflictError, match=r"layout\.ptd: key 'w' has other bytes"):
        dedup_programs(["a.ptd", "layout.ptd"], "out")
    assert not (files / "out").exists()


def test_programs_and_data_files(files: Path) -> None:
    """What leaves a program is stored with the equal bytes of a data file, and a conflict is explained by programs."""
    Payload([], {"k1": W.tobytes()}).write(files / "m.pte")
    result = dedup_programs(["m.pte", "a.ptd", "b.ptd"], "out")
    shared = contents(files / "out" / "shared.ptd")
    assert shared == {"k1": W.tobytes(), "w": W.tobytes(), "v": V.tobytes()}
    same = {key.key: key.same_as for key in result.data_inputs[0].keys}
    assert same in ({"w": "k1", "v": None}, {"w": None, "v": None})
    with blobstore.open_ptd("out/shared.ptd") as data_map:
        assert len(data_map.extents) == 2
    with pytest.raises(KeyConflictError, match="lower these programs with different tags"):
        dedup_programs(["m.pte", "a.ptd", "other-bytes.ptd"], "other")


def test_a_dry_run_says_the_same(files: Path) -> None:
    said = described(dedup_programs(["a.ptd", "other-keys.ptd"], "out", dry_run=True))
    assert said == described(dedup_programs(["a.ptd", "other-keys.ptd"], "out"))


def test_on_the_terminal_and_in_json(files: Path) -> None:
    text = run("dedup", "a.ptd", "b.ptd", "other-keys.ptd", "-o", "out")
    assert "a.ptd: its 2 keys are in out/shared.ptd.\n" in text
    assert (
        "b.ptd: its 2 keys are in out/shared.ptd; a.ptd has all of them with equal bytes, so each is stored once.\n"
        in text
    )
    assert "'x' shares the bytes of 'w', 'y' shares the bytes of 'v'; its metadata 'author' is not kept.\n" in text
    assert "Load it with blobstore.load_file('out/shared.ptd')" in text and "--prune" not in text
    assert "out/shared.ptd had all of them already" in run("dedup", "b.ptd", "-o", "out")
    assert "Replaced 1 key of an earlier run: 'w'." in run("dedup", "other-bytes.ptd", "-o", "out")
    plain = json.loads(run("dedup", "a.ptd", "b.ptd", "-o", "out", "--json"))
    assert [one["source"] for one in plain["data_inputs"]] == ["a.ptd", "b.ptd"]
    assert plain["data_inputs"][1]["keys"][0] == {
        "key": "w",
        "path": "out/shared.ptd",
        "merged_with": "a.ptd",
        "same_as": None,
    }


def test_many_files_have_no_line_each(files: Path) -> None:
    for number in range(25):
        blobstore.save_file({f"k{number}": W, **{f"{number}.{i}": V for i in range(9)}}, f"many-{number}.ptd")
    text = run("dedup", *(f"many-{number}.ptd" for number in range(25)), "-o", "out")
    assert "15 more data files; --json has the keys of all." in text
    assert "and 7 more" in text and len(text.splitlines()) < 20
