"""The names that pip knows the packages by; what is imported is `blobstore`, which was taken on PyPI."""

from __future__ import annotations

__all__ = ["DISTRIBUTION", "OPENVINO", "RELEASED", "RUNTIME", "install"]

DISTRIBUTION = "executorch-blobstore"

RELEASED = False
"""Whether the packages are on PyPI. Until they are, nobody owns their names there, and whoever registers one runs code on the
machine of everybody who is told to install it."""

RUNTIME = f"{DISTRIBUTION}-runtime"
"""The native package, `blobstore_runtime` where it is imported."""

OPENVINO = "pip install --no-deps 'openvino>=2025.1,<2026'"
"""What ExecuTorch 1.5 takes. It is no extra, because openvino asks for a package that reports what its users do, and for
an older numpy than it needs."""


def install(extra: str, *options: str) -> str:
    """What to run for one of the extras in pyproject.toml, as messages say it, with options for pip."""
    command = " ".join(["pip install", *options])
    if RELEASED:
        return f"{command} '{DISTRIBUTION}[{extra}]'"
    what = "./runtime_bindings" if extra == "runtime" else f"'.[{extra}]'"
    return f"{command} {what} in the clone"
