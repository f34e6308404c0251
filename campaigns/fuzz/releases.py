"""The fuzzed functions of releases: their indexes, parts and ways, encoded contents, and the answers of servers."""

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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from blobstore import save_file
from blobstore.core.codec.blobs import DecodeError, decode
from blobstore.core.errors import BlobStoreError, ReleaseError
from blobstore.releases import Patience, publish, pull
from blobstore.releases.index.index import File, Index, Object, encode, parse_index
from blobstore.releases.index.needs import check_time
from blobstore.releases.index.parts import parse_parts
from blobstore.releases.index.ways import parse_ways
from blobstore.runtime.native import native
from campaigns.fuzz.answers import ANSWER, KEPT, KIND, agree, answer, insist, temporary_folder
from tests.releases.recording import would_ask
from tests.releases.server import serving

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
        parts = parse_index(data, "fuzz").parts
        insist(
            [(url, sha256) for url, _, _, sha256, _ in fetches] == [(parts.path, parts.sha256)] * (parts.size > 0),
            "bytes are asked for that the index does not name",
        )
        insist(sorted(os.listdir(folder)) == ["device", "index.json"], "something was written beside the folder")


def parts(data: bytes) -> None:
    """Parts: Python and C++ accept the same ones, and ask for the same bytes of a device with some of the contents."""
    files = tuple(File(f"{number}.ptd", "data", f"{number:064x}", size) for number, size in enumerate(_sizes_in(data)))
    named = Object(hashlib.sha256(data).hexdigest(), len(data))
    index = Index("blobstore.release.1", "fuzz", "3", int(time.time()), "1.0", files, named, plain=True)
    with _device() as (root, device, other):
        place = root / "fuzz/3/index.json"
        place.parent.mkdir()
        place.write_bytes(encode(index))
        (root / "files" / named.sha256).write_bytes(data)
        _compare(place, named, device, other, "parts")
    parse_parts(data, index, "fuzz")


def ways(data: bytes) -> None:
    """Ways: likewise."""
    with _device() as (root, device, other):
        place = root / "fuzz/2/index.json"
        sha256 = hashlib.sha256(place.read_bytes()).hexdigest()
        data = re.sub(rb'"index":"[0-9a-f]{64}"', f'"index":"{sha256}"'.encode(), data, count=1)
        listed = place.with_name("ways.json.zst")
        listed.unlink()  # it is a second name of the original
        listed.write_bytes(data)
        index = parse_index(place.read_bytes(), "fuzz")
        _compare(place, index.parts, device, other, "ways")
        found = parse_parts((root / "files" / index.parts.sha256).read_bytes(), index, "fuzz")
    parse_ways(data, sha256, found, "fuzz")


def _compare(index: Path, parts: Object, device: Path, other: Path, what: str) -> None:
    """What Python would fetch for one device, and C++ for another one, which is the same."""
    (other / "incoming").mkdir(exist_ok=True)
    (other / "incoming" / parts.sha256).write_bytes((index.parents[2] / "files" / parts.sha256).read_bytes())

    def python() -> Any:
        return sorted(would_ask(index.parent, device))

    def cpp() -> Any:
        listed = native.missing(os.fsencode(index), os.fsencode(other), executorch="")[-1]
        starts = [int(range_.removeprefix("bytes=").split("-")[0]) if range_ else 0 for _, range_, *_ in listed]
        return sorted((one[3], start, start + one[2]) for start, one in zip(starts, listed, strict=True))

    agree(answer(python), answer(cpp), what)


def _sizes_in(data: bytes) -> list[int]:
    """Sizes of files that these parts can be of."""
    with contextlib.suppress(ValueError, RecursionError, TypeError, KeyError, IndexError, OverflowError):
        found = [
            max((int(part[0]) + int(part[1]) for part in listed), default=0) for listed in json.loads(data)["files"]
        ]
        if len(found) <= 1000 and all(0 <= size < 1 << 53 for size in found):
            return found
    return [1 << 20]


@functools.cache
def published() -> tuple[Any, Path]:
    """A folder with two releases, and a device that has the first."""
    folder = temporary_folder()
    work = Path(folder.name)
    for version, tensors in (("1", release_weights()), ("2", next_weights())):
        save_file(tensors, work / "weights.ptd")
        publish([work / "weights.ptd"], work / "www", name="fuzz", version=version)
    pull(work / "www/fuzz/1/index.json", work / "device")
    return folder, work


def release_weights() -> dict[str, Any]:
    """Small weights."""
    rows = np.arange(4096, dtype=np.float32)
    return {"first": rows, "second": rows * rows, "third": rows[:8]}


def next_weights() -> dict[str, Any]:
    """Some of them are near to the others."""
    tensors = release_weights()
    return {**tensors, "second": np.nextafter(tensors["second"], np.float32(np.inf)), "new": tensors["first"] * 3}


@contextlib.contextmanager
def _device() -> Iterator[tuple[Path, Path, Path]]:
    """A release folder, and two copies of a device that has its release."""
    _, work = published()
    with temporary_folder() as folder:
        copies = [Path(folder, name) for name in ("www", "device", "other")]
        for source, copy in zip(("www", "device", "device"), copies, strict=True):
            shutil.copytree(work / source, copy, symlinks=True, copy_function=os.link)
        yield copies[0], copies[1], copies[2]


ENCODINGS = ("raw", "planes:1", "planes:4", "near:u1:0", "near:f2:2", "near:f4:4", "near:u8:2", "near:f8:0")
ENCODED_SIZE = 3001
"""Bytes of the content that is encoded."""
ENCODED_BASE = bytes(range(256)) * 12
"""Its base is the beginning of this."""


def encoded(data: bytes) -> None:
    """An encoded content: the first byte says how, and chunks follow. Python and C++ read the same bytes of it."""
    if not data:
        raise ReleaseError("there is no form")
    encoding, stored = ENCODINGS[data[0] % 8], data[1:]
    base = ENCODED_BASE[:ENCODED_SIZE] if encoding.startswith("near") else b""
    decoded: bytes | None = None
    with contextlib.suppress(DecodeError):
        decoded = b"".join(
            map(bytes, decode(encoding, ENCODED_SIZE, memoryview(stored), memoryview(base) if base else None))
        )
    other: bytes | None = None
    with contextlib.suppress(ValueError):
        other = native.decoded(encoding, ENCODED_SIZE, stored, base)
    # What a damaged frame gives is up to the version of zstd; who decodes it compares it with its digest.
    if b"\x28\xb5\x2f\xfd" not in stored:
        insist(decoded == other, "Python and C++ decode different bytes")
    insist(other is None or len(other) == ENCODED_SIZE, "a content has another size in C++")
    if decoded is None:
        raise ReleaseError("a content that is malformed")
    insist(len(decoded) == ENCODED_SIZE, "a content has another size")


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


CLOSES = b"Connection: close\r\n"
"""Without this in an answer, the next request may be sent while the player ends the connection."""


def ok(body: bytes, status: str = "200 OK", headers: str = "") -> bytes:
    """An answer as servers give it before they close the connection."""
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{headers}".encode()
    return head + CLOSES + b"\r\n" + body


def answers_in(folder: Path, reference: str, device: Path) -> tuple[str, list[bytes]]:
    """Pull what a server of the folder has; the digest of the release, and the answers of the server."""
    with serving(folder) as server:
        server.parts = False
        done = pull(reference.replace("{host}", server.url.removeprefix("http://")), device, threads=1)
    answers = []
    for _, path, asked, _ in server.log:
        data = (folder / path.lstrip("/")).read_bytes()
        if found := re.fullmatch(r"bytes=(\d+)-(\d+)", asked or ""):
            first, last = map(int, found.groups())
            ranged = f"Content-Range: bytes {first}-{last}/{len(data)}\r\n"
            answers.append(ok(data[first : last + 1], "206 Partial Content", ranged))
        else:
            answers.append(ok(data))
    return done.sha256, answers
