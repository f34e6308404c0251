"""Arguments of any type to releases lead to a result or a BlobStoreError."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import blobstore.releases
from blobstore.releases import Patience, Release, publish, pull
from tests.package.wrong_kinds import PublicCallable, check, public_callables
from tests.releases.models import inputs, weights
from tests.releases.server import serving

pytestmark = pytest.mark.long

RESULTS = {"File", "Removed", "Followed", "Published", "Pulled", "Pushed", "Swept"}
INTERNAL = {"wait", "path", "object"}  # of Patience, for the library; of Published and of File, what takes no arguments
CALLABLES = [
    one
    for one in public_callables(blobstore.releases, results=RESULTS)
    if str(one) != "Release" and one.name not in INTERNAL
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release folder with two versions, and a device with the first."""
    folder = tmp_path_factory.mktemp("releases")
    inputs(folder / "in", weights(layers=1, size=16))
    publish(folder / "in", folder / "releases", name="a", version="1")
    pull(folder / "releases/a/1", folder / "device")
    return folder


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with serving(folder / "releases") as server:
        yield f"{server.url}/a/1/index.json"


def makers(folder: Path, url: str, one: PublicCallable, tmp_path: Path) -> dict[str, Any]:
    numbers = iter(range(10**9))

    return {
        "inputs": lambda: folder / "in",
        "releases": lambda: folder / "releases",
        "name": lambda: "a",
        "version": lambda: f"{one.name}.{next(numbers)}",
        "executorch": lambda: "1.5",
        "reference": lambda: folder / "releases/a/1",
        "pull.reference": lambda: url,
        "push.reference": lambda: f"oci:{tmp_path / 'layout'}:1",
        "push.release": lambda: folder / "releases/a/1",
        "threads": lambda: 1,
        "directory": lambda: folder / "device",
        "executor": lambda: None,
        "grace": lambda: 0.0,
        "sweep.keep": lambda: 0.0,
        "new": lambda: tmp_path / f"new{next(numbers)}",
        "keep": lambda: 1,
        "data": lambda: None,
        "packed": lambda: None,
        "patience": lambda: Patience(attempts=1),
        "Release": lambda: Release.open(folder / "device"),
        "Patience": Patience,
        "adapters": lambda: "keep",
        "pause": lambda: lambda seconds: None,
    }


@pytest.mark.slow_for("publish", "sweep")
@pytest.mark.parametrize("one", CALLABLES, ids=str)
def test_every_wrong_kind_of_argument(
    one: PublicCallable, folder: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every public function and method, with every wrong type for each argument."""
    here = tmp_path / "here"  # ".." is one of the values
    here.mkdir()
    monkeypatch.chdir(here)
    check(one, makers(folder, url, one, tmp_path), here)
