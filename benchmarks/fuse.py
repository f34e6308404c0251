"""Several programs as one, against cp of the same bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.harness import MIB, Row, copy_synced, flush, memory_row, peak_of, ratio_row, side_by_side
from blobstore import fuse_programs
from blobstore.lowering.export import quiet

TITLE = "Several programs as one"
BLOBS, NBYTES = 64, 16 * MIB
LIMIT = 64 * MIB


def rows(folder: Path) -> Iterator[Row]:
    """1 GiB in two programs, and the same beside a third one that has all of it; everything is in the page cache."""
    generator = np.random.default_rng(0)
    blobs = [generator.bytes(NBYTES) for _ in range(BLOBS)]
    halves = [
        _program(folder / "a.pte", blobs[: BLOBS // 2], "a"),
        _program(folder / "b.pte", blobs[BLOBS // 2 :], "b"),
    ]
    whole = _program(folder / "c.pte", blobs, "c")
    del blobs
    fused, copy = folder / "fused.pte", folder / "copy.pte"

    def synced() -> None:
        copy_synced(whole, copy)

    def anew() -> None:
        fused.unlink(missing_ok=True)
        copy.unlink(missing_ok=True)
        flush()

    times = side_by_side(lambda: fuse_programs(halves, fused), synced, before=anew)
    yield ratio_row("fuse two programs of 512 MiB, against cp and fsync of 1 GiB", *times, at_most=1.25)
    times = side_by_side(lambda: fuse_programs([whole, *halves], fused), synced, before=anew)
    yield ratio_row("  with a third one that has the bytes of both, against the same", *times, at_most=1.5)
    anew()
    with peak_of("RssAnon") as peak:
        fuse_programs([whole, *halves], fused)
    yield memory_row("  growth of anonymous memory", peak.growth, LIMIT)
    assert fused.stat().st_size < whole.stat().st_size + MIB
    anew()


def _program(path: Path, blobs: list[bytes], method: str) -> Path:
    """A program of ExecuTorch with an empty method, and these blobs as the named data of a delegate."""
    with quiet():
        from executorch.exir import schema
        from executorch.exir._serialize._named_data_store import NamedDataStore
        from executorch.exir._serialize._program import PTEFile, serialize_pte_binary
    plan = schema.ExecutionPlan(
        name=method,
        container_meta_type=schema.ContainerMetadata("", ""),
        values=[],
        inputs=[],
        outputs=[],
        chains=[schema.Chain([], [], [], None)],
        operators=[],
        delegates=[],
        non_const_buffer_sizes=[0],
    )
    program = schema.Program(
        version=0,
        execution_plan=[plan],
        constant_buffer=[schema.Buffer(b"")],
        backend_delegate_data=[],
        segments=[],
        constant_segment=schema.SubsegmentOffsets(0, []),
    )
    store = NamedDataStore()
    for blob in blobs:
        store.add_named_data(hashlib.sha256(blob).hexdigest(), blob, alignment=16)
    file_of = PTEFile(program=program, named_data=store.get_named_data_store_output())
    cord = serialize_pte_binary(file_of, extract_delegate_segments=True)
    with path.open("wb") as file:
        cord.write_to_file(file)
    return path
