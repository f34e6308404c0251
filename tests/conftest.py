"""Fixtures for all tests. The models that they lower are in tests/helpers/models.py."""

import gc
import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from blobstore.core.memory import distinct
from tests.cpp.module_runner import ModuleRunner, build
from tests.helpers import lowering_speed, models, native_build

# No example has a time limit, because the machine may be busy. CI tries the same examples in every run.
settings.register_profile("blobstore", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("blobstore")

# Small models gain nothing from threads, which wait for each other as soon as the machine is busy: `make test` runs as many
# processes as there are cores. Child processes read the variable.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")


if "UNPATCHED_TORCH" not in os.environ:  # a night runs on the torch that users have
    lowering_speed.install()


@pytest.hookimpl(tryfirst=True)  # before -m is looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Cases of `slow_for` are slow, those of `long_for` are long, and so are tests on the build with `hooks`, which is
    compiled for them. Modules with long tests come first, so that no worker is left alone with one at the end."""
    for item in items:
        for mark in ("slow", "long"):
            marker = item.get_closest_marker(f"{mark}_for")
            if marker is not None and isinstance(item, pytest.Function) and item.callspec.id in marker.args:
                item.add_marker(mark)
        if isinstance(item, pytest.Function) and "hooks" in item.fixturenames:
            item.add_marker("long")
    long = {item.path for item in items if item.get_closest_marker("long")}
    items.sort(key=lambda item: item.path not in long)


def pytest_collection_finish() -> None:
    """A quarter of the time of lowering is looking for garbage among the objects of torch's modules, which stay."""
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)


# Folders whose tests run programs on blobstore's own runtime; `make test` builds it.
_NEED_RUNTIME = {"adapters", "llm", "lowering", "runtime", "training"}


class WithoutRuntime(pytest.Module):
    """A module of tests that cannot be imported, and is skipped with a reason."""

    def collect(self) -> Any:
        pytest.skip("needs the native package executorch-blobstore-runtime", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if module_path.parent.name in _NEED_RUNTIME and importlib.util.find_spec("blobstore_runtime") is None:
        return WithoutRuntime.from_parent(parent, path=module_path)
    return None


@pytest.fixture(scope="session")
def lowered() -> Any:
    """The module tests.helpers.models; each of its functions lowers a small model, once in a session."""
    return models


@pytest.fixture(scope="session")
def stock_run() -> Callable[..., list[Any]]:
    """Runs a method with ExecuTorch's own Python runtime, with its full verification.

    Call it as `stock_run(pte, inputs, data_path=None, method="forward")`, where pte is a path or bytes; it
    returns the outputs as tensors. Give it the data file of a delegated program: without one this runtime
    crashes the process instead of raising an error.
    """
    with models.quiet():
        from executorch.runtime import Runtime, Verification

    def run(
        pte: Path | bytes, inputs: Sequence[Any], data_path: Path | None = None, method: str = "forward"
    ) -> list[Any]:
        program = Runtime.get().load_program(pte, verification=Verification.InternalConsistency, data_path=data_path)
        loaded = program.load_method(method)
        assert loaded is not None
        return list(loaded.execute(inputs))

    return run


@pytest.fixture(scope="session")
def module_runner() -> ModuleRunner:
    """The stock C++ Module: `module_runner(pte, data_files, inputs, method="forward")`, in numpy arrays."""
    native_build.need()
    return build()


@pytest.fixture
def comparisons(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The size of every blob that is compared with another one of the same digest."""
    compared: list[int] = []

    def counted(one: memoryview, other: memoryview) -> bool:
        compared.append(len(one))
        return bytes(one) == bytes(other)

    monkeypatch.setattr(distinct, "same_bytes", counted)
    return compared
