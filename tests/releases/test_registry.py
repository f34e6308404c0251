"""Releases in a real registry and in image layouts, and signatures (F1, F2, F4)."""

import base64
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from blobstore.errors import ReleaseError, TransferError, TrustError
from blobstore.releases import publish, pull, push
from blobstore.releases.sources.patience import InterruptedTransferError
from blobstore.releases.sources.registry import _Upload
from tests.helpers.ports import answers, free_ports
from tests.helpers.waiting import until
from tests.releases.models import NOW, found, inputs, keys, read_ways, same, weights
from tests.releases.wire import wire_to

REGISTRY = shutil.which("docker-registry")
needs_registry = pytest.mark.skipif(REGISTRY is None, reason="needs docker-registry (apt-get install docker-registry)")


@pytest.fixture(params=["open", "with a password"])
def registry(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A registry on this machine; its host and port."""
    [port] = free_ports(1)
    config = {
        "version": "0.1",
        "log": {"level": "error", "accesslog": {"disabled": True}},
        "storage": {"filesystem": {"rootdirectory": str(tmp_path / "registry")}},
        "http": {"addr": f"127.0.0.1:{port}"},
    }
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    if request.param == "with a password":
        if shutil.which("htpasswd") is None:
            pytest.skip("needs htpasswd (apt-get install apache2-utils)")
        done = subprocess.run(
            [shutil.which("htpasswd") or "", "-nbB", "user", "secret"], capture_output=True, text=True, check=True
        )
        (tmp_path / "htpasswd").write_text(done.stdout)
        config["auth"] = {"htpasswd": {"realm": "here", "path": str(tmp_path / "htpasswd")}}
        auth = base64.b64encode(b"user:secret").decode()
        (tmp_path / "config.json").write_text(json.dumps({"auths": {f"127.0.0.1:{port}": {"auth": auth}}}))
    (tmp_path / "registry.yml").write_text(json.dumps(config))  # JSON is YAML
    assert REGISTRY is not None
    with subprocess.Popen(
        [REGISTRY, "serve", str(tmp_path / "registry.yml")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            until(lambda: answers(port))
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()


def published(tmp_path: Path, **options: Path) -> Path:
    """Two versions; the second changes a layer."""
    tensors = weights()
    publish(inputs(tmp_path / "in", tensors), tmp_path / "releases", name="a", version="1", **options)
    tensors["layer1.weight"] = tensors["layer1.weight"] * 2
    publish(inputs(tmp_path / "in", tensors), tmp_path / "releases", name="a", version="2", **options)
    (tmp_path / "in/tokenizer/0.json").write_text("other")
    publish(tmp_path / "in", tmp_path / "releases", name="a", version="3", **options)
    return tmp_path / "releases"


@pytest.mark.long
@needs_registry
def test_push_and_pull(registry: str, tmp_path: Path) -> None:
    """What is there already is not sent, and not fetched (F1, F2)."""
    releases, device = published(tmp_path), tmp_path / "device"
    first = push(f"{registry}/team/a:1", releases / "a/1")
    assert first.sent_bytes == first.bytes
    assert push(f"{registry}/team/a:1", releases / "a/1").sent_bytes == 0
    second = push(f"{registry}/team/a:2", releases / "a/2")
    assert second.sent_bytes < second.bytes / 3
    third = push(f"{registry}/team/a:latest", releases / "a/3")
    assert pull(f"{registry}/team/a:1", device).changed
    done = pull(f"{registry}/team/a:1", device)
    assert not done.changed
    assert done.fetched_bytes < 5000
    assert pull(second.reference, device).version == "2"
    assert pull(f"{registry}/team/a", device).version == "3"
    tensors = weights()
    tensors["layer1.weight"] = tensors["layer1.weight"] * 2
    assert same(found(device / "current"), tensors)
    assert pull(third.reference, tmp_path / "other").sha256 == pull(releases / "a/3", tmp_path / "third").sha256
    with pytest.raises(TransferError, match="404"):
        pull(f"{registry}/team/a:nothing", device)


@pytest.mark.long
@needs_registry
def test_a_poll_of_a_registry(registry: str, tmp_path: Path) -> None:
    """The manifest of a tag is not sent again; without a password, 300 bytes go over the wire, both ways (F2)."""
    releases, device = published(tmp_path), tmp_path / "device"
    push(f"{registry}/team/a:latest", releases / "a/1")
    with wire_to(f"http://{registry}") as wire:
        place = f"{wire.url.removeprefix('http://')}/team/a"
        config = json.loads((tmp_path / "config.json").read_text()) if (tmp_path / "config.json").exists() else None
        if config is not None:
            config["auths"][wire.url.removeprefix("http://")] = config["auths"][registry]
            (tmp_path / "config.json").write_text(json.dumps(config))
        assert pull(place, device).changed
        wire.reset()
        done = pull(place, device)
        assert (done.changed, done.fetched_bytes) == (False, 0)
        assert config is not None or 0 < wire.total <= 300
        push(f"{registry}/team/a:latest", releases / "a/2")
        assert pull(place, device).version == "2"
        push(f"{registry}/team/a:latest", releases / "a/1")  # as a cache has it
        assert pull(place, device).stale == "1"


@pytest.mark.long
@needs_registry
@pytest.mark.parametrize("lost", [1, 2, 4])
@pytest.mark.parametrize("what", ["request", "answer"])
def test_an_upload_goes_on(
    registry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: int, what: str
) -> None:
    """Whether a chunk or its answer was lost, or those of the last request: no chunk is sent again that arrived (F2)."""
    monkeypatch.setattr("blobstore.releases.sources.registry._CHUNK", 150_000)
    releases = published(tmp_path)
    sizes = [size for _, size, *_ in read_ways(releases / "a/1")["objects"]]
    assert sum(size > 150_000 for size in sizes) == 1
    real, count = _Upload._send, 0

    def send(self: _Upload, method: str, url: str | None, stop: int, accept: tuple[int, ...]) -> None:
        nonlocal count
        large = self._wanted.size > 150_000
        count += large
        if not (large and count == lost and what == "request"):
            real(self, method, url, stop, accept)
        if large and count == lost:
            raise InterruptedTransferError("the connection broke")

    monkeypatch.setattr(_Upload, "_send", send)
    done = push(f"{registry}/a:1", releases / "a/1", patience=NOW)
    assert count >= lost
    # once complete, an upload is forgotten, and what became of it is unknown
    assert done.sent_bytes == done.bytes or (lost, what) == (4, "answer")
    pull(f"{registry}/a:1", tmp_path / "device")
    assert same(found(tmp_path / "device/current"), weights())


@needs_registry
def test_what_is_wrong_with_credentials_is_said(registry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry with a password refuses a client without one (F4)."""
    if not (tmp_path / "htpasswd").exists():
        pytest.skip("this registry asks for none")
    (tmp_path / "none").mkdir()
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "none"))
    with pytest.raises(TransferError, match=r"config\.json has none"):
        pull(f"{registry}/a:1", tmp_path / "device")
    wrong = {"auths": {registry: {"auth": base64.b64encode(b"user:wrong").decode()}}}
    (tmp_path / "none/config.json").write_text(json.dumps(wrong))
    with pytest.raises(TransferError, match="refuses the credentials"):
        pull(f"{registry}/a:1", tmp_path / "device")


@pytest.mark.long
def test_an_image_layout(tmp_path: Path) -> None:
    """A folder that other tools for OCI read and write (F2)."""
    releases = published(tmp_path)
    for version in ("1", "2"):
        push(f"oci:{tmp_path}/layout:{version}", releases / "a" / version)
    pull(f"oci:{tmp_path}/layout:1", tmp_path / "device")
    assert same(found(tmp_path / "device/current"), weights())
    assert pull(f"oci:{tmp_path}/layout:2", tmp_path / "device").version == "2"
    layout = json.loads((tmp_path / "layout/index.json").read_text())
    assert len(layout["manifests"]) == 2
    if shutil.which("skopeo"):
        copy = ["skopeo", "copy", "--quiet", f"oci:{tmp_path}/layout:2", f"oci:{tmp_path}/copy:2"]
        subprocess.run(copy, check=True)
        pull(f"oci:{tmp_path}/copy:2", tmp_path / "copied")
        assert same(found(tmp_path / "copied/current").copy(), found(tmp_path / "device/current"))
    (tmp_path / "layout/blobs/sha256" / layout["manifests"][0]["digest"][7:]).write_text("{}")
    with pytest.raises(TrustError, match="expected the digest"):
        pull(f"oci:{tmp_path}/layout:1", tmp_path / "other")
    with pytest.raises(ReleaseError):
        push(str(tmp_path / "folder"), releases / "a/1")


@pytest.mark.long
def test_signatures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release that is unsigned, or signed by another key, or changed, is refused (F4)."""
    private, public, _ = keys(tmp_path, "one", password=b"pass")
    _, other, _ = keys(tmp_path, "other")
    monkeypatch.setenv("COSIGN_PASSWORD", "pass")
    releases = published(tmp_path, sign=private)
    pull(releases / "a/1", tmp_path / "device", key=public)
    assert not pull(releases / "a/1", tmp_path / "device", key=public).changed
    with pytest.raises(TrustError, match="not signed by"):
        pull(releases / "a/2", tmp_path / "device", key=other)
    push(f"oci:{tmp_path}/layout:1", releases / "a/1")
    pull(f"oci:{tmp_path}/layout:1", tmp_path / "layout-device", key=public)
    if openssl := shutil.which("openssl"):  # another implementation agrees
        (signature,) = (
            path
            for path in (releases / "signatures").iterdir()
            if path.name in str(pull(releases / "a/1", tmp_path / "third").sha256)
        )
        (tmp_path / "raw").write_bytes(base64.b64decode(signature.read_bytes()))
        proof = ("-verify", public, "-signature", tmp_path / "raw", releases / "a/1/index.json")
        subprocess.run([openssl, "dgst", "-sha256", *proof], check=True, stdout=subprocess.DEVNULL)
    index = releases / "a/2/index.json"
    index.write_bytes(index.read_bytes() + b" ")
    with pytest.raises(TrustError, match="is not signed"):
        pull(releases / "a/2", tmp_path / "device", key=public)
    monkeypatch.setenv("COSIGN_PASSWORD", "wrong")
    with pytest.raises(ReleaseError, match="COSIGN_PASSWORD"):
        publish(tmp_path / "in", tmp_path / "releases", name="a", version="9", sign=private)
    assert not (tmp_path / "releases/a/9").exists()
