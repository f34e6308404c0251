"""Text for people: sizes in words, lists of names, and text from files that cannot harm a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["amount", "parse_size", "printable", "quoted", "saving", "size"]


def printable(text: object) -> str:
    """Text in which every character that does not print is spelled out, so that it does nothing to a terminal or a page."""
    shown = str(text)
    if shown.isprintable():
        return shown
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in shown)


def size(nbytes: int) -> str:
    """A number of bytes for people: three digits, and units of a thousand."""
    value = float(nbytes)
    for unit in ("B", "KB", "MB", "GB"):
        if abs(value) < 999.5:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:#.3g} {unit}".replace(". ", " ")
        value /= 1000
    return f"{value:.3g} TB"


def amount(number: int) -> str:
    """A number of parameters as people write it: 22.7M, 7.24B."""
    value = float(number)
    for unit in ("", "K", "M"):
        if value < 999.5:
            return f"{number}{unit}" if not unit else f"{value:#.3g}{unit}".replace(".K", "K").replace(".M", "M")
        value /= 1000
    return f"{value:.3g}B"


def saving(before: int, after: int) -> str:
    """One sentence that says how many bytes went, or came if there are more than before."""
    change = f"{size(abs(before - after))}, {abs(before - after) / max(before, 1):.1%} of the original size"
    if before == after:
        return "Saved nothing."
    return f"Saved {change}." if before > after else f"Grew by {change}."


def quoted(names: Iterable[str], *, most: int | None = None) -> str:
    """Names in quotes, with commas; after `most` of them only the number of the others."""
    every = list(names)
    shown = ", ".join(f"'{name}'" for name in every[:most])
    return shown if most is None or len(every) <= most else f"{shown} and {len(every) - most} others"


_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{p}b": 1000**i for i, p in enumerate("kmgt", 1)} | {f"{p}ib": 1024**i for i, p in enumerate("kmgt", 1)}


def parse_size(text: str) -> int:
    """Read a number of bytes: "1048576", "10 MB" or "1.5GiB". A fraction of a byte is dropped.

    Raises:
        ValueError: it is something else.
    """
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{text!r} is not a number of bytes, like 1048576, 10MB or 1.5GiB")
    from fractions import Fraction  # with decimal, a twentieth of what importing the runtime takes

    return int(Fraction(match[1]) * _UNITS[match[2]])
