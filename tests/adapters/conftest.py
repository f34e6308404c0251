"""Files that the tests of adapters share."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture(scope="session")
def lowered_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Path]:
    """A function that lowers a model with or without adapters, once in a session, and returns the folder."""
    from tests.adapters import nets
    from tests.lowering.live import inputs

    known: dict[tuple[str, bool], Path] = {}

    def get(kind: str, delegated: bool) -> Path:
        if (kind, delegated) not in known:
            folder = tmp_path_factory.mktemp(f"{kind}-{delegated}")
            module = nets.make(nets.LoraNet)
            if kind == "lora":
                nets.lower_lora(module, inputs(3, 16), folder, delegated=delegated)
            else:
                nets.lower_plain(nets.plain_of(module), inputs(3, 16), folder, delegated=delegated)
            known[kind, delegated] = folder
        return known[kind, delegated]

    return get


def _files(source: Path, target: Path) -> Any:
    shutil.copytree(source, target)
    return SimpleNamespace(
        folder=target,
        pte=target / "model.pte",
        foundation=target / "foundation.ptd",
        adapter=target / "adapter.ptd",
        model=target / "model.ptd",
    )


@pytest.fixture(params=[False, True], ids=["portable", "delegated"])
def lora(request: Any, lowered_once: Any, tmp_path: Path) -> Any:
    """`pte`, `foundation` and `adapter` of a `nets.LoraNet`."""
    return _files(lowered_once("lora", request.param), tmp_path / "lora")


@pytest.fixture(params=[False, True], ids=["portable", "delegated"])
def plain(request: Any, lowered_once: Any, tmp_path: Path) -> Any:
    """`pte` and `model` (its .ptd) of a `nets.PlainNet` with the same base weights."""
    return _files(lowered_once("plain", request.param), tmp_path / "plain")
