"""The results of the campaign, and the table in docs/transformers.md that is made of them."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["PAGE", "RESULTS", "TOLERANCE", "failures", "read_results", "table", "write_results", "write_table"]

RESULTS = Path(__file__).parent / "results.json"
PAGE = Path(__file__).parents[2] / "docs/transformers.md"
TOLERANCE = 1e-5  # from the outputs of eager mode
_LEAST = 0.95  # of the parameters of an architecture follow an update
_TABLE = re.compile(r"(<!-- made by make architectures -->\n).*?(<!-- end -->)", re.DOTALL)


def read_results() -> dict[str, dict[str, Any]]:
    """What was found, by type; the newest last."""
    if not RESULTS.exists():
        return {}
    return {one["kind"]: one for one in json.loads(RESULTS.read_text(encoding="utf-8"))}


def write_results(found: dict[str, dict[str, Any]]) -> None:
    lines = ",\n".join(json.dumps(one, sort_keys=True) for one in found.values())
    RESULTS.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def failures(found: Iterable[dict[str, Any]]) -> list[str]:
    """What is wrong and ours, a line each."""
    wrong = []
    for one in found:
        if one["result"] == "ours":
            wrong.append(f"{one['kind']}: {one['message']}")
        if one["result"] == "works":
            wrong += [f"{one['kind']}: {name} does not follow, without an error" for name in one["silent"]]
            if not one["bits"]:
                wrong.append(f"{one['kind']}: after dedup, other bits")
            if one["follow"] < _LEAST * one["parameters"]:
                wrong.append(f"{one['kind']}: only {one['follow']} of {one['parameters']} parameters follow an update")
    return wrong


def table(found: dict[str, dict[str, Any]]) -> str:
    """The text between the marks of the page."""
    by: dict[str, list[dict[str, Any]]] = {}
    for kind in sorted(found):
        by.setdefault(found[kind]["result"], []).append(found[kind])
    works, theirs, untried, ours, parts = (by.get(one, []) for one in ("works", "theirs", "untried", "ours", "part"))
    lines = [
        f"Of the types of models that transformers lists, these {len(found) - len(parts)} were run: {len(works)} work, "
        f"{len(theirs)} are refused by transformers' exporter or by ExecuTorch, {len(ours)} fail in blobstore, and {len(untried)} "
        f"did not get that far. {len(parts)} more types are parts of models, for which the auto classes have no model.",
        "",
        f"Of those that work, {sum(one['bits'] for one in works)} return the same bits on stock ExecuTorch after `dedup`, and in "
        f"{sum(not one['silent'] for one in works)} no parameter stays as it was without an error.",
        "",
        "| model | class | parameters | follow an update | refused by name |",
        "|---|---|---:|---:|---|",
    ]
    for one in works:
        refused = ", ".join(f"`{name}`" for name in one["refused"]) or "none"
        share = 100 * one["follow"] / one["parameters"]
        lines.append(f"| {one['kind']} | {one['class']} | {one['parameters']:,} | {share:.1f} % | {refused} |")
    far = [f"{one['kind']} ({one['stock']:.0e})" for one in works if one.get("stock", 0) > TOLERANCE]
    if far:
        lines += [
            "",
            f"Of these, transformers' own programs are further from eager mode than 1e-5: {', '.join(far)}. Ours are "
            "compared within twice that.",
        ]
    lines += _by_message("Refused by transformers' exporter or by ExecuTorch", theirs)
    lines += _by_message("Failing in blobstore", ours)
    lines += _by_message("Without a tiny model, or without a result in time", untried)
    return "\n".join(lines) + "\n"


def _by_message(title: str, some: list[dict[str, Any]]) -> list[str]:
    """A table of messages, each with the models that it is about; the most frequent first."""
    models: dict[str, list[str]] = {}
    for one in some:
        models.setdefault(one["message"], []).append(one["kind"])
    rows = sorted(models.items(), key=lambda row: (-len(row[1]), row[0]))
    head = ["", f"{title}:", "", "| message | models |", "|---|---|"] if rows else []
    return head + [f"| {_cell(message)} | {', '.join(kinds)} |" for message, kinds in rows]


def _cell(text: str) -> str:
    return "`" + text.replace("|", "/").replace("`", "'") + "`"


def write_table() -> None:
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(_TABLE.sub(lambda match: match[1] + table(read_results()) + match[2], page), encoding="utf-8")
