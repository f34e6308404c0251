"""The name that pip knows the package by; what is imported is `blobstore`, which was taken on PyPI."""

from __future__ import annotations

__all__ = ["DISTRIBUTION", "install"]

DISTRIBUTION = "executorch-blobstore"


def install(extra: str) -> str:
    """What to run for one of the extras in pyproject.toml, as messages say it."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"
