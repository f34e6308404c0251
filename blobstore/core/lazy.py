"""Names of a package that are imported when they are first used."""

from __future__ import annotations

TYPE_CHECKING = False  # see blobstore/__init__.py
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def lazily(package: str, home: Mapping[str, str], name: str) -> object:
    """What the `__getattr__` of a package returns; later uses find it in the package itself.

    Args:
        package: its name.
        home: for each name, the module below the package that defines it; a dot at its front leads to a neighbour of the
            package.
        name: the one that is looked up.

    Raises:
        AttributeError: the package has no such name.
    """
    import sys
    from importlib import import_module

    if name not in home:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    value = getattr(import_module(f".{home[name]}", package), name)
    setattr(sys.modules[package], name, value)
    return value


def usable(package: str, names: Iterable[str]) -> list[str]:
    """What the `__dir__` of a package returns: its names without those whose packages are not installed.

    `help`, completion and `inspect` look up each name that `dir` has, and stop at the first error.
    """
    import sys

    from blobstore.core.errors import MissingDependencyError

    found = []
    for name in sorted(names):
        try:
            getattr(sys.modules[package], name)
        except MissingDependencyError:
            continue
        found.append(name)
    return found
