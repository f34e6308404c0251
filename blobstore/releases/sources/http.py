"""Requests to servers that may fail, lie, redirect, or ask for a password.

A server is believed in nothing that is not checked: a range is accepted only with the Content-Range that was asked for,
a body only with its length, and contents by their digests, which is up to the caller.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import socket
import ssl
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

from blobstore.core.constants import MOST_GAP
from blobstore.core.errors import ReleaseError, TransferError
from blobstore.core.requirements import needed
from blobstore.core.text import printable
from blobstore.releases.index.index import Object
from blobstore.releases.index.references import check_url, is_loopback
from blobstore.releases.sources.credentials import Credentials, credentials_for
from blobstore.releases.sources.multipart import OVERHEAD, boundary_of, parts_of
from blobstore.releases.sources.patience import (
    GoneError,
    InterruptedTransferError,
    Patience,
    SlowTransferError,
    WrongAnswerError,
    retry,
)
from blobstore.releases.sources.source import Body

with needed("releases on servers need urllib3", "releases"):
    import urllib3
    from urllib3.exceptions import HTTPError, LocationValueError
    from urllib3.util import SKIP_HEADER

    from blobstore.releases.sources.watched import watched

__all__ = ["MOST_RANGES", "Client", "Polled", "joined", "natural", "origin"]

MOST_RANGES = 100
"""In one request: Apache takes up to 200, and servers take about 8 KiB of a header."""

_BUSY = {408, 425, 429}
_NEVER = {501, 505}
"""Of the statuses from 500 on, those that will not pass."""
_REDIRECTS = {301, 302, 303, 307, 308}
_MOST_REDIRECTS = 5
_READ = 1 << 18  # bytes that are read at once
_ANSWER = 1 << 20  # bytes of an answer that is not a file
_CHALLENGE = 1 << 13  # bytes of a request to log in
_TAG = re.compile(r'(W/)?"[!#-~]{0,200}"')
_NEW = 2  # seconds: a tag made of a file's time may miss a second change within them
_HEADS = 500  # bytes of the heads of a request and its answer, as they are usual
_WIDEST = 1 << 20  # bytes between two ranges that always cost more than a request
_NO_RANGES = {400, 416, 431}
"""How servers refuse several ranges, if they do not send all bytes."""
_GONE = {404, 410}
_WHOLE: tuple[int, ...] = (200,)
_UNFIT = {400, 404, 406}
"""How servers answer that have nothing in the form that is asked for."""
_SAMPLE = 1 << 16  # bytes from which on the time of a body says how fast the way is


@dataclass(frozen=True)
class Polled:
    """The answer to a question that is asked again and again.

    Attributes:
        data: the contents; None if they are those that the caller has.
        tag: what to send to ask for changes only; None if the server gives nothing for it, or nothing to rely on.
        age: the seconds that the answer was in a cache; 0 if none says so.
    """

    data: bytes | None
    tag: str | None
    age: int


def _redirected(url: str, response: urllib3.BaseHTTPResponse) -> str:
    if not (location := response.headers.get("Location")):
        raise TransferError(f"{url}: a redirect that leads nowhere")
    return joined(url, location)


class Client:
    """Connections to servers; it may be used by several threads.

    Args:
        patience: how long to try.
        connections: how many to keep open to one host.

    Attributes:
        fetched: bytes of all bodies so far, without what separates several ranges.
        requests: the number of requests so far.
        latency: the least seconds from a request to its answer so far; None before the first.
        bandwidth: the most bytes per second of a body so far; None before one that is large enough to tell.
    """

    def __init__(self, patience: Patience | None = None, connections: int = 8) -> None:
        self.patience = patience or Patience()
        self.fetched = self.requests = 0
        self.latency: float | None = None
        self.bandwidth: float | None = None
        self._options: dict[str, Any] = {
            "maxsize": connections,
            "block": False,
            "retries": False,
            "timeout": urllib3.Timeout(connect=self.patience.connect, read=self.patience.read),
            "blocksize": _READ,
        }
        self._pool = watched(urllib3.PoolManager(**self._options))
        self._proxies: dict[str, urllib3.PoolManager] = {}
        self._lock = threading.Lock()
        self._headers: dict[str, str] = {}  # Authorization by origin
        self._credentials: dict[str, Credentials | None] = {}

    def close(self) -> None:
        """Close all connections."""
        self._pool.clear()
        for proxy in self._proxies.values():
            proxy.clear()

    # Requests

    @contextmanager
    def request(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: Any = None,
        accept: tuple[int, ...] = (200,),
    ) -> Iterator[urllib3.BaseHTTPResponse]:
        """Send one request, follow redirects, and log in if the server asks for it. The answer's body is not read yet.

        The host of `url` gets credentials, so it must be one that the user named. Where it redirects to gets none, also if
        that redirects back.

        Args:
            method, url, headers, body: of the request. A body that is not bytes is sent once; after a redirect or a
                request to log in, `InterruptedTransferError` is raised.
            accept: the statuses that are an answer.

        Raises:
            InterruptedTransferError: trying again may help.
            TransferError: the server answers with another status.
            ReleaseError: it redirects to where HTTPS does not lead.
        """
        first = origin(url)
        trusted, tried = True, 0
        for _ in range(_MOST_REDIRECTS + 3):
            response = self._send(method, url, headers, body, trusted=trusted)
            try:
                status = response.status
                if status in accept:
                    yield response
                    return
                if status == 401 and trusted and tried < 2:
                    tried += 1
                    self._log_in(url, response.headers.get_all("WWW-Authenticate", []), again=tried > 1)
                    if not isinstance(body, bytes | None):
                        raise InterruptedTransferError(f"{url}: the server asks for credentials again")
                    continue
                if status in _REDIRECTS and method in {"GET", "HEAD"}:
                    url = _redirected(url, response)
                    trusted = trusted and origin(url) == first
                    continue
                self._refuse(method, url, response)
            finally:
                response.close()
                response.release_conn()
        raise TransferError(f"{url}: more than {_MOST_REDIRECTS} redirects")

    def _send(
        self, method: str, url: str, headers: Mapping[str, str] | None, body: Any, *, trusted: bool
    ) -> urllib3.BaseHTTPResponse:
        check_url(url)
        sent: dict[str, str] = {"User-Agent": "blobstore", "Accept-Encoding": "identity"}
        sent.update(headers or {})
        with self._lock:
            self.requests += 1
            if trusted and (value := self._headers.get(origin(url))) is not None:
                sent["Authorization"] = value
        since = time.monotonic()
        try:
            response = self._manager(url).request(
                method, url, headers=sent, body=body, redirect=False, preload_content=False, decode_content=False
            )
        except (HTTPError, OSError) as error:
            kind = InterruptedTransferError if _passes(error) else TransferError
            raise kind(f"{url}: {_reason(error)}") from None
        with self._lock:
            self.latency = min(self.latency or math.inf, time.monotonic() - since)
        return response

    def _manager(self, url: str) -> urllib3.PoolManager:
        """The connections to use: through a proxy if the environment names one, as other programs do."""
        parts = urllib.parse.urlsplit(url)
        host = parts.hostname or ""
        proxy = urllib.request.getproxies().get(parts.scheme)
        if proxy is None or is_loopback(host) or urllib.request.proxy_bypass(host):
            return self._pool
        with self._lock:
            if proxy not in self._proxies:
                self._proxies[proxy] = watched(urllib3.ProxyManager(proxy, **self._options))
            return self._proxies[proxy]

    def _refuse(self, method: str, url: str, response: urllib3.BaseHTTPResponse) -> None:
        text = ""
        with contextlib.suppress(
            HTTPError, OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError
        ):
            problem = json.loads(response.read(1 << 14, decode_content=False))["errors"][0]
            text = printable(f": {problem.get('code')}: {problem.get('message')}")[:300]
        message = f"{method} {url}: the server answers {response.status} {printable(response.reason or '')}{text}"
        if response.status in _BUSY or (response.status >= 500 and response.status not in _NEVER):
            raise InterruptedTransferError(message, _retry_after(response.headers.get("Retry-After")))
        raise GoneError(message) if response.status in _GONE else TransferError(message)

    def get(
        self,
        url: str,
        limit: int,
        *,
        headers: Mapping[str, str] | None = None,
        missing: bool = False,
    ) -> bytes | None:
        """A small answer, whole.

        Args:
            url: what to get.
            limit: the most bytes that it may have.
            headers: to send.
            missing: return None if the server does not have it.

        Raises:
            TransferError: patience ended, or the answer is longer.
        """

        def work() -> bytes | None:
            accept = (200, 404) if missing else (200,)
            with self.request("GET", url, headers=headers, accept=accept) as response:
                if response.status == 404:
                    return None
                return b"".join(self._pieces(url, response, None, limit))

        content: bytes | None = retry(self.patience, work)
        return content

    def poll(
        self,
        url: str,
        limit: int,
        *,
        tag: str | None = None,
        fresh: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> Polled:
        """A small answer, whole, unless it is what the caller has.

        Args:
            url: what to get.
            limit: the most bytes that it may have.
            tag: that of what the caller has.
            fresh: ask caches to ask the server.
            headers: to send besides, where contents are wanted.

        Raises:
            TransferError: as `get`.
        """
        sent = {"Cache-Control": "no-cache"} if fresh else {}

        def ask(tag: str | None) -> Polled | None:
            # Every byte counts when a fleet asks every day. A server that encodes its answer unasked, or needs the other
            # headers to find it, is asked once more.
            more = dict(headers or {})
            if tag is not None:
                more = {"If-None-Match": tag, "Accept-Encoding": SKIP_HEADER}
            accept = _WHOLE if tag is None else (200, 304, *_UNFIT)
            with self.request("GET", url, headers={**sent, **more}, accept=accept) as response:
                age = natural(response.headers.get("Age", "")) or 0
                if response.status == 304:
                    return Polled(None, tag, age)
                if tag is not None and (headers or response.status != 200 or "Content-Encoding" in response.headers):
                    return None
                return Polled(b"".join(self._pieces(url, response, None, limit)), _tag(response), age)

        def work() -> Polled:
            found = ask(tag) or ask(None)
            assert found is not None  # noqa: S101 - without a tag there is an answer
            return found

        return retry(self.patience, work)

    def _counted(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        for piece in pieces:
            with self._lock:
                self.fetched += len(piece)
            yield piece

    def _pieces(
        self,
        url: str,
        response: urllib3.BaseHTTPResponse,
        expected: int | None,
        limit: int | None = None,
        *,
        count: bool = True,
    ) -> Iterator[bytes]:
        """The body of an answer, with exactly the expected number of bytes, or at most the limit."""
        if response.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise TransferError(f"{url}: the server encodes what it was asked to send as it is")
        length = response.headers.get("Content-Length")
        if expected is not None and length is not None and length != str(expected):
            raise WrongAnswerError(f"{url}: expected {expected} bytes, the server announces {printable(length)}")
        most = expected if expected is not None else limit
        assert most is not None  # noqa: S101 - one of the two is given
        flow = _Flow(url, self.patience)
        while piece := _read(url, response, min(_READ, most - flow.received + 1), flow.received):
            with self._lock:
                self.fetched += len(piece) if count else 0
            flow.received += len(piece)
            if flow.received > most:
                raise TransferError(f"{url}: the server sends more than {most} bytes")
            flow.check()
            yield piece
        self._measure(flow.received, flow.seconds)
        if expected is not None and flow.received != expected:
            raise InterruptedTransferError(f"{url}: the connection ended after {flow.received} of {expected} bytes")

    def _measure(self, nbytes: int, seconds: float) -> None:
        """Note how fast a body came."""
        if nbytes >= _SAMPLE:
            with self._lock:
                self.bandwidth = max(self.bandwidth or 0, nbytes / max(seconds, 1e-6))

    @contextmanager
    def body(self, url: str, wanted: Object, start: int, stop: int) -> Iterator[Body]:
        """Read a range of an object; the whole object if the server has no ranges.

        Raises:
            As `Source.open`.
        """
        whole = (start, stop) == (0, wanted.size)
        headers = None if whole else {"Range": f"bytes={start}-{stop - 1}"}
        with self.request("GET", url, headers=headers, accept=(200,) if whole else (200, 206)) as response:
            if response.status == 206:
                content_range = response.headers.get("Content-Range", "")
                if not re.fullmatch(rf"bytes {start}-{stop - 1}/({wanted.size}|\*)", content_range):
                    raise WrongAnswerError(
                        f"{url}: asked for bytes {start}-{stop - 1}/{wanted.size}, the server sends {printable(content_range)!r}"
                    )
                yield Body(start, self._pieces(url, response, stop - start))
            else:
                yield Body(0, self._pieces(url, response, wanted.size))

    @contextmanager
    def bodies(self, url: str, wanted: Object, ranges: Sequence[tuple[int, int]]) -> Iterator[Iterator[Body] | None]:
        """Read several ranges of an object, as `Source.open_ranges`."""
        start, stop = ranges[0][0], ranges[-1][1]
        asked = ",".join(f"{first}-{end - 1}" for first, end in ranges)
        with self.request("GET", url, headers={"Range": f"bytes={asked}"}, accept=(200, 206, *_NO_RANGES)) as response:
            boundary = boundary_of(response.headers.get("Content-Type", ""))
            single = re.fullmatch(
                rf"bytes ([0-9]{{1,18}})-([0-9]{{1,18}})/({wanted.size}|\*)", response.headers.get("Content-Range", "")
            )
            if response.status != 206:
                yield None
            elif boundary is not None:
                most = stop - start + OVERHEAD * (len(ranges) + 1)
                pieces = self._pieces(url, response, None, most, count=False)
                parts = parts_of(url, pieces, boundary, start, stop, wanted.size)
                yield (Body(part.start, self._counted(part.pieces)) for part in parts)
            elif single is not None and start <= int(single[1]) <= int(single[2]) < stop:
                length = int(single[2]) + 1 - int(single[1])
                yield iter([Body(int(single[1]), self._pieces(url, response, length))])
            else:
                raise WrongAnswerError(f"{url}: asked for {len(ranges)} ranges, the server sends something else")

    def gap(self, requests: int) -> int:
        """As `Source.gap`: what the way carries while a request waits for its answer, which others of them share."""
        if self.latency is None or self.bandwidth is None:
            return MOST_GAP
        return min(_WIDEST, _HEADS + int(self.latency * self.bandwidth / requests))

    # Logging in

    def _log_in(self, url: str, challenges: list[str], *, again: bool) -> None:
        """Answer a challenge: the next request to this origin has a header for it."""
        place, host = origin(url), urllib.parse.urlsplit(url).netloc
        with self._lock:
            if host not in self._credentials:
                self._credentials[host] = credentials_for(host)
            credentials = self._credentials[host]
        for challenge in challenges:
            if len(challenge) > _CHALLENGE:
                raise TransferError(
                    f"{url}: the server asks for credentials in {len(challenge)} bytes; expected at most {_CHALLENGE}"
                )
            scheme, fields = _challenge(challenge)
            if scheme == "bearer" and fields.get("realm"):
                value = f"Bearer {self._token(url, fields, credentials)}"
            elif scheme == "basic" and credentials is not None and not again:
                value = credentials.basic
            else:
                continue
            with self._lock:
                self._headers[place] = value
            return
        if credentials:
            raise TransferError(f"{url}: the server refuses the credentials of {host}")
        raise TransferError(f"{url}: the server asks for credentials, and Docker's config.json has none for {host}")

    def _token(self, url: str, challenge: Mapping[str, str], credentials: Credentials | None) -> str:
        """A token for one repository, from the server that the one of `url` names; it may be another host.

        Format: https://distribution.github.io/distribution/spec/auth/token/
        """
        realm = joined(url, challenge["realm"])
        asked = {name: challenge[name] for name in ("service", "scope") if name in challenge}
        if credentials is not None and credentials.identity:
            form = {
                **asked,
                "grant_type": "refresh_token",
                "refresh_token": credentials.identity,
                "client_id": "blobstore",
            }
            headers = {"Content-Type": "application/x-www-form-urlencoded"}
            answer = self._unauthorized("POST", realm, headers, urllib.parse.urlencode(form).encode())
        else:
            headers = {"Authorization": credentials.basic} if credentials is not None else {}
            joint = "&" if "?" in realm else "?"
            answer = self._unauthorized("GET", realm + joint + urllib.parse.urlencode(asked), headers, None)
        try:
            content = json.loads(answer)
            token = content.get("token") or content["access_token"]
            if not isinstance(token, str) or not token.isascii() or not token.isprintable():
                raise ValueError
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise TransferError(f"{realm}: this answer has no token") from None
        return token

    def _unauthorized(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None) -> bytes:
        """An answer of a server of tokens. It is never redirected: the request has a password."""
        response = self._send(method, url, headers, body, trusted=False)
        try:
            if response.status != 200:
                self._refuse(method, url, response)
            return b"".join(self._pieces(url, response, None, _ANSWER))
        finally:
            response.close()
            response.release_conn()


class _Flow:
    """The bytes of a body as they come."""

    def __init__(self, url: str, patience: Patience) -> None:
        self._url, self._patience = url, patience
        self.received = self._counted = 0
        self._began = self._since = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since the first byte was waited for."""
        return time.monotonic() - self._began

    def check(self) -> None:
        """Raise SlowTransferError if those of the time that patience gives a read are too few."""
        passed, came = time.monotonic() - self._since, self.received - self._counted
        if passed < self._patience.read:
            return
        if came < self._patience.slowest * passed:
            raise SlowTransferError(
                f"{self._url}: the server sent {came} bytes in {passed:.0f} seconds, which is too slow"
            )
        self._counted, self._since = self.received, time.monotonic()


def _read(url: str, response: urllib3.BaseHTTPResponse, most: int, received: int) -> bytes:
    """The next piece of a body; empty at its end."""
    try:
        piece: bytes = response.read1(most, decode_content=False)
    except (HTTPError, OSError) as error:
        raise InterruptedTransferError(f"{url}: {_reason(error)} after {received} bytes") from None
    return piece


def _challenge(text: str) -> tuple[str, dict[str, str]]:
    """The scheme of a request to log in, in lower case, and its fields."""
    scheme, _, rest = text.partition(" ")
    pairs = (one.partition("=") for one in urllib.request.parse_http_list(rest))
    return scheme.lower(), {
        name.strip().lower(): value.strip().removeprefix('"').removesuffix('"') for name, _, value in pairs
    }


def joined(url: str, location: str) -> str:
    """The URL that an answer of `url` leads to. Every URL that a server sends goes through this function.

    Raises:
        TransferError: it is not a URL.
        ReleaseError: it leads away from HTTPS, also to this machine; or to where HTTPS would be needed.
    """
    try:
        target = urllib.parse.urljoin(url, location)
        urllib.parse.urlsplit(target)
    except ValueError as error:
        raise TransferError(f"{url}: the server leads to {printable(location)!r}, which is no URL: {error}") from None
    if url.startswith("https:") and not target.startswith("https:"):
        raise ReleaseError(f"{url}: the server leads to {printable(target)}, away from HTTPS")
    check_url(target)
    return target


def natural(text: str) -> int | None:
    """The number of up to 18 digits that a server sent; None if it is something else."""
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None


def origin(url: str) -> str:
    """Scheme, host and port of a URL."""
    parts = urllib.parse.urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    return f"{parts.scheme}://{parts.hostname}:{port}"


def _passes(error: BaseException) -> bool:
    """Whether trying again may help: not if there is no such host, or if it is another one than its certificate says."""
    seen: BaseException | None = error
    for _ in range(8):
        if isinstance(seen, ssl.SSLCertVerificationError | LocationValueError):
            return False
        if isinstance(seen, socket.gaierror) and seen.errno == socket.EAI_NONAME:
            return False
        inner = [one for one in (seen.args if seen is not None else ()) if isinstance(one, BaseException)]
        seen = inner[0] if inner else getattr(seen, "__cause__", None)
    return True


def _tag(response: urllib3.BaseHTTPResponse) -> str | None:
    """The tag of an answer, if it is sound, and would be another one after any change."""
    tag = response.headers.get("ETag", "")
    if not _TAG.fullmatch(tag):
        return None
    times = []
    for name in ("Last-Modified", "Date"):
        with contextlib.suppress(KeyError, ValueError, TypeError, OverflowError):
            times.append(parsedate_to_datetime(response.headers[name]).timestamp())
    return tag if len(times) < 2 or times[1] - times[0] >= _NEW else None


def _reason(error: BaseException) -> str:
    """What went wrong, without the connection's address in memory."""
    text = printable(str(error) or type(error).__name__)
    return re.sub(r"<[^>]* object at 0x[0-9a-f]+>:? ?|^[\w.]+\(host=[^)]*\): ", "", text)


def _retry_after(value: str | None) -> float | None:
    if value is None:
        return None
    if (seconds := natural(value.strip())) is not None:
        return float(seconds)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None
