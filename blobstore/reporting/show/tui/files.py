"""The files: folders, files, modules and blobs, one level at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from rich.cells import cell_len
from rich.text import Text

from blobstore.core.reprs import count
from blobstore.core.text import size
from blobstore.reporting.model import Place
from blobstore.reporting.show.after import After, after
from blobstore.reporting.show.tree import Node, Tree
from blobstore.reporting.show.tui.cells import FAINT, STRONG, bar, column, fit, wastes
from blobstore.reporting.show.tui.facts import Facts, typed, waste
from blobstore.reporting.show.tui.view import Details, View, matches
from blobstore.reporting.show.words import FINDINGS, REGIONS, region_name

__all__ = ["Files"]

_SIZE, _ITEMS = 8, 7
_NAME = 20
"""Cells that a name needs before anything is beside it."""
_GRAPHS = ("graph", "percent", "graph percent", "")
_KEYS: dict[str, Callable[[Node], Any]] = {
    "size": lambda node: node.nbytes,
    "name": lambda node: node.label.lower(),
    "waste": lambda node: node.saves,
    "items": lambda node: node.items,
}


class Files(View):
    """A level of the tree: of the files as they are, or as they are after commands."""

    NAME = "Files"
    KEYS = "→ open  ← up  n s w C sort  g bar  i info  a after  / find  ? help  q quit"
    SEARCHES = True
    SORTS: ClassVar[Mapping[str, bool]] = {"size": True, "name": False, "waste": True, "items": True}

    def __init__(self, facts: Facts) -> None:
        super().__init__()
        self._facts = facts
        self._now = self.tree = Tree.of(facts.report)
        self.level = self.tree.root
        self.then: After | None = None
        self._when = ""
        self._folders_first = self._counts = False
        self._graph = 0
        self._said: dict[Place, str] = {}
        self._most = 0
        self.fill()

    # ---- rows

    def fill(self) -> None:
        """The nodes of the level, or those in it that were searched for; above them None, which leads up."""
        nodes = list(self._found() if self.query else self.tree.children(self.level))
        key, descending = self.sort
        nodes.sort(key=lambda node: node.label)  # equal ones by name
        nodes.sort(key=_KEYS[key], reverse=descending)
        if self._folders_first:
            nodes.sort(key=lambda node: node.source is not None)
        self._most = max((node.nbytes for node in nodes), default=0)
        leads_up = self.query or self.level.parent
        self.rows = [None, *nodes] if leads_up else nodes
        self.cursor = 1 if leads_up and nodes else 0

    def show(self, level: Node, chosen: Node | None = None) -> None:
        """Open a level, with one of its nodes chosen."""
        self.level, self.query = level, ""
        self.fill()
        if chosen is not None and chosen in self.rows:
            self.cursor = self.rows.index(chosen)

    def open(self, row: Node | None) -> bool:
        """Go into a row, or to where it was found; False if it is a blob that is there."""
        if row is None:
            return self.up()
        if self.query and row.source is not None:
            node = self.tree.blob(row.source, row.place) if row.place else self.tree.file(row.source)
            if node.parent is not None:
                self.show(node.parent, node)
            return True
        if not self.tree.children(row):
            return False
        self.show(row)
        return True

    def up(self) -> bool:
        """Leave what was searched for, or else the level; False if there is nothing above it."""
        if self.query:
            self.show(self.level)
        elif self.level.parent is not None:
            self.show(self.level.parent, self.level)
        else:
            return False
        return True

    def go_to(self, place: Place) -> None:
        """Show a blob among the files as they are now."""
        self.show_now()
        node = self.tree.blob(place[0], place)
        if node.parent is not None:
            self.show(node.parent, node)

    def show_now(self) -> None:
        if self.then is not None:
            self.then, self.tree = None, self._now
            self.show(self.tree.root)

    def show_after(self, commands: Sequence[str], when: str) -> None:
        self.then, self._when = after(self._facts.report, commands), when
        self.tree = self._now.after(self.then)
        self.show(self.tree.root)

    def mark(self) -> Callable[[], None]:
        """Remember what is shown; the call that this returns shows it again."""
        state = {name: getattr(self, name) for name in ("tree", "then", "_when", "level", "query")}
        cursor = self.cursor

        def restore() -> None:
            for name, value in state.items():
                setattr(self, name, value)
            self.fill()
            self.cursor = cursor

        return restore

    def _found(self) -> Iterator[Node]:
        """Files that a search finds by their names, and the blobs that it finds in the others."""
        has = matches(self.query)
        in_file = self.level.source is not None
        for source in self.tree.sources(self.level):
            file, node = self.tree.files[source], self.tree.file(source)
            if not in_file and has(file.name.lower()):
                yield Node(file.name, None, node.nbytes, node.goes, node.files, node.items, source, None)
                continue
            for place in self.tree.places(self.level) if in_file else file.places:
                if has(f"{file.name.lower()}\n{self._says(place)}"):
                    region, goes = self._facts.report.region(place), file.goes.get(place, {})
                    label = region_name(region) if in_file else f"{file.name}: {region_name(region)}"
                    yield Node(label, None, region.nbytes, dict(goes), 0, 1, source, place)

    def _says(self, place: Place) -> str:
        """What a search looks at, besides the name of the file."""
        if place not in self._said:
            region = self._facts.report.region(place)
            kinds = [FINDINGS[kind] for kind in self._facts.report.goes.get(place, ())]
            self._said[place] = "\n".join([region_name(region), typed(region), REGIONS[region.kind], *kinds]).lower()
        return self._said[place]

    # ---- keys

    def toggle(self, what: str) -> None:
        """Change which columns there are, or whether folders come first."""
        if what == "graph":
            self._graph = (self._graph + 1) % len(_GRAPHS)
        elif what == "counts":
            self._counts = not self._counts
        else:
            chosen = self.chosen
            self._folders_first = not self._folders_first
            self.fill()
            self.cursor = self.rows.index(chosen)

    # ---- text

    def heading(self) -> Text:
        """The way from the root, and after which command this is."""
        labels = []
        at: Node | None = self.level
        while at is not None:
            labels.append(at.label)
            at = at.parent
        way = " / ".join(labels[-2::-1] or labels)
        text = Text()
        if self.then is not None:
            total, now = self.then.total_bytes(self._facts.report), self._facts.report.total_bytes
            text.append(f"after {self._when}: {size(total)}, {size(now - total)} less", STRONG).append(" ─ ")
        if self.query:
            text.append(f"{len(self.rows) - 1:,} found in ")
        return text.append(way)

    def columns(self, width: int) -> Text:
        text = f"{'size':>{_SIZE + 1}}{'can go':>{_SIZE + 2}} "
        cells = self._bar(width)
        text += f"{'':{cells + 3}}" if cells else ""
        text += f"{'share':>6} " if "percent" in _GRAPHS[self._graph] else ""
        text += f"{'items':>{_ITEMS}} " if self._counts else ""
        return Text(f"{text} {'found' if self.query else 'name'} (by {self.sort[0]})", FAINT)

    def line(self, row: Node | None, width: int) -> Text:
        """The numbers, the name, and what it is."""
        text = self._numbers(row, self._bar(width))
        if row is None:
            return text.append("/..")
        room = width - text.cell_len - 1
        note = self._note(row)
        beside = cell_len(note) + 2 if room >= _NAME + cell_len(note) + 2 else 0
        opens = bool(row.source is None or row.place is None)
        text.append("/" if opens else " ").append(column(row.label, room - beside), STRONG if opens else "")
        return text.append(f"  {note}", FAINT) if beside else text

    def _bar(self, width: int) -> int:
        return 0 if "graph" not in _GRAPHS[self._graph] or width < 56 else 12 if width < 110 else 24

    def _numbers(self, row: Node | None, cells: int) -> Text:
        text = Text()
        saves = row.saves if row else 0
        text.append(f"{size(row.nbytes) if row else '':>{_SIZE + 1}}{size(saves) if saves else '':>{_SIZE + 2}} ")
        if cells:
            text.append(bar(row.nbytes, row.goes, self._most, cells) if row else " " * (cells + 2)).append(" ")
        if "percent" in _GRAPHS[self._graph]:
            share = f"{row.nbytes / max(self.level.nbytes, 1):.1%}" if row else ""
            text.append(f"{share:>6} ")
        if self._counts:
            text.append(f"{f'{row.items:,}' if row else '':>{_ITEMS}} ")
        return text

    def _note(self, node: Node) -> str:
        if node.place is not None:
            region = self._facts.report.region(node.place)
            return typed(region) or REGIONS[region.kind]
        if node.is_file and node.source is not None:
            return self.tree.files[node.source].format
        return count(node.files, "file") if node.source is None else count(node.items, "item")

    def about(self, row: Node | None, width: int, lines: int) -> Text:
        """What the row is, what of it can go, and where its copies are."""
        node = row or (self.level.parent if self.level.parent and not self.query else self.level)
        facts = [size(node.nbytes)]
        if node.place is not None:
            region = self._facts.report.region(node.place)
            facts += [REGIONS[region.kind], typed(region)]
        elif node.source is None:
            facts.append(count(node.files, "file"))
        text = Text.assemble((fit(node.label, 60), STRONG), f": {', '.join(filter(None, facts))}; ", waste(node.goes))
        others = self._facts.goes_with(node.place) if node.place is not None and self.then is None else ""
        return text.append(f"; {others}") if others else text

    def details(self, row: Node | None) -> Details | None:
        if row is None:
            return None
        if row.place is not None and self.then is None:
            return self._facts.of_blob(row.place)
        what = self._note(row)
        if row.source is not None:
            file = self.tree.files[row.source]
            what = f"{file.name} ({file.format}): {count(row.items, 'item') if row.place is None else what}"
        facts = [Text(what), Text(f"{size(row.nbytes)} ({row.nbytes:,} bytes)"), *wastes(row.goes)]
        return Details(row.label, facts)
