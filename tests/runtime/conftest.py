"""What the tests of the runtime share."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def hooks() -> Path:
    """The native module of a test build: the folder to put on PYTHONPATH, see tests/runtime/hooks.py."""
    from tests.helpers import native_build
    from tests.runtime.hooks import build

    native_build.need()
    return build()


@pytest.fixture(scope="session")
def foundation(tmp_path_factory):
    """A .ptd with blobs of many sizes: less than a page, whole pages, several megabytes, tied, opaque and empty."""
    from tests.runtime.blobs import write_foundation

    return write_foundation(tmp_path_factory.mktemp("foundation") / "foundation.ptd")


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that every user may enter."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture(scope="session")
def mlp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small program, `nets.MLP`, with its data; tests must not change the files."""
    return _lowered("MLP", (2, 16), tmp_path_factory)


@pytest.fixture(scope="session")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program of `nets.Wide`, with its weights beside it; packed they take 16 MiB."""
    return _lowered("Wide", (1, 1024), tmp_path_factory)


def _lowered(name: str, sizes: tuple[int, int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch

    from tests.lowering import nets
    from tests.lowering.live import lower_through, seeded

    folder = tmp_path_factory.mktemp(name)
    lower_through({"forward": (seeded(getattr(nets, name)), (torch.ones(sizes),))}, folder)
    return folder
