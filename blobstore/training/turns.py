"""A lock for the state of a training program, which reports in a forked child that the state may be incomplete."""

from __future__ import annotations

import os
import threading
import weakref

from blobstore.core.errors import TrainingError

__all__ = ["Turns"]


class Turns:
    """A lock as a context manager; the thread that holds it may take it again.

    If a process is forked while another thread holds the lock, the guarded state, which messages name, may be half changed
    in the child. Taking the lock raises TrainingError there.
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
                "here; load the program again and continue from a checkpoint"
            )

    def __exit__(self, *exception: object) -> None:
        self._lock.release()

    def after_fork_in_child(self) -> None:
        """Replace a lock that another thread holds: that thread does not exist in this process."""
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
