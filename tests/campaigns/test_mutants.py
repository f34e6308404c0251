"""The campaign of mutants takes out the guards that its list names, and the list is that of the sources."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from campaigns.mutants import copies
from campaigns.mutants.copies import StaleGuardError, mutated, place, with_switches
from campaigns.mutants.guard import Guard
from campaigns.mutants.native_guards import GUARDS as NATIVE
from campaigns.mutants.python_guards import GUARDS as PYTHON

TESTS = ("tests/campaigns/test_mutants.py",)


def test_the_list_is_that_of_the_sources() -> None:
    """Each guard is in its file, once, and its tests exist. Whoever changes one mends its entry."""
    stale = []
    for guard in (*PYTHON, *NATIVE):
        try:
            place(guard)
        except StaleGuardError as error:
            stale.append(f"{guard.name}: {error}")
    assert stale == []
    with_switches(enumerate(NATIVE))
    assert Counter(guard.name for guard in (*PYTHON, *NATIVE)).most_common(1)[0][1] == 1
    assert len(PYTHON) + len(NATIVE) >= 120 and all(guard.tests for guard in (*PYTHON, *NATIVE))
    assert {guard.native for guard in PYTHON} == {False} and {guard.native for guard in NATIVE} == {True}


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(copies, "ROOT", tmp_path)
    (tmp_path / "tests/campaigns").mkdir(parents=True)
    (tmp_path / TESTS[0]).touch()
    (tmp_path / "a.py").write_text("if x > 1:\n    fail()\nif y:\n    fail()\n")
    (tmp_path / "a.cpp").write_text("if (x > 1) {\n  check(x);\n}\n")
    return tmp_path


def test_guards_are_replaced(source: Path) -> None:
    """In Python by the mutant, in C++ by a choice between the two."""
    assert mutated(Guard("", "a.py", "x > 1", "False", TESTS)) == "if False:\n    fail()\nif y:\n    fail()\n"
    guards = [(4, Guard("", "a.cpp", "x > 1", "false", TESTS)), (5, Guard("", "a.cpp", "check(x);", ";", TESTS))]
    [text] = with_switches(guards).values()
    assert text == (
        "if ((blobstore_mutant(4) ? (false) : (x > 1))) {\n  if (blobstore_mutant(5)) { ; } else { check(x); }\n}\n"
    )


@pytest.mark.parametrize(
    ("guard", "message"),
    [
        (Guard("", "a.py", "fail()", "pass", TESTS), "occurs 2 times"),
        (Guard("", "a.py", "x > 2", "False", TESTS), "occurs 0 times"),
        (Guard("", "b.py", "x > 1", "False", TESTS), "does not exist"),
        (Guard("", "a.py", "x > 1", "False", ("tests/other.py::test",)), "there is no test"),
        (Guard("", "a.cpp", "x > 1", "false", ("other_test",)), "there is no test"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_there_is_a_finding(source: Path, guard: Guard, message: str) -> None:
    with pytest.raises(StaleGuardError, match=message):
        place(guard)


def test_guards_that_overlap(source: Path) -> None:
    guards = [
        (1, Guard("", "a.cpp", "x > 1", "false", TESTS)),
        (2, Guard("", "a.cpp", "if (x > 1", "if (false", TESTS)),
    ]
    with pytest.raises(StaleGuardError, match="overlaps"):
        with_switches(guards)
