"""The versions of other packages that lowering and the native runtime need, and the error if there is another one.

Files, reports and releases work with any version of them, or with none.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from blobstore.core.distribution import RUNTIME, install
from blobstore.core.errors import MissingDependencyError
from blobstore.core.version import __version__

__all__ = ["SUPPORTED", "check_lowering", "check_runtime", "installed", "is_supported", "needed"]

SUPPORTED = {"executorch": "1.5", "torch": "2.13"}
"""What the extra `executorch` installs, and what lowering is tested with: any release of these versions."""


def installed(package: str) -> str | None:
    """The version of a package as pip knows it; None if pip does not know the package."""
    import importlib.metadata  # takes longer than the rest of the runtime

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def is_supported(package: str, version: str) -> bool:
    """Whether lowering works with this version of a package."""
    return re.match(rf"{re.escape(SUPPORTED[package])}(?![0-9])", version) is not None


def check_lowering(what: str = "lowering") -> None:
    """Check the versions of torch and executorch.

    Args:
        what: what needs them, for the message.

    Raises:
        MissingDependencyError: one of them is not installed, or has another version. The message has both versions.
    """
    for package, version in SUPPORTED.items():
        found = installed(package)
        if found is None or not is_supported(package, found):
            raise _error(what, package, version, found, "executorch")


@contextmanager
def needed(what: str, extra: str) -> Iterator[None]:
    """A block that imports an optional package: `what` says what needs which one, `extra` installs it.

    Raises:
        MissingDependencyError: it is not installed, or does not load.
    """
    try:
        yield
    except MissingDependencyError:
        raise
    except ImportError as error:
        raise MissingDependencyError(f"{what}: {install(extra)} ({error})") from error


def check_runtime() -> None:
    """Check that the native package belongs to this package, and that executorch, if it is there, is the one it is built on.

    Without pip's records, as in a bundled application, nothing is known and nothing is refused.

    Raises:
        MissingDependencyError: one of them has another version. The message has both versions.
    """
    if importlib.util.find_spec("executorch") is None and _recorded("blobstore_runtime", RUNTIME) == [__version__]:
        return
    runtime = installed(RUNTIME)
    if runtime is None:
        return
    if runtime != __version__:
        raise _error(f"blobstore {__version__}", RUNTIME, __version__, runtime, "runtime")
    pinned = _pinned(RUNTIME, "executorch")
    found = installed("executorch")
    if pinned is not None and found is not None and found.partition("+")[0] != pinned:
        raise _error(f"{RUNTIME} {runtime}", "executorch", pinned, found, "executorch")


def _recorded(module: str, package: str) -> list[str]:
    """The versions of a package in the names of pip's records beside its module."""
    spec, name = importlib.util.find_spec(module), package.replace("-", "_")
    places = spec.submodule_search_locations if spec else None
    records = [record for place in places or () for record in Path(place).parent.glob(f"{name}-*.dist-info")]
    return [record.stem.removeprefix(f"{name}-") for record in records]


def _pinned(package: str, needed: str) -> str | None:
    """The one version of another package that a package works with, from its requirements or those of an extra."""
    import importlib.metadata

    for requirement in importlib.metadata.requires(package) or ():
        if match := re.match(rf"{re.escape(needed)}\s*\(?==\s*([\w.]+)", requirement):
            return match[1]
    return None


def _error(what: str, package: str, version: str, found: str | None, extra: str) -> MissingDependencyError:
    if found is None:
        return MissingDependencyError(f"{what} needs {package} {version}, which is not installed: {install(extra)}")
    return MissingDependencyError(f"{what} needs {package} {version}, found {package} {found}: {install(extra)}")
