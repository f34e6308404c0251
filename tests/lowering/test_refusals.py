"""What cannot be done is refused with the reason, and changes nothing."""

import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from torch import nn

from blobstore import errors
from blobstore.core.formats import payload
from blobstore.lowering import BlobStoreBackend, register_inner
from blobstore.lowering.export import quiet
from blobstore.runtime import BlobCache, Program
from tests.helpers.bombs import payload_bomb
from tests.lowering import nets
from tests.lowering.live import BlobStorePartitioner, Live, XnnpackPartitioner, inputs, lower_through, seeded

with quiet():
    from executorch.exir.backend.backend_details import CompileSpec


@pytest.fixture
def live(tmp_path: Path) -> Live:
    return Live.make(seeded(nets.MLP), inputs(3, 16), tmp_path)


@pytest.mark.parametrize("name", ["layers.0.weight", "shift"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_not_finite(live: Live, name: str, value: float) -> None:
    """With `finite`, infinities and NaN are refused, in a delegate and outside (B3)."""
    tensor = torch.zeros_like(live.module.state_dict()[name])
    tensor.view(-1)[-1] = value
    with pytest.raises(errors.UpdateError, match=f"'{name}' has values that are not finite"):
        live.cache.update({name: tensor}, finite=True)
    live.check()
    live.cache.update({name: tensor})
    assert not live.run().isfinite().all()


@pytest.mark.parametrize("count", [400, 20_000])
def test_small_payloads_cost_little(count: int) -> None:
    """Below 1 MB, at most 2 seconds and 300 MB; then an error (B5)."""
    data = payload_bomb(count)
    assert len(data) < 1 << 20
    tracemalloc.start()
    try:
        started = time.process_time()
        with pytest.raises(errors.InvalidFileError, match="again and again"):
            payload.split(data)
        assert time.process_time() - started < 2
        assert tracemalloc.get_traced_memory()[1] < 300 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.long
def test_missing_inner_backend(tmp_path: Path) -> None:
    """The message names the backend (B5)."""
    path = lower_through({"forward": (seeded(nets.MLP), inputs(3, 16))}, tmp_path)
    whole = bytearray(path.read_bytes())
    at = whole.rindex(b"XnnpackBackend")
    whole[at : at + 14] = b"NnpackXBackend"
    path.write_bytes(whole)
    with pytest.raises(errors.MissingBackendError, match="NnpackXBackend"):
        Program(path, BlobCache(tmp_path / "model.ptd")).method()


@pytest.mark.parametrize("tag", ["a/b", "", "..", "a\0b", 5, b"model", ["model"]])
def test_tags(tag: Any) -> None:
    """What is not a plain file name is refused when the partitioner is made (W2)."""
    with pytest.raises(errors.InvalidTagError):
        BlobStorePartitioner(XnnpackPartitioner(), tag=tag)


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        ([XnnpackPartitioner(), XnnpackPartitioner()], "wraps one partitioner, found 2; wrap each of them"),
        ((XnnpackPartitioner(),), "wraps one partitioner, found 1; wrap"),
        (XnnpackPartitioner, "found the class XnnpackPartitioner"),
        (None, "expected a partitioner, found None"),
        ("XnnpackBackend", "expected a partitioner, found 'XnnpackBackend'"),
        (BlobStorePartitioner(XnnpackPartitioner()), "is wrapped in a BlobStorePartitioner already"),
    ],
    ids=["list", "tuple", "class", "none", "name", "twice"],
)
def test_wrong_partitioners(inner: Any, message: str) -> None:
    """A wrong argument is an error where it is passed, not inside ExecuTorch's lowering (W2)."""
    with pytest.raises(errors.UnsupportedDataError, match=message):
        BlobStorePartitioner(inner)


@pytest.mark.parametrize(
    "inner", [None, "XnnpackBackend", XnnpackPartitioner(), object()], ids=lambda inner: type(inner).__name__
)
def test_wrong_inner_backends(inner: Any) -> None:
    """They are refused when they are registered (W2)."""
    with pytest.raises(errors.UnsupportedDataError, match="expected an object with a backend_id and a preprocess"):
        register_inner(inner)


def test_what_no_partitioner_partitioned_is_not_lowered() -> None:
    """Nor is what another process partitioned (W2)."""
    program = torch.export.export(nn.Linear(4, 4), inputs(1, 4))
    with pytest.raises(errors.UnsupportedOperationError, match="only what a BlobStorePartitioner partitioned"):
        BlobStoreBackend.preprocess(program, [])
    with pytest.raises(errors.BlobStoreError, match="partitioned in another process"):
        BlobStoreBackend.preprocess(program, [CompileSpec("blobstore.table", bytes(16))])


@pytest.mark.long
def test_tag_functions_are_checked(tmp_path: Path) -> None:
    """Their results are checked when the graph is partitioned (W2)."""
    with pytest.raises(errors.InvalidTagError):
        lower_through({"forward": (seeded(nets.MLP), inputs(3, 16))}, tmp_path, tag=lambda name: "a/b")


def test_an_initialization_that_fails_does_not_disturb_others(tmp_path: Path) -> None:
    """It leaves XNNPACK's cache of packed weights open, which would refuse every other delegate (U1)."""
    live = Live.make(seeded(nets.MLP), inputs(3, 16), tmp_path)
    live.check()
    bad = bytearray(live.program.path.read_bytes())
    at = bad.index(b"XH00")
    end = bad.rindex(payload.MAGIC)
    size = next(
        n for n in range(len(bad) - at) if xxhash.xxh3_128_digest(bytes(bad[at - 4 : at - 4 + n])) in bad[at:end]
    )
    digest = xxhash.xxh3_128_digest(bytes(bad[at - 4 : at - 4 + size]))
    bad[at : at + 4] = b"XXXX"  # so XNNPACK refuses the payload, after it opened its cache
    other = xxhash.xxh3_128_digest(bytes(bad[at - 4 : at - 4 + size]))
    where = bad.index(digest)
    bad[where : where + 16] = other
    (tmp_path / "bad.pte").write_bytes(bytes(bad))
    for _ in range(3):
        with pytest.raises(errors.ProgramError, match="'XnnpackBackend' cannot be initialized"):
            Program(tmp_path / "bad.pte", live.cache).method()
        live.check()
        with torch.no_grad():
            live.module.layers[0].weight.neg_()
        live.cache.update({"layers.0.weight": live.module.layers[0].weight})
        live.check()
