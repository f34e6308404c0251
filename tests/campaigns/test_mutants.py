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
// void f() { if (x > 1) {} }
void f(int x) {
  if (x
      > 1) {
    check(x, '{', "}");
  }
}

C::C(int x) : a_(x > 1), b_{f(x)} {
  if (x > 2) { f(x); }
}

int g() { return x > 1; }
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
    ("function", "text", "mutant", "lines"),
    [
        ("f", "x > 1", "False", ["if False:"]),
        ("f", "x>1+y", "y", ["if y and y:"]),
        ("f", "sync()", "None", ["None"]),
        ("f", "sync()\ntell()", "tell()", []),
        ("C.f", "fail()\nfail()", "pass", ["pass"]),
    ],
)
def test_a_guard_in_python_is_replaced(source: Path, function: str, text: str, mutant: str, lines: list[str]) -> None:
    """By what the mutant has, however it is wrapped; everything else says the same."""
    result = mutated(Guard("", "a.py", function, text, TESTS, mutant))
    before = Counter(
        line.strip() for line in PYTHON_SOURCE.replace("(\n        x\n        > 1 + y\n    )", "x > 1 + y").splitlines()
    )
    assert [line for line in lines if line not in {new.strip() for new in result.splitlines()}] == []
    new = Counter(line.strip() for line in result.splitlines()) - before
    assert sorted(new) == sorted(lines)


def test_a_guard_in_cpp_can_be_switched_off(source: Path) -> None:
    guards = [
        (4, Guard("", "a.cpp", "f", "x > 1", TESTS, "false")),
        (5, Guard("", "a.cpp", "f", "check(x,'{',\"}\");", TESTS, ";")),
        (6, Guard("", "a.cpp", "C", "x > 2", TESTS, "false")),
        (7, Guard("", "a.cpp", "g", "x > 1", TESTS, "true")),
    ]
    [text] = with_switches(guards).values()
    assert text == (
        NATIVE_SOURCE.replace("x\n      > 1", "(blobstore_mutant(4) ? (false) : (x\n      > 1))")
        .replace("check(x, '{', \"}\");", "if (blobstore_mutant(5)) { ; } else { check(x, '{', \"}\"); }")
        .replace("x > 2", "(blobstore_mutant(6) ? (false) : (x > 2))")
        .replace("return x > 1", "return (blobstore_mutant(7) ? (true) : (x > 1))")
    )


@pytest.mark.parametrize(
    ("guard", "message"),
    [
        (Guard("", "a.py", "C.f", "fail()", TESTS, "pass"), "occurs 2 times"),
        (Guard("", "a.py", "f", "x > 2", TESTS, "False"), "occurs 0 times"),
        (Guard("", "a.py", "g", "x > 1", TESTS, "False"), "the function occurs 0 times"),
        (Guard("", "b.py", "f", "x > 1", TESTS, "False"), "does not exist"),
        (Guard("", "a.py", "f", "x > 1", ("tests/other.py::test",), "False"), "there is no test"),
        (Guard("", "a.py", "f", "x > 1", (f"{TESTS[0]}::test_it",)), "there is no test"),
        (Guard("", "a.cpp", "f", "x > 1", ("other_test",), "false"), "there is no test"),
        (Guard("", "a.cpp", "h", "x > 1", TESTS, "false"), "there is no function h"),
        (Guard("", "a.cpp", "g", "x > 2", TESTS, "false"), "occurs 0 times"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_there_is_a_finding(source: Path, guard: Guard, message: str) -> None:
    with pytest.raises(StaleGuardError, match=message):
        check(guard)


def test_guards_that_overlap(source: Path) -> None:
    guards = [
        (1, Guard("", "a.cpp", "f", "x > 1", TESTS, "false")),
        (2, Guard("", "a.cpp", "f", "if (x > 1", TESTS, "if (false")),
    ]
    with pytest.raises(StaleGuardError, match="overlaps"):
        with_switches(guards)
