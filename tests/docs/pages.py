"""What each page of the documentation finds in its folder, and the names that its code uses without making them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import models

__all__ = ["PAGES"]


def _checkpoint(path: Path, module: Any) -> None:
    from safetensors.torch import save_file

    save_file(module.state_dict(), path)


def _dedup(folder: Path, names: dict[str, Any]) -> None:
    """Two programs of one model, its checkpoint, and a program of another one."""
    model = models.mlp()
    for name in ("a", "b"):
        model.write(folder / "old", name)
    models.mlp(seed=1).write(folder / "more", "c")
    _checkpoint(folder / "model.safetensors", model.methods["forward"][0])


def _ci(folder: Path, names: dict[str, Any]) -> None:
    for name in ("a", "b"):
        models.mlp().write(folder / "build", name)


def _processes(folder: Path, names: dict[str, Any]) -> None:
    """A program with its weights beside it, by the model's names."""
    models.mlp(external=True).write(folder)
    (folder / "_default_external_constant.ptd").rename(folder / "model.ptd")


def _named_data_store(folder: Path, names: dict[str, Any]) -> None:
    (folder / "out").mkdir()


PAGES: dict[str, Callable[[Path, dict[str, Any]], None]] = {
    "docs/howto/ci.md": _ci,
    "docs/howto/dedup.md": _dedup,
    "docs/howto/named-data-store.md": _named_data_store,
    "docs/howto/processes.md": _processes,
}
