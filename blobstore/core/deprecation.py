"""What is deprecated: a warning that names the replacement, and the version without it.

    @deprecated("`merge` is deprecated since blobstore 0.3 and will be removed in 0.5; use `combine`")
    def merge(...): ...

Messages have this form and are literals: type checkers show them (PEP 702), and a test finds in the sources what outlives
its version. `docs/stability.md` lists them. An argument is deprecated with `warn`, the public name of a module with the
`moved` of `lazily`, an option of the command line with `deprecated_option` of `cli/options.py`.
"""

from __future__ import annotations

import functools
import re

TYPE_CHECKING = False  # see blobstore/__init__.py
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from typing_extensions import deprecated

__all__ = ["FORM", "deprecated", "warn"]

FORM = re.compile(
    r"`(?P<what>[^`]+)` is deprecated since blobstore (?P<since>\d+\.\d+) and will be removed in (?P<until>\d+\.\d+)"
    r"; use (?P<use>`[^`]+`)"
)
"""The form of a message: what is deprecated, since which version, the first one without it, and what to use."""


def warn(message: str, stacklevel: int = 2) -> None:
    """Warn that the caller's caller uses something deprecated.

    Args:
        message: of the form `FORM`.
        stacklevel: whose line the warning names, as in `warnings.warn`; 2 is the caller of the function that calls this.

    Raises:
        ValueError: the message has another form.
    """
    import warnings

    if not FORM.fullmatch(message):
        raise ValueError(f"expected a message such as {FORM.pattern}, found {message!r}")
    warnings.warn(message, DeprecationWarning, stacklevel=stacklevel + 1)


if not TYPE_CHECKING:

    def deprecated(message: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """A decorator for a function that is deprecated, with a message of the form `FORM`."""

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                warn(message)
                return function(*args, **kwargs)

            wrapper.__deprecated__ = message
            return wrapper

        return decorate
