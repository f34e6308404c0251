import asyncio
import inspect
from pathlib import Path

import pytest

import blobstore
from blobstore.core.formats.opening import open_any
from blobstore.reporting import Report
from tests.reporting.zoo import write_zoo


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test touches the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache-home"))
    return tmp_path / "cache-home"


@pytest.fixture(scope="session")
def zoo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two hundred files below a folder `models`; the checkpoint of the first family is among them."""
    folder = tmp_path_factory.mktemp("zoo") / "models"
    write_zoo(folder)
    return folder


@pytest.fixture(scope="session")
def zoo_report(zoo_folder: Path) -> Report:
    """Of the whole zoo, with the names of the first family's tensors."""
    return blobstore.report([zoo_folder], names=open_any(zoo_folder / "checkpoints" / "vision-mobile.safetensors"))
