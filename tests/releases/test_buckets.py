"""Releases in a bucket of a real S3 server: published into it, pulled from it, and swept (F1, F2)."""

import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import obstore
import pytest

from blobstore.errors import ReleaseError, TransferError
from blobstore.pool import Pool
from blobstore.publishing import beside
from blobstore.publishing.publish import _Publisher
from blobstore.releases import publish, pull, sweep
from tests.helpers.between import between
from tests.pool import places
from tests.pool.conftest import gateway  # noqa: F401 - a fixture
from tests.releases.models import found, inputs, same, weights

pytestmark = pytest.mark.slow


@pytest.fixture
def bucket(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[places.Place]:
    """A bucket whose credentials are in the environment."""
    place = places.bucket(request.getfixturevalue("gateway"), tmp_path / "cache")
    for name, value in place.options.items():
        monkeypatch.setenv(name.upper() if name.startswith("aws") else f"AWS_{name.upper()}", value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield place


def test_from_a_bucket_to_a_device(bucket: places.Place, tmp_path: Path) -> None:
    """Two versions, and a third that devices with the first take; what is dropped goes."""
    device, tensors = tmp_path / "device", weights()
    for version in ("1", "2", "3"):
        done = publish(inputs(tmp_path / "in", tensors), bucket.url, name="a", version=version)
        assert done.index == f"{bucket.url}/a/{version}/index.json"
        if version == "1":
            first = pull(f"{bucket.url}/a/1", device)
            assert same(found(device / "current"), tensors)
        tensors = {**tensors, "layer1.weight": tensors["layer1.weight"] + 1}
    with pytest.raises(ReleaseError, match="published already"):
        publish(tmp_path / "in", bucket.url, name="a", version="2")
    pulled = pull(f"{bucket.url}/a/latest/index.json", device)
    assert pulled.version == "3" and pulled.fetched_bytes < first.fetched_bytes / 3
    for path in bucket.paths():
        kept = obstore.get(bucket.store, path).attributes.get("Cache-Control")
        if path.startswith(("packs/", "files/")) or path == "a/1/index.json":
            assert kept == "max-age=31536000, immutable", path
        elif path.endswith(("latest/index.json", "ways.json.zst")):
            assert kept == "max-age=60", path
    with Pool(bucket.url) as pool:
        pool.drop("a@3")
    assert sweep(bucket.url, keep=0).withdrawn == 1
    for _ in range(2):
        sweep(bucket.url, keep=0)
    assert pull(f"{bucket.url}/a/latest", tmp_path / "new").version == "2"
    assert same(found(tmp_path / "new/current"), {**weights(), "layer1.weight": weights()["layer1.weight"] + 1})
    with pytest.raises(TransferError, match="there is no such release"):
        pull(f"{bucket.url}/a/3", device)
    with pytest.raises(ReleaseError, match="expected the URL of a release"):
        pull("s3://bucket", device)


def test_two_publishers_at_once(bucket: places.Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that began later ends first; the newest release is the latest one all the same."""

    def other() -> None:
        monkeypatch.setenv("SOURCE_DATE_EPOCH", str(int(time.time()) + 60))
        publish(inputs(tmp_path / "in", weights(seed=1)), bucket.url, name="a", version="2")

    with between([(_Publisher, "_write")], 0, other):
        publish(inputs(tmp_path / "in", weights()), bucket.url, name="a", version="1")
    assert pull(f"{bucket.url}/a/latest", tmp_path / "device").version == "2"
    assert pull(f"{bucket.url}/a/1", tmp_path / "other").version == "1"


@pytest.mark.parametrize("before", ["_listed", "read_index", "whole_release"])
@pytest.mark.parametrize("dropped", ["no", "the newest", "all"])
def test_a_release_that_appears_during_a_sweep_stays(
    before: str, dropped: str, bucket: places.Place, tmp_path: Path
) -> None:
    """Nothing is locked. It is the latest one, too, if the one before it is withdrawn (F3)."""
    for version in ("1", "2"):
        publish(inputs(tmp_path / "in", weights()), bucket.url, name="a", version=version)
    with Pool(bucket.url) as pool:
        for version in {"no": (), "the newest": ("2",), "all": ("1", "2")}[dropped]:
            pool.drop(f"a@{version}")

    def publish_another() -> None:
        publish(inputs(tmp_path / "in", weights(seed=1)), bucket.url, name="a", version="3")

    with between([(beside, before)], 0, publish_another) as made:
        assert sweep(bucket.url).withdrawn == {"no": 0, "the newest": 1, "all": 2}[dropped]
    if not made:  # nothing was left to look at
        publish_another()
    assert pull(f"{bucket.url}/a/3", tmp_path / "device").version == "3"
    assert pull(f"{bucket.url}/a/latest", tmp_path / "newest").version == "3"


def test_an_object_that_is_stored_again_during_a_sweep_stays(bucket: places.Place, tmp_path: Path) -> None:
    """It was unused for long, and now belongs to a release that the sweep did not see (F3)."""
    for version in ("1", "2"):
        publish(inputs(tmp_path / "in", weights(seed=int(version))), bucket.url, name="a", version=version)
    with Pool(bucket.url) as pool:
        pool.drop("a@2")
        assert sweep(bucket.url).waiting > 0
        unused = json.loads(pool.objects.get("releases.json") or b"")["unused"]
        pool.objects.put("releases.json", json.dumps({"unused": dict.fromkeys(unused, 0)}).encode())
    event = partial(publish, tmp_path / "in", bucket.url, name="a", version="3")
    with between([(beside.Round, "_remove")], 0, event):
        sweep(bucket.url, keep=60)
    pull(f"{bucket.url}/a/3", tmp_path / "device")
    assert same(found(tmp_path / "device/current"), weights(seed=2))


def test_a_release_without_an_object(bucket: places.Place, tmp_path: Path) -> None:
    """The device keeps what it has (F3)."""
    publish(inputs(tmp_path / "in", weights()), bucket.url, name="a", version="1")
    for path in bucket.packs():
        obstore.delete(bucket.store, path)
    with pytest.raises(TransferError, match="this object is missing"):
        pull(f"{bucket.url}/a/1", tmp_path / "device")
    assert not (tmp_path / "device/current").exists()
