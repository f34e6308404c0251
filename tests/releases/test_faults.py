"""Servers that cut, lie, redirect and refuse, and indexes that are hostile (F2, F3, F4)."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from urllib3 import HTTPHeaderDict

from blobstore.core.memory.digest import sha256
from blobstore.errors import BlobStoreError, IntegrityError, InvalidFileError, ReleaseError, TransferError
from blobstore.releases import publish, pull
from blobstore.releases.index.index import Object
from blobstore.releases.sources.http import Client
from blobstore.releases.sources.patience import Patience
from blobstore.releases.sources.registry import _Upload
from tests.releases.models import NOW, found, inputs, published_once, same, weights
from tests.releases.server import Server, is_object, serving


@published_once
def releases(folder: Path) -> None:
    publish(inputs(folder / "in", weights()), folder / "releases", name="a", version="1", plain=True)


@pytest.fixture
def server(releases: Path) -> Iterator[Server]:
    with serving(releases) as server:
        yield server


def go(server: Server, device: Path, **options: Any) -> Any:
    return pull(f"{server.url}/a/1/index.json", device, patience=NOW, **options)


def test_a_connection_that_is_cut_goes_on_where_it_stopped(server: Server, tmp_path: Path) -> None:
    """Every body ends halfway the first time; what came is not asked for again."""

    def fault(handler: BaseHTTPRequestHandler, times: int) -> bool:
        path = tmp_path / "releases" / handler.path.lstrip("/")
        if times > 1 or handler.headers.get("Range") or not is_object(handler.path):
            return False
        data = path.read_bytes()
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data[: len(data) // 2])
        handler.close_connection = True
        return True

    server.fault = fault
    done = go(server, tmp_path / "device", plain=True)
    assert same(found(tmp_path / "device/current"), weights())
    assert done.fetched_bytes < 1.02 * done.release_bytes + 4096
    assert any(asked for _, _, asked, _ in server.log)


@pytest.mark.parametrize("plain", [False, True])
def test_a_flipped_bit_is_fetched_again(server: Server, tmp_path: Path, plain: bool) -> None:
    """Once is an accident."""

    def body(path: str, times: int, data: bytes) -> bytes:
        if not is_object(path) or times > 1:
            return data
        return data[:100] + bytes([data[100] ^ 4]) + data[101:] if len(data) > 100 else data

    server.body = body
    go(server, tmp_path / "device", plain=plain)
    assert same(found(tmp_path / "device/current"), weights())


@pytest.mark.parametrize("plain", [False, True])
def test_a_server_that_always_lies_is_refused(server: Server, tmp_path: Path, plain: bool) -> None:
    """Nothing is installed, and nothing wrong has the name of its digest."""
    server.body = lambda path, times, data: bytes([data[0] ^ 1]) + data[1:] if is_object(path) else data
    with pytest.raises((IntegrityError, InvalidFileError)):
        go(server, tmp_path / "device", plain=plain)
    assert not (tmp_path / "device/current").exists()
    assert all(sha256(path.read_bytes()) == path.name for path in (tmp_path / "device/files").iterdir())


@pytest.mark.parametrize(
    "change",
    [
        lambda path, times, data: data + b"more",
        lambda path, times, data: data[:-1],
        lambda path, times, data: b"",
    ],
)
def test_lengths_that_are_wrong(server: Server, tmp_path: Path, change: Any) -> None:
    """Of bodies whose Content-Length is that of the wrong bytes."""
    server.body = lambda path, times, data: change(path, times, data) if is_object(path) else data
    with pytest.raises((TransferError, InvalidFileError)):
        go(server, tmp_path / "device")


def test_a_range_that_was_not_asked_for_is_refused(server: Server, tmp_path: Path) -> None:
    """A 206 counts only with its Content-Range."""

    def fault(handler: Any, times: int) -> bool:
        if not is_object(handler.path):
            return False
        handler.answer(206, b"x" * 10, {"Content-Range": "bytes 7-16/17"})
        return True

    server.fault = fault
    with pytest.raises(TransferError):
        go(server, tmp_path / "device")


@pytest.mark.parametrize("wrong", ["bytes {later}-{end}/{size}", "bytes {start}-{stop}/{more}", "bytes */{size}", ""])
def test_a_range_says_which_one_it_is(server: Server, tmp_path: Path, wrong: str) -> None:
    """The right bytes, with another Content-Range, which makes them doubtful."""

    def fault(handler: Any, times: int) -> bool:
        if not is_object(handler.path) or not handler.headers.get("Range"):
            return False
        data = (tmp_path / "releases" / handler.path[1:]).read_bytes()
        start, stop = (int(one) for one in handler.headers["Range"].removeprefix("bytes=").split("-"))
        values = {"start": start, "stop": stop, "later": start + 1, "end": stop + 1, "size": len(data)}
        said = wrong.format(more=len(data) + 1, **values)
        handler.answer(206, data[start : stop + 1], {"Content-Range": said} if said else {})
        return True

    go(server, tmp_path / "device")
    tensors = weights()
    tensors["layer1.weight"] = tensors["layer1.weight"] * 2
    publish(inputs(tmp_path / "in", tensors), tmp_path / "releases", name="a", version="2")
    server.fault = fault
    with pytest.raises(TransferError, match=r"asked for bytes .* the server sends"):
        pull(f"{server.url}/a/2/index.json", tmp_path / "device", patience=NOW)


@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "br", "x", "identity, gzip"])
def test_bodies_that_are_encoded_are_refused(server: Server, tmp_path: Path, encoding: str) -> None:
    """They were asked for as they are; nothing is decoded."""

    def fault(handler: Any, times: int) -> bool:
        assert handler.headers["Accept-Encoding"] == "identity"
        data = (tmp_path / "releases" / handler.path[1:]).read_bytes()
        handler.answer(200, data, {"Content-Encoding": encoding})
        return True

    server.fault = fault
    with pytest.raises(TransferError, match="the server encodes"):
        go(server, tmp_path / "device")


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_asked_again_when_it_says(server: Server, tmp_path: Path, status: int) -> None:
    """Retry-After counts, up to a limit."""
    waited: list[float] = []

    def fault(handler: Any, times: int) -> bool:
        if times > 1:
            return False
        handler.answer(status, headers={"Retry-After": "17"})
        return True

    server.fault = fault
    pull(f"{server.url}/a/1/index.json", tmp_path / "device", patience=Patience(pause=waited.append))
    assert same(found(tmp_path / "device/current"), weights())
    assert min(waited) >= 17
    server.fault = lambda handler, times: handler.answer(status, headers={"Retry-After": "100000"}) or True
    with pytest.raises(TransferError, match="come back in 100000 seconds"):
        pull(f"{server.url}/a/1/index.json", tmp_path / "other", patience=Patience(pause=waited.append))


def test_a_redirect_takes_no_credentials_along(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server that asks for them gets them; where it redirects to does not."""
    with serving(tmp_path / "releases") as other:
        (tmp_path / "docker").mkdir()
        host = server.url.removeprefix("http://")
        config = {"auths": {host: {"auth": "dXNlcjpzZWNyZXQ="}}}
        (tmp_path / "docker/config.json").write_text(json.dumps(config))
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))

        def fault(handler: Any, times: int) -> bool:
            if handler.headers.get("Authorization") != "Basic dXNlcjpzZWNyZXQ=":
                handler.answer(401, headers={"WWW-Authenticate": 'Basic realm="here"'})
            elif is_object(handler.path):
                handler.answer(307, headers={"Location": other.url + handler.path})
            else:
                return False
            return True

        server.fault = fault
        go(server, tmp_path / "device")
        assert same(found(tmp_path / "device/current"), weights())
        assert other.log and {sent for *_, sent in other.log} == {None}
        (tmp_path / "docker/config.json").write_text("{}")
        with pytest.raises(TransferError, match=r"config\.json has none"):
            go(server, tmp_path / "anonymous")


@pytest.mark.parametrize("back", [False, True])
def test_who_is_redirected_to_gets_no_credentials(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, back: bool
) -> None:
    """Also if it asks for those that Docker's config.json has for it, or sends back to the first host (F4)."""
    with serving(tmp_path / "releases") as other:
        config = {
            "auths": {one.url.removeprefix("http://"): {"auth": "dXNlcjpzZWNyZXQ="} for one in (server, other)},
        }
        (tmp_path / "config.json").write_text(json.dumps(config))
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))

        def asks(handler: Any, times: int) -> bool:
            if not handler.headers.get("Authorization"):
                handler.answer(401, headers={"WWW-Authenticate": 'Basic realm="here"'})
                return True
            return False

        def elsewhere(handler: Any, times: int) -> bool:
            if asks(handler, times):
                return True
            if "back" in handler.path:
                return False
            handler.answer(307, headers={"Location": other.url + handler.path})
            return True

        server.fault = elsewhere
        other.fault = asks
        if back:
            target = f"{server.url}/back"
            other.fault = lambda handler, times: handler.answer(307, headers={"Location": target}) or True
        with pytest.raises(TransferError, match="the server answers 401"):
            go(server, tmp_path / "device")
        assert {sent for *_, sent in other.log} == {None}
        assert all(sent is None for _, path, _, sent in server.log if path == "/back")


PLACES = {
    "https to http": ("https://a.example/x", "http://a.example/y"),
    "https to this machine": ("https://a.example/x", "http://127.0.0.1/y"),
    "this machine by https to itself": ("https://localhost/x", "http://localhost/y"),
    "http to http elsewhere": ("http://localhost/x", "http://a.example/y"),
    "a file": ("https://a.example/x", "file:///etc/passwd"),
    "a password": ("https://a.example/x", "https://user:secret@a.example/y"),
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_nothing_leads_away_from_https(place: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a redirect, nor where an upload goes, nor who gives tokens, nor a redirect by two hops (F4)."""
    first, second = place
    sent: list[str] = []

    class Answer(contextlib.nullcontext):  # type: ignore[type-arg]
        def __init__(self, status: int, headers: dict[str, str]) -> None:
            super().__init__()
            self.status, self.reason, self.headers = status, "", HTTPHeaderDict(headers)

        def release_conn(self) -> None:
            pass

        close = release_conn

    def answering(status: int, headers: dict[str, str]) -> None:
        def send(self: Client, method: str, url: str, *rest: Any, **options: Any) -> Answer:
            sent.append(url)
            return Answer(status, headers)

        monkeypatch.setattr(Client, "_send", send)

    client = Client(NOW)
    for status, headers in (
        (307, {"Location": second}),
        (401, {"WWW-Authenticate": f'Bearer realm="{second}",service="a"'}),
    ):
        answering(status, headers)
        with pytest.raises(ReleaseError), client.request("GET", first):
            pass
    answering(202, {"Location": second})
    upload = _Upload(client, first, Object("0" * 64, 1), -1, lambda count: None)
    with pytest.raises(ReleaseError):
        upload.go_on()
    assert set(sent) <= {first, f"{first}/blobs/uploads/"}
    client.close()


@pytest.mark.parametrize("target", ["http://192.0.2.1/x", "ftp://127.0.0.1/x", "file:///etc/passwd"])
def test_a_redirect_to_elsewhere_is_refused(server: Server, tmp_path: Path, target: str) -> None:
    """HTTPS, but on this machine."""
    server.fault = lambda handler, times: handler.answer(302, headers={"Location": target}) or True
    with pytest.raises(ReleaseError):
        go(server, tmp_path / "device")
    with pytest.raises(ReleaseError, match="HTTPS"):
        pull("http://192.0.2.1/a/1/index.json", tmp_path / "device")


def test_redirects_in_a_circle_end(server: Server, tmp_path: Path) -> None:
    server.fault = lambda handler, times: handler.answer(302, headers={"Location": handler.path}) or True
    with pytest.raises(TransferError, match="redirects"):
        go(server, tmp_path / "device")


def chunked(first: bytes = b"") -> bytes:
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + first


ENDLESS = {
    "100 Continue": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "100 Continue with headers": (b"", b"HTTP/1.1 100 Continue\r\nX: y\r\n\r\n"),
    "103 Early Hints": (b"", b"HTTP/1.1 103 Early Hints\r\nX: y\r\n\r\n"),
    "a status": (b"", b"H"),
    "headers": (b"HTTP/1.1 200 OK\r\n", b"X: y\r\n"),
    "a header": (b"HTTP/1.1 200 OK\r\nX: ", b"y"),
    "sizes of a piece": (chunked(), b"0"),
    "extensions of a piece": (chunked(b"1;"), b"x"),
    "trailers": (chunked(b"2\r\n{}\r\n0\r\n"), b"X: y\r\n"),
    "a trailer": (chunked(b"2\r\n{}\r\n0\r\nX: "), b"y"),
    "challenges": (b"HTTP/1.1 401 No\r\n", b"WWW-Authenticate: X " + b"a" * 60_000 + b"\r\n"),
}


@pytest.mark.long
@pytest.mark.parametrize("speed", ["at once", "byte by byte"])
@pytest.mark.parametrize("endless", ENDLESS.values(), ids=ENDLESS)
def test_what_comes_without_contents_ends(
    server: Server, tmp_path: Path, endless: tuple[bytes, bytes], speed: str
) -> None:
    """Heads, and the lines around pieces of a body, have one budget of time and of bytes, however they come (F2)."""

    def fault(handler: BaseHTTPRequestHandler, times: int) -> bool:
        first, again = endless
        handler.close_connection = True
        handler.connection.settimeout(0.01)
        with contextlib.suppress(OSError):
            handler.wfile.write(first)
            while True:
                if speed == "at once":
                    handler.connection.settimeout(60)
                    handler.wfile.write(again * (1 + (1 << 16) // len(again)))
                    continue
                for i in range(len(again)):
                    handler.wfile.write(again[i : i + 1])
                    with contextlib.suppress(TimeoutError):
                        if handler.connection.recv(1) == b"":  # the client went away
                            return True
        return True

    server.fault = fault
    patience = Patience(attempts=2, read=60 if speed == "at once" else 0.1, pause=lambda seconds: None)
    with pytest.raises(TransferError):
        pull(f"{server.url}/a/1/index.json", tmp_path / "device", patience=patience)
    assert 1 <= len(server.log) <= 2


@pytest.mark.parametrize("challenge", ["X " + "a" * 60_000, "Bearer " + "a" * 60_000 + '="', "Bearer " + ", " * 30_000])
def test_a_long_challenge_is_refused(server: Server, tmp_path: Path, challenge: str) -> None:
    """It is not even read (F2)."""
    server.fault = lambda handler, times: handler.answer(401, headers={"WWW-Authenticate": challenge}) or True
    with pytest.raises(TransferError, match=rf"credentials in {len(challenge)} bytes; expected at most 8192"):
        go(server, tmp_path / "device")


HOSTILE = {
    "a name that leads out": lambda index: index["files"][0].update(name="../../evil"),
    "an absolute name": lambda index: index["files"][0].update(name="/etc/passwd"),
    "a name of another system": lambda index: index["files"][0].update(name="C:\\evil"),
    "a hidden name": lambda index: index["files"][0].update(name=".blobstore-0.tmp"),
    "a name twice": lambda index: index["files"][1].update(name=index["files"][0]["name"].upper()),
    "a file as a folder": lambda index: index["files"][1].update(name=index["files"][0]["name"] + "/x"),
    "a digest that leads out": lambda index: index["files"][0].update(sha256="../" * 20 + "0000"),
    "a negative size": lambda index: index["files"][0].update(size=-1),
    "a size without end": lambda index: index["files"][0].update(size=1 << 60),
    "parts without end": lambda index: index.update(parts=["0" * 64, 1 << 40]),
    "data of nothing": lambda index: index["files"][0].update(kind="program", data=["nothing.ptd"]),
    "another format": lambda index: index.update(format="blobstore.release.9"),
    "no files": lambda index: index.pop("files"),
    "a number as a name": lambda index: index.update(name=7),
    "a name with a break": lambda index: index.update(name="a\n"),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_index_is_refused(server: Server, tmp_path: Path, change: Any) -> None:
    """Before anything is written (F4)."""
    path = tmp_path / "releases/a/1/index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))
    with pytest.raises(InvalidFileError):
        go(server, tmp_path / "device")
    assert not (tmp_path / "device/current").exists()
    assert not list((tmp_path / "device").rglob("evil*"))


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff" * 50, b"[" * 100_000])
def test_what_is_no_index_at_all(server: Server, tmp_path: Path, data: bytes) -> None:
    (tmp_path / "releases/a/1/index.json").write_bytes(data)
    with pytest.raises(BlobStoreError):
        go(server, tmp_path / "device")
