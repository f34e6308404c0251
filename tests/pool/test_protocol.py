"""In no order of their steps do adders, droppers, collectors and readers lose a version (P4), and each rule is needed for that."""

from typing import Any

import pytest

from tests.pool import protocol as model
from tests.pool.protocol import Row, Search, World, adder, collector, condemning, dropper, emptying, reader, sweeping

OLD = World(
    packs=frozenset({"p"}),
    blobs=frozenset({Row("a", "p")}),
    parts=frozenset({("old", "a")}),
    events=frozenset({("old", "add")}),
)
"""A version with one content."""

SERIES = World(
    packs=frozenset("pqrs"),
    blobs=frozenset({Row("a", "p"), Row("a", "q", "z"), Row("z", "r"), Row("b", "s", "a")}),
    parts=frozenset({("old", "a"), ("old", "b")}),
    events=frozenset({("old", "add")}),
)
"""A version with a base that is also stored as a difference."""

RECIPES = World(
    packs=frozenset("pqr"),
    blobs=frozenset({Row("a", "p"), Row("b", "q", "a"), Row("c", "r", "b")}),
    parts=frozenset({("old", "c")}),
    events=frozenset({("old", "add")}),
)
"""A version with a recipe whose base is a difference."""

DROPPED = RECIPES._replace(
    packs=frozenset("pq"), blobs=RECIPES.blobs - {Row("c", "r", "b")}, parts=frozenset({("old", "b")})
)
"""A version that is a difference to what nothing else needs."""

DEEP = World(
    packs=frozenset("pqrst"),
    blobs=frozenset({Row("a", "p"), Row("a", "q", "z"), Row("z", "r"), Row("b", "s", "a"), Row("c", "t", "b")}),
    parts=frozenset({("old", "a"), ("old", "c")}),
    events=frozenset({("old", "add")}),
)
"""The same as in `SERIES`, and what is below the base is also stored as a difference."""

SCENES: dict[str, tuple[World, list[tuple[Any, ...]]]] = {
    # the contents of a version that is dropped are added again while one condemns and the other deletes
    "two collections": (OLD, [(adder, "new", "a"), (dropper, "old"), (condemning,), (emptying, "c"), (sweeping,)]),
    # two versions with the same contents are added at once
    "twins": (World(), [(adder, "one", "a"), (adder, "two", "a"), (condemning,), (sweeping,)]),
    # what is added is a difference to what is dropped
    "a base goes": (OLD, [(adder, "new", "b", "a"), (dropper, "old"), (condemning,), (emptying, "c")]),
    # a base is needed, and what is stored against it
    "a series": (SERIES, [(collector, "c"), (condemning,)]),
    # of a recipe that is needed, everything may be condemned, also its base and what that is a difference to
    "a recipe": (RECIPES, [(collector, "k"), (condemning,), (reader, "old")]),
    # what is below the base of a recipe is needed, too, and has a row that nothing else can be read by
    "a deep series": (DEEP, [(collector, "k"), (condemning,)]),
    # a version appears when it is given up
    "given up": (World(), [(adder, "new", "a"), (model.giving_up, "new"), (collector, "c")]),
    # somebody reads a version that appears
    "read": (World(), [(adder, "new", "a"), (reader, "new"), (collector, "c")]),
}
LARGE: dict[str, tuple[World, list[tuple[Any, ...]]]] = {
    # of a version that stays, packs are condemned while they are written
    "a copy is condemned": (OLD, [(condemning,), (collector, "c"), (collector, "d")]),
    # rows of a pack come after it was condemned and deleted; meanwhile, others need the same
    "a pack is late": (
        OLD._replace(marks=OLD.packs),
        [(adder, "new", "a"), (emptying, "c"), (condemning,), (sweeping,)],
    ),
    # one that adds, one that drops, and two whole collections
    "everybody": (OLD, [(adder, "new", "a"), (dropper, "old"), (collector, "c"), (collector, "d")]),
    # two that add, one of them against the other's contents, and one each that drops and collects
    "two that add": (
        OLD,
        [(adder, "new", "a"), (adder, "near", "b", "a"), (dropper, "old"), (condemning,), (emptying, "c")],
    ),
    # a recipe is there, and what it needs goes, which another version adds again, in another form
    "a recipe is added again": (
        RECIPES,
        [(adder, "new", "c", "b"), (adder, "other", "b"), (dropper, "old"), (condemning,), (emptying, "k")],
    ),
    # what is added follows from what is dropped
    "a base of a base goes": (
        DROPPED,
        [(adder, "new", "c", "b"), (dropper, "old"), (condemning,), (emptying, "k"), (sweeping,)],
    ),
}

RULES = {
    model.PARTS_FIRST: "two collections",
    model.ADDER_MARKS: "two collections",
    model.ADDER_MARKS_LAST: "twins",
    model.ADDER_AGAIN: "twins",
    model.ENDS_ONCE: "given up",
    model.NOTED_BEFORE: "two collections",
    model.COLLECTOR_MARKS_LAST: "a pack is late",
    model.COLLECTOR_AGAIN: "a copy is condemned",
    model.WHOLE_BASES: "a deep series",
    model.NEAR_BASES: "a recipe",
    model.BASES_OF_BASES: "a recipe",
    model.ADDER_BASES: "a base of a base goes",
    model.SWEEP_MARKS_FIRST: "twins",
    model.EVENTS_FIRST: "read",
}


@pytest.mark.parametrize("scene", [*SCENES, *(pytest.param(one, marks=pytest.mark.long) for one in LARGE)])
def test_no_order_loses_a_version(scene: str) -> None:
    assert Search(*{**SCENES, **LARGE}[scene]).run() is None


@pytest.mark.parametrize(
    "rule", [pytest.param(rule, marks=[pytest.mark.long] if scene in LARGE else []) for rule, scene in RULES.items()]
)
def test_each_rule_is_needed(rule: str) -> None:
    """Without it, an order of steps loses a version, so the model is about something."""
    assert Search(*{**SCENES, **LARGE}[RULES[rule]], rule).run(), rule
