"""Try the architectures of transformers, each in a process of its own: `make architectures`.

Each is exported in a tiny configuration by transformers' own exporter and by ours. The first is deduplicated and run by
stock ExecuTorch, the second gets new weights by their names. What was found is in `results.json`, and as a table in
docs/transformers.md. The campaign fails if anything is wrong that is ours.
"""

import argparse
import sys
import time

from campaigns.architectures.process import try_one
from campaigns.architectures.table import RESULTS, failures, read_results, write_results, write_table


def main() -> None:
    parser = argparse.ArgumentParser(prog="make architectures", description=__doc__)
    parser.add_argument("--only", nargs="*", help="types of models, such as llama; by default all there are")
    parser.add_argument("--seconds", type=int, default=900, help="the limit for each")
    parser.add_argument("--minutes", type=int, default=24 * 60, help="for all; the next run goes on behind them")
    parser.add_argument("--table", action="store_true", help="only write the table")
    options = parser.parse_args()
    if not options.table:
        run(options.only or _oldest_first(), options.seconds, time.monotonic() + 60 * options.minutes)
    write_table()
    wrong = failures(read_results().values())
    for line in wrong:
        print(line)  # noqa: T201
    sys.exit(bool(wrong))


def run(kinds: list[str], seconds: int, until: float) -> None:
    """Try types of models, and write down each result when it is there."""
    for kind in kinds:
        if time.monotonic() > until:
            break
        found = try_one(kind, seconds)
        print(f"{kind}: {found['result']} {found.get('message', '')}", flush=True)  # noqa: T201
        write_results({**read_results(), kind: found})


def _oldest_first() -> list[str]:
    """All types: first those that were never tried, then as they stand in the results, whose last ones are the newest."""
    from campaigns.architectures.tiny import architectures

    known = list(read_results()) if RESULTS.exists() else []
    return [*(kind for kind in architectures() if kind not in known), *known]


if __name__ == "__main__":
    main()
