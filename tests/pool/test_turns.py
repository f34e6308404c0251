"""Two that add, two that drop, two that collect and one that reads, stopped between any two tables: nothing is lost (P4)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.pool import places
from tests.pool.turns import Inline, Program, Turns
from tests.pool.worlds import World, Worlds

pytestmark = pytest.mark.long


@pytest.fixture
def worlds(tmp_path: Path) -> Worlds:
    return Worlds(places.folder(tmp_path / "pool"), tmp_path, None)


def drop(world: World, reference: str) -> None:
    with world.place.open() as pool:
        pool.drop(reference)


def added_again(world: World, turns: Turns, version: str) -> Program:
    return turns.program(lambda: world.add("kept", version, Inline()))


def test_two_collections_and_contents_that_are_dropped_and_added_again(
    worlds: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One collection stops anywhere after it has condemned packs. The other finds the dropped contents unused, two that add
    find them stored, and then the other one condemns them."""
    goes_on, at = True, 0
    while goes_on:
        world = worlds.new()
        with monkeypatch.context() as patched:
            turns = Turns(patched)
            first, second = turns.program(world.collect), turns.program(world.collect)
            adding = [added_again(world, turns, version) for version in "23"]
            first.until("append marks")
            for _ in range(at):
                goes_on = first.go()
            drop(world, "kept@1")
            second.until("append marks")
            for one in adding:
                one.until("append events")
            second.go()
            for one in (first, second, *adding):
                one.end()
        world.check()
        assert {"kept@2", "kept@3"} <= world.versions()
        at += 1
    assert at > 10


def read(world: World) -> None:
    with world.place.open() as pool:
        pieces = pool.cat("kept@2", "kept.safetensors")
        assert b"".join(map(bytes, pieces)) == (world.files / "kept.safetensors").read_bytes()


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_many(worlds: Worlds, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """All versions that are there are whole after each step that changes something, and what stays can be read."""
    chance = random.Random(seed)  # noqa: S311 - any order will do
    world = worlds.new()
    world.add("kept")
    with monkeypatch.context() as patched:
        turns = Turns(patched)
        running = [
            turns.program(world.collect),
            turns.program(world.collect),
            turns.program(lambda: world.add("gone+child", "2", Inline())),
            turns.program(lambda: world.add("gone+other", "2", Inline())),
            turns.program(lambda: drop(world, "kept@1")),
            turns.program(lambda: drop(world, "gone+child@2") if "gone+child@2" in world.versions() else None),
            turns.program(lambda: read(world)),
        ]
        while running:
            one = chance.choice(running)
            before = one.step or ""
            for _ in range(chance.choice((1, 1, 1, 4, 16))):
                before = one.step or ""
                if not one.go():
                    break
            if before.startswith(("delete", "append events")):
                world.check()
            if one.step is None:
                one.end()
                running.remove(one)
    for _ in range(2):
        world.collect()
        world.check()
