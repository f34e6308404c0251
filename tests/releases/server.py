"""A web server that behaves, or that does what a test tells it to."""

import contextlib
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from tests.helpers.web import Handler, running


@dataclass
class Server:
    """What the server did, and what it does wrong.

    Attributes:
        url: its root.
        log: method, path, range and authorization of each request.
        fault: called with the handler and how often this path was asked for, before a request is answered; true if it
            answered itself.
        body: changes the bytes of a body.
        ranges: whether ranges are honoured.
        parts: whether several ranges in one request are.
        tags: whether answers have an ETag, and If-None-Match is honoured.
        conditions: the If-None-Match and the Cache-Control of each request.
    """

    url: str = ""
    log: list[tuple[str, str, str | None, str | None]] = field(default_factory=list)
    fault: Callable[[BaseHTTPRequestHandler, int], bool] = lambda handler, times: False
    body: Callable[[str, int, bytes], bytes] = lambda path, times, data: data
    ranges: bool = True
    parts: bool = True
    tags: bool = False
    conditions: list[tuple[str | None, str | None]] = field(default_factory=list)

    @property
    def paths(self) -> list[str]:
        return [path for _, path, _, _ in self.log]


def parts_of(data: bytes, asked: str) -> bytes:
    """Several ranges as multipart/byteranges, as RFC 9110 shows it in 15.3.7.2."""
    body = b""
    for start, stop in (map(int, one.split("-")) for one in asked.removeprefix("bytes=").split(",")):
        head = f"Content-Type: application/octet-stream\r\nContent-Range: bytes {start}-{stop}/{len(data)}\r\n"
        body += b"--between\r\n" + head.encode() + b"\r\n" + data[start : stop + 1] + b"\r\n"
    return body + b"--between--\r\n"


def is_object(path: str) -> bool:
    """Whether a path is that of an object of a release folder."""
    return "/files/" in path or "/packs/" in path


def contents(state: Server, data: bytes, ranges: str, tag: str | None) -> tuple[int, bytes, dict[str, str]]:
    """Status, body and headers of the answer for a file."""
    headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()[:16]}"'} if state.tags else {}
    if headers and headers["ETag"] == tag:
        return 304, b"", headers
    if state.ranges and state.parts and re.fullmatch(r"bytes=\d+-\d+(,\d+-\d+)+", ranges):
        return 206, parts_of(data, ranges), {"Content-Type": "multipart/byteranges; boundary=between"}
    if state.ranges and (found := re.fullmatch(r"bytes=(\d+)-(\d+)", ranges)):
        start, stop = int(found[1]), int(found[2]) + 1
        return 206, data[start:stop], {"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"}
    return 200, data, headers


def begin(handler: BaseHTTPRequestHandler, data: bytes) -> bytes:
    """Send the head of a sound answer for a file, or for one range of it; the body that is to follow. Then the connection ends."""
    asked = re.fullmatch(r"bytes=(\d+)-(\d+)", handler.headers.get("Range", ""))
    start, stop = (int(asked[1]), int(asked[2]) + 1) if asked else (0, len(data))
    handler.send_response(206 if asked else 200)
    if asked:
        handler.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
    handler.send_header("Content-Length", str(stop - start))
    handler.end_headers()
    handler.close_connection = True
    return data[start:stop]


def registry_of(place: Path, layout: Path) -> str:
    """A folder that answers as a registry's API for reading: blobs, and the manifest of a layout; its repository."""
    repository = place / "v2/team/a"
    (repository / "blobs").mkdir(parents=True)
    (repository / "manifests").mkdir()
    for blob in (layout / "blobs/sha256").iterdir():
        (repository / "blobs" / f"sha256:{blob.name}").write_bytes(blob.read_bytes())
    (manifest,) = json.loads((layout / "index.json").read_text())["manifests"]
    (repository / "manifests/1").write_bytes((layout / "blobs/sha256" / manifest["digest"][7:]).read_bytes())
    return "team/a:1"


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """A server of a folder on this machine."""
    state = Server()
    times: Counter[str] = Counter()

    class Files(Handler):
        def respond(self) -> None:
            state.log.append((self.command, self.path, self.headers.get("Range"), self.headers.get("Authorization")))
            state.conditions.append((self.headers.get("If-None-Match"), self.headers.get("Cache-Control")))
            times[self.path] += 1
            if state.fault(self, times[self.path]):
                return
            path = folder / self.path.lstrip("/")
            if not path.is_file():
                self.answer(404)
                return
            asked = self.headers.get("Range", ""), self.headers.get("If-None-Match")
            status, body, headers = contents(state, path.read_bytes(), *asked)
            self.answer(status, state.body(self.path, times[self.path], body), headers)

        def answer(self, status: int, data: bytes = b"", headers: dict[str, str] | None = None) -> bool:
            """Answer, and say so, as a fault does."""
            self.send_response(status)
            length = {} if status == 304 else {"Content-Length": str(len(data))}
            for name, value in {**length, **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(data)
            return True

    with running(Files) as state.url:
        yield state
