"""Pushing a release from a release folder into a registry or an image layout."""

from __future__ import annotations

import os
import threading
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from blobstore.core.disk.progress import Progress, check_progress
from blobstore.core.errors import ReleaseError
from blobstore.core.memory.digest import sha256
from blobstore.core.memory.mapped_file import as_path
from blobstore.core.reprs import count, line
from blobstore.core.text import size
from blobstore.releases.index.index import TABLE_LIMIT, Object, parse_index
from blobstore.releases.index.manifests import layers_of, make_manifest
from blobstore.releases.index.parts import parse_parts
from blobstore.releases.index.references import check_named, parse_reference
from blobstore.releases.index.ways import EARLIER, WAYS, parse_ways
from blobstore.releases.sources.patience import Patience, telling
from blobstore.releases.sources.places import check_effort
from blobstore.releases.sources.source import FolderSource, read_small

if TYPE_CHECKING:
    from blobstore.releases.sources.oci_layout import LayoutTarget
    from blobstore.releases.sources.registry import RegistryTarget

__all__ = ["Pushed", "push"]

_THREADS = 4


@dataclass(frozen=True)
class Pushed:
    """What `push` did.

    Attributes:
        reference: the release, pinned by the digest of its manifest.
        sha256: that digest.
        layers: the number of objects of the release.
        bytes: their size.
        sent_bytes: the size of those that were not there before.
    """

    reference: str
    sha256: str
    layers: int
    bytes: int
    sent_bytes: int

    def __repr__(self) -> str:
        objects = f"{count(self.layers, 'object')} of {size(self.bytes)}"
        return line("Pushed", self.reference, objects, f"{size(self.sent_bytes)} sent")


def push(
    reference: str | os.PathLike[str],
    release: str | os.PathLike[str],
    *,
    threads: int = _THREADS,
    patience: Patience | None = None,
    progress: Progress | None = None,
) -> Pushed:
    """Copy a release to `registry/name:tag` or `oci:DIR:tag`; files that the target already has are not sent.

    The manifest comes last, so a release never appears with a part missing.

    Args:
        reference: where to.
        release: its index, or the folder that the index is in.
        threads: how many objects are sent at a time.
        patience: how long to try.
        progress: called with every step, and with what is waited for, unless `patience` has a notice.

    Raises:
        ReleaseError: the reference is of something else.
        TrustError: the tag says another version.
        FileAccessError, InvalidFileError: the release cannot be read, or is malformed.
        TransferError: the registry cannot be reached, or refuses.
    """
    check_progress(progress)
    patience, progress = telling(Patience() if patience is None else patience, progress)
    target = _target(reference, patience, threads)
    try:
        source = FolderSource(str(as_path(release)), None)
        found = source.find(None)
        data = found.index or b""
        index = parse_index(data, source.name)
        check_named(parse_reference(reference), index.name, index.version)
        root = source.path.parent.parent.parent
        place = root / index.name / index.version
        lists = read_small(root / index.parts.path, TABLE_LIMIT)
        parts = parse_parts(lists, index, str(root / index.parts.path))
        ways = {name: read_small(place / name, TABLE_LIMIT) for name in (WAYS, EARLIER) if (place / name).exists()}
        if WAYS not in ways:
            raise ReleaseError(
                f"{source.name}: {index.name} {index.version} has no list of ways to its contents, {WAYS}"
            )
        layers = layers_of(index, [parse_ways(one, found.sha256, parts, str(place)) for one in ways.values()])
        wanted = [(layer.object, root / layer.object.path) for layer in layers]
        wanted.append((Object(sha256(data), len(data)), source.path))
        wanted += [(Object(sha256(one), len(one)), place / name) for name, one in ways.items()]
        total, done, sent = sum(one.size for one, _ in wanted), 0, 0
        lock = threading.Lock()

        def count(nbytes: int) -> None:
            nonlocal done
            with lock:
                done += nbytes
                if progress:
                    progress("pushing", min(done, total), total)

        def put(one: tuple[Object, Path]) -> int:
            if target.has(one[0]):
                count(one[0].size)
                return 0
            target.put(one[0], one[1], count)
            return one[0].size

        pool = ThreadPoolExecutor(threads)
        try:
            work = [pool.submit(put, one) for one in wanted]
            ended, _ = wait(work, return_when=FIRST_EXCEPTION)
            sent = sum(one.result() for one in ended)
            there = [one for one, done_by in zip(wanted, work, strict=True) if not done_by.result()]
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
        digest = target.put_manifest(
            make_manifest(index, data, list(ways.values()), source.signature(found.sha256), layers)
        )
        # What was there already, a collection of the target may have removed until the manifest was there.
        sent += sum(map(put, there))
        return Pushed(f"{target.name}@sha256:{digest}", digest, len(layers), total, sent)
    finally:
        target.close()


def _target(reference: str | os.PathLike[str], patience: Patience, connections: int) -> LayoutTarget | RegistryTarget:
    parsed = parse_reference(reference)
    check_effort(patience, connections)
    if parsed.kind not in {"registry", "layout"}:
        raise ReleaseError(
            f"{parsed.text}: expected registry/name:tag or oci:DIR:tag; a release folder is copied to web servers"
        )
    if parsed.pin:
        raise ReleaseError(f"{parsed.text}: a digest follows from what is pushed; expected a tag")
    if parsed.kind == "layout":
        from blobstore.releases.sources.oci_layout import LayoutTarget

        return LayoutTarget(parsed)
    from blobstore.releases.sources.http import Client
    from blobstore.releases.sources.registry import RegistryTarget

    return RegistryTarget(parsed, Client(patience, connections))
