"""In no order of their steps do adders, droppers, collectors and readers lose a version (P4), and each rule is needed for that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.pool import protocol as model
from tests.pool.protocol import Row, Search, World

Actors = list[tuple[Callable[..., model.Steps], tuple[Any, ...]]]

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

DEEP = World(
    packs=frozenset("pqrst"),
    blobs=frozenset({Row("a", "p"), Row("a", "q", "z"), Row("z", "r"), Row("b", "s", "a"), Row("c", "t", "b")}),
    parts=frozenset({("old", "a"), ("old", "c")}),
    events=frozenset({("old", "add")}),
)
"""The same, and what is below the base is also stored as a difference."""


def two_collections(without: str) -> tuple[World, Actors]:
    """The contents of a version that is dropped are added again while one condemns and the other deletes."""
    return OLD, [
        (model.adder, ("new", "a", "", without)),
        (model.dropper, ("old",)),
        (model.condemning, ()),
        (model.emptying, ("c", without)),
        (model.sweeping, (without,)),
    ]


def a_copy_is_condemned(without: str) -> tuple[World, Actors]:
    """Of a version that stays, packs are condemned while they are written."""
    return OLD, [(model.condemning, ()), (model.collector, ("c", without)), (model.collector, ("d", without))]


def a_pack_is_late(without: str) -> tuple[World, Actors]:
    """Rows of a pack come after it was condemned and deleted; meanwhile, others need the same."""
    return OLD._replace(marks=OLD.packs), [
        (model.adder, ("new", "a", "", without)),
        (model.emptying, ("c", without)),
        (model.condemning, ()),
        (model.sweeping, (without,)),
    ]


def twins(without: str) -> tuple[World, Actors]:
    """Two versions with the same contents are added at once."""
    return World(), [
        (model.adder, ("one", "a", "", without)),
        (model.adder, ("two", "a", "", without)),
        (model.condemning, ()),
        (model.sweeping, (without,)),
    ]


def a_base_goes(without: str) -> tuple[World, Actors]:
    """What is added is a difference to what is dropped."""
    return OLD, [
        (model.adder, ("new", "b", "a", without)),
        (model.dropper, ("old",)),
        (model.condemning, ()),
        (model.emptying, ("c", without)),
    ]


def a_series(without: str) -> tuple[World, Actors]:
    """A base is needed, and what is stored against it."""
    return SERIES, [(model.collector, ("c", without)), (model.condemning, ())]


def a_recipe(without: str) -> tuple[World, Actors]:
    """Of a recipe that is needed, everything may be condemned, also its base and what that is a difference to."""
    return RECIPES, [(model.collector, ("k", without)), (model.condemning, ()), (model.reader, ("old", without))]


def a_deep_series(without: str) -> tuple[World, Actors]:
    """What is below the base of a recipe is needed, too, and has a row that nothing else can be read by."""
    return DEEP, [(model.collector, ("k", without)), (model.condemning, ())]


def a_base_of_a_base_goes(without: str) -> tuple[World, Actors]:
    """What is added follows from what is dropped, which is a difference to what nothing else needs."""
    dropped = RECIPES._replace(
        packs=frozenset("pq"), blobs=RECIPES.blobs - {Row("c", "r", "b")}, parts=frozenset({("old", "b")})
    )
    return dropped, [
        (model.adder, ("new", "c", "b", without)),
        (model.dropper, ("old",)),
        (model.condemning, ()),
        (model.emptying, ("k", without)),
        (model.sweeping, (without,)),
    ]


def a_recipe_is_added_again(without: str) -> tuple[World, Actors]:
    """A recipe is there, and what it needs goes, which another version adds again, in another form."""
    return RECIPES, [
        (model.adder, ("new", "c", "b", without)),
        (model.adder, ("other", "b", "", without)),
        (model.dropper, ("old",)),
        (model.condemning, ()),
        (model.emptying, ("k", without)),
    ]


def given_up(without: str) -> tuple[World, Actors]:
    """A version appears when it is given up."""
    return World(), [
        (model.adder, ("new", "a", "", without)),
        (model.giving_up, ("new",)),
        (model.collector, ("c", without)),
    ]


def read(without: str) -> tuple[World, Actors]:
    """Somebody reads a version that appears."""
    return World(), [
        (model.adder, ("new", "a", "", without)),
        (model.reader, ("new", without)),
        (model.collector, ("c", without)),
    ]


def everybody(without: str) -> tuple[World, Actors]:
    """One that adds, one that drops, and two whole collections."""
    return OLD, [
        (model.adder, ("new", "a", "", without)),
        (model.dropper, ("old",)),
        (model.collector, ("c", without)),
        (model.collector, ("d", without)),
    ]


def two_that_add(without: str) -> tuple[World, Actors]:
    """Two that add, one of them against the other's contents, and one each that drops and collects."""
    return OLD, [
        (model.adder, ("new", "a", "", without)),
        (model.adder, ("near", "b", "a", without)),
        (model.dropper, ("old",)),
        (model.condemning, ()),
        (model.emptying, ("c", without)),
    ]


LARGE = [
    *(a_copy_is_condemned, a_pack_is_late, everybody, two_that_add),
    *(a_recipe_is_added_again, a_base_of_a_base_goes),
]
SCENES = [two_collections, twins, a_base_goes, a_series, a_recipe, a_deep_series, given_up, read]

RULES = {
    model.PARTS_FIRST: two_collections,
    model.ADDER_MARKS: two_collections,
    model.ADDER_MARKS_LAST: twins,
    model.ADDER_AGAIN: twins,
    model.ENDS_ONCE: given_up,
    model.NOTED_BEFORE: two_collections,
    model.COLLECTOR_MARKS_LAST: a_pack_is_late,
    model.COLLECTOR_AGAIN: a_copy_is_condemned,
    model.WHOLE_BASES: a_deep_series,
    model.NEAR_BASES: a_recipe,
    model.BASES_OF_BASES: a_recipe,
    model.ADDER_BASES: a_base_of_a_base_goes,
    model.SWEEP_MARKS_FIRST: twins,
    model.EVENTS_FIRST: read,
}


@pytest.mark.parametrize("scene", [*SCENES, *(pytest.param(one, marks=pytest.mark.long) for one in LARGE)])
def test_no_order_loses_a_version(scene: Callable[[str], tuple[World, Actors]]) -> None:
    assert Search(*scene("")).run() is None


@pytest.mark.parametrize(
    "rule", [pytest.param(rule, marks=[pytest.mark.long] if scene in LARGE else []) for rule, scene in RULES.items()]
)
def test_each_rule_is_needed(rule: str) -> None:
    """Without it, an order of steps loses a version, so the model is about something."""
    assert Search(*RULES[rule](rule)).run(), rule
