"""Which tests are about what differs from a commit: `make test CHANGED=main`.

docs/architecture.md says which tests each room has. Those of the rooms above run, too: the rooms that import what differs.
"""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "blobstore/"
SOURCES = "runtime_bindings/src/"
NATIVE = "runtime_bindings/"
FACE = "blobstore/runtime/"  # what of Python stands on the C++ library


def main() -> None:
    files = different(sys.argv[1])
    print("\n".join(tests_of(files)))  # noqa: T201


def different(commit: str) -> list[str]:
    """The files that differ from where this branch left a commit, also those that git does not know yet."""
    base = _git("merge-base", commit, "HEAD").strip()
    listed = _git("diff", "--name-only", base) + _git("ls-files", "--others", "--exclude-standard")
    return sorted(set(listed.splitlines()))


def tests_of(files: Iterable[str]) -> list[str]:
    """What pytest is to run for some files: folders and modules, none of which lies in another one."""
    rooms = tests_of_rooms()
    users = _users()
    wanted: set[str] = set()
    for file in files:
        if file.startswith("tests/"):
            wanted.update(_tests_of_test(file))
        touched = {room for room in rooms if file == room or (room.endswith("/") and file.startswith(room))}
        if file.startswith(NATIVE) and not file.startswith((SOURCES, f"{NATIVE}python/")):
            touched.update(room for room in rooms if room.startswith(SOURCES))  # how all of it is built
        for room in touched:
            for above in _above(room, users):
                wanted.update(f"tests/{test}" for test in rooms.get(above, ()))
    there = {test for test in wanted if (ROOT / test).exists()}
    folders = tuple(test for test in there if test.endswith("/"))
    return sorted(test for test in there if not any(test != folder and test.startswith(folder) for folder in folders))


@functools.cache
def tests_of_rooms() -> dict[str, list[str]]:
    """Each room, as a path from the root of the project, with its tests, as paths below `tests/`."""
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    found = {}
    for head, place in (
        ("| room | concept | tests |", PACKAGE),
        ("| C++ room | concept | tests |", SOURCES),
        ("| other files | tests |", ""),
    ):
        lines = page.split(f"{head}\n")[1].split("\n\n")[0].splitlines()[1:]
        for line in lines:
            cells = [re.findall(r"`([^`]+)`", cell) for cell in line.strip("|").split("|")]
            for room in cells[0]:
                found[place + room] = cells[-1]
    return found


def _tests_of_test(file: str) -> Iterator[str]:
    """A test is run itself; what the tests of a room share means this room, and what all share means all."""
    path = Path(file)
    if path.name.startswith("test_"):
        yield file
    elif len(path.parts) > 2 and path.parts[1] not in {"data", "helpers"}:
        yield f"{path.parts[0]}/{path.parts[1]}/"
    else:
        yield "tests/"


def _above(room: str, users: dict[str, set[str]]) -> set[str]:
    """A room and all that stand on it, directly or not."""
    found, left = {room}, [room]
    while left:
        new = users.get(left.pop(), set()) - found
        found |= new
        left.extend(new)
    return found


@functools.cache
def _users() -> dict[str, set[str]]:
    """Each room with those that import or include something of it."""
    known = sorted(tests_of_rooms(), key=len, reverse=True)

    def room_of(path: str) -> str | None:
        return next((room for room in known if path == room or (room.endswith("/") and path.startswith(room))), None)

    users: dict[str, set[str]] = {}
    for path in [*(ROOT / PACKAGE).rglob("*.py"), *(ROOT / SOURCES).rglob("*.[ch]*")]:
        here = room_of(str(path.relative_to(ROOT)))
        for target in _targets(path):
            there = room_of(target)
            if here is not None and there is not None and here != there:
                users.setdefault(there, set()).add(here)
    for room in known:
        if room.startswith(SOURCES):
            users.setdefault(room, set()).add(FACE)
    return users


def _targets(path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield from (SOURCES + name for name in re.findall(r'#include "([^"]+)"', text))
        return
    for node in ast.walk(ast.parse(text)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            place = name.replace(".", "/")
            yield f"{place}.py" if (ROOT / f"{place}.py").is_file() else f"{place}/"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
