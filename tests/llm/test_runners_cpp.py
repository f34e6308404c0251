"""Requests with adapters in C++: each text is that of eager PyTorch with these weights (L3, N1)."""

import subprocess
from pathlib import Path

import pytest

from tests.llm.letters import eager
from tests.runtime.application import ROOT, build

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def application() -> Path:
    return build(ROOT / "tests" / "llm" / "runners", "requests_with_adapters")


def step(application: Path, name: str, folder: Path) -> list[str]:
    """What a step of the application prints."""
    done = subprocess.run([str(application), name, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_conversation(application: Path, exported: Path) -> None:
    """On its key/value cache while the adapter stays, and read again when it changes; then stopping."""
    *answers, text, continued, stopped, never = step(application, "conversation", exported)
    said = ""
    for adapter, answer in zip(("one", "one", "two", "two"), answers, strict=True):
        assert answer == eager(said + "hi", adapter)
        said += "hi" + answer
    assert text == said and continued == "2"
    assert stopped == eager("hi", "two")[0] and never == "''"


def test_errors_as_values(application: Path, exported: Path) -> None:
    """Each names what is wrong, and the next request is answered. What else is refused, test_runners.py shows: the queue is
    the same."""
    unknown, long, answer, file, none, load = step(application, "without_exceptions", exported)
    assert "no adapter is called 'one'; there are 'two'" in unknown
    assert "generate of ExecuTorch's runner ended with error 18; the text may be too long" in long
    assert answer == eager("once", "two")
    assert file == "refused" and none == "there is no runner"
    assert "load of ExecuTorch's runner ended with error" in load
