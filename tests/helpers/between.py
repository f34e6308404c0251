"""What happens between two steps of something: others do their work, a step fails, or the process ends."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest


class KilledError(BaseException):
    """The process ends."""


def die() -> None:
    raise KilledError


@contextlib.contextmanager
def between(
    steps: Iterable[tuple[Any, str]], at: int, event: Callable[[], object], counts: Callable[..., Any] = lambda *_: True
) -> Iterator[list[str]]:
    """Let something happen before step number `at` of what is done inside; the steps that were made.

    Args:
        steps: the functions whose calls are steps: where each is, and its name.
        at: counted from 0; what happens is no step itself.
        event: what happens.
        counts: whether a call with such arguments is a step.
    """
    made: list[str] = []
    inside = False

    def wrapped(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal inside
            if not inside and counts(*arguments):
                made.append(name)
                if len(made) - 1 == at:
                    inside = True
                    try:
                        event()
                    finally:
                        inside = False
            return function(*arguments, **options)

        return call

    with pytest.MonkeyPatch.context() as patched:
        for owner, name in steps:
            patched.setattr(owner, name, wrapped(name, getattr(owner, name)))
        yield made
