"""Which command acts on findings: one for all files that are to share a data file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from blobstore.reporting.findings.building import DEPLOYED, dedup_command
from blobstore.reporting.model import FileReport, Finding, FindingKind, RegionKind

__all__ = ["unite"]


CONNECTING = 4096
"""What two models have to have in common, in one blob, to be given one data file: small blobs are equal by accident."""


def unite(files: Sequence[FileReport], findings: Sequence[Finding]) -> list[Finding]:
    """Give all findings that `blobstore dedup` acts on the command for all files that they connect.

    Files in which one key has two contents cannot share a data file; what they have in common stays without a
    command.
    """
    group = list(range(len(files)))

    def of(f: int) -> int:
        while group[f] != f:
            f = group[f]
        return f

    for finding in findings:
        if _is_dedup(finding) and finding.saves >= CONNECTING:
            first, *others = {f for f, _ in finding.places}
            for other in others:
                group[of(other)] = of(first)
    members: dict[int, list[int]] = {}
    for finding in findings:
        if _is_dedup(finding) and len({of(f) for f, _ in finding.places}) == 1:
            for f, _ in finding.places:
                found = members.setdefault(of(f), [])
                if f not in found:
                    found.append(f)
    commands: dict[int, str | None] = {}
    weight = dict.fromkeys(members, 0)
    for finding in findings:
        if (root := of(finding.places[0][0])) in weight:
            weight[root] += finding.saves
    for number, (root, of_group) in enumerate(sorted(members.items(), key=lambda item: -weight[item[0]]), 1):
        paths = [files[f].path for f in sorted(of_group)]
        directory = "slim" if len(members) == 1 else f"slim-{number}"
        commands[root] = None if _conflict([files[f] for f in of_group]) else dedup_command(paths, directory)

    united = []
    for finding in findings:
        if _is_dedup(finding) and len({of(f) for f, _ in finding.places}) > 1:
            united.append(replace(finding, command=None, advice="too little in common to share a data file for it"))
        elif _is_dedup(finding):
            command = commands[of(finding.places[0][0])]
            if command is None and finding.kind is FindingKind.DUPLICATE_FILES:
                advice = "not in one data file: a key has different bytes in these files; lower them with unique keys"
                united.append(replace(finding, command=None, advice=advice))
            else:
                united.append(replace(finding, command=command or finding.command))
        else:
            united.append(finding)
    return united


def _is_dedup(finding: Finding) -> bool:
    return finding.command is not None and finding.command.startswith("blobstore dedup ")


def _conflict(files: Sequence[FileReport]) -> bool:
    """Whether a key that has to stay as it is has two contents."""
    known: dict[str, str] = {}
    for file in files:
        if file.format in DEPLOYED:
            for region in file.regions:
                if region.kind in {RegionKind.NAMED_DATA, RegionKind.TENSOR}:
                    for key in region.keys:
                        if known.setdefault(key, region.digest) != region.digest:
                            return True
    return False
