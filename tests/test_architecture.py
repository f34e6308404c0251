"""Imports and includes go in one direction, which docs/architecture.md lists (H2)."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import budget, changed

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "blobstore"


def table(head: str) -> list[str]:
    """The rows of the table with this head."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    return page.split(f"{head}\n")[1].split("\n\n")[0].splitlines()[1:]


def inner_orders(head: str = "| inside | from top to bottom |") -> dict[str, dict[str, int]]:
    """For each folder of such a table, its modules and folders with their level, counted from the top."""
    orders: dict[str, dict[str, int]] = {}
    for line in table(head):
        folder, levels = re.findall(r"[^|]+", line)
        orders[folder.strip(" `")] = {
            name: level for level, part in enumerate(levels.split("→")) for name in re.findall(r"`([^`]+)`", part)
        }
    return orders


def rooms() -> dict[str, int]:
    """Each room of the first table, a module or a folder of the package, with the number of its row."""
    found: dict[str, int] = {}
    for row, line in enumerate(table("| room | concept | tests |")):
        for name in re.findall(r"`([^`]+)`", line.split("|")[1]):
            assert name not in found, f"{name} is listed twice"
            found[name] = row
    return found


def room_of(module: Path, listed: dict[str, int]) -> str:
    """The room of a module of the package."""
    alone = str(module.relative_to(PACKAGE))
    name = alone if alone in listed else part_of(module, PACKAGE)
    assert name in listed, f"docs/architecture.md does not list {name}"
    return name


def part_of(module: Path, folder: Path) -> str:
    """The module or folder directly below `folder` that a module belongs to."""
    first = module.relative_to(folder).parts[0]
    return first if first.endswith(".py") else f"{first}/"


def imported(module: Path) -> Iterator[tuple[int, Path]]:
    """Line and file of everything that a module imports from the package, also inside functions and for types."""
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
    """The file of a dotted name: a module, or the package that defines the name."""
    for length in range(len(parts), 0, -1):
        place = ROOT.joinpath(*parts[:length])
        if place.with_suffix(".py").is_file():
            return place.with_suffix(".py")
        if (place / "__init__.py").is_file():
            return place / "__init__.py"
    raise AssertionError(f"no such module: {'.'.join(parts)}")


MODULES = sorted(PACKAGE.rglob("*.py"))


def test_the_list_names_what_there_is() -> None:
    """A room that is added or removed changes the page."""
    listed = set(rooms())
    there = {room_of(module, rooms()) for module in MODULES}
    assert listed == there


@pytest.mark.parametrize("module", MODULES, ids=lambda module: str(module.relative_to(PACKAGE)))
def test_imports_go_down_the_list(module: Path) -> None:
    listed = rooms()
    here = room_of(module, listed)
    for line, target in imported(module):
        there = room_of(target, listed)
        assert listed[there] >= listed[here], f"{module}:{line}: {here} imports {there}, which is above it"


def stands_on() -> dict[str, set[str]]:
    """For each room the others of which it may use any module."""
    rows = [[re.findall(r"`([^`]+)`", cell) for cell in line.split("|")[1:3]] for line in table("| room | stands on |")]
    return {room: set(others) for uppers, others in rows for room in uppers}


def is_face(module: Path) -> bool:
    """Whether a module is what users import: a room's `__init__.py`, whose `__all__` mypy holds to, or a module beside rooms."""
    return module.relative_to(PACKAGE).parts[1:] in {(), ("__init__.py",)}


def test_a_room_uses_public_names_of_those_that_it_does_not_stand_on() -> None:
    """The list says what there is, and no more: the report, the pool and what pulls releases stand apart."""
    listed, allowed, found = rooms(), stands_on(), set()
    for module in MODULES:
        here = room_of(module, listed)
        for line, target in imported(module):
            there = room_of(target, listed)
            if there not in {here, "core/"} and not is_face(target):
                found.add((here, there))
                assert there in allowed.get(here, ()), (
                    f"{module}:{line}: {here} imports {target}, which is inside {there}"
                )
    assert found == {(here, there) for here, others in allowed.items() for there in others}


def doors() -> set[Path]:
    """Folders of rooms, outside the core, whose `__init__.py` has an `__all__`."""
    inits = (
        init for init in PACKAGE.rglob("__init__.py") if not is_face(init) and PACKAGE / "core" not in init.parents
    )
    return {init.parent for init in inits if "\n__all__ = " in init.read_text(encoding="utf-8")}


def test_a_folder_with_a_door_is_entered_by_it() -> None:
    closed = doors()
    assert {PACKAGE / "reporting" / folder for folder in ("read", "find", "show")} <= closed
    for module in MODULES:
        for line, target in imported(module):
            for folder in set(target.parents) & closed - set(module.parents):
                assert target == folder / "__init__.py", f"{module}:{line} imports {target}, which is inside {folder}"


@pytest.mark.parametrize("folder", inner_orders())
def test_imports_inside_a_room_go_down_its_list(folder: str) -> None:
    """Every module of such a room has a place in the list."""
    place, order = PACKAGE / folder, inner_orders()[folder]
    for module in sorted(set(place.rglob("*.py")) - {place / "__init__.py"}):
        here = part_of(module, place)
        assert here in order, f"docs/architecture.md does not list {folder}{here}"
        for line, target in imported(module):
            if place in target.parents and target != place / "__init__.py" and part_of(target, place) != here:
                there = part_of(target, place)
                assert order[there] > order[here], f"{module}:{line}: {here} imports {there}, which is not below it"


SOURCES = ROOT / "runtime_bindings" / "src"
PUBLIC = ROOT / "runtime_bindings" / "include"


def test_includes_go_down_the_list() -> None:
    """Every folder of the C++ library is a room of its own row."""
    order = {
        name: row
        for row, line in enumerate(table("| C++ room | concept | tests |"))
        for name in re.findall(r"`([^`]+)/`", line.split("|")[1])
    }
    assert set(order) == {folder.name for folder in SOURCES.iterdir() if folder.is_dir()}
    for source in SOURCES.rglob("*.[ch]*"):
        here = source.relative_to(SOURCES).parts[0]
        for path in re.findall(r'#include "([^"]+)"', source.read_text(encoding="utf-8")):
            there = path.split("/")[0]
            assert (SOURCES / path).is_file(), f"{source} includes {path}, which is not named from {SOURCES}"
            assert there == here or order[there] > order[here], f"{source} includes {path}, which is above it"


INSIDE = inner_orders("| inside C++ | from top to bottom |")


@pytest.mark.parametrize("room", sorted(folder.name for folder in SOURCES.iterdir() if folder.is_dir()))
def test_includes_inside_a_cpp_room_go_down_its_list(room: str) -> None:
    """A header and a source of one name are one thing, so no two of them include each other."""
    order = INSIDE[f"{room}/"]
    assert set(order) == {path.stem for path in (SOURCES / room).iterdir()}
    for source in (SOURCES / room).iterdir():
        for there in re.findall(rf'#include "{room}/(\w+)\.h"', source.read_text(encoding="utf-8")):
            assert there == source.stem or order[there] > order[source.stem], f"{source} includes {there}"


def test_the_cpp_core_includes_nothing_of_executorch() -> None:
    """Not in the public headers that it includes, either."""
    waiting = [path for room in ("os", "format", "cache", "codec", "releases") for path in (SOURCES / room).iterdir()]
    seen = set(waiting)
    while waiting:
        text = waiting.pop().read_text(encoding="utf-8")
        assert "#include <executorch/" not in text
        headers = {PUBLIC / path for path in re.findall(r"#include <(blobstore/.*)>", text)}
        waiting += headers - seen
        seen |= headers
    assert PUBLIC / "blobstore" / "cache.h" in seen


def test_each_test_is_about_something() -> None:
    """The columns of tests name what there is, and all of it, so that `make test CHANGED=main` finds it."""
    listed = {f"tests/{test}" for tests in changed.tests_of_rooms().values() for test in tests}
    assert {test for test in listed if not (ROOT / test).exists()} == set()
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    assert {module for module in modules - listed if not any(module.startswith(room) for room in listed)} == set()


@pytest.mark.parametrize(
    ("file", "runs", "not_those"),
    [
        ("blobstore/llm/export.py", {"tests/llm/"}, {"tests/adapters/", "tests/core/"}),
        ("blobstore/logical/steps.py", {"tests/logical/", "tests/lowering/", "tests/training/"}, {"tests/core/"}),
        ("blobstore/core/store.py", {"tests/core/", "tests/lowering/", "tests/releases/"}, set()),
        ("runtime_bindings/src/releases/parts.cpp", {"tests/releases/"}, {"tests/pool/", "tests/core/"}),
        (
            "runtime_bindings/src/os/file.cpp",
            {"tests/runtime/", "tests/lowering/", "tests/core/disk/"},
            {"tests/core/"},
        ),
        ("tests/core/tools/test_delta.py", {"tests/core/tools/test_delta.py"}, {"tests/core/tools/"}),
        ("tests/pool/gateway.py", {"tests/pool/"}, {"tests/core/"}),
        ("tests/helpers/models.py", {"tests/"}, set()),
        ("java/src/dev/blobstore/Tensor.java", {"tests/runtime/test_java.py"}, {"tests/runtime/"}),
        ("LICENSE", set(), {"tests/"}),
    ],
)
def test_what_a_change_runs(file: str, runs: set[str], not_those: set[str]) -> None:
    """The tests of its room and of those above, and no others (H2)."""
    found = set(changed.tests_of([file]))
    assert runs <= found and not not_those & found


COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def test_no_comprehension_makes_a_collection_for_each_of_its_items() -> None:
    """`x in {*a, *b}` in a comprehension takes time for each pair: publishing 100,000 blobs took minutes by that."""
    for module in (ROOT / "blobstore").rglob("*.py"):
        for made in filter(lambda node: isinstance(node, COMPREHENSIONS), ast.walk(ast.parse(module.read_text()))):
            bound = {
                name.id for name in ast.walk(made) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
            }
            for test in (test for generator in made.generators for test in generator.ifs):  # type: ignore[attr-defined]
                for part in ast.walk(test):
                    stars = isinstance(part, ast.Dict) and None in part.keys
                    stars |= any(isinstance(item, ast.Starred) for item in getattr(part, "elts", ()))
                    used = {name.id for name in ast.walk(part) if isinstance(name, ast.Name)}
                    assert not stars or used & bound, f"{module}:{part.lineno}: {ast.unparse(part)}"  # type: ignore[attr-defined]


def test_no_room_has_more_lines_than_its_ceiling() -> None:
    """`make budget ARGUMENTS=--write` brings the numbers of the page up to date; a ceiling is raised by hand."""
    known, lines = budget.ceilings(), budget.counted()
    assert set(known) == set(lines), f"the rooms differ; the table is to be:\n{budget.text()}"
    high = {room: lines[room] - known[room] for room in known if lines[room] > known[room]}
    assert high == {}, f"these rooms are above their ceilings:\n{budget.text()}"
