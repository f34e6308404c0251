"""A pool in a bucket: how it is opened, what it asks for, and what it says when the store refuses (P1, P4, P5)."""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from blobstore.cli.app import app
from blobstore.errors import BlobStoreError, PoolError, TransferError
from blobstore.pool import Pool
from blobstore.storage.objects import REQUEST
from tests.pool import places
from tests.pool.gateway import Gateway
from tests.pool.models import halves, tensors, tuned, write
from tests.pool.places import Place
from tests.pool.proxy import Proxy, Request

pytestmark = pytest.mark.slow


@pytest.fixture
def place(gateway: Gateway, tmp_path: Path) -> Place:
    return places.bucket(gateway, tmp_path / "cache")


def variables(place: Place, **options: str) -> dict[str, str]:
    """The variables that all clients of S3 read."""
    given = {**place.options, **options}
    return {("AWS_ALLOW_HTTP" if name == "allow_http" else name.upper()): value for name, value in given.items()}


def in_environment(monkeypatch: pytest.MonkeyPatch, place: Place, tmp_path: Path, **options: str) -> None:
    for name, value in {**variables(place, **options), "XDG_CACHE_HOME": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)


# ------------------------------------------------------------------------------------------------------ opening


def test_the_command_line_takes_buckets(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_environment(monkeypatch, place, tmp_path)
    path = write(tmp_path / "a.safetensors", tensors())

    def run(*arguments: str) -> str:
        done = CliRunner().invoke(app, ["pool", *arguments])
        assert done.exit_code == 0, done.output
        return done.output

    run("add", place.url, str(path), "--as", "team/m@1")
    assert "team/m@1" in run("ls", place.url)
    run("get", place.url, "team/m@1", "-o", str(tmp_path / "out"))
    assert (tmp_path / "out" / "a.safetensors").read_bytes() == path.read_bytes()
    assert "ok" in run("verify", place.url)
    run("drop", place.url, "team/m@1")
    assert json.loads(run("gc", place.url, "--grace", "0", "--keep", "0", "--json"))["packs"] == 1
    assert place.packs() == []


@pytest.mark.parametrize("option", [{"max_retries": "many"}, {"aws_nonsense": "1"}])
def test_options_that_there_are_not(place: Place, option: dict[str, str]) -> None:
    with pytest.raises(PoolError, match=next(iter(option))):
        place.open(create=True, **option)


# ------------------------------------------------------------------------------------------------ several at once

_ADD = """
import sys
from blobstore.errors import PoolError
from blobstore.pool import Pool
url, cache, path, *references = sys.argv[1:]
pool = Pool(url, create=True, cache=cache)
print("ready", flush=True)
sys.stdin.readline()
for reference in references:
    try:
        pool.add(path, reference)
        print(reference, flush=True)
    except PoolError as error:
        assert "in the pool already" in str(error), error
"""


def added(place: Place, paths: list[Path], references: list[list[str]]) -> list[list[str]]:
    """What processes added that begin together, each a file under some references."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _ADD, place.url, str(place.cache), str(path), *names],
            env={**os.environ, **variables(place)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for path, names in zip(paths, references, strict=True)
    ]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    outputs = [process.communicate()[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes)
    return outputs


def test_processes_add_at_once(where: Place, tmp_path: Path) -> None:
    """Nothing of what each adds is lost, and of what both add, each is added once and an error for the other one. The pool
    itself is made once, and the copies of table files are shared."""
    base = halves(tensors())
    paths = [write(tmp_path / f"{n}" / "m.safetensors", tuned(base, n)) for n in range(2)]
    both = [f"m@{version}" for version in range(5)]
    own = [[f"{name}@{version}" for version in range(4)] for name in "ab"]
    outputs = added(where, paths, [[*names, *both] for names in own])
    assert sorted(itertools.chain(*outputs)) == sorted(itertools.chain(both, *own))
    with where.open() as pool:
        assert len(pool.versions()) == 13
        assert pool.verify() == []
        for path, output in zip(paths, outputs, strict=True):
            for name in output:
                assert b"".join(map(bytes, pool.cat(name, "m.safetensors"))) == path.read_bytes()


# -------------------------------------------------------------------------------------------------------- ranges


def packs_read(proxy: Proxy) -> list[Request]:
    return [request for request in proxy.log if "/packs/" in request.path]


def test_a_tensor_is_read_by_its_range(place: Place, proxy: Proxy, tmp_path: Path) -> None:
    """And a look at the map, its keys and layouts reads nothing."""
    model = {f"{n}.weight": np.random.default_rng(n).integers(0, 256, 50_000, np.uint8) for n in range(20)}
    with place.open(create=True, aws_endpoint=proxy.url) as pool:
        pool.add(write(tmp_path / "a.safetensors", model), "m@1")
        opened = pool.open("m@1")
        proxy.begin()
        assert "1.00 MB" in repr(opened) and len(opened) == 20 and opened.get_tensor_layout("3.weight")
        assert packs_read(proxy) == []
        np.testing.assert_array_equal(opened.numpy("7.weight"), model["7.weight"])
        (only,) = packs_read(proxy)
        assert only.range and only.sent < 50_100


def test_tensors_side_by_side_are_read_with_one_request(place: Place, proxy: Proxy, tmp_path: Path) -> None:
    """By `get`, `cat`, `verify` and `views`; of a fine-tune also its bases."""
    random = np.random.default_rng(0)
    base = {f"{n}.weight": (random.standard_normal((64, 128)) * 0.02).astype(np.float16) for n in range(200)}
    with place.open(create=True, aws_endpoint=proxy.url) as pool:
        models = {"base@1": base, "tuned@1": tuned(base, 1)}
        for reference, model in models.items():
            path = write(tmp_path / f"{reference}.safetensors", model)
            pool.add(path, reference)
            for read in (
                lambda reference=reference: pool.get(reference, tmp_path / "out"),
                lambda reference=reference, name=path.name: list(pool.cat(reference, name)),
                lambda reference=reference: pool.verify(reference),
            ):
                proxy.begin()
                read()
                assert len(packs_read(proxy)) <= 3  # a pack, that of the bases, and no more
            proxy.begin()
            views = {key: bytes(data) for key, data in pool.open(reference).views()}
            assert len(packs_read(proxy)) <= 3
            assert views == {key: values.tobytes() for key, values in model.items()}
            assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
        assert pool.why("base@1", "tuned@1").near > 0


def test_no_request_is_larger_than_the_limit(place: Place, proxy: Proxy, tmp_path: Path) -> None:
    """A blob of several requests, and many that come before and behind it."""
    random = np.random.default_rng(0)
    sizes = {"a": 3 * REQUEST + 5, **{f"b{n}": 3_000_000 for n in range(12)}, "c": REQUEST + 1}
    model = {key: random.integers(0, 256, size, np.uint8) for key, size in sizes.items()}
    path = write(tmp_path / "a.safetensors", model)
    with place.open(create=True, aws_endpoint=proxy.url) as pool:
        pool.add(path, "m@1")
        proxy.begin()
        pool.get("m@1", tmp_path / "out")
        assert (tmp_path / "out" / "a.safetensors").read_bytes() == path.read_bytes()
        read = packs_read(proxy)
        assert max(one.sent for one in read) <= REQUEST
        assert len(read) < 4 + 12 + 2 + 2
        assert sum(one.sent for one in read) < path.stat().st_size + (1 << 20)
        np.testing.assert_array_equal(pool.open("m@1").numpy("a"), model["a"])


# -------------------------------------------------------------------------------------------------------- errors

Call = Callable[[Pool, Path], object]
WRITES: dict[str, Call] = {
    "add": lambda pool, path: pool.add(path, "new@1"),
    "drop": lambda pool, path: pool.drop("m@1"),
    "gc": lambda pool, path: pool.gc(grace=0, keep=0),
}
READS: dict[str, Call] = {
    "get": lambda pool, path: pool.get("m@1", path.parent / "out"),
    "cat": lambda pool, path: list(pool.cat("m@1", "a.safetensors")),
    "views": lambda pool, path: list(pool.open("m@1").views()),
    "key": lambda pool, path: pool.open("m@1").numpy("layer.weight"),
}


@pytest.fixture
def filled(place: Place, tmp_path: Path) -> Place:
    """A place with a version, and a dropped one."""
    with place.open(create=True) as pool:
        pool.add(write(tmp_path / "a.safetensors", tensors()), "m@1")
        pool.add(write(tmp_path / "b.safetensors", tensors(3)), "gone@1")
        pool.drop("gone@1")
    return place


def refused(filled: Place, reason: str, action: Callable[[], object]) -> None:
    """One error in one line, which names the object and the reason."""
    with pytest.raises(TransferError) as caught:
        action()
    text = str(caught.value)
    assert text.startswith(f"{filled.url}/") and reason in text and "\n" not in text and "\x1b" not in text


WRONG = {
    "no such bucket": ({}, "there is no such bucket"),
    "unknown key": ({"aws_access_key_id": "nobody"}, "403 Forbidden, InvalidAccessKeyId"),
    "wrong secret": ({"aws_secret_access_key": "wrong"}, "403 Forbidden, SignatureDoesNotMatch"),
    "nobody there": ({"aws_endpoint": "http://127.0.0.1:9", "max_retries": "0"}, "cannot be reached"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("create", [False, True])
def test_a_store_that_cannot_be_used(filled: Place, wrong: str, create: bool) -> None:
    options, reason = WRONG[wrong]
    if wrong == "no such bucket":
        filled.url = "s3://no-such-bucket/some/pool"
    refused(filled, reason, lambda: filled.open(create=create, **options))


def test_the_command_line_says_what_a_user_may_not(filled: Place, gateway: Gateway, tmp_path: Path) -> None:
    """And nothing else, not even the libraries' own threads."""
    reader = Place(filled.url, filled.cache, filled.store, gateway.options(reader=True))
    path = str(tmp_path / "a.safetensors")
    for arguments in (["add", filled.url, path, "--as", "new@1"], ["drop", filled.url, "m@1"], ["gc", filled.url]):
        done = subprocess.run(
            [sys.executable, "-m", "blobstore", "pool", *arguments],
            env={**os.environ, **variables(reader), "XDG_CACHE_HOME": str(tmp_path / "cache")},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stdout) == (3, "")
        (line,) = done.stderr.splitlines()
        assert filled.url in line and "403 Forbidden, AccessDenied" in line


@pytest.mark.parametrize("call", [*WRITES])
def test_a_user_who_may_only_read(filled: Place, gateway: Gateway, tmp_path: Path, call: str) -> None:
    """Reads everything; a change is an error, and changes nothing."""
    reader = Place(filled.url, filled.cache, filled.store, gateway.options(reader=True))
    before = {path: filled.read(path) for path in filled.paths()}
    with reader.open() as pool:
        assert pool.verify() == []
        assert pool.get("m@1", tmp_path / "out")[0].read_bytes() == (tmp_path / "a.safetensors").read_bytes()
        refused(filled, "403 Forbidden, AccessDenied", lambda: WRITES[call](pool, tmp_path / "a.safetensors"))
    assert {path: filled.read(path) for path in filled.paths()} == before


@pytest.mark.parametrize("call", READS)
def test_credentials_that_end_while_something_is_read(filled: Place, proxy: Proxy, tmp_path: Path, call: str) -> None:
    """An error at whatever request they end, and no file; for what writes, see test_store_faults.py."""
    for number in itertools.count():
        with filled.open(aws_endpoint=proxy.url) as pool:
            proxy.begin(lambda at, request, number=number: "403" if at >= number else None)
            try:
                READS[call](pool, tmp_path / "a.safetensors")
                break
            except BlobStoreError as error:
                text = str(error)
                assert text.startswith(filled.url) and "403 Forbidden" in text and "\n" not in text
        assert not (tmp_path / "out" / "a.safetensors").exists()
    assert number > 1


def test_a_conflict_is_not_taken_for_success(filled: Place, proxy: Proxy, tmp_path: Path) -> None:
    """S3 answers 409 to one of two uploads at once: nothing was stored."""

    def conflict(at: int, request: Request) -> str | None:
        return "409" if request.method == "PUT" and "/packs/" in request.path else None

    with filled.open(aws_endpoint=proxy.url) as pool:
        proxy.begin(conflict)
        path = write(tmp_path / "c.safetensors", tensors(8))
        refused(filled, "409 Conflict", lambda: pool.add(path, "new@1"))
    with filled.open() as pool:
        assert pool.verify() == [] and len(pool.versions()) == 1
