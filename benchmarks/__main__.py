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
    if missing := [str(page) for page in arguments.page if not page.is_file()]:
        parser.error(f"no page: {', '.join(missing)}")
    chosen = [
        name
        for named in arguments.modules
        for name in (*MODULES, *BY_NAME)
        if name == named or name.startswith(f"{named}_")
    ]
    if lacking := [name for name in chosen or MODULES if arguments.page and page_of(arguments.page, name) is None]:
        pages = ", ".join(map(str, arguments.page))
        parser.error(f"{pages}: expected marks such as <!-- {lacking[0]} -->, once, for {', '.join(lacking)}")
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


def page_of(pages: Iterable[Path], name: str) -> Path | None:
    """The page that has the marks of a table, once."""
    texts = {page: page.read_text(encoding="utf-8") for page in pages}
    marks = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    return next((page for page, text in texts.items() if all(text.count(mark) == 1 for mark in marks)), None)


def put(pages: Iterable[Path], name: str, text: str) -> None:
    """Replace what stands between the marks `<!-- name -->` and `<!-- /name -->` of one of the pages, if there are any."""
    page = page_of(pages, name)
    if page is not None:
        before, rest = page.read_text(encoding="utf-8").split(f"<!-- {name} -->\n")
        after = rest.split(f"<!-- /{name} -->")[1]
        page.write_text(f"{before}<!-- {name} -->\n{text}\n<!-- /{name} -->{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
