"""What users of data files and checkpoints are told to do: every command runs, loses no tensor, and saves what it claims (B2)."""

import itertools
import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import blobstore
from blobstore.cli.app import app
from blobstore.core.programs.inputs import output_places
from blobstore.reporting import FindingKind, Report
from blobstore.reporting.show.after import after
from blobstore.reporting.show.page_data import page_data
from tests.reporting.find.test_planted import accounted, values
from tests.reporting.find.test_pooling import write_families
from tests.reporting.planted import Payload, Tensor, write_ptd, write_safetensors

ENTRY = 320  # bytes that a table, a manifest and padding take for a blob, at most
FILE = 1200  # and for a file
SHARED = {"layers.0": values(1, 60, 50), "layers.1": values(2, 60, 50), "norm": values(3, 60)}
OWN = values(4, 60, 50)

Tensors = dict[str, np.ndarray]
Contents = dict[str, bytes]


def near(array: np.ndarray) -> np.ndarray:
    other = array.copy()
    other.reshape(-1)[:9] += 1
    return other


def turned(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array.T)


HALF = {key: array.astype(np.float16) for key, array in SHARED.items()}

PAIRS: dict[str, tuple[Tensors, Tensors, FindingKind, str]] = {
    # two files, what is found, and the command if both are of one format
    "equal files": (SHARED, SHARED, FindingKind.DUPLICATE_FILES, "delta or dedup"),
    "a fine-tune": (SHARED, {**SHARED, "norm": values(5, 60)}, FindingKind.DUPLICATE_FILES, "delta"),
    "a fine-tune with a head": (
        SHARED,
        {**SHARED, "layers.1": OWN, "head": values(6, 70, 50)},
        FindingKind.DUPLICATE_FILES,
        "delta",
    ),
    "other keys": (SHARED, {f"model.{k}": v for k, v in SHARED.items()}, FindingKind.DUPLICATE_FILES, "dedup"),
    "a key is missing": (
        {**SHARED, "head": OWN},
        {**SHARED, "norm": values(5, 60), "tail": values(7, 60, 50)},
        FindingKind.DUPLICATE_FILES,
        "",
    ),
    "tied": ({**SHARED, "head": SHARED["layers.0"]}, {"own": OWN}, FindingKind.DUPLICATE_TIED, "dedup or convert"),
    "tied, and a fine-tune": (
        {**SHARED, "head": SHARED["layers.0"]},
        {**SHARED, "head": SHARED["layers.0"], "norm": values(5, 60)},
        FindingKind.DUPLICATE_TIED,
        "delta",
    ),
    "other dtype": (HALF, {key: array.astype(np.float32) for key, array in HALF.items()}, FindingKind.OTHER_DTYPE, ""),
    "other layout": (SHARED, {key: turned(array) for key, array in SHARED.items()}, FindingKind.OTHER_LAYOUT, ""),
    "zeros": ({**SHARED, "mask": np.zeros((100, 90), np.float32)}, {"own": OWN}, FindingKind.CONSTANT, ""),
    "near": (SHARED, {key: near(array) for key, array in SHARED.items()}, FindingKind.NEAR_DUPLICATE, ""),
}


def write(path: Path, tensors: Tensors, **options: Any) -> None:
    listed = [Tensor.of(key, array) for key, array in tensors.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".ptd":
        write_ptd(path, listed, **options)
    else:
        write_safetensors(path, listed)


def contents(path: str | Path) -> Contents:
    with blobstore.open_any(path) as data_map:
        return {key: data_map.bytes(key) for key in data_map}


def commands(report: Report) -> list[str]:
    return list(dict.fromkeys(finding.command for finding in report.findings if finding.command))


def made_by(command: str) -> dict[str, Contents]:
    """For each file that a command replaces, all that a user gets from what it made in its place."""
    _, what, *paths, target = shlex.split(command)
    paths = [path for path in paths if path != "-o"]
    if what == "convert":
        return {paths[0]: contents(target)}
    if what == "delta":
        base, *tuned = paths
        outputs = output_places([(Path(path), Path(Path(path).name)) for path in tuned])
        return {
            path: {**contents(base), **contents(Path(target, output))}
            for path, output in zip(tuned, outputs, strict=True)
        }
    return {path: contents(Path(target, "shared.ptd")) for path in paths}


def check(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Report:
    """Run the commands of a report on `models`; then the files are as predicted, and have all tensors."""
    monkeypatch.chdir(folder)
    report = blobstore.report(["models"])
    accounted(report)
    assert not report.problems
    given = commands(report)
    then = after(report, given)
    sizes = {file.path: file.size for file in report.files}
    before = {file.path: contents(file.path) for file in report.files}
    for command in given:
        done = CliRunner().invoke(app, shlex.split(command)[1:])
        assert done.exit_code == 0, (command, done.output)
        for path, now in made_by(command).items():
            assert path in {report.files[f].path for f in then.replaced}
            if path.endswith(".pte"):  # what a delegate looks up; constants have other keys
                assert set(before[path].values()) <= set(now.values()), command
            elif " dedup " in command:  # with the keys of all
                assert before[path].items() <= now.items(), command
            else:
                assert before[path] == now, command
    # the predicted files are there, no others, and as large as predicted
    made = {str(path) for path in Path().rglob("*") if path.is_file() and "models" not in path.parts}
    assert made == {str(Path(file.path)) for file in then.files}
    for file in then.files:
        expected = sum(report.region(place).nbytes for place in file.places)
        assert expected == pytest.approx(Path(file.path).stat().st_size, abs=FILE + ENTRY * (1 + len(file.places)))
    replaced = {report.files[f].path for f in then.replaced}
    freed = sum(sizes[path] for path in replaced) - sum(Path(path).stat().st_size for path in made)
    slack = FILE * len(report.files) + ENTRY * sum(len(file.regions) for file in report.files)
    assert freed == pytest.approx(report.command_saves, abs=slack)
    # another report, without the replaced files, finds only what no command could save
    for path in replaced:
        Path(path).unlink()
    again = blobstore.report(["models", *sorted({Path(path).parts[0] for path in made})])
    accounted(again)
    assert again.total_saves == pytest.approx(report.total_saves - report.command_saves, abs=slack)
    return report


@pytest.mark.parametrize("formats", list(itertools.product(["ptd", "safetensors"], repeat=2)), ids="-".join)
@pytest.mark.parametrize("name", PAIRS)
def test_each_finding_in_each_pair_of_formats(
    name: str, formats: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other, kind, command = PAIRS[name]
    for tensors, label, suffix in ((one, "a", formats[0]), (other, "b", formats[1])):
        write(tmp_path / "models" / f"{label}.{suffix}", tensors)
    report = check(tmp_path, monkeypatch)
    found = [finding for finding in report.findings if finding.kind is kind]
    assert found
    assert all("lower" not in finding.advice and "export" not in finding.advice for finding in report.findings)
    kinds = {line.split()[1] for line in commands(report)}
    allowed = set(command.split(" or ")) if command else set()
    if command == "dedup" and "safetensors" in formats:  # other keys: only data files can have both names of a tensor
        allowed = set()
    assert kinds <= allowed and bool(kinds) == bool(allowed)


@pytest.mark.parametrize("appended", [b"", b"not referred to" * 400])
def test_padding_and_leftovers_of_a_data_file(appended: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "models" / "a.ptd", {f"w{i}": values(i, 30, 30) for i in range(9)}, alignment=16384)
    path = tmp_path / "models" / "a.ptd"
    path.write_bytes(path.read_bytes() + appended)
    report = check(tmp_path, monkeypatch)
    assert {finding.kind for finding in report.findings if finding.command} >= {FindingKind.PADDING}
    assert report.command_saves > 10000


def test_several_formats_with_one_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fine-tunes of both formats, equal names in several folders, and a name with a blank."""
    write(tmp_path / "models" / "base.safetensors", SHARED)
    for number, name in enumerate(["x/tuned.safetensors", "y/tuned.safetensors", "z/tuned one.ptd", "z/-v.ptd"]):
        write(tmp_path / "models" / name, {**SHARED, "norm": values(20 + number, 60)})
    report = check(tmp_path, monkeypatch)
    [command] = commands(report)
    assert command.startswith("blobstore delta models/base.safetensors ")
    assert report.command_saves == 4 * (SHARED["layers.0"].nbytes + SHARED["layers.1"].nbytes)


def test_programs_data_files_and_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data files beside programs go to the programs' data file and become no delta, since a program finds a key once."""
    one = SHARED["layers.0"]
    write(tmp_path / "models" / "w.ptd", SHARED)
    write(tmp_path / "models" / "tuned.ptd", {**SHARED, "norm": values(8, 60)})
    write(tmp_path / "models" / "checkpoint.safetensors", SHARED)
    Payload([], {"k": one.tobytes()}).write(tmp_path / "models" / "m.pte")
    report = check(tmp_path, monkeypatch)
    assert {line.split()[1] for line in commands(report)} == {"dedup"}
    assert any("without the checkpoint" in finding.advice for finding in report.findings)
    assert report.command_saves >= one.nbytes


def test_a_key_that_divides_files_divides_no_more_than_it_must(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three programs with one blob two can share a data file, and the third has another content under a key."""
    one, key = SHARED["layers.0"], SHARED["layers.1"]
    (tmp_path / "models").mkdir()
    for name, other in (("a", key), ("b", key), ("c", OWN)):
        Payload([], {"k": one.tobytes(), "key": other.tobytes()}).write(tmp_path / "models" / f"{name}.pte")
    report = check(tmp_path, monkeypatch)
    assert commands(report) == ["blobstore dedup models/a.pte models/b.pte -o slim"]
    assert report.command_saves == one.nbytes + key.nbytes
    payload = len(b"k\0key")  # which names both, in all three
    assert report.total_saves == 2 * one.nbytes + key.nbytes + 2 * payload


def test_programs_of_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They get the places that the command gives them."""
    for folder in ("x", "y"):
        (tmp_path / "models" / folder).mkdir(parents=True)
        Payload([], {"a1" * 32: SHARED["layers.0"].tobytes()}).write(tmp_path / "models" / folder / "m.pte")
    assert commands(check(tmp_path, monkeypatch))


def test_what_a_command_leaves_can_still_go(tmp_path: Path) -> None:
    """Zeros that are twice in two files: once they are there once, they are still one value repeated."""
    for name in ("a", "b"):
        write(tmp_path / f"{name}.ptd", {"w": values(1, 60, 50), "z": np.zeros((60, 50), np.float32)})
    report = blobstore.report([tmp_path])
    then = after(report, commands(report))
    left = {report.region(place).keys[0]: sum(kinds.values()) for place, kinds in then.goes.items()}
    assert left == {"z": 60 * 50 * 4 - 4}
    total = sum(report.region(place).nbytes for file in then.files for place in file.places)
    assert then.total_bytes(report) == total


def test_the_page_grows_with_its_files_and_not_with_their_square(tmp_path: Path) -> None:
    """A command that leaves something in each of the files that it writes."""

    def size_with(count: int) -> int:
        folder = tmp_path / str(count)
        for i in range(count):
            left = np.full((60, 50), i + 1, np.float32)
            write(folder / f"m{i:02}.safetensors", {"w": values(1, 60, 500), "left": left})
        report = blobstore.report([folder])
        assert report.commands
        return len(json.dumps(page_data(report, [Path(file.path).name for file in report.files], 10)["after"]))

    assert size_with(40) < 3 * size_with(20)


@pytest.mark.long
def test_families_of_teams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty copies, fine-tunes, halves, tied heads and adapters, in both formats."""
    write_families(tmp_path / "models")
    report = check(tmp_path, monkeypatch)
    equal = sum(finding.counted for finding in report.findings if finding.kind is FindingKind.DUPLICATE_FILES)
    assert report.command_saves > 0.9 * equal


@pytest.mark.long
def test_real_programs(lowered: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one model, with and without a delegate."""
    for number in range(3):
        lowered.decoder(delegated=number % 2 == 0).write(tmp_path / "models", f"decoder-{number}")
    report = check(tmp_path, monkeypatch)
    assert len(commands(report)) == 1
    assert report.command_saves > 0.3 * report.total_bytes
