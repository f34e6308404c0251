"""Which command acts on findings: one for all files that it takes together, each with an output of its own.

- `dedup` for programs and data files that can share one data file, in which a key has one content.
- `delta` for data files and checkpoints of which one has the keys of the other, and many of its bytes.
- `convert` for a checkpoint that has tensors twice.

A file is in one command at most: what a command replaces may be deleted before the next one runs.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import PurePath
from typing import NamedTuple

from blobstore.core.groups import Groups
from blobstore.core.regions.region import RegionKind
from blobstore.core.regions.source import is_url
from blobstore.reporting.find.families import Family, can_be_delta, find_families, left_out
from blobstore.reporting.find.kinds.building import DEPLOYED, convert_command, dedup_command, delta_command, writing
from blobstore.reporting.model import Claim, FileReport, Finding, FindingKind, Place, Work
from blobstore.reporting.savings import measure

__all__ = ["CONNECTING", "free_names", "unite"]


CONNECTING = 4096
"""Two models share a data file only if one blob of at least this size is in both; smaller blobs are equal by accident."""


class _Output(NamedTuple):
    """What a command writes, which has a name once all commands are known.

    Attributes:
        command: the command without it.
        name: what it is called if it is the only one, such as "slim" or "model.ptd".
        weight: those of one name are numbered from the largest weight to the smallest,
        file: and of one weight in the order of these files.
    """

    command: str
    name: str
    weight: int
    file: int


def unite(files: Sequence[FileReport], findings: Sequence[Finding]) -> list[Finding]:
    """Give findings their commands. Equal bytes in several files become a finding for each command, and one for what is left.

    Args:
        files: the files.
        findings: findings of all kinds, each with the work that acts on it alone.
    """
    commands = _Commands(files, findings)
    whole = _complete(commands.outputs())
    return [
        finding if finding.command is None else replace(finding, command=whole[finding.command])
        for finding in commands.apply()
    ]


def _complete(outputs: Iterable[_Output]) -> dict[str, str]:
    """For each command without what it writes the whole command. Outputs have distinct names, none of which exists already."""
    by_name: dict[str, list[_Output]] = defaultdict(list)
    for output in outputs:
        by_name["" if output.name.endswith(".ptd") else output.name].append(output)
    whole: dict[str, str] = {}
    for name, some in sorted(by_name.items()):
        some.sort(key=lambda output: (-output.weight, output.file))
        names = (
            [f"{name}-{n}" for n in range(1, len(some) + 1)] if name and len(some) > 1 else [one.name for one in some]
        )
        whole.update(
            (one.command, writing(one.command, given)) for one, given in zip(some, free_names(names), strict=True)
        )
    return whole


@dataclass(frozen=True)
class _Delta:
    """A family with its command, and the regions of its members that the deltas leave out."""

    family: Family
    command: str
    gone: frozenset[Place]


class _Commands:
    """The commands for a set of files.

    Attributes:
        for_deltas: the files that can be deltas.
        sets: files that `dedup` takes together; a file is in one of them at most.
        set_of: for each such file the number of its set.
        weights: by the number of a set, what its findings save.
        dedups: by the number of a set, the command.
        deltas: by member, the delta that it becomes.
        in_deltas: the members and their bases.
        converts: by checkpoint, its command.
    """

    def __init__(self, files: Sequence[FileReport], findings: Sequence[Finding]) -> None:
        self.files, self.findings = files, findings
        self.for_deltas = can_be_delta(files)
        self.sets = self._sets()
        self.set_of = {f: number for number, one in enumerate(self.sets) for f in one}
        self.deltas = self._deltas()
        self.in_deltas = {f for one in self.deltas.values() for f in (one.family.base, *one.family.members)}
        self.weights: dict[int, int] = defaultdict(int)
        self.dedups = self._dedups()
        self.converts = self._converts()

    # ------------------------------------------------------------------------------------------- which files go together

    def _sets(self) -> list[tuple[int, ...]]:
        """Sets of files that share a data file. Data files alone that cannot all share one are left for deltas."""
        dedups = [finding for finding in self.findings if finding.work == "dedup"]
        groups: Groups[int] = Groups(range(len(self.files)))
        connecting = [finding for finding in dedups if finding.saves >= CONNECTING]
        for finding in connecting:
            groups.join(self._deployed(finding))
        # smaller findings connect nothing, but within a group they are acted on, too
        members: dict[int, dict[int, None]] = defaultdict(dict)
        for finding in dedups:
            taken = self._deployed(finding)
            roots = set(map(groups.root, taken))
            if len(roots) == 1:
                members[roots.pop()].update(dict.fromkeys(taken))
        by_root: dict[int, list[Finding]] = defaultdict(list)
        for finding in connecting:
            by_root[groups.root(self._deployed(finding)[0])].append(finding)
        return [one for root, some in members.items() for one in self._divided(sorted(some), by_root[root])]

    def _divided(self, some: Sequence[int], connecting: Sequence[Finding]) -> list[tuple[int, ...]]:
        """The sets that connected files are in."""
        if self.for_deltas.issuperset(some) and self._is_divided(some):
            return [(f,) for f in some]
        return self._without_conflict(some, connecting)

    def _is_divided(self, some: Iterable[int]) -> bool:
        """Whether a key has several contents in some files."""
        contents: dict[str, object] = {}
        keys = (item for f in some for item in self._fixed_keys(f).items())
        return any(contents.setdefault(key, what) != what for key, what in keys)

    def _without_conflict(self, members: Sequence[int], connecting: Sequence[Finding]) -> list[tuple[int, ...]]:
        """The files in as few sets as a look at each file in order gives, of files that a blob connects and no key divides."""
        shared: dict[int, set[int]] = defaultdict(set)
        for number, finding in enumerate(connecting):
            for f in self._deployed(finding):
                shared[f].add(number)
        sets: list[tuple[list[int], set[int], dict[str, object]]] = []
        for f in members:
            keys = self._fixed_keys(f)
            if not _can_be_rewritten(self.files[f]):
                sets.append(([f], set(), {}))
                continue
            for one, blobs, contents in sets:
                if blobs & shared[f] and all(contents.get(key, what) == what for key, what in keys.items()):
                    one.append(f)
                    blobs.update(shared[f])
                    contents.update(keys)
                    break
            else:
                sets.append(([f], set(shared[f]), keys))
        return [tuple(one) for one, _, _ in sets]

    def _fixed_keys(self, f: int) -> dict[str, object]:
        """The keys of a file that stay as they are, each with its content."""
        fixed = {RegionKind.NAMED_DATA, RegionKind.TENSOR}
        regions = [region for region in self.files[f].regions if region.kind in fixed]
        return {key: (region.digest, region.layout) for region in regions for key in region.keys}

    def _deployed(self, finding: Finding) -> list[int]:
        return [f for f, _ in finding.places if self.files[f].format in DEPLOYED]

    # ----------------------------------------------------------------------------------------------------- the commands

    def _deltas(self) -> dict[int, _Delta]:
        """Families of what `dedup` does not take together."""
        united = {f for one in self.sets if len(one) > 1 for f in one}
        candidates = {
            f
            for finding in self.findings
            if finding.kind is FindingKind.DUPLICATE_FILES
            for f, _ in finding.places
            if f not in united
        }
        families = find_families(self.files, candidates & self.for_deltas, CONNECTING)
        deltas: dict[int, _Delta] = {}
        for family in families:
            base = self.files[family.base]
            gone = frozenset((f, r) for f in family.members for r in left_out(base, self.files[f]))
            command = delta_command(base.path, [self.files[f].path for f in family.members])
            deltas.update(dict.fromkeys(family.members, _Delta(family, command, gone)))
        return deltas

    def _dedups(self) -> dict[int, str]:
        """The command of each set of files that a finding is in."""
        for finding in self.findings:
            if finding.work == "dedup":
                self._weigh(finding)
        return {
            number: dedup_command(self.files[f].path for f in self.sets[number])
            for number in self.weights
            if all(map(self._may_be_rewritten, self.sets[number]))
        }

    def _weigh(self, finding: Finding) -> None:
        """Count what a finding saves for each set of which it is about one file, or about several."""
        within = finding.kind is not FindingKind.DUPLICATE_FILES
        for number, places in self._by_set(finding.places).items():
            if within or len(places) > 1:
                self.weights[number] += finding.saves

    def _may_be_rewritten(self, f: int) -> bool:
        return _can_be_rewritten(self.files[f]) and f not in self.in_deltas

    def _by_set(self, places: Sequence[Place]) -> dict[int, list[Place]]:
        sets: dict[int, list[Place]] = defaultdict(list)
        for place in places:
            if place[0] in self.set_of:
                sets[self.set_of[place[0]]].append(place)
        return sets

    def _converts(self) -> dict[int, str]:
        """The command of each checkpoint that has tensors twice and can be converted."""
        checkpoints = dict.fromkeys(f.places[0][0] for f in self.findings if f.work == "convert")
        taken = [f for f in checkpoints if _can_be_converted(self.files[f]) and f not in self.in_deltas]
        return {f: convert_command(self.files[f].path) for f in taken}

    def outputs(self) -> Iterator[_Output]:
        """What the commands write: that with which `dedup` saves most has the first folder."""
        for number, command in self.dedups.items():
            yield _Output(command, "slim", self.weights[number], min(self.sets[number]))
        for delta in {one.command: one for one in self.deltas.values()}.values():
            yield _Output(delta.command, "delta", 0, delta.family.base)
        for f, command in self.converts.items():
            yield _Output(command, PurePath(self.files[f].path).with_suffix(".ptd").name, 0, f)

    # ------------------------------------------------------------------------------------------- what each finding gets

    def apply(self) -> Iterator[Finding]:
        """The findings with their commands."""
        for finding in self.findings:
            first = finding.places[0][0]
            if finding.kind is FindingKind.DUPLICATE_FILES:
                yield from self._of_files(finding)
            elif finding.work and first in self.deltas:
                yield _with(finding, "delta", self._delta_for(finding, self.deltas[first]))
            elif finding.work == "convert":
                yield _with(finding, "convert", self.converts.get(first))
            elif finding.work == "dedup":
                yield _with(finding, "dedup", self.dedups.get(self.set_of[first]))
            else:
                yield finding

    def _delta_for(self, finding: Finding, delta: _Delta) -> str | None:
        """The command, if it frees all that a finding within one file claims."""
        rewritten = finding.kind in {FindingKind.PADDING, FindingKind.UNREFERENCED}
        gone = all((claim.file, claim.region) in delta.gone for claim in finding.claims)
        return delta.command if rewritten or gone else None

    def _of_files(self, finding: Finding) -> Iterator[Finding]:
        """The parts of a finding: what each command frees, and the rest, in which the first place stays."""
        freed: set[Place] = set()
        for number, places in self._by_set(finding.places).items():
            if len(places) > 1 and (command := self.dedups.get(number)):
                part = self._part(places, "move it to one data file that all programs use")
                yield _with(part, "dedup", command)
                freed.update(places[1:])
        gone: dict[int, list[Place]] = defaultdict(list)
        for place in finding.places:
            delta = self.deltas.get(place[0])
            if delta is not None and place in delta.gone:
                gone[delta.family.base].append(place)
                freed.add(place)
        of_file = dict(finding.places)
        for base, places in gone.items():
            command = self.deltas[places[0][0]].command
            advice = "keep the base whole, and of the others what differs from it"
            yield _with(self._part([(base, of_file[base]), *places], advice), "delta", command)
        rest = [place for place in finding.places if place not in freed]
        if len(rest) > 1:
            yield self._part(rest, self._advice(finding, rest))

    def _part(self, places: Sequence[Place], advice: str) -> Finding:
        claims = tuple(Claim(f, r, 0, self.files[f].regions[r].nbytes) for f, r in places[1:])
        detail = f"in {len(places)} files"
        return Finding(FindingKind.DUPLICATE_FILES, tuple(places), claims, measure(claims), detail, advice=advice)

    def _advice(self, finding: Finding, places: Sequence[Place]) -> str:
        """What to do about equal bytes in files that no command takes together."""
        some = [self.files[f] for f, _ in places]
        formats = {file.format for file in some}
        if any(is_url(file.path) for file in some):
            return "copy the files here: commands take local files"
        if formats <= DEPLOYED:
            return self._advice_for_deployed(finding, places)
        if "pte" in formats:
            return "deploy the programs without the checkpoint that they were made from"
        if "gguf" in formats:
            return "keep one of the files"
        return "keep one of the files, or give equal tensors equal names, so that one file can be a delta of the other"

    def _advice_for_deployed(self, finding: Finding, places: Sequence[Place]) -> str:
        if not all(_can_be_rewritten(self.files[f]) for f, _ in places):
            return "export again without the bytes that nothing refers to, which a command would lose"
        if finding.saves < CONNECTING:
            return "too little in common to share a data file for it"
        if any(self.files[f].format == "pte" for f, _ in places):
            return "not in one data file: a key has different bytes in these files; lower them with unique keys"
        return "not in one data file: a key has different bytes in these files; give one of them other keys"


def _with(finding: Finding, work: Work, command: str | None) -> Finding:
    return replace(finding, command=command, work=work if command is not None else None)


def free_names(names: Sequence[str]) -> list[str]:
    """Distinct names for outputs, none of which exists already."""
    taken: dict[str, None] = {}
    for name in names:
        path = PurePath(name)
        candidates = (path.with_stem(f"{path.stem}-{number}") if number > 1 else path for number in count(1))
        taken[next(str(one) for one in candidates if str(one) not in taken and not os.path.lexists(one))] = None
    return list(taken)


def _can_be_rewritten(file: FileReport) -> bool:
    """`blobstore dedup` reads local files, and refuses programs with bytes that it would lose."""
    lost = file.format == "pte" and any(r.kind is RegionKind.UNREFERENCED and not r.keys for r in file.regions)
    return not is_url(file.path) and not lost


def _can_be_converted(file: FileReport) -> bool:
    return not is_url(file.path) and all(r.layout for r in file.regions if r.kind is RegionKind.TENSOR)
