"""Two that add, two that drop, two that collect and one that reads, stopped between any two tables: nothing is lost (P4)."""

import random
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

from blobstore.errors import PoolError
from blobstore.pool import Pool, collecting
from blobstore.pool.relations import stored_rows
from tests.pool import places
from tests.pool.models import halves, tensors, tuned, write
from tests.pool.turns import Inline, Program, Turns
from tests.pool.worlds import NEVER, World, Worlds


@pytest.fixture
def worlds(tmp_path: Path) -> Worlds:
    return Worlds(places.folder(tmp_path / "pool"), tmp_path, None)


def drop(world: World, reference: str) -> None:
    with world.place.open() as pool:
        pool.drop(reference)


def added_again(world: World, turns: Turns, version: str) -> Program:
    return turns.program(lambda: world.add("kept", version, Inline()))


@pytest.mark.long
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


@pytest.mark.long
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


# ------------------------------------------------------------------------------------------------- two at one place


def folder(tmp_path: Path) -> Path:
    """Of a pool with one version."""
    write(tmp_path / "a.safetensors", tensors(1))
    write(tmp_path / "old.safetensors", tensors(2))
    with Pool(tmp_path / "pool", create=True) as pool:
        pool.add(tmp_path / "old.safetensors", "old@1")
    return tmp_path / "pool"


def add(place: Path, name: str, file: str = "a") -> None:
    with Pool(place) as pool:
        pool.add(place.parent / f"{file}.safetensors", f"{name}@1", executor=Inline())


def collect(place: Path, grace: float = NEVER) -> None:
    with Pool(place) as pool:
        pool.gc(grace=grace, keep=0)


def condemn(place: Path, packs: set[str]) -> None:
    with Pool(place) as pool:
        pool.tables.append("marks", [(None, bytes.fromhex(pack), 0) for pack in packs])


def packs_of(place: Path) -> set[str]:
    return {path.name for path in (place / "packs").rglob("*") if path.is_file()}


def versions(place: Path) -> set[str]:
    """Those that are there, which must be whole."""
    with Pool(place) as pool:
        assert pool.verify() == []
        return {version.name for version in pool.versions()}


def test_a_version_appears_when_it_is_about_to_be_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays, with its parts."""
    place, turns = folder(tmp_path), Turns(monkeypatch)
    adding, giving_up = turns.program(lambda: add(place, "new")), turns.program(lambda: collect(place, grace=-10))
    adding.until("append events")
    giving_up.until("append events")
    adding.end()
    giving_up.end()
    assert versions(place) == {"old", "new"}


@pytest.mark.long
def test_a_version_is_given_up_when_it_is_about_to_appear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, turns = folder(tmp_path), Turns(monkeypatch)
    adding = turns.program(lambda: add(place, "new"))
    adding.until("append events")
    collect(place, grace=-10)
    with pytest.raises(PoolError, match="gave it up"):
        adding.end()
    assert versions(place) == {"old"}


@pytest.mark.long
def test_a_pack_is_condemned_and_deleted_before_its_rows_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else changes the blobs; the new rows are looked at all the same."""
    place, turns = folder(tmp_path), Turns(monkeypatch)
    before = packs_of(place)
    adding = turns.program(lambda: add(place, "new"))
    adding.until("append blobs")
    condemn(place, packs_of(place) - before)
    collect(place)
    assert packs_of(place) == before
    adding.end()
    assert versions(place) == {"old", "new"}
    collect(place)
    assert versions(place) == {"old", "new"}


@pytest.mark.long
def test_rows_that_lead_nowhere_come_between_two_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever adds the same contents has not seen them, or that their pack was condemned."""
    place, turns = folder(tmp_path), Turns(monkeypatch)
    before = packs_of(place)
    late, adding = (turns.program(lambda name=name: add(place, name)) for name in ("late", "new"))
    late.until("append blobs")
    adding.until("append parts")
    adding.go()
    adding.go()  # one of the two tables
    condemn(place, packs_of(place) - before)
    sweep(place)
    late.go()
    adding.end()
    assert versions(place) == {"old", "new"}
    late.end()
    assert versions(place) == {"old", "new", "late"}


@pytest.mark.long
def test_a_copy_is_condemned_and_deleted_before_its_rows_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The collection that made it makes another one, and needs the old pack until then; if it dies, the next one does."""
    for dies in (True, False):
        place = folder(tmp_path / str(dies))
        with monkeypatch.context() as patched:
            turns = Turns(patched)
            before = packs_of(place)
            condemn(place, before)
            copying = turns.program(lambda place=place: collect(place))
            copying.until("append blobs")
            condemn(place, packs_of(place) - before)
            sweep(place)
            assert packs_of(place) == before
            if dies:
                copying.go()  # the rows come, and lead nowhere
            else:
                copying.end()
            assert versions(place) == {"old"}
        for _ in range(2):
            collect(place)
            assert versions(place) == {"old"}
        assert not packs_of(place) & before


@pytest.mark.long
def test_rows_that_lead_nowhere(tmp_path: Path) -> None:
    """Whoever reads or collects takes other rows, whichever come first."""
    place, nowhere = folder(tmp_path), {"00" * 32, "ff" * 32}
    with Pool(place) as pool:
        rows = pool.tables.query("SELECT * EXCLUDE (filename, file_row_number) FROM blobs")
        pool.tables.append("blobs", [(*row[:6], bytes.fromhex(pack), *row[7:]) for row in rows for pack in nowhere])
    assert versions(place) == {"old"}
    condemn(place, nowhere | packs_of(place))
    assert versions(place) == {"old"}
    collect(place)
    assert versions(place) == {"old"}
    with Pool(place) as pool:
        packs = {pack.hex() for (pack,) in pool.tables.query("SELECT pack FROM blobs")}
    assert packs and packs <= packs_of(place)


def sweep(place: Path) -> None:
    """What a collection does at its end."""
    with Pool(place) as pool:
        pool.tables.fresh()
        collecting._sweep(pool.objects, pool.tables, 0, NEVER * 10)


def test_rows_come_and_their_pack_is_condemned_while_another_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the two looks of a sweep."""
    place, turns = folder(tmp_path), Turns(monkeypatch)
    before = packs_of(place)
    adding, sweeping = turns.program(lambda: add(place, "new")), turns.program(lambda: sweep(place))
    adding.until("append blobs")
    for _ in range(10):  # opening, looking at all, and one of the two
        sweeping.go()
    adding.end()
    condemn(place, packs_of(place) - before)
    sweeping.end()
    assert versions(place) == {"old", "new"}


@pytest.mark.long
def test_a_base_stays_whole_though_it_is_stored_as_a_difference_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two that add, one has not seen what the other one stores the same content against."""
    first = halves(tensors())
    base = tuned(first, 1, 0.02)
    for name, model in {"first": first, "base": base, "near": tuned(base, 2, 0.02)}.items():
        write(tmp_path / f"{name}.safetensors", model)
    place, turns = folder(tmp_path), Turns(monkeypatch)
    slow = turns.program(lambda: add(place, "slow", "base"))
    slow.until("append blobs")
    whole = packs_of(place)
    add(place, "first", "first")
    add(place, "base", "base")
    slow.end()
    with Pool(place) as pool:
        rows = pool.tables.query(
            "SELECT digest, pack FROM blobs WHERE base IS NULL AND digest IN (SELECT digest FROM blobs WHERE base IS NOT NULL)"
        )
    assert rows and {pack.hex() for _, pack in rows} <= whole
    add(place, "near", "near")
    with Pool(place) as pool:
        ((against,),) = pool.tables.query(
            "SELECT count(*) FROM blobs WHERE base IN (SELECT a FROM doubles)",
            doubles=[(digest,) for digest, _ in rows],
        )
    assert against
    condemn(place, whole)
    for _ in range(2):
        collect(place)
        assert versions(place) == {"old", "slow", "first", "base", "near"}
    assert not packs_of(place) & whole


@pytest.mark.long
def test_a_thread_looks_for_contents_while_another_sees_tables_that_were_compacted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where rows are is asked first, and what they have then; in between, the other thread has to wait."""
    place = folder(tmp_path)
    for seed in (3, 4, 5):
        write(place.parent / f"{seed}.safetensors", tensors(seed))
        add(place, f"m{seed}", str(seed))
    with Pool(place) as pool, Pool(place) as other, ThreadPoolExecutor(1) as threads:
        digests = [digest for (digest,) in pool.tables.query("SELECT digest FROM blobs")]
        other.tables.tidy(always=True)
        numbers, looked = pool.tables.numbers, list[Future[None]]()

        def interrupted(text: str, **given: Any) -> Any:
            found = numbers(text, **given)
            looked.append(threads.submit(pool.tables.fresh))
            wait(looked, timeout=0.3)  # it does not end before what it would disturb
            return found

        monkeypatch.setattr(pool.tables, "numbers", interrupted)
        assert stored_rows(pool.tables, digests).keys() == set(digests)
        assert looked
