"""Limits on what may be wasted, for `--fail-over`."""

from __future__ import annotations

import re
from typing import NamedTuple

from blobstore.text import size

__all__ = ["Limit"]

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{p}b": 1000**i for i, p in enumerate("kmgt", 1)} | {f"{p}ib": 1024**i for i, p in enumerate("kmgt", 1)}


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
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%|[a-z]*)", text.strip().lower())
        if match and match[2] == "%":
            return cls(float(match[1]) / 100, True, text.strip())
        if match and match[2] in _UNITS:
            return cls(float(match[1]) * _UNITS[match[2]], False, text.strip())
        raise ValueError(f"{text!r} is neither a number of bytes, like 1048576 or 10MB, nor a share, like 5%")

    def exceeded(self, nbytes: int, total: int) -> str | None:
        """One line that says why `nbytes` of `total` are too many; None if they are within the limit."""
        if nbytes <= (self.number * total if self.is_share else self.number):
            return None
        share = f", {nbytes / total:.1%} of all" if self.is_share and total else ""
        return f"{size(nbytes)} ({nbytes:,} bytes{share}), which is over the limit of {self.text}"
