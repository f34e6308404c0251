"""What `repr` returns: one line of text that prints, whatever an object holds and whatever it is called."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Iterable, Sequence, Sized
from contextlib import suppress
from dataclasses import fields
from typing import Any, TypeAlias

from blobstore.core.text import printable

__all__ = [
    "LIMIT",
    "LIMIT_OF_FIELDS",
    "Fact",
    "and_others",
    "count",
    "fields_line",
    "joined",
    "line",
    "listed",
    "shorten",
]

LIMIT = 120
"""The most characters of a repr."""

LIMIT_OF_FIELDS = 200
"""The most characters of a repr that lists fields, so that ten counts fit."""

_FIELD = 40
"""The most characters of a field of a dataclass, and of a name that shares a line with facts."""


Fact: TypeAlias = "str | Callable[[], str]"
"""What a line says of an object besides its name. If a function raises an error, the line does without it."""


def shorten(text: object, most: int = _FIELD) -> str:
    """Text that prints, in at most `most` characters. What is left out is before the end, which says most of a path."""
    shown = printable(text)
    if len(shown) <= most:
        return shown
    head = (most - 3) // 3
    return f"{shown[:head]}...{shown[head + 3 - most :]}"


def line(kind: str, name: object, *facts: Fact) -> str:
    """`<BlobCache live/model.ptd: 3 keys, 4.19 MB>`.

    Args:
        kind: the class.
        name: what the object is called, such as its path; the empty string if it has no name.
        facts: what else to say; empty ones are left out.
    """
    said = printable(joined(facts))
    head = f"<{kind} {shorten(name, max(LIMIT - len(f'<{kind} : {said}>'), _FIELD))}".strip()
    room = LIMIT - len(head) - len(": >")
    said = said if len(said) <= room else f"{said[: room - 3]}..."
    return f"{head}: {said}>" if said else f"{head}>"


def joined(facts: Iterable[Fact]) -> str:
    """The facts that can be said, with commas."""
    said = []
    for fact in facts:
        with suppress(Exception):
            said.append(fact if isinstance(fact, str) else fact())
    return ", ".join(filter(None, said))


def count(number: int, what: str) -> str:
    """`1 key`, `1,234 keys`."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def and_others(names: Sequence[str]) -> str:
    """Up to three names, or the first and the number of the others."""
    return " + ".join(names) if len(names) < 4 else f"{names[0]} + {len(names) - 1:,} others"


def listed(names: Iterable[object], most: int = 3) -> str:
    """The first names, and the number of the others."""
    every = list(names)
    shown = ", ".join(shorten(name, 24) for name in every[:most])
    return shown if len(every) <= most else f"{shown} and {len(every) - most:,} more"


def fields_line(self: Any) -> str:
    """The `__repr__` of a dataclass of a few facts: `ValueInfo(kind='tensor', layout=float[1, 8])`.

    Of a collection it says the size, unless it is short. Fields that are None or empty are left out.
    """
    name, said = type(self).__qualname__, ""
    for field in fields(self):
        value = getattr(self, field.name, None)
        if not field.repr or value is None or (isinstance(value, str | tuple | list | dict) and not value):
            continue
        part = f"{', ' * bool(said)}{field.name}={_value(value)}"
        if len(name) + len(said) + len(part) + len("(, ...)") > LIMIT_OF_FIELDS:
            said += ", ..."
            break
        said += part
    return f"{name}({said})"


def _value(value: Any) -> str:
    try:
        if isinstance(value, enum.Enum):
            return value.name
        if isinstance(value, str | os.PathLike):
            return f"'{shorten(os.fsdecode(value))}'"
        if isinstance(value, Sized):
            shown = repr(value) if len(value) < 5 else ""
            return shorten(shown) if shown and len(shown) <= _FIELD else f"<{len(value):,}>"
        return shorten(value)
    except Exception:  # of what a caller put there
        return f"<{type(value).__qualname__}>"
