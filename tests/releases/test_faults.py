"""Servers that cut, lie, redirect and refuse (F2, F3, F4)."""

import contextlib
import json
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from blobstore.core.memory.digest import sha256
from blobstore.errors import IntegrityError, InvalidFileError, TransferError
from blobstore.releases import publish, pull
from blobstore.releases.sources.patience import Patience
from tests.releases.models import NOW, found, inputs, published_once, same, weights
from tests.releases.server import Server, begin, is_object, serving


@published_once
def releases(folder: Path) -> None:
    publish(inputs(folder / "in", weights()), folder / "releases", name="a", version="1", plain=True)


def go(server: Server, device: Path, **options: Any) -> Any:
    return pull(f"{server.url}/a/1/index.json", device, patience=NOW, **options)


def test_a_connection_that_is_cut_goes_on_where_it_stopped(server: Server, tmp_path: Path) -> None:
    """Every body ends halfway the first time; what came is not asked for again."""

    def fault(handler: BaseHTTPRequestHandler, times: int) -> bool:
        path = tmp_path / "releases" / handler.path.lstrip("/")
        if times > 1 or handler.headers.get("Range") or not is_object(handler.path):
            return False
        body = begin(handler, path.read_bytes())
        handler.wfile.write(body[: len(body) // 2])
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
    """Nothing is installed, and nothing wrong has the name of its digest; also if the list of parts is right."""
    parts = json.loads((tmp_path / "releases/a/1/index.json").read_text())["parts"][0]
    for right, error in (("nothing", InvalidFileError), (parts, IntegrityError)):
        server.body = lambda path, times, data, right=right: (
            bytes([data[0] ^ 1]) + data[1:] if is_object(path) and right not in path else data
        )
        with pytest.raises(error):
            go(server, tmp_path / "device", plain=plain)
    assert not (tmp_path / "device/current").exists()
    assert all(sha256(path.read_bytes()) == path.name for path in (tmp_path / "device/files").iterdir())


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
                return handler.answer(401, headers={"WWW-Authenticate": 'Basic realm="here"'})
            return is_object(handler.path) and handler.answer(307, headers={"Location": other.url + handler.path})

        server.fault = fault
        go(server, tmp_path / "device")
        assert same(found(tmp_path / "device/current"), weights())
        assert other.log and {sent for *_, sent in other.log} == {None}
        (tmp_path / "docker/config.json").write_text("{}")
        with pytest.raises(TransferError, match=r"config\.json has none"):
            go(server, tmp_path / "anonymous")


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
    server.fault = lambda handler, times: handler.answer(401, headers={"WWW-Authenticate": challenge})
    with pytest.raises(TransferError, match=rf"credentials in {len(challenge)} bytes; expected at most 8192"):
        go(server, tmp_path / "device")
