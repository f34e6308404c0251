"""Fetching ranges of objects with several threads, until they are there or patience ends."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator

from blobstore.core.disk.progress import Progress
from blobstore.core.errors import TransferError
from blobstore.releases.device.spool import Spool
from blobstore.releases.index.index import Object
from blobstore.releases.index.intervals import coalesced
from blobstore.releases.sources.patience import (
    Backoff,
    GoneError,
    InterruptedTransferError,
    Pace,
    WrongAnswerError,
    retry,
)
from blobstore.releases.sources.source import RANGE_COST, Source

__all__ = ["Transfer", "read_object"]

Ranges = list[tuple[int, int]]
"""First byte of each, and first byte behind it."""

_LONGEST = 1 << 25
"""Bytes of one request; what several of them fetch at once is more than what one connection gives on most networks."""
_TOGETHER = 1 << 20
"""Bytes of the largest request for several ranges; more than that is faster in several requests at a time."""
_NOTE = 1 << 22
"""After this many bytes of a request, the list of fetched ranges gets a line."""


class Transfer:
    """Requests that threads work on, in the order in which they were asked for.

    Args:
        source: where the objects are.
        threads: how many requests are sent at a time.
        progress: called with the bytes that are there and those that were asked for.
    """

    def __init__(self, source: Source, threads: int, progress: Progress | None) -> None:
        self._source, self._patience, self._progress = source, source.patience, progress
        self._pace = Pace(source.patience)
        self._todo: deque[tuple[Spool, Ranges]] = deque()
        self._most_ranges = source.most_ranges
        self._spools: dict[str, Spool] = {}
        self._lock = threading.Lock()
        self._stopped = False
        self._working = 0
        self._threads: list[threading.Thread] = []
        self._most = threads
        self.asked = self.done = 0

    def ask(self, spool: Spool, ranges: Iterable[tuple[int, int]]) -> None:
        """Fetch what is missing of some ranges. Call this before `start`."""
        self._spools[spool.wanted.sha256] = spool
        for together in self._requests_for(_missing(spool, ranges), self._most_ranges):
            self._todo.append((spool, together))
            self.asked += _size(together)

    def _requests_for(self, missing: Ranges, most_ranges: int) -> Iterator[Ranges]:
        """The requests for some ranges: as few bytes as possible, where each request counts as many, too.

        Each gap between two ranges is decided on its own: it travels if it costs less than what it saves.
        """
        gap = RANGE_COST if most_ranges > 1 else self._source.gap(self._most)
        together: Ranges = []
        for one in coalesced(missing, gap, _LONGEST):
            if together and (len(together) >= most_ranges or _size(together) + one[1] - one[0] > _TOGETHER):
                yield together
                together = []
            together.append(one)
        if together:
            yield together

    @property
    def requests(self) -> list[tuple[Object, int, int]]:
        """What would be fetched: object, first byte, and first byte behind it."""
        return [(spool.wanted, start, stop) for spool, ranges in self._todo for start, stop in ranges]

    def start(self) -> None:
        """Begin."""
        for _ in range(min(self._most, len(self._todo))):
            self._begin()

    def join(self) -> None:
        """Wait until all is there."""
        for thread in self._threads:
            thread.join()

    def stop(self) -> None:
        """Give up. A thread that waits for a server is not waited for; what comes is dropped."""
        with self._lock:
            self._stopped = True
            self._todo.clear()

    def again(self, spool: Spool, start: int, stop: int) -> None:
        """Fetch a range once more, because its bytes were wrong; readers of the spool wait for it."""
        spool.forget(start, stop)
        with self._lock:
            self._todo.appendleft((spool, [(start, stop)]))
        self._begin()

    def _begin(self) -> None:
        with self._lock:
            self._working += 1
        thread = threading.Thread(target=self._work, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _work(self) -> None:
        while True:
            with self._lock:
                if self._stopped or not self._todo:
                    self._working -= 1
                    return
                spool, ranges = self._todo.popleft()
            try:
                self._fetch(spool, ranges)
            except BaseException as error:
                with self._lock:
                    self._working -= 1
                    self._stopped = True
                for one in self._spools.values():
                    one.fail(error)
                return

    def _fetch(self, spool: Spool, ranges: Ranges) -> None:
        """One request, and further ones as long as it fails in ways that may pass."""
        backoff = Backoff(self._patience, self._pace)
        while missing := _missing(spool, ranges):
            if len(ranges) > 1:
                self._fetch_several(spool, missing, backoff)
                return
            try:
                self._read(spool, missing[0][0], missing[-1][1])
            except InterruptedTransferError as error:
                if self._stopped:
                    raise
                backoff.wait(error, _size(missing) - _size(_missing(spool, ranges)))

    def _fetch_several(self, spool: Spool, ranges: Ranges, backoff: Backoff) -> None:
        """One request for several ranges. If it fails, for whatever reason, they are asked for one by one; and all later
        ones, too, if it brought nothing."""
        try:
            if self._most_ranges > 1 and self._read_several(spool, ranges):
                return
        except GoneError:
            raise
        except TransferError as error:
            if self._stopped:
                raise
            brought = 0
            if isinstance(error, InterruptedTransferError):
                brought = _size(ranges) - _size(_missing(spool, ranges))
                backoff.wait(error, brought)
            if not brought:
                self._most_ranges = 1
        self._split(spool, _missing(spool, ranges))

    def _read_several(self, spool: Spool, ranges: Ranges) -> bool:
        """Read several ranges by one request; False if the server does not do that."""
        with self._source.open_ranges(spool.wanted, ranges) as bodies:
            count = 0
            for count, body in enumerate(bodies or (), 1):  # noqa: B007 - it is used below
                self._write(spool, body.start, body.start, body.pieces)
        missing = bool(_missing(spool, ranges))
        if count == 0 or (count == 1 and missing):  # it sends all, or only the first range
            self._most_ranges = 1
            return not missing
        if missing:
            raise WrongAnswerError(f"{self._source.name}: {spool.wanted.sha256}: the server sends fewer ranges")
        return True

    def _split(self, spool: Spool, ranges: Ranges) -> None:
        """Ask for some ranges one by one; near ones become one."""
        with self._lock:
            requests = list(self._requests_for(ranges, 1))
            self._todo.extendleft((spool, one) for one in reversed(requests))
            more = min(self._most - self._working, len(self._todo) - 1)
        for _ in range(more):
            self._begin()

    def _read(self, spool: Spool, start: int, stop: int) -> None:
        with self._source.open(spool.wanted, start, stop) as body:
            if body.start == start:
                self._write(spool, start, stop, body.pieces)
                return
            # The server has no ranges: one thread takes all, and the others find everything there.
            if spool.whole.acquire(blocking=False):
                try:
                    self._write(spool, 0, spool.wanted.size, body.pieces)
                finally:
                    spool.whole.release()
                return
        with spool.whole:
            if spool.missing(start, stop):
                with self._source.open(spool.wanted, 0, spool.wanted.size) as body:
                    self._write(spool, 0, spool.wanted.size, body.pieces)

    def _write(self, spool: Spool, start: int, stop: int, pieces: Iterable[bytes]) -> None:
        at = noted = start
        try:
            for piece in pieces:
                if self._stopped:
                    raise TransferError(f"{self._source.name}: the transfer was stopped")
                spool.write(at, piece)
                at += len(piece)
                self._pace.count(len(piece))
                if at - noted >= _NOTE:
                    spool.note(noted, at)
                    noted = at
                if self._progress:
                    with self._lock:
                        self.done += len(piece)
                        self._progress("fetching", min(self.done, self.asked), self.asked)
        finally:
            spool.note(noted, at)
        if at < stop:
            raise InterruptedTransferError(f"{self._source.name}: {spool.wanted.sha256} ended at byte {at} of {stop}")


def _missing(spool: Spool, ranges: Iterable[tuple[int, int]]) -> Ranges:
    return [gap for start, stop in ranges for gap in spool.missing(start, stop)]


def _size(ranges: Ranges) -> int:
    return sum(stop - start for start, stop in ranges)


def read_object(source: Source, wanted: Object) -> bytes:
    """A small object, whole, in memory; the caller compares it with its digest.

    Raises:
        TransferError: patience ended.
    """

    def read() -> bytes:
        with source.open(wanted, 0, wanted.size) as body:
            data = b"".join(body.pieces)
        if len(data) != wanted.size:
            raise InterruptedTransferError(f"{source.name}: {wanted.sha256} ended at byte {len(data)} of {wanted.size}")
        return data

    return retry(source.patience, read)
