"""Who does the work of adding a version: threads, processes of this machine, or the workers of a Dask cluster."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Executor, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any, TypeVar

from blobstore.core.errors import PoolError
from blobstore.core.requirements import needed

__all__ = ["batches", "open_executor", "run"]

_Item = TypeVar("_Item")

_LOCAL = re.compile(r"(threads|processes):([1-9][0-9]{0,3})")
_DASK = re.compile(r"dask://([^/@\s]+:[0-9]{1,5})")
_SECONDS = 10  # until a scheduler has answered
_WITHOUT_WORKERS = 60  # seconds for which a cluster may have none
_LOOK = 5  # seconds between two looks at its workers


@contextlib.contextmanager
def open_executor(text: Executor | str | None, undone: str = "nothing was added") -> Iterator[Executor]:
    """An executor, and its workers ended when it is left. A cluster goes on, and so does what is an executor already.

    Args:
        text: an executor, `threads:N`, `processes:N` or `dask://HOST:PORT`, the address of a scheduler; None for as many threads
            as there are processors. The workers of a cluster must see the files and the pool under the same paths, and have
            the same version of this package.
        undone: what the error says if workers die.

    Raises:
        PoolError: it is none of these, no scheduler answers, or inside the block: workers died.
        MissingDependencyError: `distributed` is not installed.
    """
    if isinstance(text, Executor):
        yield text
        return
    if text is None:
        text = f"threads:{os.cpu_count() or 1}"
    if not isinstance(text, str):
        raise PoolError(f"{text!r} is no executor: expected one of concurrent.futures, or its name, such as threads:2")
    if local := _LOCAL.fullmatch(text):
        with _local(local[1], int(local[2]), undone) as executor:
            yield executor
    elif dask := _DASK.fullmatch(text):
        with _cluster(text, dask[1], undone) as executor:
            yield executor
    else:
        raise PoolError(f"{text!r} names no executor: expected threads:N, processes:N or dask://HOST:PORT")


@contextlib.contextmanager
def _local(kind: str, number: int, undone: str) -> Iterator[Executor]:
    if kind == "threads":
        with ThreadPoolExecutor(number) as threads:
            yield threads
        return
    try:
        with ProcessPoolExecutor(number, mp_context=get_context("spawn")) as processes:
            yield processes
    except BrokenProcessPool:
        raise PoolError(f"processes:{number}: a worker process died; {undone}") from None


@contextlib.contextmanager
def _cluster(text: str, address: str, undone: str) -> Iterator[Executor]:
    with needed(f"{text}: a Dask cluster needs distributed", "dask"):
        from distributed import Client
        from distributed.comm import CommClosedError
        from distributed.scheduler import KilledWorker
    try:
        client: Any = Client(f"tcp://{address}", timeout=_SECONDS, set_as_default=False)
    except (OSError, ValueError) as error:  # it wraps what was wrong in several layers, and a time-out is one of them
        raise PoolError(f"{text}: no scheduler answers: {type(error).__name__}") from None
    quiet = [logging.getLogger(name) for name in ("asyncio", "tornado.application")]
    for logger in quiet:  # of a scheduler that goes away, they print a trace in addition to the error
        logger.addFilter(_nothing)
    ended, given_up = threading.Event(), threading.Event()
    watch = threading.Thread(target=_end_without_workers, args=(client, ended, given_up), daemon=True)
    watch.start()
    try:
        # not pure: files change, and every pack is a new one. What a worker began that died is done again by another one;
        # what it had stored `gc` removes
        yield client.get_executor(pure=False)
    except KilledWorker as error:
        raise PoolError(f"{text}: {error.last_worker.address} and workers before it died of this; {undone}") from None
    except (CommClosedError, CancelledError):
        if given_up.is_set():
            raise PoolError(f"{text}: the cluster had no workers for {_WITHOUT_WORKERS} seconds; {undone}") from None
        raise PoolError(f"{text}: the scheduler went away, or ended the work; {undone}") from None
    finally:
        ended.set()
        watch.join()
        client.close()
        for logger in quiet:
            logger.removeFilter(_nothing)


def run(executor: Executor, function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
    """The results as they come; tasks that have not begun when the caller stops are cancelled."""
    futures = [executor.submit(function, *task) for task in tasks]
    try:
        for future in as_completed(futures):
            yield future.result()
    finally:
        for future in futures:
            future.cancel()


def batches(items: Iterable[_Item], size: Callable[[_Item], int], enough: int) -> Iterator[list[_Item]]:
    """Items that a worker takes together: as many as have `enough` bytes."""
    batch: list[_Item] = []
    nbytes = 0
    for item in items:
        batch.append(item)
        nbytes += size(item)
        if nbytes >= enough:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def _nothing(record: logging.LogRecord) -> bool:
    """A filter that lets no record of the log pass."""
    return False


def _end_without_workers(client: Any, ended: threading.Event, given_up: threading.Event) -> None:
    """Cancel all work when a cluster has had no workers for a while: its scheduler would wait for new ones for ever."""
    waited = 0
    while not ended.wait(_LOOK):
        with contextlib.suppress(Exception):  # whoever waits for the work is told what is wrong
            workers = client.sync(client.scheduler.ncores, workers=None, callback_timeout=_LOOK)
            waited = 0 if workers else waited + _LOOK
        if waited >= _WITHOUT_WORKERS:
            given_up.set()
            client.close()
            return
