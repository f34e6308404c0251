"""What the page says of the files after a command is what running the command gives (B2)."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import blobstore
from blobstore.cli.app import app
from blobstore.reporting import Report
from blobstore.reporting.show.after import after
from blobstore.reporting.show.page_data import page_data
from tests.reporting.find.test_planted import values
from tests.reporting.planted import Payload, Tensor, write_ptd, write_safetensors

ENTRY = 300  # bytes that a table, a manifest and padding take for a blob, at most


def commands(report: Report) -> list[str]:
    return list(dict.fromkeys(finding.command for finding in report.findings if finding.command))


def check(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Report:
    monkeypatch.chdir(folder)
    report = blobstore.report(["models"])
    given = commands(report)
    assert given
    then = after(report, given)
    for command in given:
        done = CliRunner().invoke(app, shlex.split(command)[1:])
        assert done.exit_code == 0, done.output
    for file in then.files:
        expected = sum(report.region(place).nbytes for place in file.places)
        assert expected == pytest.approx(Path(file.path).stat().st_size, abs=600 + ENTRY * len(file.places))
    made = {str(path) for path in Path().rglob("*") if path.is_file() and "models" not in path.parts}
    assert made == {str(Path(file.path)) for file in then.files}
    assert then.total_bytes(report) <= report.total_bytes - report.command_saves
    return report


def test_of_data_files_and_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    weight, other = values(1, 60, 50), values(2, 70, 50)
    write_ptd(tmp_path / "models" / "a.ptd", [Tensor.of("w", weight), Tensor.of("tied", weight)])
    write_ptd(tmp_path / "models" / "b.ptd", [Tensor.of("w", weight), Tensor.of("own", other)])
    write_safetensors(tmp_path / "models" / "-c.safetensors", [Tensor.of("x", other), Tensor.of("y", other)])
    report = check(tmp_path, monkeypatch)
    assert len(commands(report)) == 2


def test_what_a_command_leaves_can_still_go(tmp_path: Path) -> None:
    """Zeros that are twice in two files: once they are there once, they are still one value repeated."""
    for name in ("a", "b"):
        write_ptd(
            tmp_path / f"{name}.ptd", [Tensor.of("w", values(1, 60, 50)), Tensor.of("z", abs(values(1, 60, 50)) * 0)]
        )
    report = blobstore.report([tmp_path])
    then = after(report, commands(report))
    left = {report.region(place).keys[0]: sum(kinds.values()) for place, kinds in then.goes.items()}
    assert left == {"z": 60 * 50 * 4 - 4}
    total = sum(report.region(place).nbytes for file in then.files for place in file.places)
    assert then.total_bytes(report) == total


@pytest.mark.long
def test_of_real_programs(zoo_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").symlink_to(zoo_folder / "vision" / "mobile")
    check(tmp_path, monkeypatch)


def test_programs_of_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They get the places that the command gives them."""
    weight = values(1, 60, 50)
    for folder in ("x", "y"):
        (tmp_path / "models" / folder).mkdir(parents=True)
        Payload([("a1" * 32).encode()], {"a1" * 32: weight.tobytes()}).write(tmp_path / "models" / folder / "m.pte")
    check(tmp_path, monkeypatch)


def test_the_page_grows_with_its_files_and_not_with_their_square(tmp_path: Path) -> None:
    """A command that leaves something in each of the files that it writes."""

    def size_with(count: int) -> int:
        folder = tmp_path / str(count)
        folder.mkdir()
        for i in range(count):
            left = np.full((60, 50), i + 1, np.float32)
            tensors = [Tensor.of("w", values(1, 60, 500)), Tensor.of("left", left)]
            write_safetensors(folder / f"m{i:02}.safetensors", tensors)
        report = blobstore.report([folder])
        assert report.commands
        return len(json.dumps(page_data(report, [Path(file.path).name for file in report.files], 10)["after"]))

    assert size_with(40) < 3 * size_with(20)
