"""Numbers of bytes as people write them, and limits on what may be wasted."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

from blobstore.core.text import size

__all__ = ["Limit", "parse_size"]

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{p}b": 1000**i for i, p in enumerate("kmgt", 1)} | {f"{p}ib": 1024**i for i, p in enumerate("kmgt", 1)}


def parse_size(text: str) -> int:
    """Read a number of bytes: "1048576", "10 MB" or "1.5GiB". A fraction of a byte is dropped.

    Raises:
        ValueError: it is something else.
    """
    found = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([a-z]*)", text.strip().lower())
    if found is None or found[2] not in _UNITS:
        raise ValueError(f"{text!r} is not a number of bytes, like 1048576, 10MB or 1.5GiB")
    return int(Fraction(found[1]) * _UNITS[found[2]])


class Limit(NamedTuple):
    """A number of bytes, or a share of all bytes, that waste must not exceed."""

    number: float
    is_share: bool
    text: str

    @classmethod
    def parse(cls, text: str) -> Limit:
        """Read "5%", "1048576", "10 MB" or "1GiB".

        Raises:
            ValueError: it is something else.
        """
        text = text.strip()
        if share := re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*%", text):
            return cls(float(share[1]) / 100, True, text)
        try:
            return cls(parse_size(text), False, text)
        except ValueError:
            raise ValueError(
                f"{text!r} is neither a number of bytes, like 1048576 or 10MB, nor a share, like 5%"
            ) from None

    def exceeded(self, nbytes: int, total: int) -> str | None:
        """One line that says why `nbytes` of `total` are too many; None if they are within the limit."""
        if nbytes <= (self.number * total if self.is_share else self.number):
            return None
        share = f", {nbytes / total:.1%} of all" if self.is_share and total else ""
        return f"{size(nbytes)} ({nbytes:,} bytes{share}), which is over the limit of {self.text}"
