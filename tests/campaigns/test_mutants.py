"""The campaign of mutants takes out the guards that its list names, and the list is that of the sources."""

from collections import Counter
from pathlib import Path

import pytest

from campaigns.mutants import copies
from campaigns.mutants.copies import check, with_switches
from campaigns.mutants.guard import Guard
from campaigns.mutants.native_guards import GUARDS as NATIVE
from campaigns.mutants.places import StaleGuardError
from campaigns.mutants.python_guards import GUARDS as PYTHON

TESTS = ("tests/campaigns/test_mutants.py",)


def test_the_list_is_that_of_the_sources() -> None:
    """Each guard is in its function, once, and its tests exist. Whoever changes one mends its entry."""
    stale = []
    for guard in (*PYTHON, *NATIVE):
        try:
            check(guard)
        except StaleGuardError as error:
            stale.append(f"{guard.name}: {error}")
    assert stale == []
    with_switches(enumerate(NATIVE))
    assert [name for name, count in Counter(guard.name for guard in (*PYTHON, *NATIVE)).items() if count > 1] == []
    assert [guard.name for guard in (*PYTHON, *NATIVE) if not guard.tests] == []
    assert {guard.native for guard in PYTHON} == {False} and {guard.native for guard in NATIVE} == {True}


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(copies, "ROOT", tmp_path)
    (tmp_path / "tests/campaigns").mkdir(parents=True)
    (tmp_path / TESTS[0]).touch()
    (tmp_path / "a.py").write_text("if x > 1:\n    fail()\n    fail()\n")
    (tmp_path / "a.cpp").write_text("int g(int x) { return x > 1; }\n")
    return tmp_path


@pytest.mark.parametrize(
    ("guard", "message"),
    [
        (Guard("", "a.py", "fail()", TESTS), "occurs 2 times"),
        (Guard("", "a.py", "x > 2", TESTS), "occurs 0 times"),
        (Guard("", "b.py", "x > 1", TESTS), "does not exist"),
        (Guard("", "a.py", "x > 1", ("tests/other.py::test",)), "there is no test"),
        (Guard("", "a.py", "x > 1", (f"{TESTS[0]}::test_it",)), "there is no test"),
        (Guard("", "a.cpp", "x > 1", ("other_test",)), "there is no test"),
        (Guard("", "a.cpp", "x > 3", TESTS), "occurs 0 times"),
    ],
)
def test_what_is_not_there_is_a_finding(source: Path, guard: Guard, message: str) -> None:
    """Of the rest the campaign tells itself: a guard that is not taken out survives."""
    with pytest.raises(StaleGuardError, match=message):
        check(guard)
