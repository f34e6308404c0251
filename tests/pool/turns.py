"""Programs on one pool that go on step by step, one at a time, in an order that a test chooses."""

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import pytest

from blobstore.pool.tables import Tables
from blobstore.storage.objects import Objects

STEPS = ((Tables, "append"), (Tables, "delete"), (Tables, "_update"), (Objects, "place"), (Objects, "delete"))
"""What others see, or what sees others: each is a look at one table, or a change of one, or of the packs."""


class Inline(Executor):
    """Does the work at once, in the thread of the program."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function(*arguments, **options))
        except Exception as error:
            future.set_exception(error)
        return future


class Program:
    """A program that waits before each of its steps.

    Args:
        function: what it does.

    Attributes:
        step: what it does next, such as "append events"; None if it has ended.
        error: with which it ended.
    """

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function
        self._go, self._waits = threading.Semaphore(0), threading.Semaphore(0)
        self._inside = False
        self.step: str | None = ""
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def go(self) -> bool:
        """Do one step; whether there is another."""
        if self.step is None:
            return False
        self.thread.start() if not self.thread.ident else self._go.release()
        self._waits.acquire()
        return self.step is not None

    def until(self, step: str) -> None:
        """Go on until a step comes next, or to the end."""
        while self.go() and self.step != step:
            pass

    def end(self) -> None:
        """Go on to the end, which is no error."""
        while self.go():
            pass
        if self.error is not None:
            raise self.error

    def wait(self, step: str, function: Callable[[], Any]) -> Any:
        """Do a step when it is this program's turn."""
        if self._inside:  # it is a part of another step
            return function()
        self.step = step
        self._waits.release()
        self._go.acquire()
        self._inside = True
        try:
            return function()
        finally:
            self._inside = False

    def _run(self) -> None:
        try:
            self._function()
        except Exception as error:
            self.error = error
        self.step = None
        self._waits.release()


class Turns:
    """Makes programs.

    Args:
        monkeypatch: for as long as they go on.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._programs: dict[int | None, Program] = {}
        for owner, name in STEPS:
            monkeypatch.setattr(owner, name, self._stepping(name, getattr(owner, name)))

    def program(self, function: Callable[[], object]) -> Program:
        def register() -> object:
            self._programs[threading.get_ident()] = program
            return function()

        program = Program(register)
        return program

    def _stepping(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(owner: Any, *arguments: Any, **options: Any) -> Any:
            program = self._programs.get(threading.get_ident())
            if program is None or (name == "append" and not arguments[1]):  # no rows: nothing happens
                return function(owner, *arguments, **options)
            what = f"{name} {arguments[0]}" if isinstance(owner, Tables) else name
            return program.wait(what, lambda: function(owner, *arguments, **options))

        return call
