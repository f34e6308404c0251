"""Folders, files, the modules of a model, and blobs: the levels that the page and the terminal open one at a time."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from blobstore.core.text import printable
from blobstore.reporting.model import FindingKind, Place
from blobstore.reporting.paths import short_paths
from blobstore.reporting.report_data import ReportData
from blobstore.reporting.show.after import After, FileAfter
from blobstore.reporting.show.words import region_name

__all__ = ["Kinds", "Node", "Tree", "TreeFile"]

_GROUPED = 12
"""The blobs of a file with more are grouped by modules."""
_MODULES = 8
"""Of which a name may be in this many."""
_CONTENT = re.compile(r"tensor\.[0-9a-f]{32}")
_UNNAMED = "\0"
"""Begins the module of all regions of a kind that have no names; no name has it."""

Kinds = Mapping[FindingKind, int]


@dataclass(eq=False, slots=True)
class Node:
    """Something that has bytes: a folder, a file, a module of a model, or a blob.

    Attributes:
        label: its name in its parent; nothing in it acts on a terminal.
        parent: None for the root.
        nbytes: of everything in it.
        goes: bytes of these that can go, by kind of finding.
        files: how many files are in it, or 1.
        items: how many regions of files are in it.
        source: of a file and of what is in one, the file's index in `Tree.files`.
        place: of a blob, its region.
        inner: what is in it, from `Tree.children`; None until it is opened.
    """

    label: str
    parent: Node | None
    nbytes: int = 0
    goes: dict[FindingKind, int] = field(default_factory=dict)
    files: int = 0
    items: int = 0
    source: int | None = None
    place: Place | None = None
    inner: list[Node] | None = field(default_factory=list, repr=False)

    @property
    def saves(self) -> int:
        return sum(self.goes.values())

    @property
    def is_file(self) -> bool:
        return self.source is not None and (self.parent is None or self.parent.source is None)

    def add(self, nbytes: int, goes: Kinds, files: int, items: int) -> None:
        """Count what is in it."""
        self.nbytes += nbytes
        self.files += files
        self.items += items
        for kind, part in goes.items():
            self.goes[kind] = self.goes.get(kind, 0) + part


@dataclass(frozen=True)
class TreeFile:
    """A file that is there, or that a command writes.

    Attributes:
        name: relative to the folder that holds all files; nothing in it acts on a terminal.
        format: as in `FileReport`.
        places: the regions that it consists of.
        goes: of regions, also of others, what can go.
        nbytes: of its regions.
        sums: what can go of all of them.
    """

    name: str
    format: str
    places: Sequence[Place]
    goes: Mapping[Place, Kinds] = field(repr=False)
    nbytes: int
    sums: Kinds

    @classmethod
    def of(cls, report: ReportData, name: str, file: FileAfter, goes: Mapping[Place, Kinds]) -> TreeFile:
        """A file, with its sums."""
        sums: dict[FindingKind, int] = defaultdict(int)
        for place in file.places:
            for kind, part in goes.get(place, {}).items():
                sums[kind] += part
        nbytes = sum(report.region(place).nbytes for place in file.places)
        return cls(printable(name), file.format, file.places, goes, nbytes, sums)


class Tree:
    """All files of a report. What is in a file is made when that file is opened, so that many files cost little.

    Args:
        report: the report.
        files: what the tree is of.
        collects: whether regions of one kind that have no names are in a level of their own, as suits a list. The
            map draws each beside what it lies between.
    """

    def __init__(self, report: ReportData, files: Sequence[TreeFile], *, collects: bool = True) -> None:
        self.files = files
        self.root = Node("all files", None)
        self._report = report
        self._collects = collects
        self._blobs: dict[Place, Node] = {}
        folders = {"": self.root}
        self._files = []
        for number, file in enumerate(files):
            path, _, label = file.name.rpartition("/")
            node = _child(_folder(folders, path), label)
            node.source, node.inner = number, None
            node.add(file.nbytes, file.sums, 1, len(file.places))
            self._files.append(node)
        _sum([*folders.values(), *self._files])
        _unite([folder for folder in folders.values() if folder.parent], "/")

    @classmethod
    def of(cls, report: ReportData, *, collects: bool = True) -> Tree:
        """The files as they are now."""
        names = short_paths([file.path for file in report.files])
        files = []
        for f, (name, file) in enumerate(zip(names, report.files, strict=True)):
            whole = FileAfter(file.path, file.format, tuple((f, r) for r in range(len(file.regions))))
            files.append(TreeFile.of(report, name, whole, report.goes))
        return cls(report, files, collects=collects)

    def after(self, then: After) -> Tree:
        """The files of this tree, which are those of now, as they are after commands."""
        gone = set(then.replaced)
        files = [file for f, file in enumerate(self.files) if f not in gone]
        files += [TreeFile.of(self._report, file.path, file, then.goes) for file in then.files]
        return Tree(self._report, files, collects=self._collects)

    def children(self, node: Node) -> list[Node]:
        """What is in a folder, a file or a module, in no order; nothing is in a blob."""
        if node.inner is None and node.source is not None:
            node.inner = []
            self._open(node, node.source)
        return node.inner or []

    def file(self, source: int) -> Node:
        return self._files[source]

    def blob(self, source: int, place: Place) -> Node:
        """The node of a region that is in a file; of the files as they are now, that is the file of the region."""
        self.children(self._files[source])
        return self._blobs[place]

    def sources(self, node: Node) -> list[int]:
        """The files that are in a folder, or the one that a node is, or is in."""
        found: list[int] = []
        left = [node]
        while left:
            at = left.pop()
            if at.source is not None:
                found.append(at.source)
            else:
                left += self.children(at)[::-1]
        return found

    def places(self, node: Node) -> Iterator[Place]:
        """The regions in a file, a module or a blob."""
        left = [node]
        while left:
            at = left.pop()
            if at.place is not None:
                yield at.place
            left += self.children(at)[::-1]

    def _open(self, node: Node, number: int) -> None:
        """Make the modules and blobs of a file."""
        file = self.files[number]
        modules: dict[tuple[str, ...], Node] = {(): node}
        unnamed = Counter(region.kind for region in map(self._report.region, file.places) if not region.keys)
        blobs = []
        for place in file.places:
            region = self._report.region(place)
            parts, label = _split(region_name(region), len(file.places) > _GROUPED)
            if self._collects and not region.keys and unnamed[region.kind] > 1:
                parts, label = [f"{_UNNAMED}{label}"], f"at byte {region.start:,}"
            blob = _child(_module(modules, tuple(parts), number), label)
            blob.source, blob.place = number, place
            blob.add(region.nbytes, file.goes.get(place, {}), 0, 1)
            blobs.append(blob)
        del modules[()]
        _sum([*modules.values(), *blobs], until=node)
        _unite(modules.values(), ".")
        self._blobs.update((one.place, one) for one in [*modules.values(), *blobs] if one.place and one.parent)


def _split(name: str, grouped: bool) -> tuple[list[str], str]:
    """The modules that a blob is in, and its name there; keys that are made of contents have no parts."""
    if not grouped or _CONTENT.match(name) or "" in name.split("."):
        return [], name
    *parts, label = name.split(".", _MODULES)
    return parts, name if len(parts) == _MODULES else label


def _child(parent: Node, label: str) -> Node:
    node = Node(label, parent)
    if parent.inner is not None:
        parent.inner.append(node)
    return node


def _folder(folders: dict[str, Node], path: str) -> Node:
    """The node of a folder; those that it is in are made, too. There may be more of them than calls can be nested."""
    missing = []
    while path not in folders:
        missing.append(path)
        path = path.rpartition("/")[0]
    for inner in reversed(missing):
        folders[inner] = _child(folders[path], inner.rpartition("/")[2])
        path = inner
    return folders[path]


def _module(modules: dict[tuple[str, ...], Node], parts: tuple[str, ...], source: int) -> Node:
    """The node of a module, made with those that it is in."""
    if parts not in modules:
        node = modules[parts] = _child(_module(modules, parts[:-1], source), parts[-1].removeprefix(_UNNAMED))
        node.source = source
    return modules[parts]


def _sum(nodes: Sequence[Node], until: Node | None = None) -> None:
    """Count each node in its parent; parents come before what is in them."""
    for node in reversed(nodes):
        if node.parent is not None and node.parent is not until:
            node.parent.add(node.nbytes, node.goes, node.files, node.items)


def _unite(nodes: Iterable[Node], separator: str) -> None:
    """Make a folder with nothing but a folder in it one with that, and a module with what is alone in it."""
    for node in nodes:
        while node.inner and len(node.inner) == 1 and not (only := node.inner[0]).is_file:
            node.label = f"{node.label}{separator}{only.label}"
            node.inner, node.place = only.inner, only.place
            only.parent = only.place = None
            for child in node.inner or ():
                child.parent = node
