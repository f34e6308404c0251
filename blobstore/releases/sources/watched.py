"""What a server sends before contents, and between their pieces, has a budget of time and of bytes.

A time limit of a socket is that of a single read, so a server could send a byte of a head now and then for ever. And one
that is fast could send headers without end, on a line that its user pays for.
"""

from __future__ import annotations

import http.client
import io
import socket
import time
from typing import Any

import urllib3

__all__ = ["Watched", "watched"]

_OVERHEAD = 1 << 17  # bytes of a head, or of the lines around the pieces of a body


class Watched(io.RawIOBase):
    """The bytes that a server sends. All reads between two calls of `renew` have the time and the bytes of one.

    Args:
        raw: where they come from.
        connection: its socket, whose time limit is that of a single read.
    """

    def __init__(self, raw: io.RawIOBase, connection: socket.socket) -> None:
        super().__init__()
        self._raw, self._connection = raw, connection
        self.renew()

    def renew(self) -> None:
        """Begin to count anew."""
        self._since, self._found = time.monotonic(), 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int | None:
        limit = self._connection.gettimeout()
        if self._found >= _OVERHEAD:
            raise http.client.HTTPException(f"the server sends more than {_OVERHEAD} bytes that are not contents")
        try:
            if limit is not None:
                left = self._since + limit - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"the server sends no contents for {limit:.3g} seconds")
                self._connection.settimeout(left)
            count = self._raw.readinto(buffer)
        finally:
            self._connection.settimeout(limit)
        self._found += count or 0
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(http.client.HTTPResponse):
    """An answer whose head, with all that comes before it, has one budget; and so has each piece of its body, with the
    lines around it.
    """

    def __init__(self, sock: socket.socket, *arguments: Any, **options: Any) -> None:
        super().__init__(sock, *arguments, **options)
        self._watched = Watched(self.fp.detach(), sock)
        self.fp = io.BufferedReader(self._watched)

    def read(self, amt: int | None = None) -> bytes:
        self._watched.renew()
        return super().read(amt)

    def read1(self, n: int = -1) -> bytes:
        self._watched.renew()
        return super().read1(n)


class _Connection(urllib3.connection.HTTPConnection):
    response_class = _Response


class _SecureConnection(urllib3.connection.HTTPSConnection):
    response_class = _Response


class _Pool(urllib3.HTTPConnectionPool):
    ConnectionCls = _Connection


class _SecurePool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _SecureConnection


def watched(manager: urllib3.PoolManager) -> urllib3.PoolManager:
    """Let all connections keep to the budget."""
    manager.pool_classes_by_scheme = {"http": _Pool, "https": _SecurePool}
    return manager
