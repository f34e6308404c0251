"""The names that pip knows the packages by; what is imported is `blobstore`, which was taken on PyPI."""

from __future__ import annotations

__all__ = ["DISTRIBUTION", "RUNTIME", "install"]

DISTRIBUTION = "executorch-blobstore"

RUNTIME = f"{DISTRIBUTION}-runtime"
"""The native package, `blobstore_runtime` where it is imported."""


def install(extra: str) -> str:
    """What to run for one of the extras in pyproject.toml, as messages say it."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"
