"""A model of how many at once change a pool, and a search through every order of their steps.

A table, or the folder of packs, is a set, and whoever reads or changes one does it in one step. What happens between two steps
is thinking. An actor is a generator of steps, which is sent what each step found. A killed actor is one whose next step never
comes, so kills are among the orders. `adding` and `collecting` in `blobstore.pool` have the same steps in the same order.

What is decided by more than the order is left out: any pack may be condemned at any time for whatever reason, and no time
is waited for. All actors can be told to go without one of the rules.
"""

import functools
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

PARTS_FIRST = "whoever adds appends its parts before it looks"
ADDER_MARKS = "whoever adds treats what condemned packs have as missing"
ADDER_MARKS_LAST = "whoever adds looks at the marks after the blobs"
ADDER_AGAIN = "whoever adds looks again after storing"
ENDS_ONCE = "a version appears or is given up, not both"
NOTED_BEFORE = "whoever collects deletes rows of packs that were condemned before it looked"
COLLECTOR_MARKS_LAST = "whoever collects looks at the marks after the blobs"
COLLECTOR_AGAIN = "whoever collects looks again after copying"
WHOLE_BASES = "whoever collects keeps bases whole"
NEAR_BASES = "whoever collects keeps bases that are differences"
BASES_OF_BASES = "whoever collects keeps what bases are differences to"
ADDER_BASES = "whoever adds treats what cannot be read without condemned packs as missing"
SWEEP_MARKS_FIRST = "whoever deletes packs looks at the marks before the blobs"
EVENTS_FIRST = "whoever reads looks at the events first"


class Row(NamedTuple):
    """Where a content lies. It is whole, or a difference against a base that is whole, or one against such a difference."""

    content: str
    pack: str
    base: str = ""


class World(NamedTuple):
    """What there is."""

    packs: frozenset[str] = frozenset()
    blobs: frozenset[Row] = frozenset()
    marks: frozenset[str] = frozenset()
    parts: frozenset[tuple[str, str]] = frozenset()
    events: frozenset[tuple[str, str]] = frozenset()


Step = Callable[[World], "list[tuple[World, Any]]"]
"""All that can be after a step, and what each tells the actor."""

Next = tuple[Callable[..., "Steps"], tuple[Any, ...]] | None
"""How an actor goes on when its steps end, remembering nothing else; None if that is all."""

Steps = Generator[Step, Any, Next]
"""What an actor does, by the rules but one, which is its first argument."""

Actor = tuple[Callable[..., Steps], tuple[Any, ...], tuple[Any, ...]]
"""A generator, its other arguments, and what it was sent."""


# ------------------------------------------------------------------------------------------------------------ steps


@dataclass(frozen=True)
class Read:
    """A step that changes nothing."""

    table: str

    def __call__(self, world: World) -> list[tuple[World, Any]]:
        return [(world, getattr(world, self.table))]


def append(table: str, *rows: Any) -> Step:
    return lambda world: [(world._replace(**{table: getattr(world, table) | set(rows)}), None)]


def delete(table: str, condition: Callable[[Any], bool]) -> Step:
    def step(world: World) -> list[tuple[World, Any]]:
        left = frozenset(row for row in getattr(world, table) if not condition(row))
        return [(world._replace(**{table: left}), None)]

    return step


def copy(rows: Iterable[Row], pack: str) -> Step:
    """A new pack with what others have; whether they are still there."""

    def step(world: World) -> list[tuple[World, Any]]:
        there = all(row.pack in world.packs for row in rows)
        return [(world._replace(packs=world.packs | {pack}) if there else world, there)]

    return step


def end(version: str, kind: str) -> Step:
    """An event, unless the version has one; whether it has this one now."""

    def step(world: World) -> list[tuple[World, Any]]:
        if any(one == version for one, _ in world.events):
            return [(world, False)]
        return [(world._replace(events=world.events | {(version, kind)}), True)]

    return step


def condemn_any(world: World) -> list[tuple[World, Any]]:
    packs = [[], *([pack] for pack in world.packs - world.marks)]
    return [(world._replace(marks=world.marks.union(pack)), None) for pack in packs]


# ----------------------------------------------------------------------------------------------------------- actors


def adder(without: str, version: str, content: str, base: str = "") -> Steps:
    if without != PARTS_FIRST:
        yield append("parts", (version, content))
    return look_up, (version, content, base, 0)


def look_up(without: str, version: str, content: str, base: str, turn: int) -> Steps:
    marks = (yield Read("marks")) if without == ADDER_MARKS_LAST else frozenset()
    blobs = yield Read("blobs")
    if without not in {ADDER_MARKS, ADDER_MARKS_LAST}:
        marks = yield Read("marks")
    usable = {row for row in blobs if row.pack not in marks}
    there = {row.content for row in usable} if without == ADDER_BASES else readable(usable)
    if content in there or (turn and without == ADDER_AGAIN):
        return appear, (version, content)
    row = Row(content, f"{version}.{turn}", base if base in bases_among(usable) else "")
    return store, (row, (version, content, base, turn + 1))


def store(_without: str, row: Row, then: tuple[Any, ...]) -> Steps:
    yield append("packs", row.pack)
    yield append("blobs", row)
    return look_up, then


def appear(without: str, version: str, content: str) -> Steps:
    if without == PARTS_FIRST:
        yield append("parts", (version, content))
    yield append("events", (version, "add")) if without == ENDS_ONCE else end(version, "add")
    return None


def dropper(_without: str, version: str) -> Steps:
    yield append("events", (version, "drop"))
    return None


def giving_up(_without: str, version: str) -> Steps:
    if (yield end(version, "abandon")):
        yield delete("parts", lambda row: row[0] == version)
    return None


def condemning(_without: str) -> Steps:
    yield condemn_any
    return None


def collector(_without: str, name: str) -> Steps:
    yield condemn_any
    return emptying, (name,)


def emptying(without: str, name: str, turn: int = 0) -> Steps:
    noted = yield Read("marks")
    marks = (yield Read("marks")) if without == COLLECTOR_MARKS_LAST else frozenset()
    blobs, parts, events = (yield Read("blobs")), (yield Read("parts")), (yield Read("events"))
    if without != COLLECTOR_MARKS_LAST:
        marks = yield Read("marks")
    ended = {version for version, kind in events if kind != "add"}
    needed = {content for version, content in parts if version not in ended}
    stranded = frozenset(row for row in kept(blobs, marks, needed, without) if row.pack in marks)
    if stranded and not (turn and without == COLLECTOR_AGAIN):
        return copying, (stranded, name, turn)
    leaving = (marks if without == NOTED_BEFORE else noted) & {row.pack for row in blobs}
    return forgetting, (leaving,)


def copying(_without: str, stranded: frozenset[Row], name: str, turn: int) -> Steps:
    pack = f"{name}.{turn}"
    if not (yield copy(stranded, pack)):
        return None  # it begins anew; so may another one
    yield append("blobs", *(row._replace(pack=pack) for row in stranded))
    return emptying, (name, turn + 1)


def forgetting(_without: str, packs: frozenset[str]) -> Steps:
    yield delete("blobs", lambda row: row.pack in packs)
    return sweeping, ()


def sweeping(without: str) -> Steps:
    there = yield Read("packs")
    if without == SWEEP_MARKS_FIRST:
        blobs, marks = (yield Read("blobs")), (yield Read("marks"))
    else:
        marks, blobs = (yield Read("marks")), (yield Read("blobs"))
    yield delete("packs", (there & marks - {row.pack for row in blobs}).__contains__)
    return None


def reader(without: str, version: str) -> Steps:
    """It says of a version that it is lost if it finds it and not what it needs, and it is still there."""
    events = frozenset() if without == EVENTS_FIRST else (yield Read("events"))
    parts, blobs = (yield Read("parts")), (yield Read("blobs"))
    if without == EVENTS_FIRST:
        events = yield Read("events")
    if version in live(events) and not contents(parts, version) <= readable(blobs):
        yield append("events", (version, "unreadable"))
    return None


def kept(blobs: frozenset[Row], marks: frozenset[str], needed: set[str], without: str) -> Iterator[Row]:
    """One row of each content that is needed, and those of its bases; of condemned packs only if there are no others."""
    usable_whole = whole(row for row in blobs if row.pack not in marks)
    near = [row for row in blobs if row.content in differences(blobs) and row.base in whole(blobs)]
    usable = usable_whole | {row.content for row in near if row.pack not in marks and row.base in usable_whole}

    def first(rows: Iterable[Row], bases: set[str]) -> Row:
        return min(rows, key=lambda row: (row.pack in marks or row.base not in {"", *bases}, not row.base, row.pack))

    chosen = []
    for content in needed & readable(blobs):
        rows = [row for row in blobs if row.content == content and row.base in {"", *bases_among(blobs)}]
        chosen.append(first(rows, usable))
    wanted = {row.base for row in chosen}
    near_bases = [
        first((row for row in near if row.content == base), usable_whole) for base in wanted & differences(blobs)
    ]
    wanted |= {row.base for row in near_bases if without != BASES_OF_BASES}
    yield from chosen
    yield from near_bases if without != NEAR_BASES else ()
    for base in wanted & whole(blobs) - (needed if without == WHOLE_BASES else set()):
        yield first((row for row in blobs if row == (base, row.pack, "")), set())


def whole(rows: Iterable[Row]) -> set[str]:
    return {row.content for row in rows if not row.base}


def differences(rows: Iterable[Row]) -> set[str]:
    """Contents that are nowhere whole, and are stored against one that is."""
    rows = list(rows)
    return {row.content for row in rows if row.base in whole(rows)} - whole(rows)


def bases_among(rows: Iterable[Row]) -> set[str]:
    rows = list(rows)
    return whole(rows) | differences(rows)


def readable(rows: Iterable[Row]) -> set[str]:
    rows = list(rows)
    return {row.content for row in rows if row.base in {"", *bases_among(rows)}}


def live(events: Iterable[tuple[str, str]]) -> set[str]:
    return {version for version, kind in events if kind == "add" and (version, "drop") not in events}


def contents(parts: Iterable[tuple[str, str]], version: str) -> set[str]:
    return {content for one, content in parts if one == version}


# ----------------------------------------------------------------------------------------------------------- search

_ADDING, _COLLECTING = {"packs", "blobs", "parts", "events"}, {"packs", "blobs"}
CHANGED: dict[Callable[..., Steps], set[str]] = {
    **dict.fromkeys((adder, look_up, store), _ADDING),
    **{actor: {"parts", "events"} for actor in (appear, giving_up)},
    **{actor: {"events"} for actor in (dropper, reader)},
    **dict.fromkeys((emptying, copying, forgetting), _COLLECTING),
    collector: {"marks", *_COLLECTING},
    condemning: {"marks"},
    sweeping: {"packs"},
}
"""What actors may still change."""


def lost(world: World) -> bool:
    """Whether a version is there that cannot be read."""
    there = readable(row for row in world.blobs if row.pack in world.packs)
    versions = live(world.events)
    return any(
        (version, "unreadable") in world.events or not contents(world.parts, version) <= there for version in versions
    )


def pending(actor: Actor, without: str) -> Step | Next:
    """The next step of an actor, or how it goes on without one."""
    function, arguments, sent = actor
    steps = function(without, *arguments)
    try:
        step = next(steps)
        for found in sent:
            step = steps.send(found)
    except StopIteration as ended:
        following: Next = ended.value
        return following
    return step


class Search:
    """Goes through all that can happen. Worlds and actors have numbers, and what one does in the other is tried once.

    Args:
        world: at the beginning.
        actors: generators, each with its arguments.
        without: the rule that nobody keeps.
    """

    def __init__(self, world: World, actors: Iterable[tuple[Any, ...]], without: str = "") -> None:
        self._without = without
        self._values: list[Any] = [None]
        self._numbers: dict[Any, int] = {None: 0}
        self._steps: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self._looks: dict[int, tuple[str, set[str]]] = {}
        self._first = (self._number(world), *(self._actor((function, tuple(given), ())) for function, *given in actors))

    def run(self) -> list[str] | None:
        """The steps to a lost version, as one order has them; None if there is none."""
        came: dict[tuple[int, ...], tuple[tuple[int, ...], int]] = {self._first: ((), 0)}
        left = [self._first]
        is_lost = functools.cache(lambda number: lost(self._values[number]))
        while left:
            state = left.pop()
            if is_lost(state[0]):
                return self._story(came, state)
            for at in self._next(state):
                for world, actor in self._after(state[at], state[0]):
                    then = (world, *state[1:at], actor, *state[at + 1 :])
                    if then not in came:
                        came[then] = state, at
                        left.append(then)
        return None

    def _number(self, value: Any) -> int:
        if value not in self._numbers:
            self._numbers[value] = len(self._values)
            self._values.append(value)
        return self._numbers[value]

    def _actor(self, actor: Actor | None) -> int:
        """The number of an actor at its next step; 0 if there is none."""
        while actor is not None and not callable(step := pending(actor, self._without)):
            actor = (*step, ()) if step else None
        return self._number(actor)

    def _after(self, actor: int, world: int) -> list[tuple[int, int]]:
        if (actor, world) not in self._steps:
            function, arguments, sent = self._values[actor]
            self._steps[actor, world] = [
                (self._number(changed), self._actor((function, arguments, (*sent, found))))
                for changed, found in pending(self._values[actor], self._without)(self._values[world])  # type: ignore[misc,operator]
            ]
        return self._steps[actor, world]

    def _next(self, state: tuple[int, ...]) -> Iterable[int]:
        """Actors of which one goes next. What nobody else may still change can as well be read now."""
        running = [at for at in range(1, len(state)) if state[at]]
        for at in running:
            table, _ = self._look(state[at])
            if table and not any(table in self._look(state[other])[1] for other in running if other != at):
                return (at,)
        return running

    def _look(self, actor: int) -> tuple[str, set[str]]:
        """The table that an actor reads next, if it does, and those that it may still change."""
        if actor not in self._looks:
            step = pending(self._values[actor], self._without)
            self._looks[actor] = step.table if isinstance(step, Read) else "", CHANGED[self._values[actor][0]]
        return self._looks[actor]

    def _story(self, came: dict[tuple[int, ...], tuple[tuple[int, ...], int]], state: tuple[int, ...]) -> list[str]:
        told: list[str] = []
        while state != self._first:
            before, at = came[state]
            function, arguments, sent = self._values[before[at]]
            told.insert(0, f"actor {at}, {function.__name__}{arguments}, step {len(sent)}: {self._values[state[0]]}")
            state = before
        return told
