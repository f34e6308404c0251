"""The campaign of mutants takes out the guards that its list names, and the list is that of the sources."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from campaigns.mutants import copies
from campaigns.mutants.copies import check, mutated, with_switches
from campaigns.mutants.guard import Guard
from campaigns.mutants.native_guards import GUARDS as NATIVE
from campaigns.mutants.places import StaleGuardError
from campaigns.mutants.python_guards import GUARDS as PYTHON

TESTS = ("tests/campaigns/test_mutants.py",)
PYTHON_SOURCE = """\
def f(x, y):
    if x > 1:
        fail()
    if y and (
        x
        > 1 + y
    ):
        sync()
        tell()


class C:
    def f(self):
        fail()
        fail()
"""
NATIVE_SOURCE = """\
void f(int x) {
  if (x
      > 1) {
    check(x, '{', "}");
  }
}

int g(int x) { return x > 2; }
"""


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
    (tmp_path / "a.py").write_text(PYTHON_SOURCE)
    (tmp_path / "a.cpp").write_text(NATIVE_SOURCE)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "mutant", "lines"),
    [
        ("x > 1", "False", ["if False:"]),
        ("x>1+y", "y", ["if y and y:"]),
        ("sync()", "None", ["None"]),
        ("sync()\ntell()", "tell()", []),
        ("fail()\nfail()", "pass", ["pass"]),
    ],
)
def test_a_guard_in_python_is_replaced(source: Path, text: str, mutant: str, lines: list[str]) -> None:
    """By what the mutant has, however it is wrapped; everything else says the same."""
    result = mutated(Guard("", "a.py", text, TESTS, mutant))
    before = Counter(
        line.strip() for line in PYTHON_SOURCE.replace("(\n        x\n        > 1 + y\n    )", "x > 1 + y").splitlines()
    )
    assert [line for line in lines if line not in {new.strip() for new in result.splitlines()}] == []
    new = Counter(line.strip() for line in result.splitlines()) - before
    assert sorted(new) == sorted(lines)


def test_a_guard_in_cpp_can_be_switched_off(source: Path) -> None:
    """One that overlaps another one cannot."""
    guards = [
        (4, Guard("", "a.cpp", "x > 1", TESTS, "false")),
        (5, Guard("", "a.cpp", "check(x,'{',\"}\");", TESTS, ";")),
        (7, Guard("", "a.cpp", "x > 2", TESTS, "true")),
    ]
    with pytest.raises(StaleGuardError, match="overlaps"):
        with_switches([*guards, (8, Guard("", "a.cpp", "if (x > 1", TESTS, "if (false"))])
    [text] = with_switches(guards).values()
    assert text == (
        NATIVE_SOURCE.replace("x\n      > 1", "(blobstore_mutant(4) ? (false) : (x\n      > 1))")
        .replace("check(x, '{', \"}\");", "if (blobstore_mutant(5)) { ; } else { check(x, '{', \"}\"); }")
        .replace("x > 2", "(blobstore_mutant(7) ? (true) : (x > 2))")
    )


@pytest.mark.parametrize(
    ("guard", "message"),
    [
        (Guard("", "a.py", "fail()", TESTS), "occurs 3 times"),
        (Guard("", "a.py", "x > 2", TESTS), "occurs 0 times"),
        (Guard("", "b.py", "x > 1", TESTS), "does not exist"),
        (Guard("", "a.py", "x > 1", ("tests/other.py::test",)), "there is no test"),
        (Guard("", "a.py", "x > 1", (f"{TESTS[0]}::test_it",)), "there is no test"),
        (Guard("", "a.cpp", "x > 1", ("other_test",)), "there is no test"),
        (Guard("", "a.cpp", "x > 3", TESTS), "occurs 0 times"),
    ],
)
def test_what_is_not_there_is_a_finding(source: Path, guard: Guard, message: str) -> None:
    with pytest.raises(StaleGuardError, match=message):
        check(guard)
