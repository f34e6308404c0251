"""Run the measurements and print them: `make bench`, or some of them: `python -m benchmarks store`.

With `--page docs/benchmarks.md` the tables on that page become those of this run.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

MODULES = (
    "store",
    "report",
    "runtime",
    "java",
    "lowering",
    "backends",
    "tensors",
    "training",
    "adapters",
    "packed",
    "memory",
    "llm",
    "transformers",
    "fuse",
    "releases",
    "pool",
)
BY_NAME = ("sizes", "without_torch", "pool_series", "pool_files")
"""Only if they are named: their tables are on another page. `pool` stands for all whose names begin with it."""


def main() -> None:
    """Measure, print Markdown tables, and exit with 1 if a bar is not met."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument(
        "modules",
        nargs="*",
        metavar="MODULE",
        help=f"some of {', '.join(MODULES)}; by default all. And {', '.join(BY_NAME)}",
    )
    parser.add_argument(
        "--folder", type=Path, help="where to write the files, about 8 GB; by default a temporary folder"
    )
    parser.add_argument(
        "--page",
        type=Path,
        action="append",
        default=[],
        help="put the tables between their marks on this Markdown page",
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.modules) - {*MODULES, *BY_NAME}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    chosen = [
        name
        for named in arguments.modules
        for name in (*MODULES, *BY_NAME)
        if name == named or name.startswith(f"{named}_")
    ]
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}; medians\n")
    met = True
    for name in chosen or MODULES:
        module = importlib.import_module(f"benchmarks.{name}")
        print(f"**{module.TITLE}**\n")
        lines = []
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            for line, held in table(module, Path(folder)):
                print(line)
                sys.stdout.flush()
                lines.append(line)
                met &= held
        print()
        put(arguments.page, name, "\n".join(lines))
    sys.exit(0 if met else 1)


def table(module: object, folder: Path) -> Iterator[tuple[str, bool]]:
    """The lines of a module's table, and whether the bar of each is met."""
    columns = getattr(module, "COLUMNS", ("work", "measured", "bar", ""))
    yield f"| {' | '.join(columns)} |".replace("|  |", "| |"), True
    yield "|---" * len(columns) + "|", True
    for row in module.rows(folder):  # type: ignore[attr-defined]
        work = re.sub(r"^ +", lambda match: "&nbsp;" * len(match[0]), row.work)
        verdict = ("met" if row.met else "**not met**") if row.bar else ""
        yield f"| {work} | {row.figure} | {row.bar} | {verdict} |", row.met


def put(pages: Iterable[Path], name: str, text: str) -> None:
    """Replace what stands between the marks `<!-- name -->` and `<!-- /name -->` of one of the pages, if there are any."""
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    olds = {page: page.read_text(encoding="utf-8") for page in pages}
    for page, old in olds.items():
        if old.count(begin) == 1 and old.count(end) == 1:
            before, rest = old.split(begin)
            page.write_text(before + begin + text + "\n" + end + rest.split(end)[1], encoding="utf-8")
            return
    if olds:
        sys.exit(f"{', '.join(map(str, olds))}: expected one {begin.strip()} and one {end}")


if __name__ == "__main__":
    main()
