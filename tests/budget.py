"""How many lines each room has, beside its ceiling: `make budget`; with `--write`, docs/architecture.md gets the numbers.

Counted are the lines of tracked files of code that are ours. The project for Java, which stands beside the two packages, has
a sum of its own. A ceiling stays what the page says; `--write` raises none. A room that the page does not have yet gets its
lines, rounded up to the next hundred.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/architecture.md"
HEAD = "| room | lines | ceiling |\n|---|---:|---:|\n"
CODE = re.compile(r"\.(py|cpp|h|c|java|kt|js|css|html|fbs|txt|cmake|toml)$")
PROOF = re.compile(r"\.(py|cpp|h|java)$")
TOTAL = "together"
JAVA = "java/"
IN_JAVA = f"`{JAVA}` together"
PROVING = "`tests/` and `campaigns/`"
VENDORED = "`third_party/`"


def main() -> None:
    table = text()
    if "--write" in sys.argv[1:]:
        page = PAGE.read_text(encoding="utf-8")
        start = page.index(HEAD)
        PAGE.write_text(page[:start] + table + page[page.index("\n\n", start + len(HEAD) - 1) + 1 :], encoding="utf-8")
    else:
        sys.stdout.write(table)


def text() -> str:
    """The table as it should be: the lines of the tree, and the ceilings of the page."""
    known = ceilings()
    rows = [(room, lines, known.get(room, -(-lines // 100) * 100)) for room, lines in counted().items()]
    return HEAD + "".join(f"| {room} | {lines:,} | {ceiling:,} |\n" for room, lines, ceiling in rows)


def ceilings() -> dict[str, int]:
    """What the page allows for each room."""
    rows = PAGE.read_text(encoding="utf-8").split(HEAD)[1].split("\n\n")[0].splitlines()
    cells = [row.strip("| ").split(" | ") for row in rows if row.startswith("| ")]
    return {room: int(ceiling.replace(",", "")) for room, _, ceiling in cells}


def counted() -> dict[str, int]:
    """The lines of each room: those of the product, their sum, the same of Java, those of the proof, and what is not ours."""
    rooms: dict[str, int] = {}
    proof = vendored = 0
    command = ["git", "-C", str(ROOT), "ls-files"]
    for name in subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines():
        path = ROOT / name
        if not path.is_file():
            continue
        if "third_party" in path.parts and CODE.search(name):
            vendored += _lines(path)
        elif name.startswith(("tests/", "campaigns/")) and PROOF.search(name):
            proof += _lines(path)
        elif name.startswith(("blobstore/", "runtime_bindings/", JAVA)) and CODE.search(name):
            room = f"`{_room(name)}`"
            rooms[room] = rooms.get(room, 0) + _lines(path)
    java = {room: lines for room, lines in rooms.items() if room.startswith(f"`{JAVA}")}
    product = {room: lines for room, lines in rooms.items() if room not in java}
    sums = {TOTAL: sum(product.values()), **java, IN_JAVA: sum(java.values())}
    return {**product, **sums, PROVING: proof, VENDORED: vendored}


def _room(name: str) -> str:
    """A folder of the package, of the C++ library or of the project for Java; single files of each count as one room."""
    parts = name.split("/")
    depth = 3 if parts[:2] == ["runtime_bindings", "src"] or parts[:2] == ["blobstore", "core"] else 2
    return "/".join(parts[: min(depth, len(parts) - 1)]) + "/"


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n")


if __name__ == "__main__":
    main()
