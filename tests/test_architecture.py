"""The direction of imports, as docs/architecture.md lists it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "blobstore"


def rooms() -> dict[str, int]:
    """Each room of the table, a module or a folder of the package, with the number of its row."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.split("| room | concept |\n|---|---|\n")[1].split("\n\n")[0]
    found = {}
    for row, line in enumerate(table.splitlines()):
        for name in re.findall(r"`([^`]+)`", line.split("|")[1]):
            assert name not in found, f"{name} is listed twice"
            found[name] = row
    return found


def room_of(module: Path, listed: dict[str, int]) -> str:
    """The room that a module of the package lies in."""
    first = module.relative_to(PACKAGE).parts[0]
    name = first if first.endswith(".py") else f"{first}/"
    assert name in listed, f"docs/architecture.md does not list {name}"
    return name


def imported(module: Path) -> Iterator[tuple[int, Path]]:
    """Line and file of everything that a module imports from the package, at any time and for any purpose."""
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: imports are absolute"
            # what is imported may be a module itself
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "blobstore":
                yield node.lineno, home(parts)


def home(parts: list[str]) -> Path:
    """The file of a dotted name: a module, or the package that has the name."""
    for length in range(len(parts), 0, -1):
        place = ROOT.joinpath(*parts[:length])
        if place.with_suffix(".py").is_file():
            return place.with_suffix(".py")
        if (place / "__init__.py").is_file():
            return place / "__init__.py"
    raise AssertionError(f"no such module: {'.'.join(parts)}")


MODULES = sorted(PACKAGE.rglob("*.py"))


def test_the_list_names_what_there_is() -> None:
    """A room that went, or that came, changes the page."""
    listed = set(rooms())
    there = {room_of(module, rooms()) for module in MODULES}
    assert {name for name in listed - there if not (ROOT / name).exists()} == set()


@pytest.mark.parametrize("module", MODULES, ids=lambda module: str(module.relative_to(PACKAGE)))
def test_imports_go_down_the_list(module: Path) -> None:
    listed = rooms()
    here = room_of(module, listed)
    for line, target in imported(module):
        there = room_of(target, listed)
        assert listed[there] >= listed[here], f"{module}:{line}: {here} imports {there}, which is above it"
