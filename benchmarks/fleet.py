"""What a fleet of devices sends and fetches, counted on the wire between them and nginx."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.harness import Row, ratio_row
from blobstore import save_file
from blobstore.releases import publish, pull
from tests.releases.wire import NGINX, nginx, wire_to

__all__ = ["many_blobs", "scattered"]


def many_blobs(folder: Path) -> Iterator[Row]:
    """Four times as many blobs take four times as long to publish, first and as a new version; the rest is for noise."""
    seconds: dict[int, list[float]] = {10_000: [], 40_000: []}
    for count, spent in seconds.items():
        tensors = {f"k{i:06}": np.full(64, i, np.float32) for i in range(count)}
        releases, inputs = folder / f"releases{count}", folder / f"in{count}"
        inputs.mkdir()
        for version in range(2):
            tensors.update((f"k{i:06}", np.full(64, -i - version, np.float32)) for i in range(0, count, 10))
            save_file(tensors, inputs / "model.ptd")
            start = time.process_time()
            publish(inputs, releases, name="a", version=str(version))
            spent.append(time.process_time() - start)
    for which, large, small in zip(("first", "next"), seconds[40_000], seconds[10_000], strict=True):
        yield ratio_row(
            f"publish 40,000 blobs as the {which} version against 10,000, CPU time", large, small, at_most=5
        )


def scattered(folder: Path) -> Iterator[Row]:
    """A tenth of the blobs of 1 KiB changes, which lie together, and changes back to those that lie here and there among the
    first; then the device polls. All bytes on the wire count."""
    work = "bytes on the wire for 11 MB of 110 MB in blobs of 1 KiB, from nginx"
    bar = "at most 16 MB, 200 requests"
    if NGINX is None:
        yield Row(work, "not measured: nginx is not there", bar, False)
        return
    rng = np.random.default_rng(0)
    first = {f"k{i:06}": rng.integers(0, 256, 1 << 10, np.uint8) for i in range(107_000)}
    changed = rng.choice(len(first), len(first) // 10, replace=False)
    other = first | {f"k{i:06}": rng.integers(0, 256, 1 << 10, np.uint8) for i in changed}
    (folder / "in").mkdir()
    for version, tensors in enumerate((first, other, first)):
        save_file(tensors, folder / "in" / "model.ptd")
        publish(folder / "in", folder / "releases", name="a", version=str(version))
    for one in (folder.parent, folder):
        one.chmod(0o755)  # nginx may be another user
    with nginx(folder, folder / "nginx") as url, wire_to(url.removesuffix(f"/{folder.name}")) as wire:
        place = f"{wire.url}/{folder.name}/releases/a"
        for text, before, after in ((work, 1, 2), ("  of blobs that lie together", 0, 1)):
            pull(f"{place}/{before}/index.json", folder / f"device{before}")
            wire.reset()
            done = pull(f"{place}/{after}/index.json", folder / f"device{before}")
            figure = f"{wire.total / 1e6:.1f} MB, {done.requests} requests"
            yield Row(text, figure, bar, wire.total <= 16e6 and done.requests <= 200)
        pull(f"{place}/latest/index.json", folder / "device1")
        wire.reset()
        pull(f"{place}/latest/index.json", folder / "device1")
        yield Row("bytes on the wire for nothing new", f"{wire.total}", "at most 300", wire.total <= 300)
