"""Rules for all tests of this project."""

import ast
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import changed
from tests.helpers.waiting import until, until_blocked

ROOT = Path(__file__).parents[1]

# A pause for as long as a test hopes that something takes, in its own code or in that of a process that it starts
PYTHON_PAUSE = re.compile(r"\bsleep\(|\bwait_for_timeout\(|\.wait\((?:timeout=)?[\d.]")
# One millisecond is the pause of a loop that checks a condition
CPP_PAUSE = re.compile(r"\bu?sleep\(|\bsleep_(?:for|until)\((?!std::chrono::milliseconds\(1\)\))")


def found(pattern: re.Pattern[str], files: str, *, but: str = "") -> Iterator[str]:
    """The lines that match, in all files but this one and `but`."""
    for path in sorted(set(ROOT.glob(files)) - {Path(__file__), ROOT / but}):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if pattern.search(line):
                yield f"{path.relative_to(ROOT)}:{number}: {line.strip()}"


def test_no_test_sleeps_to_win_a_race() -> None:
    """Tests wait for conditions, with tests/helpers/waiting.py."""
    assert list(found(PYTHON_PAUSE, "tests/**/*.py", but="tests/helpers/waiting.py")) == []
    assert list(found(CPP_PAUSE, "tests/**/*.cpp")) == []
    assert list(found(CPP_PAUSE, "runtime_bindings/tests/**/*.cpp")) == []


def test_examples_have_no_time_limit() -> None:
    """The profile in tests/conftest.py sets this for all."""
    assert list(found(re.compile(r"\bdeadline="), "tests/**/*.py", but="tests/conftest.py")) == []


@pytest.mark.parametrize("room", ["memory", "disk"])
def test_each_module_of_a_low_room_has_tests_of_its_own(room: str) -> None:
    """A defect there would show in the tests of other rooms, far from its cause."""
    modules = {path.stem for path in (ROOT / "blobstore" / "core" / room).glob("*.py")} - {"__init__"}
    assert modules == {path.stem.removeprefix("test_") for path in (ROOT / "tests" / "core" / room).glob("test_*.py")}


def test_a_short_run_goes_through_each_wing() -> None:
    """Each folder around the core has a test that is marked as a way, so that `make test` sees when it breaks (H2)."""
    ways = [line.removeprefix("tests/") for line in found(re.compile(r"@pytest\.mark\.way\b"), "tests/**/test_*.py")]
    below = {f"blobstore/{room}/" for room in ("cli", "core", "storage", "testing")}
    wings = {room: tests for room, tests in changed.tests_of_rooms().items() if re.fullmatch(r"blobstore/\w+/", room)}
    assert below < set(wings)
    assert [
        room
        for room, tests in wings.items()
        if room not in below and not any(way.startswith(tuple(tests)) for way in ways)
    ] == []


@pytest.mark.long
def test_docstrings_of_tests_cite_requirements_and_no_issues() -> None:
    """They are read long after the work that led to them is done."""
    found = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node) or ""
                if re.search(r"\b(issue|audit)\b|#\d", text, re.IGNORECASE):
                    found.append(f"{path.relative_to(ROOT)}: {text.splitlines()[0]}")
    assert found == []


@pytest.mark.long
def test_what_needs_the_native_package_is_skipped_visibly_without_it() -> None:
    """A run without it names the modules that it skipped, and why; it does not leave them out silently."""
    script = """
import importlib.util, sys, pytest
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "blobstore_runtime" else find(name, *rest)
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "tests/runtime/test_exit.py"]))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, done.stdout + done.stderr
    assert "needs the native package executorch-blobstore-runtime" in done.stdout


def test_a_thread_that_waits_for_a_lock_is_blocked() -> None:
    """A thread that computes, or that waits for its turn to run Python, is not blocked."""
    lock, done = threading.Lock(), []

    def work() -> None:
        for number in range(300_000):
            done.append(number)
        with lock:
            pass

    with lock:
        thread = threading.Thread(target=work)
        thread.start()
        until_blocked(thread)
        assert len(done) == 300_000
    thread.join()
    with pytest.raises(AssertionError, match="the thread ended"):
        until_blocked(thread)


def test_a_condition_that_never_holds_fails_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.helpers.waiting.SECONDS", 0)
    with pytest.raises(TimeoutError, match="never came true"):
        until(lambda: False)
