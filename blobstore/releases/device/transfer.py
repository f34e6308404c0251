"""Fetching ranges of objects with several threads, until they are there or patience ends."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable

from blobstore.core.constants import MOST_GAP
from blobstore.core.disk.progress import Progress
from blobstore.core.errors import TransferError
from blobstore.releases.device.spool import Spool
from blobstore.releases.index.index import Object
from blobstore.releases.index.intervals import coalesced
from blobstore.releases.sources.source import InterruptedTransferError, SlowTransferError, Source, retry

__all__ = ["Transfer", "read_object"]

_LONGEST = 1 << 25
"""Bytes of one request; what several of them fetch at once is more than what one connection gives on most networks."""
_NOTE = 1 << 22
"""After this many bytes of a request, the list of fetched ranges gets a line."""


class Transfer:
    """Requests that threads work on, in the order in which they were asked for.

    Args:
        source: where the objects are.
        threads: how many requests are sent at a time.
        progress: called with the bytes that are there and those that were asked for.
        longest: bytes of the largest request.
    """

    def __init__(self, source: Source, threads: int, progress: Progress | None, longest: int = _LONGEST) -> None:
        self._source, self._patience, self._progress = source, source.patience, progress
        self._todo: deque[tuple[Spool, int, int]] = deque()
        self._spools: dict[str, Spool] = {}
        self._lock = threading.Lock()
        self._stopped = False
        self._threads: list[threading.Thread] = []
        self._most, self._longest = threads, longest
        self.asked = self.done = 0

    def ask(self, spool: Spool, ranges: Iterable[tuple[int, int]]) -> None:
        """Fetch what is missing of some ranges. Call this before `start`."""
        self._spools[spool.wanted.sha256] = spool
        missing = [gap for start, stop in ranges for gap in spool.missing(start, stop)]
        for start, stop in coalesced(missing, MOST_GAP, self._longest):
            self._todo.append((spool, start, stop))
            self.asked += stop - start

    @property
    def requests(self) -> list[tuple[Object, int, int]]:
        """What would be fetched: object, first byte, and first byte behind it."""
        return [(spool.wanted, start, stop) for spool, start, stop in self._todo]

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
            self._todo.appendleft((spool, start, stop))
        self._begin()

    def _begin(self) -> None:
        thread = threading.Thread(target=self._work, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _work(self) -> None:
        while True:
            with self._lock:
                if self._stopped or not self._todo:
                    return
                spool, start, stop = self._todo.popleft()
            try:
                self._fetch(spool, start, stop)
            except BaseException as error:
                with self._lock:
                    self._stopped = True
                for one in self._spools.values():
                    one.fail(error)
                return

    def _fetch(self, spool: Spool, start: int, stop: int) -> None:
        """One request, and further ones as long as it fails in ways that may pass."""
        failures = 0
        while missing := spool.missing(start, stop):
            before = spool.present
            try:
                self._read(spool, missing[0][0], missing[-1][1])
            except InterruptedTransferError as error:
                if self._stopped:
                    raise
                progress = spool.present > before and not isinstance(error, SlowTransferError)
                failures = 1 if progress else failures + 1
                self._patience.wait(error, failures)

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
