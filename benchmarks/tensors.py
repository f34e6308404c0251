"""Laying out weights by the names of a model, against the Python that did it before the native library."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import Row, ratio_row, side_by_side, without_bar
from benchmarks.lowered import plugin, save
from blobstore.core.memory.arrays import plain
from blobstore.core.memory.layout import ScalarType
from blobstore.core.store import BlobStore
from blobstore.logical.records import ModelTensor, Operation, Record, Records, Step, records_key
from blobstore.logical.steps import store
from blobstore.lowering.export import lower
from blobstore.runtime import BlobCache, Program
from examples.demo.models import load_encoder

TITLE = "Weights by name"

_CHAR = int(ScalarType.CHAR)
_Array = np.ndarray[Any, np.dtype[Any]]
_Scales = Mapping[str, _Array]


def rows(folder: Path) -> Iterator[Row]:
    """The rows of this table; `folder` is empty and for the files."""
    yield floats(folder)
    # From now on malloc keeps what is freed, up to this size, as in a process that runs for a while. Otherwise both sides
    # mostly wait for pages of the system, numpy for more of them because it keeps intermediate results.
    np.empty(31 << 20, np.uint8)
    rng = np.random.default_rng(0)
    for sizes in ((1536, 384), (4096, 4096)):
        yield from int8(rng, sizes)
    yield int4(rng)
    for channels in (128, 256):
        yield from folded_convolution(rng, channels)
    for sizes in ((384, 1536), (4096, 4096)):
        yield from folded_linear(rng, sizes)
    yield whole_model(folder)


def int8(rng: np.random.Generator, sizes: tuple[int, int]) -> Iterator[Row]:
    """Rows for a quantized linear layer."""
    weight = rng.standard_normal(sizes, np.float32)
    scales = (np.abs(weight).max(1) / 127).astype(np.float32)
    by_channel = Step(Operation.QUANTIZE_CHANNEL, (0, -127, 127, _CHAR), names=("scales",))
    work = f"a linear layer of {sizes[0]}x{sizes[1]} to int8"
    yield steps(f"{work}, by channel", [weight], [by_channel], {"scales": scales})
    by_tensor = Step(Operation.QUANTIZE_TENSOR, (0, -127, 127, _CHAR), (float(scales.max()),))
    yield steps(f"{work}, with one scale", [weight], [by_tensor])


def int4(rng: np.random.Generator) -> Row:
    """A row for a linear layer in groups of four bits."""
    weight = rng.standard_normal((1536, 384), np.float32)
    groups = (np.abs(weight.reshape(1536, -1, 32)).max(2) / 7).view(np.uint32) >> 16
    done = [Step(Operation.QUANTIZE_GROUP, (32, -8, 7, _CHAR), names=("scales",)), Step(Operation.PACK_INT4)]
    return steps("a linear layer of 1536x384 to 4 bits", [weight], done, {"scales": groups.astype(np.uint16)})


def folded_convolution(rng: np.random.Generator, channels: int) -> Iterator[Row]:
    """Rows for a convolution with a batch norm: again and again, and once after other work, when nothing of it is in the
    processor's caches."""
    given = [rng.standard_normal((channels, channels, 3, 3), np.float32), *_norm(rng, channels)]
    done = [Step(Operation.FOLD_CONV_WEIGHT, (0, 1), (1e-5,)), Step(Operation.CHANNELS_LAST)]
    yield steps(f"a convolution of {channels}x{channels}x3x3 with a folded batch norm", given, done, at_least=1)
    once = side_by_side(*_sides(given, done), rounds=31, clock=time.thread_time)
    yield without_bar(ratio_row("  once after other work", *once, at_least=0))


def folded_linear(rng: np.random.Generator, sizes: tuple[int, int]) -> Iterator[Row]:
    """Rows for a linear layer with a batch norm, and for a copy of its bytes, which is the limit: nothing is computed that
    takes as long as the memory."""
    given = [rng.standard_normal(sizes, np.float32), *_norm(rng, sizes[0])]
    done = [Step(Operation.FOLD_LINEAR_WEIGHT, (0, 1), (1e-5,))]
    yield steps(f"a linear layer of {sizes[0]}x{sizes[1]} with a folded batch norm", given, done, at_least=1)
    copied = repeated(given[0].copy, lambda: _store(done, given, {}))
    yield without_bar(ratio_row("  copying its bytes instead", *copied, at_least=0))


def _norm(rng: np.random.Generator, channels: int) -> list[_Array]:
    """Variance and gamma."""
    return [np.abs(rng.standard_normal(channels, np.float32)) + np.float32(0.1) for _ in range(2)]


def steps(
    work: str, arrays: list[_Array], done: list[Step], scales: _Scales | None = None, *, at_least: float = 3
) -> Row:
    """A row for steps."""
    return ratio_row(f"laying out {work}", *repeated(*_sides(arrays, done, scales)), at_least=at_least)


def _sides(
    arrays: list[_Array], done: list[Step], scales: _Scales | None = None
) -> tuple[Callable[[], memoryview], Callable[[], _Array]]:
    """Steps as the library and as numpy do them, with the same result."""
    known = scales or {}
    theirs = functools.partial(_store, done, arrays, known)
    expected = theirs()
    record = Record("k@1", expected.nbytes, (), tuple(done))

    def ours() -> memoryview:
        return store(record, [plain(array) for array in arrays], known)

    assert bytes(ours()) == expected.tobytes()
    return ours, theirs


def repeated(ours: Callable[[], object], theirs: Callable[[], object]) -> tuple[float, float]:
    """The median seconds of both on the processor, for a tenth of a second at a time. One call may be too short to be
    measured, and the first ones fill the processor's caches again."""
    first = side_by_side(ours, theirs, rounds=1, clock=time.thread_time)
    times = max(1, round(0.1 / max(first)))

    def often(work: Callable[[], object]) -> None:
        for _ in range(times):
            work()

    both = side_by_side(lambda: often(ours), lambda: often(theirs), rounds=31, clock=time.thread_time)
    return both[0] / times, both[1] / times


def floats(folder: Path) -> Row:
    """A row for tensors that are stored as they are, without a new layout."""
    names = [f"layer.{number}.weight" for number in range(200)]
    source = [ModelTensor(name, ScalarType.FLOAT, (64, 64)) for name in names]
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

    return ratio_row("updating 200 float tensors", *repeated(lambda: one.update(values), theirs), at_most=1)


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


def _store(done: Sequence[Step], arrays: Sequence[_Array], scales: _Scales) -> _Array:
    values = [plain(array)[0] for array in arrays]
    for step in done:
        values = [_OPERATIONS[step.operation](step, values, scales)]
    return np.ascontiguousarray(values[0])


def _round(array: _Array, step: Step) -> _Array:
    low, high = step.ints[-3:-1]
    return np.clip(np.rint(array), low, high).astype(np.int8)


def _quantize_tensor(step: Step, values: list[_Array], scales: _Scales) -> _Array:
    return _round(values[0] * np.float32(1.0 / step.floats[0]), step)


def _quantize_channel(step: Step, values: list[_Array], scales: _Scales) -> _Array:
    return _round(values[0] * (np.float32(1) / scales[step.names[0]]).reshape(-1, 1), step)


def _quantize_group(step: Step, values: list[_Array], scales: _Scales) -> _Array:
    groups = (scales[step.names[0]].astype(np.uint32) << 16).view(np.float32)
    wide = np.repeat(groups, step.ints[0], axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return _round(np.where(wide == 0, np.float32(0), values[0] * (np.float32(1) / wide)), step)


def _pack_int4(step: Step, values: list[_Array], scales: _Scales) -> _Array:
    array = values[0]
    assert array.min() >= -8 and array.max() <= 7
    shifted = array.astype(np.uint8) + np.uint8(8)
    packed: _Array = shifted[:, 1::2] << 4 | shifted[:, ::2]
    return packed


def _fold_weight(step: Step, values: list[_Array], scales: _Scales) -> _Array:
    weight, variance, gamma = values
    scale = gamma * (np.float32(1) / np.sqrt(variance + np.float32(step.floats[0])))
    shape = [1] * weight.ndim
    shape[step.ints[0]] = -1
    folded: _Array = weight * scale.reshape(shape)
    return folded


def _channels_last(step: Step, values: list[_Array], scales: _Scales) -> _Array:
    return values[0].transpose(0, 2, 3, 1)


_OPERATIONS: dict[Operation, Callable[[Step, list[_Array], _Scales], _Array]] = {
    Operation.QUANTIZE_TENSOR: _quantize_tensor,
    Operation.QUANTIZE_CHANNEL: _quantize_channel,
    Operation.QUANTIZE_GROUP: _quantize_group,
    Operation.PACK_INT4: _pack_int4,
    Operation.FOLD_CONV_WEIGHT: _fold_weight,
    Operation.FOLD_LINEAR_WEIGHT: _fold_weight,
    Operation.CHANNELS_LAST: _channels_last,
}
