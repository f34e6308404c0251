"""Laying out weights by the names of a model, against the same steps in numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import Row, ratio_row, side_by_side
from benchmarks.lowered import plugin, save
from blobstore.demo.models import load_encoder
from blobstore.logical.records import Operation, Record, Records, Source, Step, records_key
from blobstore.logical.steps import plain, store
from blobstore.lowering.export import lower
from blobstore.memory.layout import ScalarType
from blobstore.runtime import BlobCache, Program
from blobstore.store import BlobStore

TITLE = "Weights by name"

REPEATS = 20  # one call is too short to be measured

_CHAR = int(ScalarType.CHAR)
_Array = np.ndarray[Any, np.dtype[Any]]


def rows(folder: Path) -> Iterator[Row]:
    """The rows of this table; `folder` is empty and for the files."""
    yield floats(folder)
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((1536, 384)).astype(np.float32)
    scales = (np.abs(weight).max(1) / 127).astype(np.float32)
    int8 = Step(Operation.QUANTIZE_CHANNEL, (0, -127, 127, _CHAR), names=("scales",))
    yield steps(
        "a linear layer of 1536x384 to int8", [weight], [int8], {"scales": scales}, lambda: _int8(weight, scales)
    )
    groups = (np.abs(weight.reshape(1536, -1, 32)).max(2) / 7).astype(np.float32).view(np.uint32) >> 16
    bfloat16 = groups.astype(np.uint16)
    int4 = [Step(Operation.QUANTIZE_GROUP, (32, -8, 7, _CHAR), names=("scales",)), Step(Operation.PACK_INT4)]
    yield steps(
        "a linear layer of 1536x384 to 4 bits", [weight], int4, {"scales": bfloat16}, lambda: _int4(weight, bfloat16)
    )
    for channels in (128, 256):
        yield folded_convolution(rng, channels)
    yield folded_linear(rng)
    yield whole_model(folder)


def folded_convolution(rng: np.random.Generator, channels: int) -> Row:
    """A row for a convolution with a batch norm."""
    conv = rng.standard_normal((channels, channels, 3, 3)).astype(np.float32)
    variance, gamma = (np.abs(rng.standard_normal(channels)).astype(np.float32) + 0.1 for _ in range(2))
    return steps(
        f"a convolution of {channels}x{channels}x3x3 with a folded batch norm",
        [conv, variance, gamma],
        [Step(Operation.FOLD_CONV_WEIGHT, (0, 1), (1e-5,)), Step(Operation.CHANNELS_LAST)],
        {},
        lambda: np.ascontiguousarray((conv * _scale(variance, gamma).reshape(-1, 1, 1, 1)).transpose(0, 2, 3, 1)),
    )


def folded_linear(rng: np.random.Generator) -> Row:
    """A row for a linear layer with a batch norm. The memory limits both sides: a copy takes as long as ours."""
    weight = rng.standard_normal((384, 1536)).astype(np.float32)
    variance, gamma = (np.abs(rng.standard_normal(384)).astype(np.float32) + 0.1 for _ in range(2))
    return steps(
        "a linear layer of 384x1536 with a folded batch norm",
        [weight, variance, gamma],
        [Step(Operation.FOLD_LINEAR_WEIGHT, (0, 1), (1e-5,))],
        {},
        lambda: weight * _scale(variance, gamma).reshape(-1, 1),
    )


def steps(
    work: str, arrays: list[_Array], done: list[Step], scales: Mapping[str, _Array], theirs: Callable[[], _Array]
) -> Row:
    """A row for steps that both sides must give the same result for."""
    expected = theirs()
    record = Record("k@1", expected.nbytes, (), tuple(done))

    def ours() -> memoryview:
        return store(record, [plain(array) for array in arrays], scales)

    assert bytes(ours()) == expected.tobytes()
    return ratio_row(f"laying out {work}", *repeated(ours, theirs), at_least=3)


def repeated(ours: Callable[[], object], theirs: Callable[[], object]) -> tuple[float, float]:
    """The median seconds of both, for work that takes less than a millisecond."""

    def often(work: Callable[[], object]) -> None:
        for _ in range(REPEATS):
            work()

    both = side_by_side(lambda: often(ours), lambda: often(theirs), rounds=31)
    return both[0] / REPEATS, both[1] / REPEATS


def floats(folder: Path) -> Row:
    """A row for tensors that are stored as they are: nothing is to be laid out."""
    names = [f"layer.{number}.weight" for number in range(200)]
    source = [Source(name, ScalarType.FLOAT, (64, 64)) for name in names]
    step = (Step(Operation.RESHAPE, (64, 64)),)
    data = Records("XnnpackBackend", tuple(Record(f"{s.name}@{0:016}", 64 * 64 * 4, (s,), step) for s in source)).pack()
    blobs = BlobStore()
    blobs.add(records_key(data), data, alignment=16)
    for name in names:
        blobs.add(f"{name}@{0:016}", bytes(64 * 64 * 4), alignment=16)
    blobs.write_ptd(folder / "floats.ptd")
    values = {name: np.full((64, 64), number, np.float32) for number, name in enumerate(names)}
    one, other = BlobCache(folder / "floats.ptd"), BlobCache(folder / "floats.ptd")
    keys = {name: other.tensors[name].keys for name in names}

    def theirs() -> int:
        made = {}
        for name, value in values.items():
            array, kind = plain(value)
            assert array.shape == (64, 64) and kind is ScalarType.FLOAT
            for key in keys[name]:
                made[key] = np.ascontiguousarray(array.reshape((64, 64))).reshape(-1).view(np.uint8).data
        return other.update_blobs(made)

    return ratio_row(
        "updating 200 float tensors", *side_by_side(lambda: one.update(values), theirs, rounds=31), at_most=1.0
    )


def whole_model(folder: Path) -> Row:
    """A row for a state dict of MiniLM, against the same bytes by key: what is left is packing and the commit."""
    model = load_encoder().eval()
    inputs = (torch.ones(1, 32, dtype=torch.long), torch.ones(1, 32, dtype=torch.long))
    manager = lower({"forward": (model, inputs)}, partitioners=plugin, external_constants=lambda node: "model")
    program = save(manager, folder / "minilm")
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    cache = BlobCache(sorted((folder / "minilm").glob("*.ptd")))
    method = Program(program, cache).method()
    cache.update_state_dict(state)
    stored = {key: bytes(cache.get_data(key)) for key in cache.dirty}
    row = ratio_row(
        "a state dict of MiniLM, against packing it",
        *side_by_side(lambda: cache.update_state_dict(state), lambda: cache.update_blobs(stored)),
        at_most=1.2,
    )
    del method
    return row


# What the library did in numpy


def _int8(array: _Array, scales: _Array) -> _Array:
    scaled = np.rint(array * (np.float32(1) / scales).reshape(-1, 1))
    return np.clip(scaled, -127, 127).astype(np.int8)


def _int4(array: _Array, groups: _Array) -> _Array:
    scales = np.repeat((groups.astype(np.uint32) << 16).view(np.float32), 32, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = np.where(scales == 0, np.float32(0), array * (np.float32(1) / scales))
    integers = np.clip(np.rint(scaled), -8, 7).astype(np.int8)
    shifted = integers.astype(np.uint8) + np.uint8(8)
    packed: _Array = shifted[:, 1::2] << 4 | shifted[:, ::2]
    return packed


def _scale(variance: _Array, gamma: _Array) -> _Array:
    scale: _Array = gamma * (np.float32(1) / np.sqrt(variance + np.float32(1e-5)))
    return scale
