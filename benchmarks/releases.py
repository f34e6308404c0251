"""Releases: bytes and time of publishing and pulling, against curl with sha256sum, skopeo, and other stores of versions."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fleet import many_blobs, scattered
from benchmarks.harness import MIB, Row, memory_row, peak_of, ratio_row, show, side_by_side, without_bar
from benchmarks.lowered import in_process, plugin
from benchmarks.pool import checkpoints, half
from benchmarks.release_peers import REGISTRY, SKOPEO, STORES, registry
from blobstore import load_file, save_file
from blobstore.core.codec.blobs import decode, encode, near_encodings, sample
from blobstore.pool import Pool
from blobstore.pool.packs import Stored
from blobstore.pool.tables import BLOBS, EVENTS, PARTS
from blobstore.releases import Release, publish, pull, push
from tests.releases.wire import NGINX, nginx

TITLE = "Releases"

_BLOBS, _SIZE = 256, 4 * MIB


def rows(folder: Path) -> Iterator[Row]:
    yield from _decoding()
    for part in (
        _gigabyte,
        _chain,
        _folder,
        _growth,
        _registry,
        _adapter,
        many_blobs,
        scattered,
        _trained,
        _versions,
        _switch,
    ):
        place = folder / part.__name__
        place.mkdir()
        yield from part(place)
        shutil.rmtree(place)


def _decoding() -> Iterator[Row]:
    rng = np.random.default_rng(0)
    weights = (rng.standard_normal(16 << 20) * 0.05).astype(np.float32)
    half = (weights.view(np.uint32) >> 16).astype(np.uint16)
    tuned = half + (rng.random(half.size) < 0.01).astype(np.uint16)
    old = memoryview(half.view(np.uint8))
    for what, array, encoding, base, bar in (
        ("fp32 weights as planes", weights, "planes:4", None, None),
        ("bf16 weights as planes", half, "planes:2", None, 0.70),
        ("bf16, of which 1 % moved, as a difference", tuned, "near:f2:2", old, 0.02),
    ):
        data = memoryview(array.view(np.uint8))
        stored = memoryview(b"".join(encode(data, encoding, base)))
        seconds = []
        for _ in range(5):
            start = time.thread_time()
            for _piece in decode(encoding, len(data), stored, base):
                pass
            seconds.append(time.thread_time() - start)
        speed, share = len(data) / 1e6 / sorted(seconds)[2], len(stored) / len(data)
        if bar is not None:
            yield Row(what, f"{share:.4f} of its bytes", f"at most {bar}", share <= bar)
        yield Row(f"  decoding {what}", f"{speed:,.0f} MB/s a core", "at least 600 MB/s", speed >= 600)


def _chain(folder: Path) -> Iterator[Row]:
    """A series of fine-tunes in bfloat16: what devices with an earlier one fetch, and how publishing grows."""
    every = itertools.islice(checkpoints(folder), 12)
    versions = [{key: _bf16(value.numpy()) for key, value in tensors.items()} for _, tensors in every]
    releases, sizes = folder / "releases", []
    (folder / "in").mkdir()
    for number, tensors in enumerate(versions):
        save_file(tensors, folder / "in" / "model.ptd")
        done = publish(folder / "in", releases, name="a", version=str(number))
        sizes.append(done)
    last = len(versions) - 1
    with _served(releases) as url:
        for back, bar in ((1, 1.05), (3, 1.05)):
            device = folder / f"device{back}"
            pull(f"{url}/a/{last - back}/index.json", device)
            fetched = pull(f"{url}/a/{last}/index.json", device).fetched_bytes
            direct = sum(_direct(versions[last - back][key], versions[last][key]) for key in versions[last])
            yield ratio_of(
                f"bytes for a device {back} versions behind, against the direct difference", fetched, direct, bar
            )
        from_one = pull(f"{url}/a/{last}/index.json", folder / "new").fetched_bytes
    alone = publish(folder / "in", folder / "alone", name="a", version="1").first_bytes
    yield from _with_nothing(folder, f"releases/a/{last}", alone)
    yield without_bar(ratio_of("  from a server that sends one range at a time", from_one, alone, 1.05))


def _with_nothing(folder: Path, release: str, alone: int) -> Iterator[Row]:
    work = "bytes for a device with nothing, from nginx, against a release folder with this release alone"
    if NGINX is None:
        yield Row(work, "not measured: nginx is not there", "at most 1.05 x", False)
        return
    for one in (folder.parent, folder):
        one.chmod(0o755)  # nginx may be another user
    with nginx(folder, folder / "nginx") as url:
        fetched = pull(f"{url}/{release}/index.json", folder / "from nginx").fetched_bytes
    yield ratio_of(work, fetched, alone, 1.05)


def _folder(folder: Path) -> Iterator[Row]:
    """Five fine-tunes in bfloat16, published in a row, or with a day between them: the bytes that the release folder takes, and
    those that devices fetch."""
    releases, days, sizes = folder / "releases", folder / "days", []
    (folder / "in").mkdir()
    for number, (_, tensors) in enumerate(itertools.islice(checkpoints(folder), 5)):
        save_file(half(tensors), folder / "in" / "model.ptd")
        publish(folder / "in", releases, name="a", version=str(number))
        sizes.append(_bytes_in(releases))
        if number:
            _a_day_later(days)
        publish(folder / "in", days, name="a", version=str(number))
    one = (folder / "in" / "model.ptd").stat().st_size
    for what, size, bar in (
        ("while they are published in a row, at most", max(sizes), 2.2),
        ("if a day is between them", _bytes_in(days), 1.4),
    ):
        work = f"bytes of a release folder with five fine-tunes, against one of them, {what}"
        yield Row(work, f"{size / one:.2f} x", f"at most {bar} x", size <= bar * one)
    for back in (1, 3):
        device = folder / f"device {back}"
        pull(releases / "a" / str(4 - back), device)
        fetched = pull(releases / "a" / "4", device).fetched_bytes
        yield without_bar(Row(f"  bytes for a device {back} before", f"{fetched / one:.3f} of a version", "", True))


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _a_day_later(releases: Path) -> None:
    """Let everything be older by more than a day."""
    note = releases / "releases.json"
    noted = json.loads(note.read_bytes())["unused"]
    note.write_text(json.dumps({"unused": {digest: since - 90_000 for digest, since in noted.items()}}))
    for path in (releases / "files").iterdir():
        os.utime(path, (path.stat().st_mtime - 90_000,) * 2)


def _direct(old: Any, new: Any) -> int:
    """Bytes of a tensor as the difference to another one."""
    data, base = (memoryview(_bytes(one)) for one in (new, old))
    encoding, _ = sample(data, near_encodings(2, floating=True), base)
    return 0 if data == base else sum(map(len, encode(data, encoding, base)))


def _bytes(tensor: Any) -> bytes:
    import torch

    if isinstance(tensor, np.ndarray):
        return tensor.tobytes()
    return bytes(tensor.contiguous().view(torch.int16).numpy().tobytes())


def fill(releases: Path, name: str, count: int) -> None:
    """Versions of 50 tensors that were never released, as rows of a pool."""
    with Pool(releases, create=True) as pool:
        for first in range(0, count, 500):
            parts, blobs, events = [], [], []
            for number in range(first, min(first + 500, count)):
                identity = f"{number:032x}"
                events.append((identity, "add", name, f"before{number}", number, "[]"))
                for at in range(50):
                    digest = hashlib.sha256(f"{number // 50 * 50 + min(at, number % 50)} {at}".encode()).digest()
                    called = (identity, name, f"before{number}")
                    parts.append(
                        (*called, "model.ptd", at << 14, 1 << 14, f"layer{at}", "float", "64,64", "", digest, number)
                    )
                    if at == number % 50:
                        kind = (1 << 14, "float", "64,64", "planes:4")
                        blobs.append(Stored(digest, *kind, None, bytes(32), at << 14, 1 << 13, number).row())
            pool.tables.append(PARTS, parts)
            pool.tables.append(BLOBS, blobs)
            pool.tables.append(EVENTS, events)
        pool.tables.tidy()


def ratio_of(what: str, ours: int, theirs: int, bar: float) -> Row:
    return Row(what, f"{ours / theirs:.3f} x ({ours:,} against {theirs:,})", f"at most {bar} x", ours <= bar * theirs)


def _growth(folder: Path) -> Iterator[Row]:
    """The 10th and the 10,000th release of a name; the pool has rows of those between, of which most have no index."""
    rng = np.random.default_rng(0)
    tensors = {f"layer{i}": rng.standard_normal((64, 64)).astype(np.float32) for i in range(50)}
    measured = {}
    (folder / "in").mkdir()
    for label, before in (("10th", 0), ("10,000th", 9_990)):
        releases = folder / label.replace(",", "")
        if before:
            fill(releases, "a", before)
        seconds = []
        for number in range(10):
            tensors[f"layer{number}"] = tensors[f"layer{number}"] + np.float32(0.001)
            save_file(tensors, folder / "in" / "model.ptd")
            start = time.process_time()
            done = publish(folder / "in", releases, name="a", version=f"9{number}")
            seconds.append(time.process_time() - start)
        start = time.process_time()
        pushed = push(f"oci:{folder / 'layout' / releases.name}:latest", done.path.parent)
        push_seconds = time.process_time() - start
        with _served(releases) as url:
            start = time.process_time()
            pulled = pull(f"{url}/a/99/index.json", folder / "devices" / releases.name)
            pull_seconds = time.process_time() - start
        lists = done.path.stat().st_size + (done.path.parent / "ways.json.zst").stat().st_size
        measured[label] = (sorted(seconds[5:])[2], push_seconds, pull_seconds, pushed.layers, pulled.requests, lists)
    first, last = measured["10th"], measured["10,000th"]
    for what, one, other in zip(
        (
            "publish, processor time",
            "push, processor time",
            "pull, processor time",
            "push, objects",
            "pull, requests",
            "pull, bytes of the index and the ways",
        ),
        first,
        last,
        strict=True,
    ):
        yield Row(
            f"the 10,000th release against the 10th: {what}",
            f"{other / one:.2f} x",
            "at most 1.5 x",
            other <= 1.5 * one,
        )


def _gigabyte(folder: Path) -> Iterator[Row]:
    rng = np.random.default_rng(0)
    tensors = {f"layer{i}": rng.integers(0, 256, _SIZE, np.uint8) for i in range(_BLOBS)}
    (folder / "in").mkdir()
    save_file(tensors, folder / "in" / "model.ptd")
    releases = folder / "releases"
    first = publish(folder / "in", releases, name="a", version="1")
    (releases / "model.ptd").hardlink_to(folder / "in" / "model.ptd")  # as whoever has no releases serves it
    new = 0
    for i in (7, 100, 200):
        tensors[f"layer{i}"] = rng.integers(0, 256, _SIZE, np.uint8)
        new += _SIZE
    save_file(tensors, folder / "in" / "model.ptd")
    publish(folder / "in", releases, name="a", version="2")
    del tensors
    with _served(releases) as url:
        device = folder / "device"
        curl = shutil.which("curl") or "curl"

        def theirs() -> None:
            subprocess.run([curl, "-sS", "-o", folder / "copy", f"{url}/model.ptd"], check=True)
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


_PUSH = """
import json, sys
from benchmarks.harness import peak_of
from blobstore.releases import push
with peak_of("RssAnon") as peak:
    push(sys.argv[1], sys.argv[2])
print(json.dumps(peak.growth))
"""


def _registry(folder: Path) -> Iterator[Row]:
    """Push and pull by a real registry, which shares the machine."""
    work = "first pull of 1 GB from docker-registry, against skopeo copy"
    if REGISTRY is None or SKOPEO is None:
        yield Row(work, "not measured: docker-registry or skopeo is not there", "at most 1.1 x", False)
        return
    rng = np.random.default_rng(0)
    (folder / "in").mkdir()
    for i in range(4):
        (folder / "in" / f"{i}.bin").write_bytes(rng.bytes(_BLOBS * _SIZE // 4))
    publish(folder / "in", folder / "releases", name="a", version="1")
    with registry(folder / "registry") as host:
        growth = in_process(_PUSH, f"{host}/team/a:1", str(folder / "releases" / "a" / "1"))
        shutil.rmtree(folder / "releases")

        def before() -> None:
            shutil.rmtree(folder / "device", ignore_errors=True)
            shutil.rmtree(folder / "copy", ignore_errors=True)

        def theirs() -> None:
            command = [SKOPEO or "", "copy", "--quiet", "--src-tls-verify=false", f"docker://{host}/team/a:1"]
            subprocess.run([*command, f"dir:{folder / 'copy'}"], check=True)

        one, other = side_by_side(lambda: pull(f"{host}/team/a:1", folder / "device"), theirs, rounds=2, before=before)
        yield ratio_row(work, one, other, at_most=1.1)
        yield memory_row("memory of a push of 1 GB", growth, 64 * MIB)


def _adapter(folder: Path) -> Iterator[Row]:
    """A device has a foundation and an adapter, and fetches another adapter."""
    rng = np.random.default_rng(0)
    (folder / "in").mkdir()
    save_file({f"layer{i}": rng.integers(0, 256, _SIZE, np.uint8) for i in range(16)}, folder / "in" / "model.ptd")
    new = 0
    for number in (1, 2):
        arrays = {f"layer{i}.lora": rng.integers(0, 256, 1 << 17, np.uint8) for i in range(16)}
        new = sum(array.nbytes for array in arrays.values())
        save_file(arrays, folder / "in" / f"adapter{number}.ptd")
        publish(folder / "in", folder / "releases", name="a", version=str(number))
    with _served(folder / "releases") as url:
        pull(f"{url}/a/1/index.json", folder / "device")
        done = pull(f"{url}/a/2/index.json", folder / "device")
    yield Row(
        "bytes for one more adapter",
        f"{done.fetched_bytes:,} for {new:,}",
        "at most 1.05 x + 64 KB",
        done.fetched_bytes <= 1.05 * new + 65_536,
    )


def _minilm() -> dict[str, np.ndarray]:
    """The trained weights of the demo's encoder."""
    from examples.demo.models import encoder_directory

    return {key: np.array(value) for key, value in load_file(encoder_directory() / "model.safetensors").items()}


def _bf16(array: np.ndarray) -> Any:
    """Rounded to bfloat16, as a tensor of this type."""
    import torch

    return torch.from_numpy(array).to(torch.bfloat16) if array.dtype == np.float32 else array  # type: ignore[no-any-return]


def _trained(folder: Path) -> Iterator[Row]:
    """The demo's trained MiniLM on the way."""
    weights = _minilm()
    for name, bar in (("fp32", 0.84), ("bf16", 0.70)):
        tensors = weights if name == "fp32" else {key: _bf16(value) for key, value in weights.items()}
        save_file(tensors, folder / f"{name}.ptd")
        done = publish(folder / f"{name}.ptd", folder / "releases", name=name, version="1")
        with _served(folder / "releases") as url:
            pulled = pull(f"{url}/{name}/1/index.json", folder / name)
        share = pulled.fetched_bytes / done.release_bytes
        yield Row(f"the demo's MiniLM on the way, {name}", f"{share:.3f} of its bytes", f"at most {bar}", share <= bar)


def _versions(folder: Path) -> Iterator[Row]:
    versions = _three_versions(folder)
    for version in versions:
        publish(version, folder / "releases", name="a", version=version.name[1:])
    ours = _bytes_in(folder / "releases")
    for name, measure in STORES.items():
        place = folder / name
        place.mkdir()
        theirs = measure(versions, place)
        yield Row(
            f"bytes of three versions, against {name}",
            f"{ours:,} against {theirs:,}" if theirs is not None else f"not measured: {name} is not there",
            "fewer",
            theirs is not None and ours < theirs,
        )


def _three_versions(folder: Path) -> list[Path]:
    """Trained weights in fp32 and bf16 with an adapter; a layer of each changed; another adapter."""
    rng = np.random.default_rng(0)
    weights = _minilm()
    versions = []
    for number in range(3):
        place = folder / f"v{number + 1}"
        place.mkdir()
        for key in [key for key in weights if "layer.3." in key] if number == 1 else ():
            weights[key] = weights[key] + (rng.standard_normal(weights[key].shape) * 1e-3).astype(np.float32)
        save_file(weights, place / "encoder.ptd")
        save_file({key: _bf16(value) for key, value in weights.items()}, place / "llm.ptd")
        for adapter in range(number or 1):
            _save_adapter(adapter, place / f"adapter{adapter}.ptd")
        versions.append(place)
    return versions


def _save_adapter(number: int, path: Path) -> None:
    arrays = np.random.default_rng(number + 1).standard_normal((12, 8, 384)).astype(np.float32)
    save_file({f"layer{i}.lora_a": array for i, array in enumerate(arrays)}, path)


def _switch(folder: Path) -> Iterator[Row]:
    """1 % of 256 MiB changes under a program that runs through XNNPACK."""
    import torch
    from torch import nn

    from blobstore import save_programs
    from blobstore.lowering.export import lower
    from blobstore.runtime import BlobCache, Program

    width, layers = 832, 97  # of 2.6 MiB each: one of them is 1 %
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).eval()
    x = torch.ones(1, width)
    program = lower({"forward": (net, (x,))}, partitioners=plugin, external_constants=lambda node: "model")
    save_programs({"model": program}, folder / "in")
    publish(folder / "in", folder / "releases", name="a", version="0")
    pull(folder / "releases" / "a" / "0", folder / "device")
    rounds = 6
    live: list[float] = []
    answers: list[float] = []
    loads: dict[str, list[float]] = {"a copy": [], "mapped": []}
    with Release.open(folder / "device") as release:
        method = Program(release.path / "model.pte", release.cache).method()
        method(x)
        for number in range(1, rounds + 1):
            with torch.no_grad():
                net[number].weight.mul_(1.01)
            with BlobCache(folder / "in" / "model.ptd", "copy") as cache:
                cache.update_state_dict(net.state_dict())
                cache.save(folder / "in" / "model.new")
            (folder / "in" / "model.new").replace(folder / "in" / "model.ptd")
            publish(folder / "in", folder / "releases", name="a", version=str(number))
            pull(folder / "releases" / "a" / str(number), folder / "device")
            start = time.perf_counter()
            done = release.follow()
            method(x)
            live.append(time.perf_counter() - start)
            start = time.perf_counter()
            method(x)
            answers.append(time.perf_counter() - start)
            assert done.taken and len(done.keys) >= 1
            for kind, mode in (("a copy", "copy"), ("mapped", "private")):
                start = time.perf_counter()
                fresh = Program(folder / "in" / "model.pte", BlobCache(folder / "in" / "model.ptd", mode)).method()
                fresh(x)
                loads[kind].append(time.perf_counter() - start)
                del fresh
    ours, answer = statistics.median(live), statistics.median(answers)
    theirs = {kind: statistics.median(seconds) for kind, seconds in loads.items()}
    work = "live switch of 1 % of 256 MiB, against loading the new release"
    for kind, text in (("a copy", "as a copy"), ("mapped", "mapped")):  # both answer once, which takes the same time
        yield ratio_row(f"{work} {text}, without an answer", ours - answer, theirs[kind] - answer, at_least=20)
        yield without_bar(ratio_row("  with the next answer of either", ours, theirs[kind], at_least=20))


@contextmanager
def _served(folder: Path) -> Iterator[str]:
    """A web server on this machine, in threads of this process."""

    class Handler(SimpleHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

        def do_GET(self) -> None:
            asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            if asked is None:
                super().do_GET()
                return
            start, stop = int(asked[1]), int(asked[2]) + 1
            with Path(self.translate_path(self.path)).open("rb") as file:
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{os.fstat(file.fileno()).st_size}")
                self.send_header("Content-Length", str(stop - start))
                self.end_headers()
                self.wfile.flush()
                while start < stop:
                    start += os.sendfile(self.connection.fileno(), file.fileno(), start, stop - start)

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            pass  # a client that has what it wants goes away

    with Server(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
