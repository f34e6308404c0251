"""The fuzzed functions of releases: their indexes and tables, the encoded forms of parts, and the answers of servers."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from blobstore import save_file
from blobstore.core.errors import BlobStoreError, ReleaseError
from blobstore.releases import Patience, plan, publish, pull
from blobstore.releases.index.encoding import DecodeError, decode
from blobstore.releases.index.index import File, Index, Object, encode, parse_index, parse_table
from blobstore.releases.index.needs import check_time
from blobstore.runtime.native import native
from campaigns.fuzz.answers import ANSWER, KEPT, KIND, agree, answer, insist, temporary_folder

PATIENCE = Patience(seconds=0, attempts=2, first=0, longest=0, connect=2, read=0.2, pause=lambda seconds: None)


def index(data: bytes) -> None:
    """An index: Python and C++ accept the same ones, and would install the same of them."""
    with temporary_folder() as folder:
        path, device = Path(folder, "index.json"), Path(folder, "device")
        path.write_bytes(data)

        def python() -> Any:
            found = parse_index(data, "fuzz")
            check_time(found.published, "fuzz")
            return found.name, found.version, hashlib.sha256(data).hexdigest(), sum(file.size for file in found.files)

        fetches: list[Any] = []

        def cpp() -> Any:
            name, version, sha256, _, size, _, _, listed = native.missing(
                os.fsencode(path), os.fsencode(device), executorch=""
            )
            fetches.extend(listed)
            return name, version, sha256, size

        one = answer(python)
        agree(one, answer(cpp), "an index")
        if isinstance(one, BlobStoreError):
            raise one
        named = {file.sha256 for file in parse_index(data, "fuzz").files}
        packed = {pack.sha256 for pack in parse_index(data, "fuzz").packs}
        insist(
            all(url == f"files/{sha256}" and sha256 in named | packed for url, _, _, sha256, _ in fetches),
            "bytes are asked for that the index does not name",
        )
        insist(sorted(os.listdir(folder)) == ["device", "index.json"], "something was written beside the folder")


def table(data: bytes) -> None:
    """A table: Python and C++ accept the same ones, and ask for the same bytes of a device with some of the parts."""
    file = _file_of(data)
    with _device() as (root, device, other):
        now = int(time.time())
        version = Index(
            "blobstore.release.1", "fuzz", "2", now, "1.0", (file, File("small", "other", file.sha256, file.size))
        )
        place = root / "fuzz/2/index.json"
        place.parent.mkdir()
        place.write_bytes(encode(version))
        for target in (root / "files", other / "incoming"):
            target.mkdir(exist_ok=True)
            (target / hashlib.sha256(data).hexdigest()).write_bytes(data)

        def python() -> Any:
            return sorted((one.range or "", one.size, one.file) for one in plan(place, device, plain=True).fetches)

        def cpp() -> Any:
            listed = native.missing(os.fsencode(place), os.fsencode(other), executorch="")[-1]
            return sorted((range_ or "", size, name) for _, range_, size, _, name in listed)

        agree(answer(python), answer(cpp), "a table")
    parse_table(data, file, "fuzz")


def _file_of(data: bytes) -> File:
    """The file that a table says it is of, or any other."""
    sha256, size = "0" * 64, 1 << 20
    with contextlib.suppress(ValueError, RecursionError, TypeError, KeyError):
        found = json.loads(data)
        sha256, size = str(found["sha256"]), int(found["size"])
    with contextlib.suppress(BlobStoreError):
        made = File("weights.ptd", "data", sha256, size, Object(hashlib.sha256(data).hexdigest(), len(data)))
        parse_index(encode(Index("blobstore.release.1", "fuzz", "2", 0, "1.0", (made,))), "fuzz")
        return made
    return File("weights.ptd", "data", "0" * 64, 1 << 20, Object(hashlib.sha256(data).hexdigest(), len(data)))


@functools.cache
def published() -> tuple[Any, Path]:
    """A release folder, and a device that has its release."""
    folder = temporary_folder()
    work = Path(folder.name)
    save_file(release_weights(), work / "weights.ptd")
    publish([work / "weights.ptd"], work / "www", name="fuzz", version="1")
    pull(work / "www/fuzz/1/index.json", work / "device")
    return folder, work


def release_weights() -> dict[str, Any]:
    """Small weights of which a table is smaller than a fiftieth."""
    rows = np.arange(4096, dtype=np.float32)
    return {"first": rows, "second": rows * rows, "third": rows[:8]}


@contextlib.contextmanager
def _device() -> Iterator[tuple[Path, Path, Path]]:
    """A release folder, and two copies of a device that has its release."""
    _, work = published()
    with temporary_folder() as folder:
        copies = [Path(folder, name) for name in ("www", "device", "other")]
        for source, copy in zip(("www", "device", "device"), copies, strict=True):
            shutil.copytree(work / source, copy, symlinks=True, copy_function=os.link)
        yield copies[0], copies[1], copies[2]


ENCODINGS = ("zstd", "planes:2", "planes:4", "planes:8", "patch:1", "patch:2", "patch:4", "patch:8")
ENCODED_SIZE = 3000
"""Bytes of the part that travels in an encoded form."""


def encoded(data: bytes) -> None:
    """A part in an encoded form: the first byte says which, and chunks follow."""
    if not data:
        raise ReleaseError("there is no form")
    at = 1

    def read(size: int) -> bytes:
        nonlocal at
        at += size
        return data[at - size : at]

    try:
        pieces = list(map(len, decode(ENCODINGS[data[0] % 8], ENCODED_SIZE, read, lambda start, size: bytes(size))))
    except DecodeError as error:
        raise ReleaseError(str(error)) from None
    insist(sum(pieces) == ENCODED_SIZE, "a part has another size")


class Player:
    """A server on this machine that answers whatever is asked with bytes that it was given.

    Each request gets the next answer as it is, and the connection ends, unless the answer begins with KEPT.
    """

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._answers: list[bytes] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def play(self, answers: list[bytes]) -> None:
        """Use these answers from now on."""
        with self._lock:
            self._answers = [one.replace(b"{port}", b"%d" % self.port) for one in answers]

    def _accept(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            threading.Thread(target=self._serve, args=[connection], daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(2)
            while _request(connection):
                with self._lock:
                    if not self._answers:
                        return
                    found = self._answers.pop(0)
                connection.sendall(found.removeprefix(KEPT))
                if not found.startswith(KEPT):
                    return


def _request(connection: socket.socket) -> bool:
    """Read the head of a request; a pull sends no more."""
    found = b""
    while b"\r\n\r\n" not in found:
        piece = connection.recv(1 << 16)
        if not piece:
            return False
        found += piece
    return True


@functools.cache
def _player(process: int) -> Player:
    """The server of a process; its thread does not survive a fork."""
    return Player()


def http(data: bytes) -> None:
    """A reference and the answers of a server: the whole release is installed, the pinned one, or none is, and in time."""
    place, _, rest = data.partition(KIND)
    player = _player(os.getpid())
    player.play(rest.split(ANSWER))
    reference = place.decode(errors="replace").replace("{host}", f"127.0.0.1:{player.port}")
    if "127.0.0.1:" not in reference:
        raise ReleaseError("this is for another server")
    with temporary_folder() as folder:
        device = Path(folder, "device")
        try:
            done = pull(reference, device, threads=1, patience=PATIENCE, executorch="1.5")
        except BlobStoreError:
            insist(not os.path.lexists(device / "current"), "a failed pull left a release")
            raise
        else:
            text = (device / "indexes" / f"{done.sha256}.json").read_bytes()
            insist(hashlib.sha256(text).hexdigest() == done.sha256, "an index has another digest than its name")
            insist(reference.partition("@sha256:")[2] in ("", done.sha256), "another release than the pinned one came")
            for file in json.loads(text)["files"]:
                found = hashlib.sha256((device / "current" / file["name"]).read_bytes()).hexdigest()
                insist(found == file["sha256"], "an installed file has another digest than the index says")
        finally:
            player.play([])
            insist(set(os.listdir(folder)) <= {"device"}, "something was written beside the folder")


def ok(body: bytes, status: str = "200 OK", headers: str = "") -> bytes:
    """An answer as servers give it."""
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body


@contextlib.contextmanager
def recorded(find: Callable[[str], bytes]) -> Iterator[tuple[str, list[bytes]]]:
    """A server that finds bytes by paths: its host and port, and its answers so far."""
    answers: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            data = find(self.path)
            if found := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
                first, last = map(int, found.groups())
                piece = data[first : last + 1]
                answers.append(ok(piece, "206 Partial Content", f"Content-Range: bytes {first}-{last}/{len(data)}\r\n"))
            else:
                answers.append(ok(data))
            self.wfile.write(answers[-1])

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}", answers
        finally:
            server.shutdown()
            thread.join()
