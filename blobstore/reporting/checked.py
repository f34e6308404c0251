"""Access to plain data from an untrusted file: every value is checked before it is used."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

__all__ = ["MalformedError", "boolean", "hexadecimal", "integer", "items", "member", "share", "text", "texts"]

_LARGEST = 2**63 - 1
"""No file is larger."""


class MalformedError(ValueError):
    """Why the data cannot be what it claims to be."""


def member(value: Any, name: str) -> Any:
    """A member of an object.

    Raises:
        MalformedError: it is not an object, or has no such member.
    """
    if not isinstance(value, dict):
        raise MalformedError(f"expected an object with {name!r}, found {_shown(value)}")
    if name not in value:
        raise MalformedError(f"it lacks {name!r}")
    return value[name]


def items(value: Any, count: int | None = None) -> list[Any]:
    """A list, of `count` elements if that is given."""
    if not isinstance(value, list) or (count is not None and len(value) != count):
        raise MalformedError(f"expected a list{'' if count is None else f' of {count}'}, found {_shown(value)}")
    return value


def integer(value: Any, largest: int = _LARGEST) -> int:
    """A count or a position: 0 to `largest`."""
    if type(value) is not int or not 0 <= value <= largest:
        raise MalformedError(f"expected an integer from 0 to {largest}, found {_shown(value)}")
    return value


def boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise MalformedError(f"expected true or false, found {_shown(value)}")
    return value


def share(value: Any) -> float | None:
    """A number from 0 to 1, or None."""
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 <= value <= 1:
        raise MalformedError(f"expected a share from 0 to 1, found {_shown(value)}")
    return float(value)


def text(value: Any, among: Collection[str] | None = None) -> str:
    """A text, one of `among` if that is given."""
    if not isinstance(value, str) or (among is not None and value not in among):
        raise MalformedError(
            f"expected {'text' if among is None else 'one of ' + ', '.join(among)}, found {_shown(value)}"
        )
    return value


def texts(value: Any) -> tuple[str, ...]:
    return tuple(text(item) for item in items(value))


def hexadecimal(value: Any, *lengths: int) -> str:
    """Digits of a digest or the like, as many as one of `lengths`."""
    digits = text(value)
    if len(digits) not in lengths or digits.strip("0123456789abcdef"):
        raise MalformedError(f"expected {' or '.join(map(str, lengths))} hexadecimal digits, found {_shown(value)}")
    return digits


def _shown(value: Any) -> str:
    if isinstance(value, int) and abs(value) > _LARGEST:
        return "a larger number"
    shown = ascii(value) if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"
    return shown if len(shown) < 60 else f"{shown[:57]}..."
