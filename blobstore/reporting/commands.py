"""Which command acts on findings: one for all files that are to share a data file, each with an output of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import PurePath

from blobstore.core.groups import Groups
from blobstore.reporting.findings.building import DEPLOYED, convert_command, dedup_command
from blobstore.reporting.model import FileReport, Finding, RegionKind
from blobstore.reporting.source import is_url

__all__ = ["CONNECTING", "unite"]


CONNECTING = 4096
"""Two models share a data file only if one blob of at least this size is in both; smaller blobs are equal by accident."""


def unite(files: Sequence[FileReport], findings: Sequence[Finding]) -> list[Finding]:
    """Give all findings that `blobstore dedup` acts on the command for all files that they connect.

    Files in which one key has two contents cannot share a data file; what they have in common stays without a
    command.
    """
    groups = Groups(range(len(files)))
    for finding in findings:
        if _is_dedup(finding) and finding.saves >= CONNECTING:
            groups.join(_files(finding))
    sets = _sets(files, findings, groups)
    commands = _dedup_commands(files, findings, sets)
    conversions = _convert_commands(files, findings)

    def united(finding: Finding) -> Finding:
        first = finding.places[0][0]
        if _is_convert(finding):
            return replace(finding, command=conversions.get(first))
        if not _is_dedup(finding):
            return finding
        if len({groups.root(f) for f in _files(finding)}) > 1:
            return replace(finding, command=None, advice="too little in common to share a data file for it")
        if len({sets[f] for f in _files(finding)}) > 1:
            advice = "not in one data file: a key has different bytes in these files; lower them with unique keys"
            return replace(finding, command=None, advice=advice)
        return replace(finding, command=commands.get(sets[first]))

    return [united(finding) for finding in findings]


def _sets(files: Sequence[FileReport], findings: Sequence[Finding], groups: Groups[int]) -> dict[int, tuple[int, ...]]:
    """For each file, the files that its command takes; none if there is no command. What saves most comes first."""
    members: dict[int, dict[int, None]] = {}
    for finding in findings:
        if _is_dedup(finding) and len({groups.root(f) for f in _files(finding)}) == 1:
            members.setdefault(groups.root(finding.places[0][0]), {}).update(dict.fromkeys(_files(finding)))
    weight = dict.fromkeys(members, 0)
    for finding in findings:
        if (root := groups.root(finding.places[0][0])) in weight:
            weight[root] += finding.saves
    sets: dict[int, tuple[int, ...]] = {}
    for root in sorted(members, key=lambda root: -weight[root]):
        together = tuple(sorted(members[root]))
        united = not _conflict([files[f] for f in together])
        for f in together:
            own = together if united else (f,)
            sets[f] = own if all(_can_be_rewritten(files[i]) for i in own) else ()
    return sets


def _dedup_commands(
    files: Sequence[FileReport], findings: Sequence[Finding], sets: Mapping[int, tuple[int, ...]]
) -> dict[tuple[int, ...], str]:
    """The command of each set of files that a finding is in, each with an output folder of its own."""
    wanted = {
        sets.get(finding.places[0][0], ())
        for finding in findings
        if _is_dedup(finding) and len({sets.get(f) for f in _files(finding)}) == 1
    }
    taking = [one for one in dict.fromkeys(sets.values()) if one and one in wanted]
    directories = _free(["slim"] if len(taking) == 1 else [f"slim-{n}" for n in range(1, len(taking) + 1)])
    return {
        one: dedup_command([files[f].path for f in one], directory)
        for one, directory in zip(taking, directories, strict=True)
    }


def _convert_commands(files: Sequence[FileReport], findings: Sequence[Finding]) -> dict[int, str]:
    """The command of each checkpoint that can be converted."""
    checkpoints = list(dict.fromkeys(f.places[0][0] for f in findings if _is_convert(f)))
    checkpoints = [f for f in checkpoints if _can_be_converted(files[f])]
    targets = _free([PurePath(files[f].path).with_suffix(".ptd").name for f in checkpoints])
    return {f: convert_command(files[f].path, t) for f, t in zip(checkpoints, targets, strict=True)}


def _free(names: Sequence[str]) -> list[str]:
    """Distinct names for outputs, none of which exists already."""
    taken: list[str] = []
    for name in names:
        path = PurePath(name)
        candidates = (path.with_stem(f"{path.stem}-{number}") if number > 1 else path for number in count(1))
        taken.append(next(str(one) for one in candidates if str(one) not in taken and not os.path.lexists(one)))
    return taken


def _can_be_rewritten(file: FileReport) -> bool:
    """`blobstore dedup` reads local files, and refuses programs with bytes that it would lose."""
    lost = file.format == "pte" and any(r.kind is RegionKind.UNREFERENCED and not r.keys for r in file.regions)
    return not is_url(file.path) and not lost


def _can_be_converted(file: FileReport) -> bool:
    return not is_url(file.path) and all(r.layout for r in file.regions if r.kind is RegionKind.TENSOR)


def _files(finding: Finding) -> list[int]:
    return [f for f, _ in finding.places]


def _is_convert(finding: Finding) -> bool:
    return finding.command is not None and finding.command.startswith("blobstore convert ")


def _is_dedup(finding: Finding) -> bool:
    return finding.command is not None and finding.command.startswith("blobstore dedup ")


def _conflict(files: Sequence[FileReport]) -> bool:
    """Whether a key that must stay as it is has two contents."""
    known: dict[str, object] = {}
    for file in files:
        if file.format in DEPLOYED:
            for region in file.regions:
                if region.kind in {RegionKind.NAMED_DATA, RegionKind.TENSOR}:
                    for key in region.keys:
                        if known.setdefault(key, (region.digest, region.layout)) != (region.digest, region.layout):
                            return True
    return False
