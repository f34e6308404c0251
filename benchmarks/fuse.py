"""Several programs as one: `blobstore fuse` against copying the same bytes."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.harness import MIB, Row, flush, ratio_row, side_by_side
from blobstore import fuse_programs

TITLE = "Several programs as one file: `fuse`"
BLOBS, NBYTES = 64, 16 * MIB


def program(path: Path, blobs: list[bytes], name: str) -> Path:
    """A program of ExecuTorch with these blobs as the named data of a delegate."""
    from executorch.exir import schema
    from executorch.exir._serialize._named_data_store import NamedDataStore
    from executorch.exir._serialize._program import PTEFile, serialize_pte_binary

    store = NamedDataStore()
    for blob in blobs:
        store.add_named_data(hashlib.sha256(blob).hexdigest(), blob, alignment=16)
    plan = schema.ExecutionPlan(
        name=name,
        container_meta_type=schema.ContainerMetadata("", ""),
        values=[],
        inputs=[],
        outputs=[],
        chains=[schema.Chain([], [], [], None)],
        operators=[],
        delegates=[],
        non_const_buffer_sizes=[0],
    )
    whole = schema.Program(
        version=0,
        execution_plan=[plan],
        constant_buffer=[],
        backend_delegate_data=[],
        segments=[],
        constant_segment=schema.SubsegmentOffsets(0, []),
    )
    output = store.get_named_data_store_output()
    from executorch.exir._serialize._program import DataPayload

    data = DataPayload(buffers=output.buffers, named_data=output.pte_data)
    path.write_bytes(bytes(serialize_pte_binary(PTEFile(program=whole, named_data=data), extract_delegate_segments=True)))
    return path


def rows(folder: Path) -> Iterator[Row]:
    """Two programs with 1 GiB of which each has all, and two with a half each."""
    generator = np.random.default_rng(0)
    blobs = [generator.bytes(NBYTES) for _ in range(BLOBS)]
    halves = [program(folder / "a.pte", blobs[: BLOBS // 2], "a"), program(folder / "b.pte", blobs[BLOBS // 2 :], "b")]
    whole = program(folder / "c.pte", blobs, "c")
    del blobs
    one, copy = folder / "one.pte", folder / "copy.pte"

    def clean() -> None:
        one.unlink(missing_ok=True)
        copy.unlink(missing_ok=True)
        flush()

    def copied() -> None:
        with copy.open("wb") as target:
            for path in halves:
                with path.open("rb") as source:
                    shutil.copyfileobj(source, target, MIB)
            target.flush()
            import os

            os.fsync(target.fileno())

    ours, theirs = side_by_side(lambda: fuse_programs(halves, one), copied, before=clean, rounds=5)
    yield ratio_row("two programs of 512 MiB, against copying and syncing their bytes", ours, theirs, at_most=1.5)
    ours, theirs = side_by_side(lambda: fuse_programs([whole, *halves], one), copied, before=clean, rounds=5)
    yield ratio_row("  with a third one of 1 GiB that has all of it, against copying 1 GiB", ours, theirs, at_most=1.5)
    clean()
