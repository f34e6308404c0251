"""Limits on what may be wasted."""

from __future__ import annotations

import re
from typing import NamedTuple

from blobstore.core.text import parse_size, size

__all__ = ["Limit"]


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
