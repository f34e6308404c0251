"""What travels in fewer bytes comes out as it was, or not at all (F2)."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blobstore.releases.index.encoding import CHUNK, DecodeError, best_width, decode, encode
from blobstore.releases.index.intervals import Intervals, coalesced

widths = st.sampled_from([1, 2, 4, 8])


def decoded(encoding: str, data: bytes, size: int, base: bytes | None = None) -> bytes:
    part = None if base is None else lambda start, count: base[start : start + count]
    return b"".join(bytes(piece) for piece in decode(encoding, size, io.BytesIO(data).read, part))


@given(st.binary(max_size=300), widths, st.sampled_from([0, 1, CHUNK - 7, CHUNK, CHUNK + 5]))
def test_planes_come_back(data: bytes, width: int, zeros: int) -> None:
    """Of all lengths, also those that are no multiple of an element or of a chunk."""
    data = data + bytes(zeros) + data
    stored = b"".join(encode(memoryview(data), width))
    assert decoded(f"planes:{width}" if width > 1 else "zstd", stored, len(data)) == data


@given(st.binary(max_size=300), widths, st.randoms(use_true_random=False))
def test_patches_come_back(data: bytes, width: int, random: object) -> None:
    """Against any other bytes of this length."""
    base = bytes(reversed(data))
    stored = b"".join(encode(memoryview(data), width, memoryview(base)))
    assert decoded(f"patch:{width}", stored, len(data), base) == data


@given(st.binary(max_size=400), st.integers(1, 3 * CHUNK))
def test_other_bytes_are_refused(stored: bytes, size: int) -> None:
    """They give the expected number of bytes, or a DecodeError, and never take more memory."""
    try:
        assert len(decoded("planes:4", stored, size)) == size
    except DecodeError:
        pass


@given(st.data())
def test_damage_never_changes_the_number_of_bytes(data: st.DataObject) -> None:
    stored = bytearray(b"".join(encode(memoryview(bytes(range(256)) * 40), 2)))
    stored[data.draw(st.integers(0, len(stored) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        assert len(decoded("planes:2", bytes(stored), 256 * 40)) == 256 * 40
    except DecodeError:
        pass


def test_a_frame_that_wants_much_memory_is_refused() -> None:
    """Its header says how much, and is believed before anything is taken."""
    import zstandard

    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 26))
    with pytest.raises(DecodeError, match="does not hold 4096 bytes"):
        decoded("zstd", len(bomb).to_bytes(4, "little") + bomb, 4096)


@pytest.mark.parametrize(("dtype", "bar"), [("float32", 0.85), ("bfloat16", 0.70)])
def test_weights_become_smaller(dtype: str, bar: float) -> None:
    """Numbers as training leaves them."""
    rng = np.random.default_rng(0)
    weights = (rng.standard_normal(1 << 19) * 0.05).astype(np.float32)
    data = weights.tobytes() if dtype == "float32" else (weights.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    width, share = best_width(memoryview(data), (1, 2, 4))
    assert (width, share < bar) == (4 if dtype == "float32" else 2, True)


def test_a_fine_tune_is_a_small_patch() -> None:
    """One element of a hundred moved by one step."""
    rng = np.random.default_rng(0)
    old = ((rng.standard_normal(1 << 20) * 0.05).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    new = old + (rng.random(old.size) < 0.01).astype(np.uint16)
    base, data = old.tobytes(), new.tobytes()
    stored = b"".join(encode(memoryview(data), 2, memoryview(base)))
    assert len(stored) < 0.02 * len(data)
    assert decoded("patch:2", stored, len(data), base) == data


ranges = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12)


@given(ranges, ranges, st.integers(0, 60), st.integers(0, 60))
def test_sets_of_bytes(added: list[tuple[int, int]], removed: list[tuple[int, int]], start: int, stop: int) -> None:
    """As a set of numbers."""
    model: set[int] = set()
    found = Intervals(added)
    for one, other in added:
        model |= set(range(one, other))
    for one, other in removed:
        if one < other:
            found.remove(one, other)
            model -= set(range(one, other))
    assert {n for one, other in found for n in range(one, other)} == model
    assert found.total == len(model)
    assert {n for one, other in found.missing(start, stop) for n in range(one, other)} == set(
        range(start, stop)
    ) - model
    assert found.end_from(start) == next(n for n in range(start, 100) if n not in model)


@given(ranges, st.integers(0, 10), st.integers(1, 30))
def test_requests_cover_what_is_wanted(wanted: list[tuple[int, int]], gap: int, longest: int) -> None:
    """And nothing but gaps that are short."""
    requests = coalesced(wanted, gap, longest)
    numbers = {n for one, other in wanted for n in range(one, other)}
    asked = [n for one, other in requests for n in range(one, other)]
    assert numbers <= set(asked)
    assert len(asked) == len(set(asked))
    assert all(0 < other - one <= longest for one, other in requests)
    for n in set(asked) - numbers:
        assert any(m in numbers for m in range(n - gap, n)) and any(m in numbers for m in range(n, n + gap + 1))
