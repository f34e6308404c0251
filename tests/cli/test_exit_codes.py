"""How commands end, as a shell sees it: exit codes, closed pipes, Ctrl-C."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import blobstore

pytestmark = pytest.mark.long

SETUP = """
import os, signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background, a shell makes a process ignore it
def interrupt():
    signal.raise_signal(signal.SIGINT)
from blobstore.cli import main
{setup}
sys.argv = ["blobstore", *{arguments!r}]
main()
"""


def run(*arguments: Any, setup: str = "", **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, after code that prepares its environment."""
    given = [str(argument) for argument in arguments]
    code = SETUP.format(setup=setup, arguments=given) if setup else ""
    command = [sys.executable, "-W", "error", *(["-c", code] if setup else ["-m", "blobstore", *given])]
    env = {**os.environ, "COLUMNS": "100", "XDG_CACHE_HOME": os.devnull}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env, **options)


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.ptd"
    blobstore.save_file({f"layers.{i}.weight": np.arange(i, i + 64.0) for i in range(300)}, path)
    return path


@pytest.fixture
def bad(good: Path, tmp_path: Path) -> dict[str, Path]:
    """Unreadable files of every kind."""
    folder = tmp_path / "bad"
    folder.mkdir()
    made = {name: folder / name for name in ("missing.ptd", "empty.pte", "cut.ptd", "text.txt", "fifo.pte", "dir.ptd")}
    made["empty.pte"].write_bytes(b"")
    made["cut.ptd"].write_bytes(good.read_bytes()[:200])
    made["text.txt"].write_text("no model")
    made["dir.ptd"].mkdir()
    os.mkfifo(made["fifo.pte"])
    return made


def quiet(done: subprocess.CompletedProcess[str]) -> bool:
    return "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


@pytest.mark.long
def test_a_file_that_cannot_be_read_is_3_everywhere(good: Path, bad: dict[str, Path], tmp_path: Path) -> None:
    """Also a pipe, which is not waited for."""
    for path in (bad["missing.ptd"], bad["cut.ptd"], bad["text.txt"], bad["fifo.pte"]):
        for command in (
            ["inspect", path],
            ["diff", path, good],
            ["diff", good, path],
            ["convert", path, tmp_path / "x.safetensors"],
            ["dedup", path, "-o", tmp_path / "out"],
            ["report", path],
            ["adapters", path, good],
            ["fuse", path, good, "-o", tmp_path / "fused"],
        ):
            done = run(*command)
            assert done.returncode == 3, (command, done)
            assert quiet(done)
            assert path.name in done.stderr + done.stdout


def test_inspect_goes_on_after_a_bad_file(good: Path, bad: dict[str, Path]) -> None:
    done = run("inspect", *bad.values(), good, "--json")
    assert done.returncode == 3
    rows = json.loads(done.stdout)
    assert [Path(row["path"]).name for row in rows] == [*bad, good.name]
    assert ["error" in row for row in rows] == [True] * len(bad) + [False]
    assert len(done.stderr.splitlines()) == len(bad)


@pytest.mark.parametrize(
    "command", [["inspect", "{}"], ["inspect", "--json", "{}"], ["report", "--json", "{}"], ["--help"]], ids=" ".join
)
def test_a_closed_pipe_is_quiet(command: Sequence[str], good: Path) -> None:
    """As in `blobstore inspect model.ptd | head -1`: nothing on standard error, and the exit code of a closed pipe."""
    read, write = os.pipe()
    os.close(read)  # the reader is gone before a byte is written
    try:
        env = {**os.environ, "XDG_CACHE_HOME": os.devnull}
        arguments = [part.format(good) for part in command]
        done = subprocess.run(
            [sys.executable, "-m", "blobstore", *arguments], stdout=write, stderr=subprocess.PIPE, check=False, env=env
        )
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


def test_standard_output_that_is_closed(good: Path) -> None:
    script = 'exec "$0" -m blobstore verify "$1" >&-'
    done = subprocess.run(
        ["/bin/sh", "-c", script, sys.executable, str(good)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 3
    assert done.stderr == "blobstore: cannot print: standard output is closed\n"


def test_a_terminal_without_box_characters(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = run("inspect", good)
    assert (done.returncode, done.stderr) == (0, "")
    assert "layers.7.weight" in done.stdout


@pytest.mark.parametrize(
    ("defect", "error"), [("None", "TypeError"), ("lambda *_, **__: open('/nowhere/x')", "FileNotFoundError")]
)
def test_a_defect_is_not_an_answer(good: Path, defect: str, error: str) -> None:
    """Python's own exit code for an exception, 1, would mean that the files differ. A file's error is none of printing."""
    setup = f"import blobstore.core.tools.compare as module\nmodule.compare_files = {defect}"
    done = run("diff", good, good, setup=setup)
    assert done.returncode == 3
    assert error in done.stderr and "cannot print" not in done.stderr


# Ctrl-C

AT_IMPORT = """
import builtins
real, left = builtins.__import__, {number}
def counting(*arguments, **named):
    global left
    left -= 1
    if left == 0:
        interrupt()
    return real(*arguments, **named)
builtins.__import__ = counting
"""


@pytest.mark.parametrize("number", [1, 2, 5, 20, 100, 300, 700, 1000, 1500, 2000])
def test_ctrl_c_while_importing(number: int, good: Path) -> None:
    """At the first import of the command, in the middle of numpy and other packages, and after them."""
    done = run("inspect", good, setup=AT_IMPORT.format(number=number))
    assert (done.returncode, done.stderr) == (130, ""), number


AT_CALL = """
import {module}
real = {module}.{function}
def interrupted(*arguments, **named):
    {when}
    return real(*arguments, **named)
{module}.{function} = interrupted
"""


def at(place: str, when: str = "interrupt()") -> str:
    module, function = place.split(":")
    return AT_CALL.format(module=module, function=function, when=when)


IN_MAIN = "threading.current_thread() is threading.main_thread() and interrupt()"


@pytest.mark.parametrize("place", ["os:fsync", "os:replace", "blobstore.core.disk.output:Output.write", "json:dumps"])
def test_ctrl_c_during_a_save_leaves_nothing(place: str, good: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    done = run("convert", good, out / "a.safetensors", setup=at(place, IN_MAIN))
    assert (done.returncode, done.stderr) == (130, "")
    assert [path.name for path in out.iterdir() if path.name != "a.safetensors"] == []


def test_ctrl_c_while_a_pool_works(good: Path) -> None:
    """The signal comes to the main thread while a worker reads."""
    when = "os.kill(os.getpid(), signal.SIGINT)"
    done = run("report", "--no-cache", good, setup=at("blobstore.reporting.read.engine:_fingerprint", when))
    assert (done.returncode, done.stderr) == (130, "")


def test_ctrl_c_inside_a_finalizer(good: Path) -> None:
    """Python drops exceptions of finalizers, but Ctrl-C still ends the command."""
    setup = """
class Late:
    def __del__(self):
        interrupt()
import blobstore.cli.files as files
real = files.inspect_file
def slow(path):
    late = Late()
    del late
    signal.pause()  # until the next signal: without one this would never end
    return real(path)
files.inspect_file = slow
"""
    done = run("inspect", good, setup=setup, timeout=60)
    assert (done.returncode, done.stderr) == (130, "")


def test_ctrl_c_after_the_output(good: Path) -> None:
    """A signal that comes while Python exits changes nothing."""
    done = run("verify", good, setup="import atexit\natexit.register(interrupt)")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "arguments", [["inspect", ""], ["pool", "add", "", "a.ptd", "--as", "a@1"], ["report", "a", "-o", ""]]
)
def test_an_empty_argument_is_no_folder(tmp_path: Path, arguments: list[str]) -> None:
    """`pool add "$POOL" ...` without the variable would make a pool in the folder where the shell is."""
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert (
        done.stderr == f"blobstore: argument {arguments.index('') + 1} is empty; is a variable of the shell not set?\n"
    )
    assert not list(tmp_path.iterdir())
