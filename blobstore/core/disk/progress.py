"""What a caller can follow long work with."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from blobstore.core.errors import UnsupportedDataError

__all__ = ["Progress", "check_progress"]

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many bytes of it are done, and how many there are in total."""


def check_progress(progress: Progress | None) -> None:
    """Raise UnsupportedDataError unless `progress` is None or can be called like a `Progress`."""
    if progress is None:
        return
    try:
        inspect.signature(progress).bind("", 0, 0)
    except TypeError:
        raise UnsupportedDataError(
            f"progress must be callable as progress(what, done, total), not {progress!r}"
        ) from None
    except ValueError:  # written in C, without a signature
        pass
