"""The commands and their output."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

import blobstore
from blobstore.cli.app import COMMANDS
from tests.core.disk.outputs import damage
from tests.helpers.terminal import Terminal, printed

HOSTILE = "layer [bold red]x[/] \x1b[31m\u202e.weight"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a command line in an empty folder, checks the exit code, and returns the output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return printed


@pytest.fixture
def ptd(tmp_path):
    tensors = {
        "a.weight": torch.arange(6.0).reshape(2, 3),
        "tied.weight": torch.arange(6.0).reshape(2, 3),
        HOSTILE: b"op",
    }
    blobstore.save_file(tensors, tmp_path / "m.ptd", metadata={"made": "here"})
    return tmp_path / "m.ptd"


def on_terminal(folder, *arguments):
    """The exit code and the output of a command whose output is a terminal of 100 columns."""
    terminal = Terminal(*arguments, folder=folder, columns=100)
    return terminal.end(), terminal.output.decode().replace("\r\n", "\n")


def state(folder):
    """Everything below a folder, hidden files too, with bytes and times."""
    paths = [folder, *folder.rglob("*")]
    return {path: (path.stat().st_mtime_ns, path.is_file() and path.read_bytes()) for path in paths}


@pytest.mark.long
def test_dedup(run, lowered, tmp_path):
    model = lowered.mlp(delegated=True)
    for name in ("short", "long"):
        model.write(tmp_path, name)
    text = run("dedup", "short.pte", "long.pte", "-o", "out")
    assert "short.pte" in text and "shared.ptd" in text and "Saved" in text
    result = json.loads(
        run("dedup", "short.pte", "long.pte", "-o", "other", "--data-name", "w", "--keep-small", 50, "--json")
    )
    assert result["data_files"] == ["other/w.ptd"]
    assert result["bytes_after"] == sum(path.stat().st_size for path in (tmp_path / "other").iterdir())
    assert [program["source"] for program in result["programs"]] == ["short.pte", "long.pte"]


@pytest.mark.long
def test_dedup_with_a_missing_data_file(run, lowered, tmp_path):
    lowered.mlp(external=True).write(tmp_path, "external")
    text = run("dedup", "external.pte", "-o", "other")
    assert "also needs a data file" in text.replace("\n", " ")


@pytest.mark.long
def test_names_of_the_wrong_file(run, lowered, tmp_path):
    """A program has no names; a file that names nothing is reported."""
    model = lowered.mlp(delegated=False)
    model.write(tmp_path, "m")
    safetensors.numpy.save_file({"other": np.ones(3)}, tmp_path / "other.safetensors")
    for command in (("dedup", "m.pte", "-o", "out"), ("report", "m.pte", "--no-cache")):
        assert "m.pte: expected names from a" in run(*command, "--names", "m.pte", code=3)
        assert not (tmp_path / "out").exists()
    text = run("report", "m.pte", "--no-cache", "--names", "other.safetensors")
    assert "note: nothing got a name from other.safetensors" in text
    for option in ((), ("--json",)):
        text = run("dedup", "m.pte", "-o", "out", "--names", "other.safetensors", *option)
        assert "note: no moved tensor got a name from other.safetensors" in text
    assert "note" not in run("dedup", "m.pte", "-o", "dry", "--names", "other.safetensors", "--dry-run")


def named_keys(path):
    with blobstore.open_ptd(path) as data_map:
        return {key for key in data_map if not key.startswith("tensor.")}


@pytest.mark.long
def test_names_of_several_checkpoints(run, lowered, tmp_path):
    """All that are given count, and without any those beside the programs, as in the report (D2)."""
    models = {"x": (lowered.mlp(delegated=False), "x"), "y": (lowered.mlp(delegated=False, seed=1), "y")}
    wanted = set()
    for name, (model, prefix) in models.items():
        model.write(tmp_path / "models", name)
        tensors = {f"{prefix}.{key}": data for key, data in model.methods["forward"][0].state_dict().items()}
        wanted |= set(tensors)
        safetensors.torch.save_file(tensors, tmp_path / "models" / f"{name}.safetensors")
    (tmp_path / "models" / "broken.safetensors").write_bytes(b"\xff" * 20)
    found = json.loads(run("report", "models/x.pte", "models/y.pte", "--json", "--no-cache"))
    shown = {region["tensor"] for file in found["files"] for region in file["regions"] if region.get("tensor")}
    both = [word for name in models for word in ("--names", f"models/{name}.safetensors")]
    text = run("dedup", "models", "-o", "given", *both)
    assert f"Named {len(shown)} moved tensors after models/x.safetensors, models/y.safetensors." in text.splitlines()
    run("dedup", "models/x.pte", "models/y.pte", "-o", "found")
    assert named_keys(tmp_path / "given/shared.ptd") == named_keys(tmp_path / "found/shared.ptd") == shown
    assert shown and shown <= wanted
    run("dedup", "models", "-o", "one", *both[:2])
    assert named_keys(tmp_path / "one/shared.ptd") == {key for key in wanted if key.startswith("x.")}
    text = run("report", "models/x.pte", "models/y.pte", "--no-cache", *both)
    assert "nothing got a name" not in text
    result = blobstore.dedup_programs("models", "api")
    assert not result.named and not named_keys(tmp_path / "api/shared.ptd")


def test_a_program_replaced_by_force_gets_names(run, lowered, tmp_path):
    """Its own earlier form cannot be read any more."""
    model = lowered.mlp(delegated=False)
    model.write(tmp_path, "m")
    safetensors.torch.save_file(dict(model.methods["forward"][0].state_dict()), tmp_path / "names.safetensors")
    text = run("dedup", "m.pte", "-o", ".", "--force", "--names", "names.safetensors")
    assert "Named 5 moved tensors after names.safetensors." in text.splitlines()


def test_one_is_singular(run, tmp_path):
    """Numbers and nouns agree."""
    blobstore.save_file({"a": np.ones(1, np.uint8)}, tmp_path / "a.ptd")
    blobstore.save_file({"a": np.ones(1, np.uint8), "b": np.ones(2, np.uint8)}, tmp_path / "b.ptd")
    assert "1 difference; the same: 1 key with 1 byte." in run("diff", "a.ptd", "b.ptd", code=1)


def test_unreadable_files_are_errors_of_the_library():
    """typer's own check would make them mistakes in the command line, with exit code 2."""

    found = {
        (command.__name__, name): info.readable
        for module in {module for module, _ in COMMANDS.values()}
        for command in (one.callback for one in import_module(f"blobstore.cli.{module}").app.registered_commands)
        for name, hint in get_type_hints(command, include_extras=True).items()
        for info in getattr(hint, "__metadata__", ())
        if "Path" in str(hint.__origin__)
    }
    assert len(found) > 30 and [place for place, checked in found.items() if checked] == []


@pytest.mark.long
def test_dedup_reports_the_effect_on_an_earlier_run(run, lowered, tmp_path):
    for name, seed in (("a", 1), ("b", 2)):
        lowered.mlp(seed=seed).write(tmp_path, name)
    run("dedup", "a.pte", "-o", "out")
    text = run("dedup", "b.pte", "-o", "out")
    assert [line.split("\t")[:2] for line in text.splitlines() if ".p" in line] == [
        ["out/b.pte", "new"],
        ["out/a.pte", "kept"],
        ["out/shared.ptd", "data"],
    ]
    lowered.mlp(seed=3).write(tmp_path, "a")
    result = json.loads(run("dedup", "a.pte", "-o", "out", "--json"))
    assert (result["kept"], result["replaced"]) == (["out/b.pte"], ["out/a.pte"])
    assert len(result["unused_keys"]) > 2 and result["pruned_keys"] == []
    text = run("dedup", "a.pte", "-o", "out")
    assert f"No program in the folder uses {len(result['unused_keys'])} keys" in text and "replaced" in text
    pruned = json.loads(run("dedup", "a.pte", "-o", "out", "--prune", "--json"))
    assert sorted(pruned["pruned_keys"]) == sorted(result["unused_keys"]) and pruned["unused_keys"] == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("line", "place"),
    [
        ("convert m.ptd in/model.pte", "in/model.pte"),
        ("report --no-cache m.ptd --html in/notes", "in/notes"),
        ("dedup in/model.pte -o in", "in/model.pte"),
    ],
)
def test_no_command_replaces_what_it_does_not_write(run, ptd, lowered, tmp_path, line, place):
    """Without --force, no file of another format and no input."""
    lowered.mlp().write(tmp_path / "in", "model")
    (tmp_path / "in" / "notes").write_text("notes of a user")
    before = state(tmp_path / "in")
    assert re.search("this is a|one of the inputs", run(*line.split(), code=3))
    assert state(tmp_path / "in") == before
    run(*line.split(), "--force")
    assert (tmp_path / place).read_bytes() != before[tmp_path / place][1]


@pytest.mark.long
def test_inspect(run, ptd, lowered, tmp_path):
    lowered.decoder().write(tmp_path, "decoder")
    safetensors.torch.save_file({"w": torch.zeros(2, 2)}, tmp_path / "w.safetensors")
    code, text = on_terminal(tmp_path, "inspect", "m.ptd", "decoder.pte", "w.safetensors")
    assert code == 0
    for expected in [
        *("a.weight", "float[2, 3]", "metadata made: here", "parameters: 4 float"),
        *("methods: ", "XnnpackBackend", "same as", "┃"),
    ]:
        assert expected in text
    assert "\x1b[31m" not in text and "\u202e" not in text
    assert max(len(re.sub(r"\x1b\[[0-9;]*m", "", line)) for line in text.splitlines()) <= 100
    found = json.loads(run("inspect", "m.ptd", "decoder.pte", "--json"))
    by_key = {blob["key"]: blob for blob in found[0]["blobs"]}
    assert by_key["tied.weight"]["shared"] == "a.weight"
    assert by_key["a.weight"]["layout"] == {"scalar_type": "FLOAT", "sizes": [2, 3], "dim_order": [0, 1]}
    assert by_key[HOSTILE]["layout"] is None
    assert {blob["kind"] for blob in found[1]["blobs"]} >= {"constant", "named data"}


@pytest.mark.long
def test_verify(run, ptd, lowered, tmp_path):
    lowered.mlp().write(tmp_path, "mlp")
    text = run("verify", "m.ptd", "mlp.pte")
    assert "m.ptd: ok: structure and all digests" in text
    assert "mlp.pte: ok: structure" in text
    damage(ptd, "tied.weight")
    text = run("verify", "m.ptd", "mlp.pte", code=1)
    assert "NOT OK" in text and "'tied.weight'" in text and "mlp.pte: ok" in text
    rows = json.loads(run("verify", "m.ptd", "mlp.pte", "--json", code=1))
    assert [row["ok"] for row in rows] == [False, True]
    text = run("verify", "missing.ptd", "m.ptd", "mlp.pte", code=3)
    assert "missing.ptd: NOT OK: No such file or directory" in text and "mlp.pte: ok" in text
    (tmp_path / "x.txt").write_text("x")
    assert "unknown format" in run("verify", "x.txt", code=3)


def test_diff(run, ptd, tmp_path):
    blobstore.save_file(
        {
            "a.weight": torch.arange(6.0).reshape(3, 2),
            "tied.weight": torch.ones(2, 3),
            "new": torch.ones(1),
            "moved": b"op",
        },
        tmp_path / "n.ptd",
    )
    assert "0 differences" in run("diff", "m.ptd", "m.ptd")
    text = run("diff", "m.ptd", "n.ptd", code=1)
    assert "6 differences" in text
    found = json.loads(run("diff", "m.ptd", "n.ptd", "--json", code=1))
    assert {(change["key"], change["kind"], change["other"]) for change in found["changes"]} == {
        ("a.weight", "layout", None),
        ("tied.weight", "bytes", None),
        (HOSTILE, "renamed", "moved"),
        ("new", "added", None),
    }
    assert {one["what"] for one in found["differences"]} == {"metadata", "keys that share their bytes"}
    back = json.loads(run("diff", "n.ptd", "m.ptd", "--json", code=1))
    assert ("new", "removed") in {(change["key"], change["kind"]) for change in back["changes"]}


def test_convert_refuses(run, ptd, tmp_path, lowered):
    safetensors.torch.save_file({"c": torch.zeros(1, dtype=torch.float8_e8m0fnu)}, tmp_path / "c.safetensors")
    assert "'c' has dtype F8_E8M0" in run("convert", "c.safetensors", "c.ptd", code=3)
    lowered.mlp().write(tmp_path, "m")
    assert "m.pte: a .pte program" in run("convert", "m.pte", "x.ptd", code=3)
    assert "one of the inputs" in run("convert", "m.ptd", "m.ptd", code=3)
    assert "must have the other format" in run("convert", "m.ptd", "n.ptd", code=3)
    store = blobstore.BlobStore()
    store.add("q", b"\1", layout=blobstore.TensorLayout(blobstore.ScalarType.QINT8, (1,)))
    store.write_ptd(tmp_path / "q.ptd")
    assert "cannot name" in run("convert", "q.ptd", "q.safetensors", code=3)
    damage(ptd, "tied.weight")
    assert "damaged" in run("convert", "m.ptd", "m.safetensors", code=3)
    assert not {"n.ptd", "c.ptd", "x.ptd", "q.safetensors", "m.safetensors"} & set(os.listdir(tmp_path))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a device that is always full")
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_output_that_cannot_be_printed(ptd, options):
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "blobstore", "inspect", str(ptd), *options]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 3
    assert done.stderr.splitlines()[0].startswith("blobstore: cannot print: ")
    assert "Traceback" not in done.stderr


def test_help_and_version(run):
    assert run("--version").strip() == f"blobstore {blobstore.__version__}"
    assert all(command in run("--help") for command in COMMANDS)
    assert "No such command" in run("nonsense", code=2)
    assert "Did you mean 'verify'?" in run("verfy", code=2)


# Folders


@pytest.fixture
def zoo(tmp_path, ptd):
    """A folder with data files, a checkpoint and a text at two levels."""
    folder = tmp_path / "zoo"
    (folder / "b").mkdir(parents=True)
    shutil.copy(ptd, folder / "b" / "m.ptd")
    blobstore.save_file({"w": np.ones(3)}, folder / "a.ptd")
    safetensors.numpy.save_file({"w": np.ones(3, np.float32)}, folder / "c.safetensors")
    (folder / "notes.txt").write_text("no model")
    return folder


def test_folders_are_searched_for_files(run, zoo):
    """Files in folders below are found, each once and in order; other files are left alone."""
    expected = ["zoo/a.ptd", "zoo/c.safetensors", "zoo/b/m.ptd"]
    assert [file["path"] for file in json.loads(run("inspect", "zoo", "zoo/a.ptd", "--json"))] == expected
    assert [row["path"] for row in json.loads(run("verify", "zoo/b/../a.ptd", "zoo", "--json"))] == [
        "zoo/b/../a.ptd",
        *expected[1:],
    ]


def test_a_folder_without_files_is_an_error(run, zoo, tmp_path):
    """Every command says that it found nothing."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").write_text("no model")
    for command in (
        ["inspect", "empty", "zoo"],
        ["verify", "empty", "zoo"],
        ["diff", "zoo", "empty"],
        ["diff", "empty", "zoo"],
        ["convert", "empty", "out"],
        ["dedup", "empty", "-o", "out"],
        ["adapters", "empty", "zoo"],
        ["adapters", "zoo/a.ptd", "empty"],
        ["report", "--no-cache", "empty"],
    ):
        assert "empty: " in run(*command, code=3)
    assert not (tmp_path / "out").exists()


def test_diff_of_folders(run, zoo, tmp_path):
    """File by file; one that cannot be read does not hide the others."""
    new = tmp_path / "new"
    shutil.copytree(zoo, new)
    assert "Files: 0 changed" in run("diff", "zoo", "new")
    blobstore.save_file({"w": np.zeros(3)}, new / "a.ptd")
    (new / "c.safetensors").rename(new / "d.safetensors")
    text = run("diff", "zoo", "new", code=1)
    assert "zoo/a.ptd -> new/a.ptd:\nw\tbytes\t" in text
    assert "only in zoo: c.safetensors" in text and "only in new: d.safetensors" in text
    found = json.loads(run("diff", "zoo", "new", "--json", code=1))["files"]
    assert [(file["path"], file["kind"]) for file in found] == [
        ("a.ptd", "changed"), ("b/m.ptd", "same"), ("c.safetensors", "removed"), ("d.safetensors", "added"),
    ]  # fmt: skip
    (new / "b" / "m.ptd").write_bytes(b"")
    text = run("diff", "zoo", "new", code=3)
    assert "new/b/m.ptd: " in text and "Files: 1 changed" in text
    assert "compare two files or two folders" in run("diff", "zoo", "m.ptd", code=3)


def test_convert_of_a_folder(run, zoo, tmp_path):
    """It keeps its structure, and a second run writes the same files; a bad file does not stop the others."""
    expected = {"a.safetensors", "c.ptd", "b/m.safetensors"}
    for target in ("out", "out", "zoo/made", "zoo/made"):
        run("convert", "zoo", target)
        made = {str(path.relative_to(tmp_path / target)) for path in (tmp_path / target).rglob("*.*")}
        assert made == expected
    shutil.rmtree(zoo / "made")
    (zoo / "a.ptd").write_bytes(b"cut")
    assert "zoo/a.ptd: " in run("convert", "zoo", "again", code=3)
    assert (tmp_path / "again" / "b" / "m.safetensors").exists()
    run("convert", "zoo/c.safetensors", "out")  # a folder that exists takes the file
    assert "this is a file" in run("convert", "zoo", "m.ptd", code=3)
    run("convert", "zoo", "zoo", code=3)
    assert "one of the inputs" in run("convert", "zoo", "zoo", code=3)


def test_adapters_in_a_folder(run, tmp_path):
    """The foundation itself is not taken for an adapter, and a file of another kind does not hide the others."""
    foundation = tmp_path / "all" / "base.ptd"
    foundation.parent.mkdir()
    blobstore.save_file({"m.weight": np.ones((4, 3), np.float32)}, foundation)
    tensors = {"m.lora_a.weight": np.ones((2, 3), np.float32), "m.lora_b.weight": np.ones((4, 2), np.float32)}
    for name in ("x", "y"):
        blobstore.adapters.save_adapter(tmp_path / "all" / f"{name}.ptd", tensors, foundation=foundation, scale=1)
    found = json.loads(run("adapters", "all/base.ptd", "all", "--json"))
    assert [(one["path"], one["fits"]) for one in found["adapters"]] == [("all/x.ptd", True), ("all/y.ptd", True)]
    blobstore.save_file({"w": np.ones(3)}, tmp_path / "all" / "other.ptd")
    text = run("adapters", "all/base.ptd", "all", code=3)
    assert "other.ptd: not an adapter" in text and text.count("made for this foundation") == 2


# Dry runs and sizes


@pytest.mark.long
def test_a_dry_run_of_dedup_changes_nothing(run, lowered, tmp_path):
    """It prints what the run would print, and has its exit code."""
    for name, seed in (("a", 1), ("b", 2)):
        lowered.mlp(seed=seed).write(tmp_path, name)
    for command in (["dedup", "a.pte", "-o", "new/out"], ["dedup", "b.pte", "-o", "new/out", "--prune"]):
        before = state(tmp_path)
        dry = json.loads(run(*command, "--json", "--dry-run"))
        text = run(*command, "--dry-run")
        assert state(tmp_path) == before
        assert "Nothing was written" in text
        assert json.loads(run(*command, "--json")) == dry
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "shared.ptd").write_text("notes of a user")
    (tmp_path / "file").write_text("no folder")
    before = state(tmp_path)
    for command in (["a.pte", "-o", "."], ["a.pte", "-o", "full"], ["a.pte", "-o", "file"], ["a.pte", "-o", "file/x"]):
        dry_text = run("dedup", *command, "--dry-run", code=3)
        assert run("dedup", *command, code=3) == dry_text
    assert state(tmp_path) == before


def test_a_dry_run_of_convert_changes_nothing(run, zoo, tmp_path):
    """For files and folders, with the exit code of the run."""
    for command in (["m.ptd", "m.safetensors"], ["zoo", "out/deep"]):
        before = state(tmp_path)
        text = run("convert", *command, "--dry-run")
        assert state(tmp_path) == before
        assert text.replace("would have ", "") == run("convert", *command)
    before = state(tmp_path)
    for command in (["m.ptd", "zoo/notes.txt"], ["m.ptd", "gone/m.safetensors"], ["m.ptd", "m.ptd"]):
        dry_text = run("convert", *command, "--dry-run", code=3)
        assert run("convert", *command, code=3) == dry_text
    assert state(tmp_path) == before


@pytest.mark.long
def test_sizes_with_units(run, lowered, tmp_path):
    """A number of bytes may have a unit, and anything else is an error of the command line."""
    lowered.mlp(delegated=True).write(tmp_path, "m")
    sizes = {
        text: json.loads(run("dedup", "m.pte", "-o", "out", "--dry-run", "--json", "--keep-small", text))["bytes_after"]
        for text in ("0", "0.1KB", "100", "100 b", "10MB", "0.01GiB")
    }
    assert sizes["0.1KB"] == sizes["100"] == sizes["100 b"] != sizes["0"]
    assert sizes["10MB"] == sizes["0.01GiB"] == (tmp_path / "m.pte").stat().st_size
    for text in ("ten", "10 M", "5%", "1e3", "-1", ""):
        assert "is not a number of bytes" in run("dedup", "m.pte", "-o", "out", "--keep-small", text, code=2)
    assert "neither a number of bytes" in run("report", "m.pte", "--fail-over", "ten", code=2)


# Pipes


def test_in_a_pipe_every_key_is_one_row(run, tmp_path):
    """No lines, no colours, nothing cut; the first cell is the key, whatever its name, and the last one the file."""
    names = [f"{'long.' * 60}{i}" for i in range(1500)] + [HOSTILE, "tab\tline\n"]
    blobstore.save_file({name: np.ones(1) for name in names}, tmp_path / "x.ptd")
    rows = [line.split("\t") for line in run("inspect", "x.ptd").splitlines()]
    assert [row[0] for row in rows] == [blobstore.core.text.printable(name) for name in names]
    assert all(len(row) == 7 and row[-1] == "x.ptd" for row in rows)
    assert rows[0][1:5] == ["tensor", "double[1]", "8", "1"]


def test_no_command_draws_in_a_pipe(run, ptd, zoo, lowered, tmp_path):
    """Neither lines of tables nor control sequences, and no line is wrapped."""
    folder = tmp_path / ("deep" * 50)
    lowered.mlp().write(folder, "m")
    for command in (
        ["inspect", folder, "zoo"],
        ["diff", "m.ptd", "zoo/a.ptd"],
        ["dedup", folder, "-o", "out"],
        ["verify", folder],
        ["report", "--no-cache", folder, "zoo"],
    ):
        text = run(*command, code=1 if command[0] == "diff" else 0)
        assert not re.search("[\u2500-\u257f\x1b]", text), command
    assert any(str(folder) in line and "XnnpackBackend" not in line for line in run("inspect", folder).splitlines())


# What programs take from data files


@pytest.mark.long
def test_inspect_lists_what_a_slim_program_takes(run, lowered, tmp_path):
    """Tensors with dtype and shape, keys of delegates with the bytes that the data file beside it has."""
    lowered.mlp(delegated=True).write(tmp_path, "m")
    run("dedup", "m.pte", "-o", "out")
    keys = {blob["key"]: blob["nbytes"] for blob in json.loads(run("inspect", "out/shared.ptd", "--json"))[0]["blobs"]}
    (slim,) = json.loads(run("inspect", "out/m.pte", "--json"))
    assert {one["key"]: one["nbytes"] for one in slim["externals"]} == keys
    assert {one["kind"] for one in slim["externals"]} == {"external", "delegate"}
    for one in slim["externals"]:
        assert one["found_in"] == "shared.ptd" and one["taken_by"]
        assert (one["layout"] is None) == (one["kind"] == "delegate")
    assert {line.split("\t")[0] for line in run("inspect", "out/m.pte").splitlines()} == set(keys)
    code, text = on_terminal(tmp_path, "inspect", "out/m.pte")
    assert code == 0 and "Taken from data files" in text and "forward/0 XnnpackBackend" in " ".join(text.split())
    (tmp_path / "out" / "shared.ptd").unlink()
    (slim,) = json.loads(run("inspect", "out/m.pte", "--json"))
    assert {one["key"] for one in slim["externals"]} == set(keys)
    assert all((one["nbytes"] is None) == (one["kind"] == "delegate") for one in slim["externals"])


# Savings, completion


def test_growing_is_not_called_saving(run, lowered, tmp_path):
    """A run whose outputs are larger than its inputs says so."""
    lowered.mlp().write(tmp_path, "m")
    text = run("dedup", "m.pte", "-o", "out")
    assert "Grew by" in text and "Saved" not in text and "--keep-small" in text
    assert "Saved nothing." in run("dedup", "m.pte", "-o", "other", "--keep-small", "10MB")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(run, shell, monkeypatch):
    """A script for the shell is printed, and it completes commands and options."""
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    assert "_BLOBSTORE_COMPLETE" in run("--show-completion", shell)


def test_help_imports_no_command():
    """Each command and the wing behind it is imported when it is run."""
    code = (
        "import sys; sys.argv = ['blobstore', '--help']; from blobstore.cli import main\n"
        "try: main()\n"
        "except SystemExit: print(*[name for name in sys.modules if name.startswith('blobstore')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert {"blobstore.cli.app", "blobstore.core.text"} <= loaded
    assert {name for name in loaded if re.match(r"blobstore\.(?!cli\b|core\b)", name)} == set()
    assert {f"blobstore.cli.{module}" for module, _ in COMMANDS.values()} & loaded == set()


@pytest.mark.parametrize("name", COMMANDS)
def test_help_says_what_each_command_says(name, run):
    """The sentence in the list is the first one of the command's own help."""
    text = " ".join(run(name, "--help").split())
    assert text.partition("] ")[0].startswith(f"Usage: blobstore {name}") and COMMANDS[name][1] in text


def test_completion_of_commands():
    env = {**os.environ, "_BLOBSTORE_COMPLETE": "complete_bash", "COMP_WORDS": "blobstore pu", "COMP_CWORD": "1"}
    code = "import sys; sys.argv = ['blobstore']; from blobstore.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)
    assert (done.stdout.split(), done.stderr) == (["publish", "push", "pull"], "")


# Without the optional packages


@pytest.mark.parametrize(
    "code",
    [
        "for name in ('torch', 'executorch', 'typer', 'rich'): sys.modules[name] = None\n"
        "import blobstore, blobstore.programs, blobstore.core.tools.compare",
        "import blobstore.torch, blobstore.numpy, blobstore.cli.app\n"
        "assert not {'torch', 'executorch'} & set(sys.modules)",
    ],
    ids=["not there", "not imported"],
)
def test_import_is_light(code):
    subprocess.run([sys.executable, "-W", "error", "-c", f"import sys\n{code}"], check=True)
