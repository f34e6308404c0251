"""A web server that behaves, or that does what a test tells it to."""

from __future__ import annotations

import contextlib
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


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
    """

    url: str = ""
    log: list[tuple[str, str, str | None, str | None]] = field(default_factory=list)
    fault: Callable[[BaseHTTPRequestHandler, int], bool] = lambda handler, times: False
    body: Callable[[str, int, bytes], bytes] = lambda path, times, data: data
    ranges: bool = True

    @property
    def paths(self) -> list[str]:
        return [path for _, path, _, _ in self.log]


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """A server of a folder on this machine."""
    state = Server()
    times: Counter[str] = Counter()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

        def do_GET(self) -> None:
            state.log.append((self.command, self.path, self.headers.get("Range"), self.headers.get("Authorization")))
            times[self.path] += 1
            if state.fault(self, times[self.path]):
                return
            path = folder / self.path.lstrip("/")
            if not path.is_file():
                self.answer(404)
                return
            data = path.read_bytes()
            found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            if found and state.ranges:
                start, stop = int(found[1]), int(found[2]) + 1
                self.answer(
                    206,
                    state.body(self.path, times[self.path], data[start:stop]),
                    {"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"},
                )
            else:
                self.answer(200, state.body(self.path, times[self.path], data))

        do_HEAD = do_POST = do_PUT = do_PATCH = do_GET  # noqa: N815 - the names that the base class looks up

        def answer(self, status: int, data: bytes = b"", headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(data)

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            pass  # a client that has what it wants goes away

    with Quiet(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        state.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield state
        finally:
            server.shutdown()
            thread.join()
