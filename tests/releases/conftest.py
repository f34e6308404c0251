"""What several tests of releases use."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.releases.server import Server, serving


@pytest.fixture
def server(releases: Path) -> Iterator[Server]:
    """A web server of the folder `releases`, which each file has for itself."""
    with serving(releases) as server:
        yield server


@pytest.fixture
def device(tmp_path: Path) -> Path:
    """The folder of a device, which is not there yet."""
    return tmp_path / "device"
