"""Nothing that a version needs is ever collected, whoever writes, dies or collects meanwhile (P4).

Adding, dropping and collecting are sequences of steps on the tables and the objects. What others do between two of them is
tried at every place: a whole collection, a whole version, or the end of the process.
"""

import contextlib
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from blobstore.errors import BlobStoreError, FileAccessError, PoolError
from blobstore.pool import Pool, PoolDataMap, collecting
from blobstore.pool.tables import Tables
from blobstore.storage.objects import Objects
from tests.helpers.between import KilledError, between, die
from tests.pool.models import halves, tensors, tuned, write
from tests.pool.places import Place
from tests.pool.worlds import NEVER, World, Worlds

STEPS = [(Tables, "append"), (Tables, "delete"), (Tables, "fresh"), (Objects, "place"), (Objects, "delete")]


@pytest.fixture
def worlds(where: Place, tmp_path: Path, request: pytest.FixtureRequest) -> Worlds:
    return Worlds(where, tmp_path, request.getfixturevalue("gateway") if where.is_bucket else None)


ADDED = "gone+child"
"""Its contents are there, but unused, and one of them is to be stored against a base that is unused."""


def add(world: World) -> None:
    world.add(ADDED)


def collect(world: World) -> None:
    world.collect()


def collect_twice(world: World) -> None:
    """The first marks, the second deletes."""
    world.collect()
    world.collect()


def steps_of(worlds: Worlds, work: Callable[[World], None]) -> list[int]:
    """The steps of what is done in a world; in a bucket, where each takes long, some of them."""
    with between(STEPS, -1, die) as made:
        work(worlds.new())
    steps = list(range(len(made)))
    return steps if worlds.gateway is None else steps[:: max(len(steps) // 5, 1)]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("work", "event"), [(add, collect), (add, collect_twice), (collect, add)])
def test_others_between_any_two_steps(
    worlds: Worlds, work: Callable[[World], None], event: Callable[[World], None]
) -> None:
    """A version is whole, whenever others collect, and whenever it is added while they do."""
    for at in steps_of(worlds, work):
        world = worlds.new()
        with between(STEPS, at, lambda world=world: event(world)):
            work(world)
        world.check()
        assert f"{ADDED}@2" in world.versions()
        collect_twice(world)
        world.check()


@pytest.mark.slow
@pytest.mark.long
def test_what_was_begun_is_given_up_between_any_two_steps_of_adding(worlds: Worlds) -> None:
    """The version is whole, or not there and adding an error."""
    outcomes = set()
    for at in steps_of(worlds, add):
        world = worlds.new()
        with between(STEPS, at, lambda world=world: world.collect(grace=0.0)):
            try:
                add(world)
                outcomes.add("added")
                assert f"{ADDED}@2" in world.versions()
            except (PoolError, FileAccessError) as error:  # or its temporary file is gone
                assert "gave it up" in str(error) or "No such file" in str(error)
                outcomes.add("given up")
                assert f"{ADDED}@2" not in world.versions()
        world.check()
        collect_twice(world)
        world.check()
    assert outcomes == {"added", "given up"}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("work", [add, collect])
def test_a_process_dies_at_any_step(worlds: Worlds, work: Callable[[World], None]) -> None:
    """The version is there or not, and can be added then; later collections leave nothing of it."""
    for at in steps_of(worlds, work):
        world = worlds.new()
        with between(STEPS, at, die), pytest.raises(KilledError):
            work(world)
        world.check()
        if f"{ADDED}@2" not in world.versions():
            add(world)
        world.check()
        collect(world)
        world.check()
        with world.place.open() as pool:
            for version in world.versions():
                pool.drop(version)
        for _ in range(3):
            world.collect(grace=0)
        assert world.place.stored_bytes() == 0


@pytest.mark.long
def test_the_same_version_twice_at_once(worlds: Worlds) -> None:
    """One is added, the other is an error, at whatever step the other comes."""
    winners = set()
    for at in steps_of(worlds, lambda world: world.add("child")):
        world = worlds.new()
        done: list[str] = []

        def add_as(who: str, world: World = world, done: list[str] = done) -> None:
            try:
                world.add("child")
                done.append(who)
            except PoolError as error:
                assert "is in the pool already" in str(error)

        with between(STEPS, at, lambda add_as=add_as: add_as("other")):
            add_as("first")
        assert len(done) == 1
        winners.update(done)
        world.check()
    after_the_commit = set() if world.place.is_bucket else {"first"}  # in a folder a look follows
    assert winners == {"other"} | after_the_commit


@pytest.mark.long
def test_what_is_dropped_is_freed(worlds: Worlds) -> None:
    world = worlds.new()
    full = world.place.stored_bytes()
    world.collect()
    world.collect()
    assert world.place.stored_bytes() < 0.8 * full
    world.check()
    with world.place.open() as pool:
        pool.drop("kept@1")
        assert pool.gc(keep=NEVER).packs == 0  # readers may still be at it
        waiting = pool.gc(keep=0)
        assert waiting.packs >= 1 and waiting.freed > 0
    assert world.place.stored_bytes() == 0


def test_a_mostly_unused_pack_is_written_anew(where: Place, tmp_path: Path) -> None:
    """And a reader that looked up before reads on."""
    small, large = {"a": tensors()["layer.bias"]}, tensors(3)
    write(tmp_path / "both" / "small.safetensors", small)
    write(tmp_path / "both" / "large.safetensors", large)
    write(tmp_path / "small.safetensors", small)
    with where.open(create=True) as pool:
        pool.add(tmp_path / "both", "both@1")
        pool.add(tmp_path / "small.safetensors", "small@1")
        reader = where.open().open("small@1")
        pool.drop("both@1")
        before = where.stored_bytes()
        pool.gc(grace=0, keep=NEVER)
        assert reader.numpy("a").tobytes() == small["a"].tobytes()
        pool.gc(grace=0, keep=0)
        pool.gc(grace=0, keep=0)
        assert where.stored_bytes() < before / 4
        assert reader.numpy("a").tobytes() == small["a"].tobytes()
        assert pool.verify() == []


@pytest.mark.parametrize("step", range(3))
def test_a_version_that_appears_while_a_reader_looks_is_whole(
    where: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """The tables are looked at one after the other; whoever sees a version sees what it needs."""
    first, second = (write(tmp_path / f"{number}.safetensors", tensors(number)) for number in (0, 1))
    with where.open(create=True) as reader, where.open() as writer:
        writer.add(first, "m@0")
        looked: list[str] = []
        update = Tables._update

        def counted(self: Tables, table: str) -> bool:
            if self is reader.tables:
                looked.append(table)
                if len(looked) - 1 == step:
                    writer.add(second, "m@1")
            return update(self, table)

        monkeypatch.setattr(Tables, "_update", counted)
        versions = reader.versions()
        for version in versions:
            assert PoolDataMap(reader.objects, reader.tables, version).numpy("layer.bias").nbytes == 384
        monkeypatch.undo()
        assert len(looked) == 3
        assert ("1" in {version.version for version in versions}) == (looked.index("events") >= step)


@pytest.mark.long
@pytest.mark.parametrize("dies", [False, True])
def test_what_is_dropped_and_added_again_while_a_pack_is_emptied(
    where: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    """Dropped before the collection looks, and added after that, before the pack is condemned."""
    base = halves(tensors())
    write(tmp_path / "a" / "a.safetensors", base)
    write(tmp_path / "b" / "a.safetensors", tuned(base, 1))
    give_up, append = collecting._give_up, Tables.append
    with where.open(create=True) as pool, where.open() as other:
        pool.add(tmp_path / "a", "a@1")
        pool.add(tmp_path / "b", "b@1")
        collector = where.open()

        def then_drop(tables: Tables, before: float) -> int:
            given_up = give_up(tables, before)
            other.drop("a@1")
            other.drop("b@1")
            return given_up

        def after_adding(self: Tables, table: str, rows: Any, once: Any = ()) -> None:
            condemns = self is collector.tables and table == "marks" and any(row[0] is None for row in rows)
            if condemns and not again:
                again.append(1)
                other.add(tmp_path / "b", "b@2")
            append(self, table, rows, once)
            if condemns and dies:
                raise KilledError

        again: list[int] = []
        with monkeypatch.context() as patched, contextlib.suppress(KilledError):
            patched.setattr(collecting, "_give_up", then_drop)
            patched.setattr(Tables, "append", after_adding)
            collector.gc(grace=NEVER, keep=0)
        assert again
        assert pool.verify() == []
        for _ in range(2):
            pool.gc(grace=NEVER, keep=0)
            assert pool.verify() == []
        assert b"".join(map(bytes, pool.cat("b@2", "a.safetensors"))) == (tmp_path / "b" / "a.safetensors").read_bytes()


def rows_of(where: Place) -> list[tuple[str, int, int]]:
    """For each table how many rows it has, and how many distinct ones."""
    with where.open() as pool:
        tables, rows = pool.tables, "SELECT * EXCLUDE (filename, file_row_number) FROM {}"
        return [
            (name, *tables.query(f"SELECT count(*), count(DISTINCT t) FROM ({rows.format(name)}) t")[0])  # noqa: S608
            for name in ("events", "parts", "blobs", "marks")
        ]


@pytest.mark.long
def test_two_that_tidy_at_once_do_not_double_rows(
    where: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine lets two compactions of the same files both succeed."""
    write(tmp_path / "a.safetensors", tensors())
    with where.open(create=True) as pool, where.open() as other:
        for number in range(6):
            pool.add(tmp_path / "a.safetensors", f"m@{number}")
        monkeypatch.setattr("blobstore.pool.tables._SMALL_FILES", 2)
        begun: list[int] = []
        look = pool.tables.fresh

        def between(*tables: str) -> None:
            """The other one tidies after the first has looked, and before it changes anything."""
            look(*tables)
            if tables == ("events",) and not begun:
                begun.append(1)
                other.tables.fresh()
                other.tables.tidy()

        monkeypatch.setattr(pool.tables, "fresh", between)
        pool.tables.tidy()
        assert begun
    assert all(number == distinct for _, number, distinct in rows_of(where))
    with where.open() as pool:
        assert len(pool.versions()) == 6


@pytest.mark.long
def test_versions_in_a_row_leave_few_files(where: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are tidied by how many files they have, not by time; but not beside one that began and is not done."""
    path = write(tmp_path / "a.safetensors", tensors())
    monkeypatch.setattr("blobstore.pool.tables._SMALL_FILES", 3)

    def files(pool: Pool, table: str) -> int:
        return pool.tables.query(f"SELECT count(DISTINCT filename) FROM {table}")[0][0]  # noqa: S608

    with where.open(create=True) as pool:
        for number in range(10):
            pool.add(path, f"m@{number}")
            assert max(files(pool, table) for table in ("events", "parts", "blobs")) <= 3
        if where.is_bucket:  # where one of two finds that it was second
            return
        now = time.time_ns()
        pool.tables._mark(pool.tables._delta("events"), "tidy", now)
        for number in range(10, 14):
            pool.add(path, f"m@{number}")
        assert files(pool, "events") > 3
        monkeypatch.setattr(time, "time_ns", lambda: now + 601 * 10**9)  # it must have died
        pool.add(path, "m@14")
        assert files(pool, "events") == 1
        assert len(pool.versions()) == 15
    assert all(number == distinct for _, number, distinct in rows_of(where))


def test_who_looks_after_old_commits_were_removed_sees_the_newest(tmp_path: Path) -> None:
    """The commit that follows the one seen last is gone, as are all old ones; there is a checkpoint instead."""
    path = write(tmp_path / "a.safetensors", tensors())
    with Pool(tmp_path / "pool", create=True) as pool, Pool(tmp_path / "pool") as other:
        pool.add(path, "m@0")
        assert len(pool.versions()) == 1
        for number in range(1, 4):
            other.add(path, f"m@{number}")
        other.tables.tidy(always=True)
        for log in (tmp_path / "pool/tables").glob("*/_delta_log"):
            assert list(log.glob("*.checkpoint.parquet"))
            for entry in sorted(log.glob("*.json"))[:-1]:
                entry.unlink()
        assert [one.version for one in pool.versions()] == list("0123")
        assert pool.verify() == []


def test_rows_that_are_there_twice_change_nothing(where: Place, tmp_path: Path) -> None:
    """The rows of a commit whose answer was lost are committed again."""
    path = write(tmp_path / "a.safetensors", tensors())
    with where.open(create=True) as pool:
        pool.add(path, "m@1")
        for table in ("events", "parts", "blobs"):
            columns = "* EXCLUDE (filename, file_row_number)"
            pool.tables.append(table, pool.tables.query(f"SELECT {columns} FROM {table}"))  # noqa: S608
        pool.tables.fresh()
        before = where.stored_bytes()
        assert len(pool.versions()) == pool.stats().versions == 1
        assert set(pool.open("m@1")) == set(tensors())
        assert pool.verify() == []
        assert pool.stats().contents_bytes == path.stat().st_size
        pool.add(write(tmp_path / "b.safetensors", tensors(5)), "m@2")
        pool.drop("m@2")
        for _ in range(2):
            pool.gc(grace=0, keep=0)
        assert pool.verify() == []
        assert where.stored_bytes() == before
        pool.drop("m@1")
        assert pool.versions() == []


class Machine(RuleBasedStateMachine):
    """Any sequence of what can be done to a pool, against a dictionary."""

    numbers = itertools.count()

    @initialize()
    def begin(self) -> None:
        import tempfile

        self.place = tempfile.TemporaryDirectory()
        self.folder = Path(self.place.name)
        self.pool = Pool(self.folder / "pool", create=True)
        self.there: dict[str, bytes] = {}

    @rule(seed=st.integers(0, 1), change=st.integers(0, 3), half=st.booleans(), name=st.sampled_from("abc"))
    def add(self, seed: int, change: int, half: bool, name: str) -> None:
        model = tensors(seed) if not half else halves(tensors(seed))
        path = write(self.folder / "m.safetensors", tuned(model, change) if change else model)
        try:
            self.pool.add(path, f"{name}@1")
            assert f"{name}@1" not in self.there
            self.there[f"{name}@1"] = path.read_bytes()
        except PoolError:
            assert f"{name}@1" in self.there

    @rule(name=st.sampled_from("abc"))
    def drop(self, name: str) -> None:
        try:
            self.pool.drop(f"{name}@1")
            del self.there[f"{name}@1"]
        except PoolError:
            assert f"{name}@1" not in self.there

    @rule(grace=st.sampled_from([0.0, NEVER]), keep=st.sampled_from([0.0, NEVER]))
    def collect(self, grace: float, keep: float) -> None:
        self.pool.gc(grace=grace, keep=keep)

    @rule()
    def begin_anew(self) -> None:
        self.pool.close()
        self.pool = Pool(self.folder / "pool")

    @rule(name=st.sampled_from("abc"))
    def read(self, name: str) -> None:
        try:
            (path,) = self.pool.get(f"{name}@1", self.folder / "out")
            assert path.read_bytes() == self.there[f"{name}@1"]
        except BlobStoreError:
            assert f"{name}@1" not in self.there

    @invariant()
    def lists(self) -> None:
        if hasattr(self, "there"):
            assert {f"{one.name}@{one.version}" for one in self.pool.versions()} == set(self.there)

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            assert self.pool.verify() == []
            self.pool.close()
            self.place.cleanup()


TestAnySequence = Machine.TestCase
TestAnySequence.settings = settings(max_examples=10, stateful_step_count=12)
TestAnySequence = pytest.mark.long(TestAnySequence)
