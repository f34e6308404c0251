"""Names of a package that are imported when they are first used."""

from __future__ import annotations

TYPE_CHECKING = False  # see blobstore/__init__.py
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def lazily(
    package: str, home: Mapping[str, Iterable[str]], name: str, *, needs: str = "", extra: str = "", why: str = ""
) -> object:
    """What the `__getattr__` of a package returns; later uses find it in the package itself.

    Args:
        package: its name.
        home: for each module below the package the names that it defines; a dot at the front of a module leads to a
            neighbour of the package.
        name: the one that is looked up.
        needs: what the names are for, if that needs the supported torch and executorch.
        extra: what installs the packages that these modules import.
        why: the beginning of the message if one of these is missing.

    Raises:
        AttributeError: the package has no such name.
        MissingDependencyError: a package that the name needs is not installed, or has another version.
    """
    import sys
    from importlib import import_module

    module = next((module for module, names in home.items() if name in names), None)
    if module is None:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    if needs:
        from blobstore.core.requirements import check_lowering

        check_lowering(needs)
    if extra:
        from blobstore.core.requirements import needed

        with needed(why, extra):
            import_module(f".{module}", package)
    value = getattr(import_module(f".{module}", package), name)
    setattr(sys.modules[package], name, value)
    return value


def usable(package: str, names: Iterable[str]) -> list[str]:
    """What the `__dir__` of a package returns: its names without those whose packages are not installed.

    `help`, completion and `inspect` look up each name that `dir` has, and stop at the first error.
    """
    import sys
    from contextlib import suppress

    from blobstore.core.errors import MissingDependencyError

    found = []
    for name in sorted(names):
        with suppress(MissingDependencyError):
            getattr(sys.modules[package], name)
            found.append(name)
    return found
