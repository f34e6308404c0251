"""Tests wait for conditions, never for a time. Only this module sleeps."""

import platform
import threading
import time
from collections.abc import Callable
from pathlib import Path

SECONDS = 60  # far more than any condition of a test takes on a busy machine
# the numbers of futex, flock
_SYSTEM_CALLS = {"x86_64": (202, 73), "aarch64": (98, 32)}


def until(condition: Callable[[], object], meanwhile: Callable[[], object] = lambda: time.sleep(0.001)) -> None:
    """Call `meanwhile` until the condition holds; if it never does, the test fails.

    Raises:
        TimeoutError: The condition did not come true in a minute.
    """
    end = time.monotonic() + SECONDS
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("the condition never came true")
        meanwhile()


def until_blocked(thread: threading.Thread) -> None:
    """Wait until a thread sleeps in the kernel until another one wakes it: for a lock of the runtime or of Python, or for
    the lock of a file. Waiting for the interpreter's own lock does not count, because that has a time limit.

    Raises:
        TimeoutError: The thread did not block in a minute.
        AssertionError: The thread ended.
    """
    futex, flock = _SYSTEM_CALLS[platform.machine()]
    before: list[str] = []

    def blocked() -> bool:
        nonlocal before
        assert thread.is_alive(), "the thread ended, it waited for nothing"
        # the number of the call and its six arguments, then the stack; "running" if it is in no call
        call = Path(f"/proc/self/task/{thread.native_id}/syscall").read_text(encoding="ascii").split()
        same, before = call == before, call
        return same and (call[0] == str(flock) or (call[0] == str(futex) and int(call[4], 16) == 0))

    until(lambda: thread.native_id is not None)
    until(blocked)
