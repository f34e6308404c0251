"""Parts of the fingerprint against plain ways to compute them."""

from __future__ import annotations

import numpy as np
import pytest

from blobstore.reporting.read.fingerprint import _NARROW, fold_for


def test_every_half_is_narrowed_to_itself() -> None:
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    halves = halves[~np.isnan(halves)]
    narrow = _NARROW["half", 4](halves.astype(np.float32).view(np.uint8))
    assert narrow is not None
    assert np.array_equal(narrow.view(np.uint16), halves.view(np.uint16))


@pytest.mark.long
@pytest.mark.parametrize("name", ["half", "bfloat16"])
def test_a_float_is_narrowed_only_if_it_comes_back(name: str) -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 20_000, dtype=np.uint64).astype(np.uint32)
    edges = [0, 1 << 31, 0x38800000, 0x387FFFFF, 0x33800000, 0x33000000, 0x477FE000, 0x47800000, 0x7F800000, 0x7FC00000]
    for value in [*bits.tolist(), *(b & 0xFFFFE000 for b in bits.tolist()), *edges]:
        wide = np.array([value], np.uint32)
        with np.errstate(all="ignore"):
            half = wide.view(np.float32).astype(np.float16).astype(np.float32).view(np.uint32)
        fits = half[0] == value if name == "half" else value & 0xFFFF == 0
        assert (_NARROW[name, 4](wide.view(np.uint8)) is not None) == fits, hex(value)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_the_fold_does_not_depend_on_the_order_of_elements(width: int) -> None:
    random = np.random.default_rng(1)
    elements = random.integers(0, 256, (1000, width), dtype=np.uint8)

    def fold(data: np.ndarray) -> tuple[int, int]:
        words = data.reshape(-1).view(np.uint64)
        return int(np.bitwise_xor.reduce(words)), int(words.view(np.uint32).sum(dtype=np.uint64))

    one = fold_for(fold(elements), width)
    assert one == fold_for(fold(random.permutation(elements)), width)
    elements[5, 0] ^= 1
    assert one != fold_for(fold(elements), width)
