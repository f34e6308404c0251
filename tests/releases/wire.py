"""What goes over a wire, and the servers that users run: nginx, with the configuration that the manual gives."""

import contextlib
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.ports import answers, free_ports
from tests.helpers.waiting import until

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
needs_nginx = pytest.mark.skipif(NGINX is None, reason="needs nginx (apt-get install nginx-light)")
MANUAL = Path(__file__).parents[2] / "docs/releases.md"


@dataclass
class Wire:
    """A way to a server.

    Attributes:
        url: where it begins.
        sent, received: bytes that a client sent and received.
    """

    url: str = ""
    sent: int = 0
    received: int = 0

    def reset(self) -> None:
        self.sent = self.received = 0

    @property
    def total(self) -> int:
        return self.sent + self.received


@contextlib.contextmanager
def wire_to(url: str) -> Iterator[Wire]:
    """A way to a server on this machine, which counts bytes."""
    wire = Wire()
    host, _, port = url.removeprefix("http://").partition(":")
    sockets: list[socket.socket] = []

    def copy(source: socket.socket, target: socket.socket, count: str) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                setattr(wire, count, getattr(wire, count) + len(data))
                target.sendall(data)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        wire.url = f"http://127.0.0.1:{listener.getsockname()[1]}"

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    server = socket.create_connection((host, int(port)))
                    sockets.extend((client, server))
                    for pair in ((client, server, "sent"), (server, client, "received")):
                        threading.Thread(target=copy, args=pair, daemon=True).start()

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield wire
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            for one in sockets:
                one.close()


@contextlib.contextmanager
def nginx(folder: Path, place: Path) -> Iterator[str]:
    """nginx, as the manual configures it for release folders; the URL of one.

    Args:
        folder: the release folder, or one that has several.
        place: for files of the server.
    """
    assert NGINX is not None
    (snippet,) = re.findall(r"```nginx\n(.*?)```", MANUAL.read_text(encoding="utf-8"), re.DOTALL)
    [port] = free_ports(1)
    snippet = re.sub(r"listen [^;]*;", f"listen 127.0.0.1:{port};", snippet)
    snippet = re.sub(r"root [^;]*;", f"root {folder.parent};", re.sub(r"\n *ssl_[^\n]*", "", snippet))
    place.mkdir()
    paths = "".join(f"{kind}_temp_path {place};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    (place / "nginx.conf").write_text(
        f"daemon off; worker_processes 1; pid {place}/pid; error_log {place}/errors; user root;"
        f"events {{ worker_connections 512; }} http {{ access_log off; {paths}\n{snippet}\n}}"
    )
    with subprocess.Popen(
        [NGINX, "-p", str(place), "-c", str(place / "nginx.conf")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            until(lambda: answers(port) or process.poll() is not None)
            assert process.poll() is None, (place / "errors").read_text()
            yield f"http://127.0.0.1:{port}/{folder.name}"
        finally:
            process.terminate()
