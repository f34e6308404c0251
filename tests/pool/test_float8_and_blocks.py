"""Weights in float8 and in gguf's blocks follow from stored ones: to the bit, as torch and the gguf package make them."""

import struct
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors.torch import save_file

from blobstore.pool import Pool
from blobstore.pool.blocks import BLOCKS, block_values, blocked
from blobstore.pool.derived import derive, made_size, split_steps
from blobstore.pool.float8 import FLOAT8, float8, float8_values

Weights = npt.NDArray[np.float32]
TORCH = {"float8e4m3fn": torch.float8_e4m3fn, "float8e5m2": torch.float8_e5m2}
FLOATS = st.floats(width=32, min_value=-1000, max_value=1000).map(lambda one: one if abs(one) > 1e-30 else 0.0)
"""Of smaller ones, the inverse is no number in float32, of which the gguf package warns."""


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def weights(seed: int = 0) -> dict[str, Weights]:
    random = np.random.default_rng(seed)
    return {f"layer{number}": (random.standard_normal((96, 256)) * 0.02).astype(np.float32) for number in range(2)}


def write_gguf(path: Path, tensors: dict[str, Weights], kind: str) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    quantization = gguf.GGMLQuantizationType[kind.upper()]
    for name, values in tensors.items():
        writer.add_tensor(name, gguf.quants.quantize(values, quantization), raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", BLOCKS)
@settings(max_examples=50)
@given(values=arrays.arrays(np.float32, st.integers(1, 6).map(lambda blocks: (blocks, 32)), elements=FLOATS))
def test_blocks_are_those_of_gguf(kind: str, values: Weights) -> None:
    quantization = gguf.GGMLQuantizationType[kind.upper()]
    expected = gguf.quants.quantize(values, quantization)
    assert bytes(blocked(memoryview(values.tobytes()), kind)) == expected.tobytes()
    positions = np.arange(0, values.size, 5)
    found = block_values(memoryview(expected.tobytes()), kind, positions)
    assert np.array_equal(found, gguf.quants.dequantize(expected, quantization).ravel()[positions], equal_nan=True)


@pytest.mark.parametrize("kind", FLOAT8)
def test_float8_is_that_of_torch(kind: str) -> None:
    """Whatever is rounded: every number of the type, what lies between two, what is no number, and any bits."""
    random = np.random.default_rng(1)
    numbers = torch.arange(256, dtype=torch.uint8).view(TORCH[kind]).float()
    finite = numbers[torch.isfinite(numbers)].sort().values
    between = (finite[1:] + finite[:-1]) / 2
    near = torch.cat([torch.nextafter(between, torch.tensor(float(end))) for end in (np.inf, -np.inf)])
    bits = torch.from_numpy(random.integers(0, 1 << 32, 100_000, dtype=np.uint32).view(np.float32))
    for values in (numbers, between, near, bits):
        made = float8(memoryview(values.numpy().tobytes()), f"float8:{kind}:1:1")
        assert bytes(made) == bytes_of(values.to(TORCH[kind]))
    values = float8_values(memoryview(bytes(range(256))), kind, np.arange(256))
    assert np.array_equal(values, np.nan_to_num(numbers.numpy(), nan=0, posinf=0, neginf=0))


SCALED = {
    "cast": lambda one, most: one,
    "a scale": lambda one, most: one / (one.abs().max() / most),
    "a factor": lambda one, most: one * (most / one.abs().max()),
    "scales of channels": lambda one, most: one / (one.abs().amax(1, keepdim=True) / most),
    "factors of channels": lambda one, most: one * (most / one.abs().amax(1, keepdim=True)),
}


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_take_nothing_beside_the_weights(pool: Pool, tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {name: torch.from_numpy(values).to(dtype) for name, values in weights().items()}
    floats = {name: one.float() for name, one in tensors.items()}
    save_file(tensors, tmp_path / "base.safetensors")
    files = {
        kind: write_gguf(tmp_path / f"{kind}.gguf", {k: v.numpy() for k, v in floats.items()}, kind) for kind in BLOCKS
    }
    for kind, type_ in TORCH.items():
        for way, scaled in SCALED.items():
            path = files[f"{kind} {way}".replace(" ", "-")] = tmp_path / f"{kind} {way}.safetensors"
            most = torch.finfo(type_).max
            save_file({name: scaled(one, most).clamp(-most, most).to(type_) for name, one in floats.items()}, path)
    pool.add(tmp_path / "base.safetensors", "base@1")
    for name, path in files.items():
        added = pool.add(path, f"{name}@1")
        headers = path.stat().st_size - sum(one.nbytes for one in tensors.values()) * 8 // (8 * dtype.itemsize)
        assert added.stored_bytes <= max(0.01 * added.bytes, headers), name
    assert pool.verify() == []
    other = {name: torch.from_numpy(values) for name, values in weights(7).items()}
    save_file({name: one.to(torch.float8_e4m3fn) for name, one in other.items()}, tmp_path / "other.safetensors")
    assert pool.add(tmp_path / "other.safetensors", "other@1").stored_bytes > 0.5 * 2 * 96 * 256


def test_of_a_tune_a_difference_remains(pool: Pool, tmp_path: Path) -> None:
    """What the base gives is nearly what the tune gives, so little is stored, and every byte comes back."""
    base = weights()
    random = np.random.default_rng(3)
    tuned = {
        name: values * (1 + 0.002 * random.standard_normal(values.shape)).astype(np.float32)
        for name, values in base.items()
    }
    save_file({name: torch.from_numpy(values) for name, values in base.items()}, tmp_path / "base.safetensors")
    path = write_gguf(tmp_path / "tuned.gguf", tuned, "q8_0")
    pool.add(tmp_path / "base.safetensors", "base@1")
    added = pool.add(path, "tuned@1")
    assert added.stored_bytes < 0.25 * added.bytes
    (restored,) = pool.get("tuned@1", tmp_path / "out")
    assert restored.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("step", ["gguf:q4_1", "float8:float8e4m3fn:/:96"])
@pytest.mark.parametrize("nbytes", [0, 3, 4, 100, 4 * 33, 4 * 96])
def test_sizes_that_do_not_fit(step: str, nbytes: int) -> None:
    """Tables may say anything: then nothing is made."""
    (steps, rest), base = split_steps(step), memoryview(bytes(nbytes))
    assert rest == ""
    made = made_size(nbytes, steps)
    assert derive(base, steps, nbytes + 1) is None
    if made is not None:
        result = derive(base, steps, made[0])
        assert result is not None and len(result) == made[0]


SPECIAL = [0.0, -0.0, 1.0, -1.0, 1e-40, -1e-40, 3e-39, 1e-37, 3e38, -3e38, np.inf, -np.inf, np.nan, -np.nan]
"""What processors may treat differently: of what is not a number, they differ in the sign, of two zeros in which is the least."""


@pytest.mark.parametrize("kind", FLOAT8)
@pytest.mark.parametrize("rule", "1/*")
@settings(max_examples=60)
@given(values=arrays.arrays(np.float32, (3, 4), elements=st.sampled_from(SPECIAL)))
def test_signs_of_float8_are_those_of_the_weights(kind: str, rule: str, values: Weights) -> None:
    """A scale has no sign, so no processor decides it, also where a channel is zero or its scale is no number."""
    made = np.frombuffer(float8(memoryview(values.tobytes()), f"float8:{kind}:{rule}:4"), np.uint8)
    assert np.array_equal(made >> 7, np.signbit(values).ravel())


@pytest.mark.parametrize("kind", BLOCKS)
@settings(max_examples=60)
@given(values=arrays.arrays(np.float32, 32, elements=st.sampled_from(SPECIAL)))
def test_blocks_have_no_bits_that_processors_choose(kind: str, values: Weights) -> None:
    """Of what is not a number, one pattern; of zeros, the first least one; numbers are within their range before they become
    whole ones, as what is beyond would become anything."""
    made = bytes(blocked(memoryview(values.tobytes()), kind))
    halves = [int.from_bytes(made[at : at + 2], "little") for at in ((0, 2) if BLOCKS[kind].has_least else (0,))]
    assert all(half & 0x7FFF <= 0x7C00 or half == 0x7E00 for half in halves)
    least: float = values[0]
    for one in values:  # as llama.cpp looks for it
        least = one if one < least else least
    if BLOCKS[kind].has_least and not np.isnan(values).any():
        with np.errstate(all="ignore"):
            assert halves[1] == int(np.float32(least).astype(np.float16).view(np.uint16))
    if kind == "q8_0":
        with np.errstate(all="ignore"):
            inverse = np.float32(1) / (np.abs(values).max() / np.float32(127))
            beyond = [127 if one > 0 else -128 for one in values] if np.isinf(inverse) else []
        numbers = np.frombuffer(made[2:], np.int8).tolist()
        assert all(one == 0 or found == expected for one, found, expected in zip(values, numbers, beyond, strict=False))


def test_tensors_that_overlap_come_back(tmp_path: Path) -> None:
    """Of the second one, what is left is no whole number of blocks, whatever its type says."""
    tensors = weights()
    path = write_gguf(tmp_path / "blocks.gguf", tensors, "q8_0")
    size = 96 * 256 // 32 * 34
    data = bytearray(path.read_bytes())
    place = data.index(struct.pack("<Q", size))
    data[place : place + 8] = struct.pack("<Q", size - 32)
    path.write_bytes(data[:-32])
    weights_of_whole_blocks = np.concatenate([*tensors.values()]).ravel()[: (size - 32) // 34 * 32]
    save_file({"w": torch.from_numpy(weights_of_whole_blocks)}, tmp_path / "wide.safetensors")
    with Pool(tmp_path / "pool", create=True) as pool:
        pool.add([tmp_path / "wide.safetensors"], "m@1")
        pool.add([path], "m@2")
        pool.get("m@2", tmp_path / "out")
    assert (tmp_path / "out/blocks.gguf").read_bytes() == path.read_bytes()
