"""Web servers on this machine, which live as long as a block."""

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Handler(BaseHTTPRequestHandler):
    """Says nothing, and answers whatever is asked by `respond`."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = lambda self: self.respond()  # noqa: N815 - names of the base class

    def respond(self) -> None:
        raise NotImplementedError

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # a client that has what it wants goes away

    def shutdown_request(self, request: Any) -> None:
        self.close_request(request)


@contextlib.contextmanager
def running(handler: type[Handler]) -> Iterator[str]:
    """A server; its URL."""
    with _Server(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
