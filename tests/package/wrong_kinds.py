"""Calls every public callable of some modules with every wrong kind of argument.

A call must succeed or raise a BlobStoreError. The callables are found by introspection: the names in `__all__`, and for
classes the public methods and the operators of mappings, calls and contexts. So a function that is added later is covered,
or the test fails because one of its parameters has no good value:

    CALLABLES = public_callables(blobstore.core.files)

    @pytest.mark.parametrize("one", CALLABLES, ids=str)
    def test_wrong_kinds(one, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)  # files with unexpected names are written here
        check(one, {"path": lambda: tmp_path / "x.ptd", "BlobStore": BlobStore}, tmp_path)
"""

from __future__ import annotations

import enum
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from blobstore.errors import BlobStoreError

__all__ = ["PublicCallable", "check", "public_callables", "wrong_values"]

Makers = Mapping[str, Callable[[], Any]]
"""What makes a good value: for a parameter by its name alone, or, before that, by `Class.method.name` or
`function.name`; for the object whose methods are called by the name of its class."""

_OPERATORS = ("__call__", "__contains__", "__getitem__", "__setitem__", "__len__", "__iter__", "__enter__")
_ATTRIBUTES = (property, functools.cached_property)


@dataclass(frozen=True)
class PublicCallable:
    """A function, a class, or a method or property of a class (`owner`)."""

    name: str
    function: Any
    owner: type | None = None

    def __str__(self) -> str:
        return self.name if self.owner is None else f"{self.owner.__name__}.{self.name}"

    @property
    def parameters(self) -> list[inspect.Parameter]:
        """All parameters but `self` and those for unknown keywords."""
        if isinstance(self.function, _ATTRIBUTES):
            return []
        found = list(inspect.signature(self.function).parameters.values())
        if self.owner is not None and not isinstance(inspect.getattr_static(self.owner, self.name), staticmethod):
            found = found[1:]
        return [parameter for parameter in found if parameter.kind is not parameter.VAR_KEYWORD]


def public_callables(*modules: ModuleType, results: Collection[str] = ()) -> list[PublicCallable]:
    """The public callables of these modules, each once.

    Enumerations and errors are left out, because Python itself makes them.

    Args:
        modules: each with `__all__`.
        results: names of classes whose objects only the library creates; their methods are included, their constructors not.
    """
    found: dict[Any, PublicCallable] = {}
    for value, name in [(getattr(module, name), name) for module in modules for name in module.__all__]:
        if not callable(value) or (isinstance(value, type) and issubclass(value, enum.Enum | BaseException)):
            continue
        if name not in results:
            found[id(value)] = PublicCallable(name, value)
        for method, function in _methods(value) if isinstance(value, type) else ():
            found[id(value), method] = PublicCallable(method, function, value)
    return list(found.values())


def _methods(cls: type) -> Iterator[tuple[str, Any]]:
    for name in dir(cls):
        value = inspect.getattr_static(cls, name)
        if name.startswith("_") and name not in _OPERATORS:
            continue
        if isinstance(value, _ATTRIBUTES):
            yield name, value
        elif isinstance(value, classmethod):
            yield name, value.__func__
        elif isinstance(value, staticmethod) or inspect.isfunction(value):
            yield name, inspect.unwrap(value.__func__ if isinstance(value, staticmethod) else value)


def wrong_values(folder: Path) -> list[Any]:
    """One value of every kind that is rarely meant; files among them are in `folder`."""
    (folder / "folder").mkdir(exist_ok=True)
    (folder / "empty").write_bytes(b"")
    (folder / "text").write_text("neither a program nor a data file\n" * 10)
    released = memoryview(b"abc")
    released.release()
    return [
        None, True, 0, 1, -1, 2**31, 2**70, -(2**70), 1.5, math.nan, math.inf, 1j,
        b"", b"bytes", b"\xff", b"\0", bytearray(b"\x80"), memoryview(b"1234"), released,
        "", "text", "\0", "\ud800", "x" * 5000, "a/b", "..",
        folder / "missing", folder / "folder", folder / "empty", folder / "text",
        object(), len, range(3), ..., iter([1]), {1, "a"}, frozenset(),
        (), [], [None], [3], ["\ud800", "\0"], [[]], (b"x", "y"), [object()],
        {}, {"w": None}, {"w": object()}, {"w": [1, "a"]}, {3: 3}, {None: None}, {"\ud800": "\0"}, {"": ""}, {b"w": b"w"},
        np.zeros(3), np.array(1.0), np.zeros((0, 3)), np.array(["a"]), np.array([object()]), np.float32(1), np.datetime64("now"),
        {"w": np.zeros(3)}, {"w": np.array([math.nan])}, {"w": np.array([object()])}, {"w": np.zeros((1,) * 20)},
        Path("relative"), ScalarLike(),
    ]  # fmt: skip


class ScalarLike:
    """Looks like a tensor, but is not one."""

    shape = (3,)
    dtype = "float32"
    qdata = scale = None

    def detach(self) -> ScalarLike:
        return self


def check(one: PublicCallable, makers: Makers, folder: Path) -> int:
    """Call a function with a wrong value for each of its parameters in turn, and for all at once.

    Flags stay as they are, because they accept anything with a truth value.

    Args:
        one: the callable.
        makers: functions that create the good values, anew for every call, because a call may change them.
        folder: for the files of `wrong_values`.

    Returns:
        The number of calls.

    Raises:
        AssertionError: calls raised something other than a BlobStoreError; the message lists the first of them.
    """
    parameters = [parameter for parameter in one.parameters if not isinstance(parameter.default, bool)]
    calls: list[dict[str, int]] = [{}]  # for each parameter with a wrong value, the number of that value
    count = len(wrong_values(folder))
    for parameter in parameters:
        calls += [{parameter.name: number} for number in range(count)]
    if len(parameters) > 1:
        calls += [dict.fromkeys((parameter.name for parameter in parameters), number) for number in range(count)]
    failures = []
    for wrong in calls:
        values = wrong_values(folder)  # anew: iterators are used up
        given = {name: values[number] for name, number in wrong.items()}
        try:
            _call(one, given, makers)
        except BlobStoreError:
            if not wrong:
                raise  # with good values the call must succeed, or the others show nothing
        except Exception as error:
            if not wrong:
                raise
            what = ", ".join(f"{name}={_show(value)}" for name, value in given.items())
            failures.append(f"{one}({what})"[:200] + f": {type(error).__name__}: {error}"[:150])
    assert not failures, f"{len(failures)} of {len(calls)} calls:\n" + "\n".join(failures[:30])
    return len(calls)


def _call(one: PublicCallable, given: Mapping[str, Any], makers: Makers) -> None:
    """Call it with the given values and good ones for the rest; consume a lazy result."""
    positional, named = _arguments(one, given, makers)
    result = _target(one, makers)
    if not isinstance(one.function, _ATTRIBUTES):
        result = result(*positional, **named)
    if any(result is value for value in given.values()):
        return
    if isinstance(result, AbstractContextManager):
        with result:
            pass
    elif isinstance(result, Iterator):
        list(itertools.islice(result, 100))


def _arguments(one: PublicCallable, given: Mapping[str, Any], makers: Makers) -> tuple[list[Any], dict[str, Any]]:
    positional: list[Any] = []
    named: dict[str, Any] = {}
    rest = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in one.parameters)
    for parameter in one.parameters:
        maker = makers.get(f"{one}.{parameter.name}", makers.get(parameter.name))
        several = parameter.kind is parameter.VAR_POSITIONAL
        if parameter.name in given:
            values = [given[parameter.name]]
        elif maker is not None:
            values = list(maker()) if several else [maker()]
        elif several or parameter.default is not parameter.empty:
            continue
        else:
            raise LookupError(f"give a good value for '{one}.{parameter.name}' in the test's makers")
        if (rest and parameter.kind is not parameter.KEYWORD_ONLY) or parameter.kind is parameter.POSITIONAL_ONLY:
            positional += values
        else:
            named[parameter.name] = values[0]
    return positional, named


def _target(one: PublicCallable, makers: Makers) -> Any:
    """The function, or the method or attribute of an object."""
    if one.owner is None:
        return one.function
    if isinstance(inspect.getattr_static(one.owner, one.name), classmethod | staticmethod):
        return getattr(one.owner, one.name)
    if one.owner.__name__ not in makers:
        raise LookupError(f"give a '{one.owner.__name__}' in the test's makers")
    return getattr(makers[one.owner.__name__](), one.name)


def _show(value: Any) -> str:
    text = ascii(value)
    return text if len(text) < 60 else f"{text[:57]}..."
