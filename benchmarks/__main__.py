"""Run the measurements and print them: `make bench`, or some of them: `python -m benchmarks store`."""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import sys
import tempfile
from pathlib import Path

MODULES = ("store", "report", "runtime", "lowering", "training", "adapters")


def main() -> None:
    """Measure, print a Markdown table, and exit with 1 if a bar is not met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=f"some of {', '.join(MODULES)}; by default all")
    parser.add_argument(
        "--folder", type=Path, help="where to write the files, about 8 GB; by default a temporary folder"
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.modules) - set(MODULES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}; medians\n")
    met = True
    for name in arguments.modules or MODULES:
        module = importlib.import_module(f"benchmarks.{name}")
        print(f"**{module.TITLE}**\n\n| work | measured | bar | |\n|---|---|---|---|")
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            for row in module.rows(Path(folder)):
                met &= row.met
                print(
                    f"| {row.work.replace('  ', '&nbsp;&nbsp;')} | {row.figure} | {row.bar} | {'met' if row.met else 'NOT MET'} |"
                )
                sys.stdout.flush()
        print()
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
