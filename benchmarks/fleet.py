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
    """A device has blobs of 1 KiB, and a tenth of them changed here and there; then it polls. All bytes on the wire count."""
    work = "bytes on the wire for 11 MB of 110 MB in blobs of 1 KiB, from nginx"
    if NGINX is None:
        yield Row(work, "not measured: nginx is not there", "at most 20 MB", False)
        return
    rng = np.random.default_rng(0)
    tensors = {f"k{i:06}": rng.integers(0, 256, 1 << 10, np.uint8) for i in range(107_000)}
    (folder / "in").mkdir()
    for version in ("1", "2"):  # in folders of their own, so that the new blobs lie between the others
        save_file(tensors, folder / "in" / "model.ptd")
        publish(folder / "in", folder / f"releases{version}", name="a", version=version)
        for i in rng.choice(len(tensors), len(tensors) // 10, replace=False):
            tensors[f"k{i:06}"] = rng.integers(0, 256, 1 << 10, np.uint8)
    for one in (folder.parent, folder):
        one.chmod(0o755)  # nginx may be another user
    with nginx(folder, folder / "nginx") as url, wire_to(url.removesuffix(f"/{folder.name}")) as wire:
        place = f"{wire.url}/{folder.name}"
        pull(f"{place}/releases1/a/latest/index.json", folder / "device")
        wire.reset()
        done = pull(f"{place}/releases2/a/latest/index.json", folder / "device")
        figure = f"{wire.total / 1e6:.1f} MB, {done.requests} requests"
        yield Row(work, figure, "at most 20 MB, 200 requests", wire.total <= 20e6 and done.requests <= 200)
        wire.reset()
        pull(f"{place}/releases2/a/latest/index.json", folder / "device")
        yield Row("bytes on the wire for nothing new", f"{wire.total}", "at most 300", wire.total <= 300)
