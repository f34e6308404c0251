"""What the classes of findings have in common."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

from blobstore.reporting.find.catalog import Catalog
from blobstore.reporting.model import Claim, Finding, FindingKind, Place, Work
from blobstore.reporting.savings import measure

__all__ = ["DEPLOYED", "convert_command", "dedup_command", "delta_command", "in_programs", "make", "whole", "writing"]

DEPLOYED = {"pte", "ptd"}
"""The formats that `blobstore dedup` rewrites."""


def whole(catalog: Catalog, places: Iterable[Place], start: int = 0) -> list[Claim]:
    """Claims to whole regions, or to all but their first `start` bytes."""
    return [Claim(f, r, start, catalog.region((f, r)).nbytes) for f, r in places]


def in_programs(catalog: Catalog, places: Iterable[Place]) -> bool:
    """Whether a program has one of the places, so that lowering again is what helps."""
    return any(catalog.files[f].format == "pte" for f, _ in places)


def make(
    kind: FindingKind,
    places: Sequence[Place],
    claims: Sequence[Claim],
    *,
    detail: str = "",
    work: Work | None = None,
    advice: str = "",
    share: float | None = None,
) -> Finding:
    """A finding, with what it saves computed; `unite` gives it the command that does its work."""
    distinct = tuple(dict.fromkeys(places))
    return Finding(kind, distinct, tuple(claims), measure(claims), detail, None, advice, share, work=work)


def dedup_command(paths: Iterable[str]) -> str:
    """The command that moves the weights of programs into one data file; like all of these, without what it writes."""
    return f"blobstore dedup {' '.join(_argument(path) for path in dict.fromkeys(paths))} -o"


def convert_command(path: str) -> str:
    """The command that writes a checkpoint as a data file, where tied weights are stored once."""
    return f"blobstore convert {_argument(path)}"


def delta_command(base: str, paths: Iterable[str]) -> str:
    """The command that writes of data files and checkpoints what differs from a base."""
    words = [base, *dict.fromkeys(paths)]
    return f"blobstore delta {' '.join(_argument(path) for path in words)} -o"


def writing(command: str, output: str) -> str:
    """One of these commands with the file or the folder that it writes."""
    return f"{command} {_argument(output)}"


def _argument(path: str) -> str:
    """A path for a shell, and for a command that takes what begins with a hyphen for an option."""
    return shlex.quote(f"./{path}" if path.startswith("-") else path)
