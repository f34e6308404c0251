"""The places where pools are tried: a folder, and a bucket of a real S3 server that is started when it is needed first."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from blobstore.pool import Pool
from tests.pool import gateway as server
from tests.pool import places
from tests.pool.proxy import Proxy, proxying


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[server.Gateway]:
    """An S3 server, one for all tests of this process."""
    if reason := server.missing():
        pytest.skip(reason)
    started = server.Gateway(tmp_path_factory.mktemp("ceph"))
    yield started
    started.close()


@pytest.fixture
def proxy(gateway: server.Gateway) -> Iterator[Proxy]:
    """What stands between a client and the server."""
    with proxying(gateway.url) as running:
        yield running


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    """An empty one in the folder `pool`."""
    with Pool(tmp_path / "pool", create=True) as made:
        yield made


@pytest.fixture(params=["folder", pytest.param("bucket", marks=pytest.mark.slow)])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> places.Place:
    """A place without a pool."""
    if request.param == "folder":
        return places.folder(tmp_path / "pool")
    return places.bucket(request.getfixturevalue("gateway"), tmp_path / "cache")
