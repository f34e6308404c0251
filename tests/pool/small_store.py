"""An object store in memory that speaks S3, and breaks the promises that it is told to break."""

import contextlib
import hashlib
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from email.utils import formatdate
from urllib.parse import parse_qs, unquote, urlsplit

from tests.helpers.web import Handler, running

BROKEN = {
    "conditions": "a conditional write of an object that is there succeeds",
    "ranges": "a range is another one",
    "lists": "lists lack the newest object",
    "writes": "writing is refused",
    "tags": "a tag is compared without its quotes",
}


@dataclass
class Store:
    """What it has.

    Attributes:
        broken: which promises it breaks, of `BROKEN`.
        objects: by name, with the bucket.
        log: methods and names.
        url: where it answers.
    """

    broken: set[str] = field(default_factory=set)
    objects: dict[str, bytes] = field(default_factory=dict)
    log: list[tuple[str, str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    url: str = ""

    def options(self) -> dict[str, str]:
        """Of a client."""
        keys = {"aws_access_key_id": "a", "aws_secret_access_key": "b", "aws_region": "here"}
        return {"aws_endpoint": self.url, "allow_http": "true", "max_retries": "0", **keys}


def tag_of(content: bytes) -> str:
    return f'"{hashlib.sha256(content).hexdigest()}"'


class _Handler(Handler):
    store: Store

    def respond(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        place = urlsplit(self.path)
        name, store = unquote(place.path).lstrip("/"), self.store
        with store.lock:
            store.log.append((self.command, name))
            if self.command in {"PUT", "POST", "DELETE"}:
                status, data = self.changed(store, name, body)
            elif "list-type" in place.query:
                status, data = 200, self.listed(store, name, parse_qs(place.query))
            else:
                status, data = self.found(store, name)
        self.send_response(status)
        for header, value in self.headers_of(store.objects.get(name, b""), data, status):
            self.send_header(header, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def headers_of(self, whole: bytes, data: bytes, status: int) -> Iterator[tuple[str, str]]:
        yield "Content-Length", str(len(data))
        yield "ETag", tag_of(whole)
        yield "Last-Modified", formatdate(0, usegmt=True)
        if status == 206:
            start = int(re.findall(r"\d+", self.headers["Range"])[0])
            yield "Content-Range", f"bytes {start}-{start + len(data) - 1}/{len(whole)}"

    def changed(self, store: Store, name: str, body: bytes) -> tuple[int, bytes]:
        if "writes" in store.broken:
            return 403, b"<Error><Code>AccessDenied</Code></Error>"
        if self.command == "POST":  # of the requests that are posted, it knows only the one that deletes several
            keys = re.findall(rb"<Key>(.*?)</Key>", body)
            for key in keys:
                store.objects.pop(f"{name.rstrip('/')}/{unquote(key.decode())}", None)
            deleted = b"".join(b"<Deleted><Key>" + key + b"</Key></Deleted>" for key in keys)
            return 200, b"<DeleteResult>" + deleted + b"</DeleteResult>"
        if self.command == "DELETE":
            store.objects.pop(name, None)
            return 204, b""
        if self.headers.get("If-None-Match") == "*" and name in store.objects and "conditions" not in store.broken:
            return 412, b"<Error><Code>PreconditionFailed</Code></Error>"
        store.objects[name] = body
        return 200, b""

    def listed(self, store: Store, bucket: str, query: dict[str, list[str]]) -> bytes:
        bucket, prefix = bucket.rstrip("/"), query.get("prefix", [""])[0]
        after = query.get("start-after", [""])[0]
        names = list(store.objects)[: -1 if "lists" in store.broken else None]
        keys = sorted(name.removeprefix(f"{bucket}/") for name in names)
        entries = "".join(
            f"<Contents><Key>{key}</Key><LastModified>1970-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>{tag_of(store.objects[f'{bucket}/{key}'])}</ETag>"
            f"<Size>{len(store.objects[f'{bucket}/{key}'])}</Size></Contents>"
            for key in keys
            if key.startswith(prefix) and key > after
        )
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>".encode()

    def found(self, store: Store, name: str) -> tuple[int, bytes]:
        if name not in store.objects:
            return 404, b"<Error><Code>NoSuchKey</Code></Error>"
        whole = store.objects[name]
        tag = tag_of(whole).strip('"') if "tags" in store.broken else tag_of(whole)
        if self.headers.get("If-Match", tag) != tag:
            return 412, b"<Error><Code>PreconditionFailed</Code></Error>"
        if (wanted := self.headers.get("Range")) is None:
            return 200, whole
        first, last = re.fullmatch(r"bytes=(\d*)-(\d*)", wanted).groups()  # type: ignore[union-attr]
        if not first:
            return 206, whole[-int(last) :]
        if int(first) >= len(whole):
            return 416, b"<Error><Code>InvalidRange</Code></Error>"
        shift = 1 if "ranges" in store.broken else 0
        return 206, whole[int(first) + shift : (int(last) + 1 if last else len(whole)) + shift]


@contextlib.contextmanager
def serving(*broken: str) -> Iterator[Store]:
    """A store on this machine."""
    store = Store(set(broken))
    with running(type("Handler", (_Handler,), {"store": store})) as store.url:
        yield store
