"""Releases: bytes and time of publishing and pulling, against curl with sha256sum."""

from __future__ import annotations

import functools
import io
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np

from benchmarks.harness import MIB, Row, memory_row, peak_of, ratio_row, show, side_by_side
from blobstore import save_file
from blobstore.releases import publish, pull
from blobstore.releases.encoding import decode, encode

TITLE = "Releases"

_BLOBS, _SIZE = 256, 4 * MIB


def rows(folder: Path) -> Iterator[Row]:
    yield from _decoding()
    yield from _gigabyte(folder)


def _decoding() -> Iterator[Row]:
    rng = np.random.default_rng(0)
    weights = (rng.standard_normal(16 << 20) * 0.05).astype(np.float32)
    half = (weights.view(np.uint32) >> 16).astype(np.uint16)
    tuned = half + (rng.random(half.size) < 0.01).astype(np.uint16)
    old = memoryview(half.tobytes())
    for what, array, width, base, bar in (
        ("fp32 weights as planes", weights, 4, None, None),
        ("bf16 weights as planes", half, 2, None, 0.70),
        ("bf16, of which 1 % moved, as a patch", tuned, 2, old, 0.02),
    ):
        data = memoryview(array.tobytes())
        stored = b"".join(encode(data, width, base))
        part = (lambda start, count, old=old: old[start : start + count]) if base is not None else None
        kind = "planes" if base is None else "patch"
        seconds = []
        for _ in range(5):
            start = time.thread_time()
            for _piece in decode(f"{kind}:{width}", len(data), io.BytesIO(stored).read, part):  # type: ignore[arg-type]
                pass
            seconds.append(time.thread_time() - start)
        speed, share = len(data) / 1e6 / sorted(seconds)[2], len(stored) / len(data)
        if bar is not None:
            yield Row(what, f"{share:.4f} of its bytes", f"at most {bar}", share <= bar)
        yield Row(f"  decoding {what}", f"{speed:,.0f} MB/s a core", "at least 600 MB/s", speed >= 600)


def _gigabyte(folder: Path) -> Iterator[Row]:
    rng = np.random.default_rng(0)
    tensors = {f"layer{i}": rng.integers(0, 256, _SIZE, np.uint8) for i in range(_BLOBS)}
    (folder / "in").mkdir()
    save_file(tensors, folder / "in" / "model.ptd")
    releases = folder / "releases"
    first = publish(folder / "in", releases, name="a", version="1")
    new = 0
    for i in (7, 100, 200):
        tensors[f"layer{i}"] = rng.integers(0, 256, _SIZE, np.uint8)
        new += _SIZE
    save_file(tensors, folder / "in" / "model.ptd")
    publish(folder / "in", releases, name="a", version="2", base="1")
    del tensors
    with _served(releases) as url:
        device, file = folder / "device", max((releases / "files").iterdir(), key=lambda path: path.stat().st_size)
        curl = shutil.which("curl") or "curl"

        def theirs() -> None:
            subprocess.run([curl, "-sS", "-o", folder / "copy", f"{url}/files/{file.name}"], check=True)
            subprocess.run([shutil.which("sha256sum") or "", folder / "copy"], check=True, stdout=subprocess.DEVNULL)

        def ours() -> None:
            pull(f"{url}/a/1/index.json", device)

        def before() -> None:
            shutil.rmtree(device, ignore_errors=True)
            (folder / "copy").unlink(missing_ok=True)

        one, other = side_by_side(ours, theirs, rounds=2, before=before)
        yield ratio_row("first pull of 1 GB with verification, against curl and sha256sum", one, other, at_most=1.1)
        before()
        with peak_of("RssAnon") as peak:
            ours()
        yield memory_row("  its memory", peak.growth, 64 * MIB)
        seconds = []
        for _ in range(9):
            start = time.perf_counter()
            done = pull(f"{url}/a/1/index.json", device)
            seconds.append(time.perf_counter() - start)
        least = sorted(seconds)[4]
        yield Row(
            "nothing new",
            f"{done.requests} request, {show(least)}",
            "1 request, at most 50 ms",
            done.requests == 1 and least <= 0.05,
        )
        done = pull(f"{url}/a/2/index.json", device)
        yield Row(
            "bytes for 1 % of 1 GB that changed",
            f"{done.fetched_bytes:,} for {new:,}",
            "at most 1.05 x + 64 KB",
            done.fetched_bytes <= 1.05 * new + 65_536,
        )
    assert first.files == 1


@contextmanager
def _served(folder: Path) -> Iterator[str]:
    """A web server on this machine, in threads of this process. It has no ranges."""

    class Handler(SimpleHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            pass  # a client that has what it wants goes away

    with Server(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
