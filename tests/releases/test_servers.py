"""Tokens, folders that are read-only, servers that are slow, uploads that are cut, and many processes (F2, F3, F4)."""

import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from blobstore.errors import BlobStoreError, ReleaseError, TransferError, TrustError
from blobstore.releases import Patience, gc, publish, pull, push
from tests.helpers.waiting import SECONDS, until
from tests.releases.models import NOW, found, inputs, published_once, same, weights
from tests.releases.server import Server, begin, is_object, registry_of, serving


@published_once
def releases(folder: Path) -> None:
    publish(inputs(folder / "in", weights()), folder / "releases", name="a", version="1")


@pytest.mark.parametrize("kind", ["anonymous", "password", "identity token"])
def test_tokens(releases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Where the registry sends for one, with the password or the identity token; the registry gets only tokens (F4)."""
    push(f"oci:{tmp_path}/layout:1", releases / "a/1")
    name = registry_of(tmp_path / "registry", tmp_path / "layout")
    asked: list[tuple[str, dict[str, list[str]], str | None]] = []
    with serving(tmp_path / "registry") as registry, serving(tmp_path) as tokens:
        host = registry.url.removeprefix("http://")

        def token(handler: Any, times: int) -> bool:
            parts = urllib.parse.urlsplit(handler.path)
            form = handler.rfile.read(int(handler.headers.get("Content-Length", 0))).decode()
            fields = urllib.parse.parse_qs(parts.query or form)
            asked.append((handler.command, fields, handler.headers.get("Authorization")))
            value = json.dumps({"access_token" if form else "token": f"token{len(asked)}"}).encode()
            return handler.answer(200, value)

        def guard(handler: Any, times: int) -> bool:
            # the second token is the one that counts: the first has run out when it arrives
            if handler.headers.get("Authorization") == "Bearer token2":
                return False
            scheme = f'Bearer realm="{tokens.url}/token",service="here",scope="repository:team/a:pull"'
            return handler.answer(401, headers={"WWW-Authenticate": scheme})

        registry.fault, tokens.fault = guard, token
        secret = base64.b64encode(b"user:secret").decode()
        entry = {
            "anonymous": {},
            "password": {"auths": {host: {"auth": secret}}},
            "identity token": {"auths": {host: {"auth": secret, "identitytoken": "long"}}},
        }[kind]
        (tmp_path / "docker").mkdir()
        (tmp_path / "docker/config.json").write_text(json.dumps(entry))
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
        pull(f"{host}/{name}", tmp_path / "device", patience=NOW, threads=1)
        assert same(found(tmp_path / "device/current"), weights())
        assert len(asked) == 2
        for method, fields, authorization in asked:
            assert fields["service"] == ["here"] and fields["scope"] == ["repository:team/a:pull"]
            assert method == ("POST" if kind == "identity token" else "GET")
            assert authorization == (f"Basic {secret}" if kind == "password" else None)
            assert fields.get("refresh_token") == (["long"] if kind == "identity token" else None)
        assert {sent for *_, sent in registry.log} <= {None, "Bearer token1", "Bearer token2"}


@pytest.mark.parametrize("answer", [b"{}", b"[", b'{"token": 7}', b'{"token": "a\\nb"}', b"[1]"])
def test_answers_that_are_no_tokens(server: Server, tmp_path: Path, answer: bytes) -> None:
    """Nothing of them gets into a header (F4)."""

    def fault(handler: Any, times: int) -> bool:
        if handler.path.startswith("/token"):
            return handler.answer(200, answer)
        return handler.answer(401, headers={"WWW-Authenticate": f'Bearer realm="{server.url}/token"'})

    server.fault = fault
    with pytest.raises(TransferError, match="no token"):
        pull(f"{server.url}/a/1/index.json", tmp_path / "device", patience=NOW)


READ_ONLY = """
import os, sys
from blobstore.errors import FileAccessError
from blobstore.releases import Release, pull
pull(sys.argv[1], sys.argv[4])
Release.open(sys.argv[4]).close()  # all modules are there: another user may not read them
if os.geteuid() == 0:
    os.setuid(65534)  # root may write everywhere
for work in (lambda: pull(sys.argv[1], sys.argv[3]), lambda: pull(sys.argv[1], sys.argv[3] + "/below")):
    try:
        work()
    except FileAccessError as error:
        assert "Permission denied" in str(error), error
    else:
        raise SystemExit("it was written")
assert not pull(sys.argv[2], sys.argv[3]).changed
with Release.open(sys.argv[3]) as release:
    print(release.version, len(release.cache))
"""


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "setuid"), reason="needs users")
def test_a_folder_that_is_read_only(server: Server, releases: Path, tmp_path: Path) -> None:
    """It can be opened, and its release is current; another one cannot be pulled into it, and it stays as it was (F3)."""
    publish(tmp_path / "in", releases, name="a", version="2")
    urls = [f"{server.url}/a/{version}/index.json" for version in ("2", "1")]
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)  # other users can go through, unlike tmp_path
        device = Path(place, "device")
        pull(releases / "a/1", device)
        before = sorted(device.rglob("*"))
        folders = [device, *(path for path in before if path.is_dir() and not path.is_symlink())]
        for folder in folders:
            folder.chmod(0o555)
        done = subprocess.run(
            [sys.executable, "-B", "-c", READ_ONLY, *urls, str(device), str(tmp_path / "other")],
            capture_output=True,
            text=True,
            check=False,
            cwd=Path(__file__).parents[2],
        )
        for folder in folders:
            folder.chmod(0o755)
        assert (done.returncode, done.stdout) == (0, "1 6\n"), done.stderr
        assert sorted(device.rglob("*")) == before


@pytest.mark.parametrize("when", ["before the answer", "in a body"])
def test_a_server_that_stalls(server: Server, tmp_path: Path, when: str) -> None:
    """It is left after the time that patience gives it, and asked again for what is missing (F2)."""
    released: list[BaseHTTPRequestHandler] = []

    def fault(handler: BaseHTTPRequestHandler, times: int) -> bool:
        if times > 1 or not is_object(handler.path):
            return False
        if when == "in a body":
            handler.wfile.write(begin(handler, (tmp_path / "releases" / handler.path[1:]).read_bytes())[:10])
        handler.connection.settimeout(60)
        assert handler.rfile.read(1) == b""  # until the client goes away
        released.append(handler)
        handler.close_connection = True
        return True

    server.fault = fault
    patience = Patience(attempts=3, read=0.2, pause=lambda seconds: None)
    pull(f"{server.url}/a/1/index.json", tmp_path / "device", patience=patience)
    assert same(found(tmp_path / "device/current"), weights())
    assert released
    server.fault = lambda handler, times: is_object(handler.path) and fault(handler, 1)
    with pytest.raises(TransferError, match="given up after 3 attempts"):
        pull(f"{server.url}/a/1/index.json", tmp_path / "other", patience=patience)


def test_a_server_that_trickles_is_left(server: Server, tmp_path: Path) -> None:
    """A byte now and then is no progress, whatever a single wait for bytes allows (F2)."""
    began: list[str] = []

    def fault(handler: BaseHTTPRequestHandler, times: int) -> bool:
        if not is_object(handler.path):
            return False
        began.append(handler.path)
        body = begin(handler, (tmp_path / "releases" / handler.path[1:]).read_bytes())
        handler.connection.settimeout(0.02)
        for _ in body:
            handler.wfile.write(b"x")
            with contextlib.suppress(TimeoutError):
                if handler.connection.recv(1) == b"":  # the client went away
                    break
        return True

    server.fault = fault
    patience = Patience(attempts=3, read=0.3, slowest=10_000, pause=lambda seconds: None)
    with pytest.raises(TransferError, match=r"too slow; given up after 3 attempts"):
        pull(f"{server.url}/a/1/index.json", tmp_path / "device", threads=1, patience=patience)
    assert len(began) == 3
    server.fault = lambda handler, times: False
    pull(f"{server.url}/a/1/index.json", tmp_path / "device", patience=NOW)  # its bytes were wrong, too
    assert same(found(tmp_path / "device/current"), weights())


PROCESSES = """
import os, sys
import blobstore.releases.device.assembly, blobstore.core.codec.blobs, blobstore.releases.sources.web
from blobstore.releases import pull
ready, go = os.pipe()
results, result = os.pipe()
children = []
for _ in range(100):
    child = os.fork()
    if child == 0:
        os.close(go)
        os.read(ready, 1)  # until all are there
        try:
            os.write(result, b"1" if pull(sys.argv[1], sys.argv[2]).changed else b"0")
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    children.append(child)
os.close(go)
codes = [os.waitpid(child, 0)[1] for child in children]
print(any(codes), os.read(results, 1000).count(b"1"))
"""


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_hundred_processes_at_once(server: Server, tmp_path: Path) -> None:
    """Into one folder, which one of them fills: each range is fetched once (F2, F3)."""
    done = subprocess.run(
        [sys.executable, "-c", PROCESSES, f"{server.url}/a/1/index.json", str(tmp_path / "device")],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout == "False 1\n", done.stderr
    fetched = [(path, asked) for _, path, asked, _ in server.log if is_object(path)]
    assert len(fetched) == len(set(fetched)) > 0
    assert len(server.log) == len(fetched) + 1 + 100  # the list of ways, and an index each
    assert same(found(tmp_path / "device/current"), weights())


ANSWERS: dict[str, tuple[int, bytes, dict[str, str]]] = {
    "a redirect to no URL": (302, b"", {"Location": "https://[::1"}),
    "a redirect to text": (302, b"", {"Location": "http://[x]:y/"}),
    "a date that is no digit": (503, b"", {"Retry-After": "\u00b2"}),
    "a date without end": (503, b"", {"Retry-After": "9" * 400}),
    "errors that are texts": (404, b'{"errors":["x"]}', {}),
    "errors that are numbers": (404, b'{"errors":[1]}', {}),
    "no errors": (404, b'{"errors":[]}', {}),
    "an array": (404, b"[1]", {}),
    "a challenge without a URL": (401, b"", {"WWW-Authenticate": 'Bearer realm="http://[::1"'}),
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_answers_that_are_nonsense(server: Server, tmp_path: Path, answer: tuple[int, bytes, dict[str, str]]) -> None:
    """Each is an error of this project (F4)."""

    server.fault = lambda handler, times: handler.answer(*answer)
    host = server.url.removeprefix("http://")
    for reference in (f"{server.url}/a/1/index.json", f"{host}/team/a:1"):
        with pytest.raises((TransferError, ReleaseError)):
            pull(reference, tmp_path / "device", patience=NOW)


HERE = {"Location": "/v2/a/blobs/uploads/1"}  # relative, as the specification allows
THERE = {"Location": "{other}/v2/a/blobs/uploads/1"}
UPLOADS: dict[str, tuple[dict[str, str], dict[str, str], dict[str, str]]] = {
    "to no URL": ({"Location": "http://[::1"}, HERE, HERE),
    "how far is no number": (HERE, HERE, {"Range": "0-\u00b2", **HERE}),
    "elsewhere at first": (THERE, HERE, HERE),
    "elsewhere after a chunk": (HERE, THERE, HERE),
    "elsewhere after a failure": (HERE, HERE, {"Range": "0-999", **THERE}),
}
"""What a registry says of an upload at first, after its first chunk, and when it is asked after a failure."""


@pytest.mark.parametrize("kind", UPLOADS)
def test_where_an_upload_goes(releases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """A registry that says nonsense, or leads an upload to another host, is refused, and that host gets neither bytes nor
    credentials (F4)."""
    monkeypatch.setattr("blobstore.releases.sources.registry._CHUNK", 1000)
    with serving(tmp_path) as registry, serving(tmp_path) as other:
        hosts = [one.url.removeprefix("http://") for one in (registry, other)]
        config = {"auths": {host: {"auth": base64.b64encode(b"user:secret").decode()} for host in hosts}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))

        def answer(handler: Any, times: int) -> bool:
            handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
            is_first = handler.headers.get("Content-Range", "").startswith("0-")
            at_first, after_a_chunk, after_a_failure = UPLOADS[kind]
            status, fields = {"HEAD": (404, {}), "POST": (202, at_first), "GET": (204, after_a_failure)}.get(
                handler.command, (202 if is_first else 503, after_a_chunk)
            )
            headers = {name: value.replace("{other}", other.url) for name, value in fields.items()}
            return handler.answer(status, headers=headers)

        registry.fault = answer
        other.fault = lambda handler, times: handler.answer(401, headers={"WWW-Authenticate": 'Basic realm="x"'})
        expected = rf"expected {registry.url}, found {other.url}" if "elsewhere" in kind else "uploads|given up"
        with pytest.raises(TransferError, match=expected):
            push(f"{hosts[0]}/a:1", releases / "a/1", patience=NOW, threads=1)
        assert other.log == []


@pytest.mark.parametrize(
    "kind", ["registry", "registry, pinned", "registry, pinned, another manifest", "layout", "layout, pinned"]
)
def test_an_index_has_the_digest_of_its_manifest(releases: Path, tmp_path: Path, kind: str) -> None:
    """What a pin rests on: another index, whole and valid, is refused, and so is a manifest other than the pinned one (F4)."""
    layout = tmp_path / "layout"
    done = push(f"oci:{layout}:1", releases / "a/1")
    name = registry_of(tmp_path / "registry", layout)
    manifest = json.loads((layout / "blobs/sha256" / done.sha256).read_text())
    index = (releases / "a/1/index.json").read_bytes()
    (digest,) = {one["digest"] for one in manifest["layers"] + [manifest["config"]] if one["size"] == len(index)}
    changed = index.replace(b'"version": "1"', b'"version": "9"')
    assert changed != index
    assert len(changed) == len(index)
    manifests = tmp_path / "registry/v2/team/a/manifests"
    more = b" " if "manifest" in kind else b""
    (manifests / f"sha256:{done.sha256}").write_bytes((manifests / "1").read_bytes() + more)
    (layout / "blobs/sha256" / digest[7:]).write_bytes(changed)
    (tmp_path / "registry/v2/team/a/blobs" / digest).write_bytes(index if more else changed)
    pin = f"@sha256:{done.sha256}" if "pinned" in kind else ""
    with serving(tmp_path / "registry") as server:
        host = server.url.removeprefix("http://")
        place = f"oci:{layout}:1{pin}" if "layout" in kind else f"{host}/{name}{pin}"
        with pytest.raises(BlobStoreError, match="digest|SHA-256"):
            pull(place, tmp_path / "device", patience=NOW)
        assert not (tmp_path / "device/current").exists()


INTERRUPTED = """
import signal, sys
from blobstore.releases import pull
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    pull(sys.argv[1], sys.argv[2])
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize("where", ["index", "an object", "an object, again"])
def test_nobody_waits_for_the_server_of_another(server: Server, releases: Path, device: Path, where: str) -> None:
    """While a server keeps a pull waiting, another one into the folder goes on, gc too, and Ctrl-C ends the first (F2, F3)."""
    waiting, released = threading.Event(), threading.Event()
    largest = max((releases / "packs").glob("*/*"), key=lambda path: path.stat().st_size)

    def fault(handler: Any, times: int) -> bool:
        if where == "an object, again" and handler.path.endswith(largest.name) and times == 1:
            return handler.answer(200, bytes(largest.stat().st_size))  # wrong, so it is asked for once more
        if handler.path.endswith("index.json" if where == "index" else largest.name):
            waiting.set()
            handler.connection.settimeout(60)
            with contextlib.suppress(OSError):
                handler.rfile.read(1)  # until the client goes away
            released.set()
            handler.close_connection = True
            return True
        return False

    server.fault = fault
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, f"{server.url}/a/1/index.json", str(device)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as process:
        try:
            until(waiting.is_set)
            assert pull(releases / "a/1", device).changed
            assert same(found(device / "current"), weights())
            assert gc(device).releases == 0
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=SECONDS)[0] == "interrupted\n"
            assert process.returncode == 0
        finally:
            process.kill()
    until(released.is_set)
    server.fault = lambda handler, times: False
    assert not pull(f"{server.url}/a/1/index.json", device).changed
    gc(device)
    assert not list((device / "partial").rglob("*"))


def test_what_is_collected_during_a_pull_is_fetched_again(server: Server, releases: Path, tmp_path: Path) -> None:
    """Objects that were here when it began, and that nothing names (F3)."""
    device, collected = tmp_path / "device", []
    pull(releases / "a/1", device)
    publish(inputs(tmp_path / "in", weights(seed=1), files=5), releases, name="a", version="2")

    def fault(handler: Any, times: int) -> bool:
        if is_object(handler.path) and not collected:
            collected.extend(path.unlink() or path.name for path in (device / "files").iterdir())
        return False

    server.fault = fault
    assert pull(f"{server.url}/a/2/index.json", device, threads=1).version == "2"
    assert len(collected) > 3  # the small files of the first release are in the second one, too
    assert same(found(device / "current"), weights(seed=1))


def test_what_became_current_during_a_pull_counts(server: Server, releases: Path, tmp_path: Path) -> None:
    """A newer release that another pull brought meanwhile stays; gc takes nothing from either pull (F3, F4)."""
    device, others = tmp_path / "device", []
    publish(inputs(tmp_path / "in", weights(seed=1), files=5), releases, name="a", version="2")

    def fault(handler: Any, times: int) -> bool:
        if is_object(handler.path) and not others:
            others.append(pull(releases / "a/2", device).version)
            gc(device)
        return False

    server.fault = fault
    with pytest.raises(TrustError, match="version 1 is older than version 2"):
        pull(f"{server.url}/a/1/index.json", device, threads=1)
    assert same(found(device / "current"), weights(seed=1))
