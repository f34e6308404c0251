"""Tests cite the requirements that docs/requirements.md lists, and each of these is cited (H2)."""

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = r"[A-Z][1-9]"
# (R1, B5) anywhere, or "R1, B5: ..." at the head
CITED = re.compile(rf"\(({CODE}(?:,\s+{CODE})*)\)|\A({CODE}(?:,\s+{CODE})*):")


def listed() -> dict[str, list[str]]:
    """Each requirement of the page with the tests that it names."""
    page = (ROOT / "docs/requirements.md").read_text(encoding="utf-8")
    rows = re.findall(rf"^\| ({CODE}) \|[^|]*\|([^|]*)\|$", page, re.MULTILINE)
    assert len({code for code, _ in rows}) == len(rows), "a requirement is listed twice"
    return {code: re.findall(r"`([^`]+)`", tests) for code, tests in rows}


@cache
def cited() -> dict[str, set[str]]:
    """Each requirement that a docstring of a test in Python cites, with the files."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted((ROOT / "tests").rglob("*.py")):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        for text in (ast.get_docstring(node) for node in nodes if isinstance(node, kinds)):
            for match in CITED.finditer(text or ""):
                for code in re.findall(CODE, match[0]):
                    found[code].add(str(path.relative_to(ROOT)))
    return found


def test_citations_and_requirements_agree() -> None:
    """A code that is not listed helps nobody, and a requirement without a citation may be without a test."""
    requirements, citations = listed(), cited()
    dead = {code: sorted(files) for code, files in citations.items() if code not in requirements}
    assert dead == {}
    assert [code for code in requirements if code not in citations] == []


def test_the_tests_of_a_requirement_cite_it() -> None:
    """Each row of the page names tests that are there and say that they are about it."""
    citations = cited()
    wrong = [
        f"{code}: {test}"
        for code, tests in listed().items()
        for test in tests
        if f"tests/{test}" not in citations[code]
    ]
    assert wrong == []
    assert [code for code, tests in listed().items() if not tests] == []
