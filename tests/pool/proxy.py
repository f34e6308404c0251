"""A proxy in front of an object store: it counts what is asked for, and lets requests fail as networks and stores do."""

import contextlib
import http.client
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from tests.helpers.web import Handler, running

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


class _Handler(Handler):
    proxy: Proxy
    target: str
    upstream: http.client.HTTPConnection | None = None

    def respond(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path, _, query = self.path.partition("?")
        request = Request(self.command, path, query, self.headers.get("Range", ""))
        fault = self.proxy.begun(request)
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

    def forwarded(self, body: bytes) -> tuple[http.client.HTTPResponse, bytes]:
        """What the store answers."""
        if self.upstream is None:
            self.upstream = http.client.HTTPConnection(self.target)
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


@contextlib.contextmanager
def proxying(target: str) -> Iterator[Proxy]:
    """A proxy on this machine, in front of a URL."""
    proxy = Proxy()
    handler = type("Handler", (_Handler,), {"proxy": proxy, "target": urlsplit(target).netloc})
    with running(handler) as proxy.url:
        yield proxy
