"""A lock that many steps take in turns, and that tells a forked child when it cannot go on."""

from __future__ import annotations

import os
import threading
import weakref
from types import TracebackType

from blobstore.errors import TrainingError

__all__ = ["Turns"]


class Turns:
    """A lock, as a context manager; the thread that has it may take it again.

    In a child process that was forked while another thread had it, what it guards may be half changed: taking it is
    an error there.

    Args:
        name: what it guards, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.RLock()
        self._torn = False
        _all.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()
        if self._torn:
            self._lock.release()
            raise TrainingError(
                f"{self._name}: another thread was using it when this process was forked, so a step may be half done "
                "here; load the program and a checkpoint anew"
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def after_fork_in_child(self) -> None:
        """Whoever had it in another thread is not in this process."""
        if self._lock.acquire(blocking=False):
            self._lock.release()
        else:
            self._lock = threading.RLock()
            self._torn = True


_all: weakref.WeakSet[Turns] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for turns in list(_all):
        turns.after_fork_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
