"""A model of how a pool is changed by many at once, and a search through every order of their steps.

A table, or the folder of packs, is a set, and whoever reads or changes one does it in one step. Everything between two steps
is thinking, so all that can happen is a sequence of steps. An actor is a generator of steps; it is sent what a step found. A
killed actor is one whose next step never comes. `adding` and `collecting` in `blobstore.pool` have the same steps in the same order.

What decides less than the order is left out: any pack may be condemned at any time, for whatever reason, and no time is waited
for before a pack is deleted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

ROUNDS = 3
"""How often an actor begins anew before it gives up."""


class Row(NamedTuple):
    """Where a content lies. It is a difference against a base, or whole."""

    content: str
    pack: str
    base: str = ""


class World(NamedTuple):
    """What all see, but for no more than one of these at a time."""

    packs: frozenset[str]
    blobs: frozenset[Row]
    marks: frozenset[str]
    parts: frozenset[tuple[str, str]]
    events: frozenset[tuple[str, str]]


Step = Callable[[World], "Iterable[tuple[World, Any]]"]
"""All that can be after a step, and what it tells the actor."""

Steps = Generator[Step, Any, "Next"]
Next = tuple[Callable[..., Steps], tuple[Any, ...]] | None
"""How an actor goes on, remembering nothing else; None if it has ended."""

Actor = tuple[Callable[..., Steps], tuple[Any, ...], tuple[Any, ...]]
"""A generator, its arguments, and what it was sent."""


# ------------------------------------------------------------------------------------------------------------ steps


@dataclass(frozen=True)
class Read:
    """A step that changes nothing."""

    table: str

    def __call__(self, world: World) -> list[tuple[World, Any]]:
        return [(world, getattr(world, self.table))]


read = functools.lru_cache(None)(Read)


def append(table: str, rows: Iterable[Any]) -> Step:
    added = frozenset(rows)
    return lambda world: [(world._replace(**{table: getattr(world, table) | added}), None)]


def delete(table: str, rows: Callable[[Any], bool]) -> Step:
    def step(world: World) -> list[tuple[World, Any]]:
        left = frozenset(row for row in getattr(world, table) if not rows(row))
        return [(world._replace(**{table: left}), None)]

    return step


def copy(rows: Iterable[Row], pack: str) -> Step:
    """A new pack of what other packs have; whether they are still there."""

    def step(world: World) -> list[tuple[World, Any]]:
        if all(row.pack in world.packs for row in rows):
            return [(world._replace(packs=world.packs | {pack}), True)]
        return [(world, False)]

    return step


def condemn(world: World) -> list[tuple[World, Any]]:
    """Any pack, or none."""
    marked = [world._replace(marks=world.marks | {pack}) for pack in world.packs - world.marks]
    return [(changed, None) for changed in (world, *marked)]


def end(version: str, kind: str) -> Step:
    """An event that excludes the others that end an addition."""

    def step(world: World) -> list[tuple[World, Any]]:
        ended = any(identity == version for identity, _ in world.events)
        return [(world if ended else world._replace(events=world.events | {(version, kind)}), None)]

    return step


def drop(world: World) -> list[tuple[World, Any]]:
    """Any version that is there."""
    dropped = [world._replace(events=world.events | {(version, "drop")}) for version in live(world.events)]
    return [(changed, None) for changed in (world, *dropped)]


# ------------------------------------------------------------------------------------------------------------ actors


def adder(version: str, content: str, base: str, without: str) -> Steps:
    if without != "the parts before the look-up":
        yield append("parts", {(version, content)})
    return look_up, (version, content, base, without, 0)


def look_up(version: str, content: str, base: str, without: str, turn: int) -> Steps:
    marks = frozenset() if without != "the adder's marks after the blobs" else (yield read("marks"))
    blobs = yield read("blobs")
    if without not in {"the adder's marks after the blobs", "marks of the adder"}:
        marks = yield read("marks")
    usable = {row for row in blobs if row.pack not in marks}
    if content in readable(usable) or (turn and without == "the second look-up"):
        return commit, (version, content, without)
    if turn == ROUNDS:
        return None
    row = Row(content, f"{version}.{turn}", base if base in whole(usable) else "")
    return store, (row, look_up, (version, content, base, without, turn + 1))


def store(row: Row, then: Callable[..., Steps], arguments: tuple[Any, ...]) -> Steps:
    yield append("packs", {row.pack})
    yield append("blobs", {row})
    return then, arguments


def commit(version: str, content: str, without: str) -> Steps:
    if without == "the parts before the look-up":
        yield append("parts", {(version, content)})
    yield end(version, "add") if without != "the mark of the end" else append("events", {(version, "add")})
    return None


def dropper() -> Steps:
    yield drop
    return None


def abandoner(version: str, without: str) -> Steps:
    yield end(version, "abandon")
    yield delete("parts", lambda row: row[0] == version)
    return None


def collector(name: str, without: str) -> Steps:
    yield condemn
    return empty, (name, without, 0)


def empty(name: str, without: str, turn: int) -> Steps:
    doomed = yield read("marks")
    marks = frozenset() if without != "the collector's marks after the blobs" else (yield read("marks"))
    blobs, parts, events = (yield read("blobs")), (yield read("parts")), (yield read("events"))
    if without != "the collector's marks after the blobs":
        marks = yield read("marks")
    if without == "the look that begins after the condemnation":
        doomed = marks
    needed = {content for version, content in parts if all(event == (version, "add") for event in events if event[0] == version)}
    stranded = [row for row in kept(blobs, marks, needed, without) if row.pack in marks]
    if not stranded or (turn and without == "the look after copying"):
        return forget, (doomed & {row.pack for row in blobs}, without)
    return rescue, (frozenset(stranded), name, without, turn)


def rescue(stranded: frozenset[Row], name: str, without: str, turn: int) -> Steps:
    pack = f"{name}.{turn}"
    if turn < ROUNDS and (yield copy(stranded, pack)):
        yield append("blobs", {row._replace(pack=pack) for row in stranded})
        return empty, (name, without, turn + 1)
    return None


def forget(doomed: frozenset[str], without: str) -> Steps:
    yield delete("blobs", lambda row: row.pack in doomed)
    return sweep, (without,)


def sweep(without: str) -> Steps:
    there = yield read("packs")
    if without == "the sweep's blobs after the marks":
        blobs, marks = (yield read("blobs")), (yield read("marks"))
    else:
        marks, blobs = (yield read("marks")), (yield read("blobs"))
    gone = there & marks - {row.pack for row in blobs}
    yield delete("packs", gone.__contains__)
    return None


def kept(blobs: frozenset[Row], marks: frozenset[str], needed: set[str], without: str) -> Iterator[Row]:
    """One row of each content that is needed, and one of its base: those that can be used, if there are any."""
    usable = whole({row for row in blobs if row.pack not in marks})
    bases = set()
    for content in needed:
        rows = [row for row in blobs if row.content == content and (not row.base or row.base in whole(blobs))]
        if rows:
            chosen = min(rows, key=lambda row: (row.pack in marks or bool(row.base and row.base not in usable), not row.base, row.pack))
            yield chosen
            bases |= {chosen.base} - {""}
    for base in bases - (needed if without == "bases that are whole" else set()):
        yield min((row for row in blobs if row.content == base and not row.base), key=lambda row: (row.pack in marks, row.pack))


def whole(rows: Iterable[Row]) -> set[str]:
    return {row.content for row in rows if not row.base}


def readable(rows: Iterable[Row]) -> set[str]:
    return {row.content for row in rows if not row.base or row.base in whole(rows)}


def live(events: Iterable[tuple[str, str]]) -> set[str]:
    return {version for version, kind in events if kind == "add" and (version, "drop") not in events}


CHANGED = {
    adder: {"packs", "blobs", "parts", "events"},
    look_up: {"packs", "blobs", "events", "parts"},
    store: {"packs", "blobs", "events", "parts"},
    commit: {"events", "parts"},
    dropper: {"events"},
    abandoner: {"parts", "events"},
    collector: {"packs", "blobs", "marks"},
    empty: {"packs", "blobs"},
    rescue: {"packs", "blobs"},
    forget: {"packs", "blobs"},
    sweep: {"packs"},
}
"""What each may still change."""


# ------------------------------------------------------------------------------------------------------------ search


def lost(world: World) -> set[str]:
    """Versions that are there, and need what is not."""
    there = readable({row for row in world.blobs if row.pack in world.packs})
    return {version for version in live(world.events) for one, content in world.parts if one == version and content not in there}


def pending(actor: Actor) -> Step | Next:
    """The next step of an actor, or how it goes on when it has no more."""
    function, arguments, sent = actor
    steps = function(*arguments)
    try:
        step = next(steps)
        for found in sent:
            step = steps.send(found)
    except StopIteration as ended:
        return ended.value
    return step


def settled(actor: Actor | None) -> Actor | None:
    """The actor at its next step; None if it has ended."""
    while actor is not None and not callable(step := pending(actor)):
        actor = (*step, ()) if step else None
    return actor


class Search:
    """Goes through all that can happen. What is alike has one number, so that it is thought about once."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {None: 0}
        self._values: list[Any] = [None]
        self._after: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self._looks: dict[int, tuple[str, set[str]]] = {}

    def run(self, world: World, actors: Iterable[tuple[Callable[..., Steps], tuple[Any, ...]]]) -> list[str] | None:
        first = (self._number(world), *(self._number(settled((*actor, ()))) for actor in actors))
        came: dict[tuple[int, ...], tuple[tuple[int, ...], int] | None] = {first: None}
        left = [first]
        bad = {}
        while left:
            state = left.pop()
            if state[0] not in bad:
                bad[state[0]] = lost(self._values[state[0]])
            if bad[state[0]]:
                return self._story(came, state)
            for at in self._next(state):
                for world, actor in self._steps(state[at], state[0]):
                    then = (world, *state[1:at], actor, *state[at + 1 :])
                    if then not in came:
                        came[then] = state, at
                        left.append(then)
        print(len(came))
        return None

    def _number(self, value: Any) -> int:
        if value not in self._numbers:
            self._numbers[value] = len(self._values)
            self._values.append(value)
        return self._numbers[value]

    def _steps(self, actor: int, world: int) -> list[tuple[int, int]]:
        if (actor, world) not in self._after:
            function, arguments, sent = self._values[actor]
            self._after[actor, world] = [
                (self._number(changed), self._number(settled((function, arguments, (*sent, found)))))
                for changed, found in pending(self._values[actor])(self._values[world])
            ]
        return self._after[actor, world]

    def _next(self, state: tuple[int, ...]) -> Iterable[int]:
        """Actors of which one goes next. A look at what nobody else may still change can as well be now."""
        there = [at for at in range(1, len(state)) if state[at]]
        for at in there:
            table = self._look(state[at])[0]
            if table and not any(table in self._look(state[other])[1] for other in there if other != at):
                return (at,)
        return there

    def _look(self, actor: int) -> tuple[str, set[str]]:
        if actor not in self._looks:
            step = pending(self._values[actor])
            self._looks[actor] = step.table if isinstance(step, Read) else "", CHANGED[self._values[actor][0]]
        return self._looks[actor]

    def _story(self, came, state):
        names = []
        while came[state]:
            before, at = came[state]
            actor = self._values[before[at]]
            names.append(f"{at}: {actor[0].__name__} {actor[1]} {len(actor[2])}: {self._values[state[0]] if state[0]!=before[0] else '-'}")
            state = before
        return names[::-1]


def search(world, actors):
    return Search().run(world, actors)
