"""A proxy in front of an object store: it counts what is asked for, and lets requests fail as networks and stores do."""

from __future__ import annotations

import contextlib
import http.client
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

FAULTS = ("403", "409", "412", "500", "503", "reset", "silent", "lost", "lost 500", "cut")
"""What can happen to a request:

    403, 409, ...  the store answers this, and does nothing
    reset          the connection ends before the store sees the request
    silent         the store does nothing and never answers
    lost           the store does what it was asked for; the connection ends without an answer
    lost 500       the store does what it was asked for, and answers that it did not
    cut            the store does what it was asked for; the connection ends within the answer
"""

_HOP = {"connection", "transfer-encoding", "content-length", "keep-alive"}


@dataclass
class Request:
    """What a client asked for.

    Attributes:
        method, path, query: of the request.
        range: the header, or an empty string.
        status: of the answer; 0 if there was none.
        sent: bytes of the answer's body.
    """

    method: str
    path: str
    query: str
    range: str
    status: int = 0
    sent: int = 0


Fault = Callable[[int, Request], "str | None"]


def never(number: int, request: Request) -> None:
    """Nothing goes wrong."""


@dataclass
class Proxy:
    """What passed, and what goes wrong.

    Attributes:
        url: where clients connect.
        log: the requests, in the order in which they came.
        fault: for a request and its number in the log, one of `FAULTS`, or None.
    """

    url: str = ""
    log: list[Request] = field(default_factory=list)
    fault: Fault = never
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, fault: Fault = never) -> None:
        """Count from here, with other faults."""
        with self.lock:
            self.log, self.fault = [], fault

    def begun(self, request: Request) -> str | None:
        """Note a request; what happens to it."""
        with self.lock:
            self.log.append(request)
            return self.fault(len(self.log) - 1, request)

    def bodies(self, under: str = "") -> int:
        """Bytes of the bodies of all answers to GET below a path."""
        return sum(one.sent for one in self.log if one.method == "GET" and under in one.path)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server
    upstream: http.client.HTTPConnection | None = None

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path, _, query = self.path.partition("?")
        request = Request(self.command, path, query, self.headers.get("Range", ""))
        fault = self.server.proxy.begun(request)
        if fault in {"reset", "silent"}:
            self.vanish(wait=fault == "silent")
        elif fault is not None and fault.isdigit():
            self.answer(request, int(fault), [], b"<Error><Code>Injected</Code></Error>")
        else:
            answer, data = self.forwarded(body)
            if fault == "lost":
                self.vanish()
            elif fault == "lost 500":
                self.answer(request, 500, [], b"<Error><Code>Injected</Code></Error>")
            else:
                self.answer(request, answer.status, answer.getheaders(), data, cut=fault == "cut")

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET  # noqa: N815 - the names that the base class looks up

    def forwarded(self, body: bytes) -> tuple[http.client.HTTPResponse, bytes]:
        """What the store answers."""
        if self.upstream is None:
            self.upstream = http.client.HTTPConnection(self.server.target)
            self.upstream.connect()
            self.upstream.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():  # the signature is about the host that the client named
            self.upstream.putheader(name, value)
        self.upstream.endheaders(body or None)
        answer = self.upstream.getresponse()
        return answer, answer.read()

    def answer(
        self, request: Request, status: int, headers: list[tuple[str, str]], data: bytes, *, cut: bool = False
    ) -> None:
        request.status, request.sent = status, len(data)
        length = {name.lower(): value for name, value in headers}.get("content-length", "0")
        head = [f"HTTP/1.1 {status} {http.client.responses.get(status, 'Other')}"]
        head += [f"{name}: {value}" for name, value in headers if name.lower() not in _HOP]
        head += [f"Content-Length: {length if self.command == 'HEAD' else len(data)}", "", ""]
        content = "\r\n".join(head).encode() + data
        with contextlib.suppress(OSError):
            self.wfile.write(content[: len(content) - len(data) // 2 - 1] if cut else content)
        if cut:
            self.vanish()

    def vanish(self, *, wait: bool = False) -> None:
        """End the connection; with `wait` not before the client does."""
        self.close_connection = True
        with contextlib.suppress(OSError):
            if wait:
                self.connection.recv(1)
            else:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def finish(self) -> None:
        super().finish()
        if self.upstream is not None:
            self.upstream.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, proxy: Proxy, target: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.proxy, self.target = proxy, target

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # a client that has what it wants goes away

    def shutdown_request(self, request: object) -> None:
        self.close_request(request)  # type: ignore[arg-type]


@contextlib.contextmanager
def proxying(target: str) -> Iterator[Proxy]:
    """A proxy on this machine, in front of a URL."""
    proxy = Proxy()
    with _Server(proxy, urlsplit(target).netloc) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        proxy.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield proxy
        finally:
            server.shutdown()
            thread.join()
