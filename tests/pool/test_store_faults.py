"""Whatever a store does to a request, a version is whole or not there, and what was there before stays (P4)."""

from collections.abc import Callable
from pathlib import Path

import pytest

from blobstore.errors import BlobStoreError
from tests.pool import places
from tests.pool.gateway import Gateway
from tests.pool.proxy import FAULTS, Fault, Proxy, Request
from tests.pool.worlds import World, Worlds

pytestmark = pytest.mark.slow

ADDED = "gone+child+large"
"""Some of its contents are there, but unused; one is so large that it is uploaded in parts."""


@pytest.fixture
def worlds(gateway: Gateway, tmp_path: Path) -> Worlds:
    return Worlds(places.bucket(gateway, tmp_path / "cache"), tmp_path, gateway)


@pytest.fixture
def through(proxy: Proxy) -> dict[str, str]:
    """Options of a client that gives up soon."""
    return {"aws_endpoint": proxy.url, "timeout": "1s", "max_retries": "2"}


def add(world: World, **options: str) -> None:
    world.add(ADDED, **options)


def collect(world: World, **options: str) -> None:
    world.collect(**options)


@pytest.fixture(params=[4, pytest.param(1, marks=pytest.mark.slow)])
def every(request: pytest.FixtureRequest) -> int:
    """Of the requests, one of so many is tried with each fault."""
    return int(request.param)


def requests(
    worlds: Worlds, proxy: Proxy, through: dict[str, str], work: Callable[..., None], every: int, fault: str
) -> list[int]:
    """The requests that are tried with a fault, of all that change something, and some of those that read."""
    world = worlds.new()
    proxy.begin()
    work(world, **through)
    reads = [number for number, one in enumerate(proxy.log) if one.method in {"GET", "HEAD"}]
    changes = [number for number, one in enumerate(proxy.log) if one.method not in {"GET", "HEAD"}]
    assert len(reads) > 20 and len(changes) > 5
    return sorted({*changes, *reads[:: len(reads) // 6]})[FAULTS.index(fault) % every :: every]


def once(number: int, fault: str) -> Fault:
    """A fault of one request."""
    return lambda at, request: fault if at == number else None


def onwards(number: int, fault: str) -> Fault:
    """A fault of one request and of all that follow."""
    return lambda at, request: fault if at >= number else None


def tried(world: World, proxy: Proxy, fault: Fault, work: Callable[[], None]) -> BlobStoreError | None:
    """The error of work while something goes wrong; afterwards nothing does."""
    proxy.begin(fault)
    try:
        work()
    except BlobStoreError as error:
        assert world.place.url in str(error)
        return error
    finally:
        proxy.begin()
    return None


Work = Callable[..., None]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("work", [add, collect])
def test_one_request_fails(
    worlds: Worlds, proxy: Proxy, through: dict[str, str], every: int, fault: str, work: Work
) -> None:
    """An error of adding means that the version is not there, and none that it is. Every version stays whole; then it can be
    added, and another collection does the rest."""
    outcomes = set()
    cleared = worlds.new()
    for _ in range(2):
        collect(cleared)
    for number in requests(worlds, proxy, through, work, every, fault):
        world = worlds.new()
        error = tried(world, proxy, once(number, fault), lambda world=world: work(world, **through))
        outcomes.add(str(error) if error else "")
        world.check()
        if work is add:
            assert (f"{ADDED}@2" in world.versions()) == (error is None), (number, error)
        if work is collect or error is not None:
            work(world)
            world.check()
        assert work is add or world.place.stored_bytes() == cleared.place.stored_bytes()
    if fault not in {"403", "409", "412"}:
        assert outcomes == {""}, "no single failure of the network or of the store is an error"


@pytest.mark.parametrize("fault", ["403", "503", "reset", "lost"])
@pytest.mark.parametrize("work", [add, collect])
def test_the_store_is_gone_in_the_middle(
    worlds: Worlds, proxy: Proxy, through: dict[str, str], every: int, fault: str, work: Work
) -> None:
    """An error. A version that was added is not there, or whole, and then the error says that this is not known."""
    through["max_retries"] = "0"
    for number in requests(worlds, proxy, through, work, every, fault):
        world = worlds.new()
        error = tried(world, proxy, onwards(number, fault), lambda world=world: work(world, **through))
        there = f"{ADDED}@2" in world.versions()
        assert not there or error is None or "it is not known whether" in str(error)
        world.check()
        if not there:
            assert work is collect or error is not None
            add(world)
            world.check()


@pytest.mark.parametrize("fault", FAULTS)
def test_one_request_of_making_a_pool_fails(
    gateway: Gateway, proxy: Proxy, through: dict[str, str], tmp_path: Path, every: int, fault: str
) -> None:
    """It is made, or an error; then it can be made."""
    counted = places.bucket(gateway, tmp_path / "cache")
    proxy.begin()
    counted.open(create=True, **through)
    for number in range(FAULTS.index(fault) % every, len(proxy.log), 2 * every):
        place = places.bucket(gateway, tmp_path / "cache")
        proxy.begin(once(number, fault))
        try:
            place.open(create=True, **through)
        except BlobStoreError as error:
            assert place.url in str(error) and fault in {"403", "409", "412"}
        proxy.begin()
        with place.open(create=True) as pool:
            assert pool.verify() == []


def test_dropping_is_done_though_its_answer_is_lost(worlds: Worlds, proxy: Proxy, through: dict[str, str]) -> None:
    for fault in ("lost", "lost 500", "cut", "reset"):
        world = worlds.new()
        done: list[Request] = []

        def commit(at: int, request: Request, fault: str = fault, done: list[Request] = done) -> str | None:
            if request.method == "PUT" and "/events/_delta_log/" in request.path and not done:
                done.append(request)
                return fault
            return None

        proxy.begin(commit)
        with world.place.open(**through) as pool:
            pool.drop("kept@1")
        assert done and world.versions() == set()
