"""What a server answers is believed in nothing that was not asked for (F2, F4, S3). No server is needed for that."""

import http.client
import io
from typing import Any

import pytest
import urllib3

from blobstore.errors import BlobStoreError, ReleaseError, TransferError
from blobstore.releases.index.index import Object
from blobstore.releases.sources.http import Client
from blobstore.releases.sources.patience import InterruptedTransferError, Patience
from blobstore.releases.sources.registry import _Upload
from blobstore.releases.sources.watched import Watched

WANTED = Object("a" * 64, 100)
URL = "https://one.test/files/a"


class Answers:
    """The connections of a client: they give these answers in order, the last one again and again."""

    def __init__(self, *answers: tuple[int, dict[str, str], bytes]) -> None:
        self._answers = list(answers)
        self.asked: list[tuple[str, dict[str, str]]] = []

    def request(self, method: str, url: str, *, headers: dict[str, str], **rest: Any) -> urllib3.HTTPResponse:
        self.asked.append((url, headers))
        assert len(self.asked) < 100, "requests without end"
        status, fields, body = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        return urllib3.HTTPResponse(io.BytesIO(body), fields, status, preload_content=False, decode_content=False)


def client(monkeypatch: pytest.MonkeyPatch, *answers: tuple[int, dict[str, str], bytes]) -> tuple[Client, Answers]:
    made = Client(Patience(attempts=1, pause=lambda seconds: None))
    connections = Answers(*answers)
    monkeypatch.setattr(made, "_manager", lambda url: connections)
    return made, connections


def read(made: Client, start: int = 10, stop: int = 20) -> bytes:
    with made.body(URL, WANTED, start, stop) as body:
        return b"".join(body.pieces)


def test_a_range_is_the_one_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Content-Range says so; the size of the whole may be unknown."""
    for sound in ("bytes 10-19/100", "bytes 10-19/*"):
        made, _ = client(monkeypatch, (206, {"Content-Range": sound}, bytes(10)))
        assert read(made) == bytes(10)
    for wrong in ("bytes 11-20/100", "bytes 10-19/101", "bytes 10-20/100", "10-19/100", "bytes 10-19", ""):
        made, _ = client(monkeypatch, (206, {"Content-Range": wrong}, bytes(10)))
        with pytest.raises(InterruptedTransferError, match="asked for bytes"):
            read(made)


def test_a_body_is_sent_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is asked for: bytes in another encoding would have another digest."""
    for encoding in ("gzip", "GZIP", "br", "x", "identity, gzip"):
        made, connections = client(monkeypatch, (200, {"Content-Encoding": encoding}, bytes(100)))
        with pytest.raises(TransferError, match="the server encodes"):
            read(made, 0, 100)
        assert connections.asked[0][1]["Accept-Encoding"] == "identity"


def test_a_body_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither more bytes than were asked for, nor fewer."""
    made, _ = client(monkeypatch, (200, {}, bytes(1 << 20)))
    with pytest.raises(TransferError, match="more than 100 bytes"):
        read(made, 0, 100)
    with pytest.raises(TransferError, match="more than 50 bytes"):
        made.get(URL, 50)
    made, _ = client(monkeypatch, (200, {}, bytes(99)))
    with pytest.raises(InterruptedTransferError, match="ended after 99 of 100"):
        read(made, 0, 100)
    made, _ = client(monkeypatch, (200, {"Content-Length": "99"}, bytes(99)))
    with pytest.raises(InterruptedTransferError, match="announces 99"):
        read(made, 0, 100)


PLACES = {
    "https to http": ("https://a.example/x", "http://a.example/y"),
    "https to this machine": ("https://a.example/x", "http://127.0.0.1/y"),
    "this machine by https to itself": ("https://localhost/x", "http://localhost/y"),
    "http to http elsewhere": ("http://localhost/x", "http://a.example/y"),
    "a file": ("https://a.example/x", "file:///etc/passwd"),
    "a password": ("https://a.example/x", "//user:secret@a.example/y"),
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_nothing_leads_away_from_https(place: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a redirect, nor who gives tokens, nor where an upload goes; not even to this machine, which has other programs."""
    first, second = place
    challenge = {"WWW-Authenticate": f'Bearer realm="{second}",service="a"'}
    for answer in ((307, {"Location": second}, b""), (401, challenge, b"")):
        made, connections = client(monkeypatch, answer, (200, {}, b'{"token": "t"}'))
        with pytest.raises(ReleaseError), made.request("GET", first):
            pass
        assert [url for url, _ in connections.asked] == [first]
    made, connections = client(monkeypatch, (202, {"Location": second}, b""))
    with pytest.raises(ReleaseError):
        _Upload(made, first, WANTED, -1, lambda count: None).go_on()
    assert [url for url, _ in connections.asked] == [f"{first}/blobs/uploads/"]


def test_nobody_logs_in_where_a_redirect_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is that host asked for a token, nor does it get one (F4)."""
    challenge = {"WWW-Authenticate": 'Bearer realm="https://two.test/token"'}
    made, connections = client(
        monkeypatch, (302, {"Location": "https://two.test/x"}, b""), (401, challenge, b""), (200, {}, b'{"token": "t"}')
    )
    with pytest.raises(TransferError, match="401"):
        read(made, 0, 100)
    assert [url for url, _ in connections.asked] == [URL, "https://two.test/x"]
    assert not any("Authorization" in headers for _, headers in connections.asked)


def test_a_host_that_was_logged_in_to_gets_nothing_by_a_redirect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another server could use the credentials there (F4)."""
    challenge = {"WWW-Authenticate": 'Bearer realm="https://one.test/token"'}
    made, connections = client(
        monkeypatch,
        (401, challenge, b""),
        (200, {}, b'{"token": "secret"}'),
        (200, {}, bytes(100)),
        (302, {"Location": URL}, b""),
        (200, {}, bytes(100)),
    )
    assert read(made, 0, 100) == bytes(100)
    with made.body("https://two.test/x", WANTED, 0, 100) as body:
        assert b"".join(body.pieces) == bytes(100)
    sent = [(url, headers.get("Authorization")) for url, headers in connections.asked]
    assert sent[2:] == [(URL, "Bearer secret"), ("https://two.test/x", None), (URL, None)]


def test_redirects_end(monkeypatch: pytest.MonkeyPatch) -> None:
    made, connections = client(monkeypatch, (302, {"Location": URL}, b""))
    with pytest.raises(BlobStoreError, match="redirects"):
        read(made, 0, 100)
    assert len(connections.asked) < 10


class _Endless(io.RawIOBase):
    """Sends for ever, up to a limit that no client should come near."""

    sent = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        assert self.sent < 1 << 24
        self.sent += len(buffer)
        return len(buffer)


class _Patient:
    """A socket without a time limit, for which time is no guard."""

    def gettimeout(self) -> None:
        return None

    def settimeout(self, seconds: float | None) -> None:
        pass


def test_what_is_not_contents_has_an_end() -> None:
    """By its bytes alone, however fast they come; each piece of contents begins anew."""
    raw = _Endless()
    watched = Watched(raw, _Patient())  # type: ignore[arg-type]
    for _ in range(4):
        watched.renew()
        watched.readinto(bytearray(1 << 16))
    with pytest.raises(http.client.HTTPException, match="bytes that are not contents"):
        while True:
            watched.readinto(bytearray(1 << 10))
    assert raw.sent < 1 << 19
