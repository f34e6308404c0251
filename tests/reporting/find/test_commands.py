"""The commands that the report prints run as they are printed, all of them, each with an output of its own (B2)."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import blobstore
from blobstore.reporting.find.kinds.building import dedup_command, writing
from tests.reporting.find.test_planted import values
from tests.reporting.find.test_zoo import printed
from tests.reporting.planted import Tensor, write_ptd, write_safetensors

NAMES = ("plain", "with blank", 'it\'s "quoted" $HOME `x`;&|*?', "-hyphen")


def run_all(commands: Sequence[str], folder: Path) -> set[str]:
    """Run commands in a shell in this order; what they made, by the names in the folder."""
    (folder / "bin").mkdir()
    program = folder / "bin" / "blobstore"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m blobstore "$@"\n')
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"}
    made: set[str] = set()
    for command in commands:
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        done = subprocess.run(
            ["/bin/sh", "-c", command], capture_output=True, text=True, cwd=folder, env=environment, check=False
        )
        assert done.returncode == 0, (command, done.stderr)
        assert all(path.read_bytes() == data for path, data in before.items()), f"changed by {command}"
        new = {path.relative_to(folder).parts[0] for path in folder.rglob("*") if path.is_file() and path not in before}
        assert len(new) == 1, (command, new)
        made |= new
    assert len(made) == len(commands)
    shutil.rmtree(program.parent)
    return made


@pytest.mark.long
def test_every_command_runs_as_printed(lowered: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of equal names in folders of all kinds of names, and checkpoints beside them."""
    decoder, mlp = lowered.decoder().pte, lowered.mlp(delegated=True).pte
    weight, bias = values(1, 60, 60), values(2, 50, 50)
    for number, name in enumerate(NAMES):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "model.pte").write_bytes(decoder)
        (folder / f"{name}.pte").write_bytes(mlp)
        tied = [Tensor.of("embed", weight + number), Tensor.of("head", weight + number)]
        write_safetensors(folder / "tied.safetensors", tied)
        own = [Tensor.of("key", bias + number), Tensor.of("other", bias + number)]
        write_ptd(folder / "tied.ptd", own)  # a key with other bytes in each file: no common data file
    write_safetensors(tmp_path / "-tied.safetensors", [Tensor.of("a", weight - 1), Tensor.of("b", weight - 1)])
    arguments = [*NAMES, "-tied.safetensors"]
    monkeypatch.chdir(tmp_path)
    report = blobstore.report(arguments)
    commands = [line.strip() for line in printed(report, 80).splitlines() if line.startswith("  blobstore ")]
    found = {f.command for f in report.findings if f.command}
    assert commands and set(commands) <= found
    assert len(found) >= 2 + 2 * len(NAMES)  # the programs, and each checkpoint and each data file
    made = run_all(sorted(found), tmp_path)
    assert {"tied.ptd", "tied-2.ptd", "-tied.ptd"} <= made
    assert any(name.startswith("slim") for name in made)
    again = " ".join(f.command for f in blobstore.report(arguments).findings if f.command)
    assert not any(again.endswith(f" {name}") or f" {name} " in again for name in made)  # those names are in use now


def test_what_dedup_would_refuse_gets_no_command(lowered: Any, tmp_path: Path) -> None:
    """A program with bytes behind its segments that nothing accounts for: a rewrite would lose them."""
    data = lowered.decoder().pte
    for name in ("a", "b"):
        (tmp_path / f"{name}.pte").write_bytes(data + b"appended by another tool" * 10)
    commands = {finding.command for finding in blobstore.report([tmp_path]).findings}
    assert commands == {None}


def test_urls_get_no_command(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    system = fsspec.filesystem("memory")
    for name in ("a", "b"):
        weight = values(5, 60, 60)
        path = f"/commands/{name}.ptd"
        tensors = [Tensor.of(name, weight), Tensor.of(f"{name}2", weight)]
        system.pipe(path, write_ptd(tmp_path / name, tensors).read_bytes())
    report = blobstore.report(["memory://commands/a.ptd", "memory://commands/b.ptd"])
    assert report.findings and {finding.command for finding in report.findings} == {None}


def test_a_path_that_looks_like_an_option() -> None:
    assert writing(dedup_command(["-x.pte"]), "slim") == "blobstore dedup ./-x.pte -o slim"
