"""How long to try, and when: the policy for servers that are away, busy or wrong.

A fleet of devices follows it together, so it never lets them meet: every wait is random. Where a server is away, the waits
grow to a few minutes; where it says when to come back, devices spread over some time after that.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from blobstore.core.disk.progress import Progress
from blobstore.core.errors import ReleaseError, ServerBusyError, TransferError
from blobstore.core.reprs import count, fields_line

__all__ = [
    "Backoff",
    "GoneError",
    "InterruptedTransferError",
    "Notice",
    "Pace",
    "Patience",
    "SlowTransferError",
    "WrongAnswerError",
    "retry",
    "telling",
]

_MOST_WRONG = 6
_SPREAD = 1.5
"""Devices that are told to come back after some time come in this many times as long. So those that were sent away in an outage of
that length add two thirds to the usual load."""
_NOTICED = 2
"""Seconds of a wait that people are told of."""
_LATEST = 7 * 86_400
"""Seconds: a server that says more may be wrong, and a device that believed it would be lost."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class Patience:
    """How long to try.

    Attributes:
        seconds: in all, without progress in between, for a server that is away, busy or slow. Bytes are progress once they
            are as many as `slowest` asks for the time since the progress before, waits included, in all requests together.
        first, longest: the most seconds to wait after the first failure, which double with each, and the most of these.
            Each wait is a random part of that; of the longest, at least half.
        attempts: how often, in all, without progress in between; None for as often as the time allows. A server that
            answers something wrong, or too slowly, is asked six times at most.
        connect, read: seconds to wait for a connection, and for bytes.
        slowest: bytes per second, in the mean of `read` seconds; a server that sends fewer is left, and asked again.
        notice: called with the error and the seconds before every wait.
        pause: waits.
        clock: the seconds since some moment.
        chance: a random number from 0 up to 1.
    """

    __repr__ = fields_line

    seconds: float = 3600
    first: float = 1
    longest: float = 300
    attempts: int | None = None
    connect: float = 15
    read: float = 60
    slowest: float = 256
    notice: Callable[[InterruptedTransferError, float], None] | None = None
    pause: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    chance: Callable[[], float] = random.random

    def __post_init__(self) -> None:
        for name in ("seconds", "first", "longest", "slowest"):
            self._check(name, _is_number(getattr(self, name), 0))
        self._check("attempts", self.attempts is None or (_is_int(self.attempts) and self.attempts >= 1))
        for name in ("connect", "read"):
            self._check(name, _is_number(getattr(self, name), 0) and getattr(self, name) > 0)
        for name in ("pause", "clock", "chance"):
            self._check(name, callable(getattr(self, name)))
        self._check("notice", self.notice is None or callable(self.notice))

    def _check(self, name: str, sound: bool) -> None:
        """Raise ReleaseError unless a value is sound."""
        if not sound:
            raise ReleaseError(f"Patience cannot have {name} {getattr(self, name)!r}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any, least: float) -> bool:
    return (_is_int(value) or isinstance(value, float)) and least <= value < math.inf


class GoneError(TransferError):
    """The source does not have what it was asked for, or no longer."""


class InterruptedTransferError(TransferError):
    """A failure after which trying again may help.

    Attributes:
        asked: seconds that the server asked to wait; None if it did not.
    """

    def __init__(self, message: str, asked: float | None = None) -> None:
        super().__init__(message)
        self.asked = asked


class WrongAnswerError(InterruptedTransferError):
    """The server answers, but not with what was asked for. It is asked again a few times, because a proxy may be at fault."""


class SlowTransferError(WrongAnswerError):
    """Bytes came, but too slowly. It counts as a failure without progress, so that it cannot go on forever."""


class Pace:
    """Whether the bytes of all requests of a transfer are worth going on; several threads may share it.

    Args:
        patience: its time begins now.
    """

    def __init__(self, patience: Patience) -> None:
        self._patience, self._lock = patience, threading.Lock()
        self._since, self._bytes = patience.clock(), 0

    def count(self, nbytes: int) -> None:
        """Bytes came."""
        with self._lock:
            self._bytes += nbytes

    def kept(self) -> bool:
        """Whether enough bytes came for the time that passed; then both begin anew."""
        with self._lock:
            now = self._patience.clock()
            if not self._bytes or self._bytes < self._patience.slowest * (now - self._since):
                return False
            self._since, self._bytes = now, 0
            return True

    @property
    def spent(self) -> float:
        """The seconds since enough bytes came."""
        return self._patience.clock() - self._since


class Backoff:
    """The waits of one piece of work that may fail.

    Args:
        patience: how long to try; its time begins now.
        pace: what it shares with other work; its time began with that.
    """

    def __init__(self, patience: Patience, pace: Pace | None = None) -> None:
        self._patience, self._pace = patience, pace or Pace(patience)
        self._waited = 0.0
        self._failures = self._wrong = self._doublings = 0

    def wait(self, error: InterruptedTransferError, brought: int = 0) -> None:
        """Wait before the next attempt.

        Args:
            error: how the last one failed.
            brought: the bytes that it brought all the same.

        Raises:
            As `seconds`.
        """
        seconds = self.seconds(error, brought)
        if self._patience.notice is not None:
            self._patience.notice(error, seconds)
        self._patience.pause(seconds)

    def seconds(self, error: InterruptedTransferError, brought: int = 0) -> float:
        """How long to wait before the next attempt, after this error.

        Raises:
            ServerBusyError: the server asks to come back later than patience lasts.
            TransferError: patience ended.
        """
        patience, is_wrong = self._patience, isinstance(error, WrongAnswerError)
        if self._pace.kept():
            self._waited, self._failures = 0.0, 0
            self._wrong = self._wrong if is_wrong else 0
        if brought and brought >= patience.slowest and not is_wrong:
            self._doublings = 0  # a way that breaks often is tried again soon
        self._failures += 1
        self._doublings += 1
        self._wrong += is_wrong
        if self._wrong >= _MOST_WRONG or self._failures == patience.attempts:
            raise TransferError(f"{error}; given up after {count(self._failures, 'attempt')}") from None
        # The waits count, too, because a machine that sleeps may stop its clock.
        spent = max(self._pace.spent, self._waited)
        left = patience.seconds - spent
        most = min(patience.longest, patience.first * 2.0 ** min(self._doublings - 1, 60))
        # Full jitter parts those that failed together; then half of it keeps them apart with fewer requests.
        least = most / 2 if most == patience.longest else 0
        wait = least + patience.chance() * (most - least)
        if error.asked is None:
            if wait > left:
                raise TransferError(
                    f"{error}; given up after {spent:.0f} seconds and {count(self._failures, 'attempt')}"
                ) from None
        else:
            # Many were told the same time.
            wait = error.asked + max(wait, patience.chance() * _SPREAD * error.asked)
            if wait > left:
                later = min(math.ceil(wait), _LATEST)
                raise ServerBusyError(
                    f"{error}; it asks to come back in {error.asked:.0f} seconds: try again in {later}", later
                ) from None
        self._waited += wait
        return wait


class Notice:
    """Tells what is waited for, as `Patience.notice`: not of short waits, and of one at a time, whatever number of threads waits.

    Args:
        tell: called with a sentence.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell, self._lock = tell, threading.Lock()
        self._until = 0.0

    def __call__(self, error: InterruptedTransferError, seconds: float) -> None:
        now = time.monotonic()
        with self._lock:
            if seconds < _NOTICED or now < self._until:
                return
            self._until = now + seconds
        self._tell(f"{error}; trying again in {seconds:.0f} seconds")


def telling(patience: Patience, progress: Progress | None) -> tuple[Patience, Progress | None]:
    """Let `progress` hear of what is waited for, too, unless somebody else does."""
    if progress is None or not isinstance(patience, Patience) or patience.notice is not None:
        return patience, progress
    last = (0, 0)

    def followed(what: str, done: int, total: int) -> None:
        nonlocal last
        last = done, total
        progress(what, done, total)

    return replace(patience, notice=Notice(lambda text: progress(f"waiting: {text}", *last))), followed


def retry(patience: Patience, work: Callable[[], Result]) -> Result:
    """Do something until it succeeds.

    Raises:
        TransferError: it failed for too long, or in a way that will not pass.
    """
    backoff = Backoff(patience)
    while True:
        try:
            return work()
        except InterruptedTransferError as error:
            backoff.wait(error)
