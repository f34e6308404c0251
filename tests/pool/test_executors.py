"""Any workers add the same versions, and one that dies loses nothing (P1, P4)."""

import contextlib
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from blobstore.errors import MissingDependencyError, PoolError
from blobstore.pool import Pool
from blobstore.pool.executors import open_executor
from tests.helpers.waiting import until
from tests.pool.models import halves, tensors, tuned, write
from tests.pool.places import Place


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for number in range(4):
        write(tmp_path / "model" / f"{number}.safetensors", tuned(halves(tensors(number % 2)), number))
    return tmp_path / "model"


def come_back(pool: Pool, reference: str, model: Path, out: Path) -> bool:
    pool.get(reference, out)
    return all((out / file.name).read_bytes() == file.read_bytes() for file in model.iterdir())


EXECUTORS: dict[str, Callable[[pytest.FixtureRequest], contextlib.AbstractContextManager[str | Executor]]] = {
    "threads": lambda _: contextlib.nullcontext("threads:2"),
    "processes": lambda _: contextlib.nullcontext("processes:2"),
    "of concurrent.futures": lambda _: ProcessPoolExecutor(2, mp_context=get_context("spawn")),
    "a cluster": lambda request: contextlib.nullcontext(request.getfixturevalue("cluster")),
}


@pytest.mark.parametrize(
    "kind",
    [
        "threads",
        *(pytest.param(kind, marks=pytest.mark.long) for kind in ("processes", "of concurrent.futures")),
        pytest.param("a cluster", marks=pytest.mark.slow),
    ],
)
def test_any_workers_add(where: Place, model: Path, tmp_path: Path, request: pytest.FixtureRequest, kind: str) -> None:
    """What they run and return can be pickled."""
    with where.open(create=True) as pool:
        with EXECUTORS[kind](request) as executor:
            added = pool.add(model, "m@1", executor=executor)
        assert pickle.loads(pickle.dumps(added)) == added  # noqa: S301 - it was made here
        assert come_back(pool, "m@1", model, tmp_path / "out")
        assert pool.verify(executor="processes:1" if kind == "processes" else None) == []


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.long
def test_a_process_that_dies_is_one_error() -> None:
    with pytest.raises(PoolError, match="processes:1: a worker process died"), open_executor("processes:1") as executor:
        executor.submit(die).result()


@pytest.mark.parametrize(
    "text",
    ["", "threads", "threads:0", "threads:x", "processes:-1", "dask://", "dask://host", "ray://host:1", "tcp://h:1"],
)
def test_other_executors_are_refused(where: Place, model: Path, text: str) -> None:
    with where.open(create=True) as pool:
        with pytest.raises(PoolError, match="expected threads:N, processes:N or dask://HOST:PORT"):
            pool.add(model, "m@1", executor=text)
        assert pool.versions() == []


def test_without_distributed_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(MissingDependencyError, match=r"dask"), open_executor("dask://127.0.0.1:1"):
        pass


@pytest.mark.slow
def test_a_scheduler_that_does_not_answer_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blobstore.pool.executors._SECONDS", 1)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"dask://127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(PoolError, match=f"{address}: no scheduler answers"), open_executor(address):
            pass


@pytest.fixture
def cluster() -> Iterator[str]:
    """The address of a scheduler with two workers, each a process."""
    from distributed import LocalCluster

    with LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0") as started:
        yield started.scheduler_address.replace("tcp://", "dask://")


@pytest.mark.slow
def test_a_changed_file_is_read_again(cluster: str, pool: Pool, tmp_path: Path) -> None:
    """A cluster remembers what it did with the same arguments, and must not here."""
    path = tmp_path / "m.safetensors"
    for number in range(2):
        write(path, tensors(number))
        pool.add(path, f"m@{number}", executor=cluster)
    assert b"".join(map(bytes, pool.cat("m@1", "m.safetensors"))) == path.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("after", [0.1, 0.4, 1.0])
def test_a_killed_worker_loses_nothing(cluster: str, tmp_path: Path, after: float) -> None:
    """The other one does its work, and `gc` leaves nothing of what it had stored."""
    from distributed import Client

    random = np.random.default_rng(0)
    for number in range(12):
        values = {"w": random.standard_normal((1200, 1000), np.float32)}
        write(tmp_path / "model" / f"{number}.safetensors", values)
    with Client(cluster.replace("dask://", "tcp://"), set_as_default=False) as client:
        (victim, *_) = client.run(os.getpid).values()
    timer = threading.Timer(after, os.kill, (victim, signal.SIGKILL))
    timer.start()
    with Pool(tmp_path / "pool", create=True) as pool:
        added = pool.add(tmp_path / "model", "m@1", executor=cluster)
        timer.join()
        assert added.bytes > 12 * 4_800_000
        assert come_back(pool, "m@1", tmp_path / "model", tmp_path / "out")
        pool.drop("m@1")
        packs = tmp_path / "pool" / "packs"
        until(lambda: not any(map(Path.is_file, packs.rglob("*"))), lambda: pool.gc(grace=0, keep=0))


@pytest.mark.slow
@pytest.mark.parametrize("who", ["workers", "scheduler"])
def test_a_cluster_that_dies_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], who: str
) -> None:
    """Also if there were no workers from the beginning; the scheduler would wait for new ones for ever."""
    monkeypatch.setattr("blobstore.pool.executors._WITHOUT_WORKERS", 1)
    monkeypatch.setattr("blobstore.pool.executors._LOOK", 0.5)
    path = write(tmp_path / "m.safetensors", tensors())
    scheduler_options = ("--host", "127.0.0.1", "--port", "0", "--no-dashboard")
    command = [sys.executable, "-m", "distributed.cli.dask_scheduler", *scheduler_options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as scheduler:
        assert scheduler.stderr is not None
        lines = (re.search(r"Scheduler at:\s+tcp://(\S+)", line) for line in scheduler.stderr)
        address = next(filter(None, lines))[1]
        threading.Thread(target=scheduler.stderr.read, daemon=True).start()
        expected = "had no workers for 1 seconds"
        if who == "scheduler":
            expected = "the scheduler went away"

            def kill(client: object, ended: threading.Event, given_up: threading.Event) -> None:
                scheduler.kill()
                ended.wait()

            monkeypatch.setattr("blobstore.pool.executors._end_without_workers", kill)
        try:
            with Pool(tmp_path / "pool", create=True) as pool:
                with pytest.raises(PoolError, match=expected):
                    pool.add(path, "m@1", executor=f"dask://{address}")
                assert pool.versions() == []
        finally:
            scheduler.kill()
    assert "Traceback" not in capfd.readouterr().err
