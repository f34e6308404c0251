"""What is stored about a blob: its digest, and what finds blobs that are similar without being equal.

Everything comes from one pass over the bytes, in pieces that stay in the processor's cache.

- **digest**: xxh3-128, for equality.
- **fold**: the exclusive-or of all 8-byte words and the sum of all 4-byte words. From these follow, for elements of
  1, 2, 4 or 8 bytes, an exclusive-or and a sum over elements that do not depend on their order: the sum of 4-byte
  words modulo 65535 is that of 2-byte elements, modulo 255 that of bytes.
- **repeats**: whether the blob is one element again and again.
- **narrow**: the digests that it would have in narrower types, if every value is exactly representable there.
- **bands**: hashes over 32 groups of 8 elements at fixed, scattered places. Two blobs that share nine elements of ten
  agree in a given group with probability 0.9 ** 8, so in at least one of 32 groups all but certainly.
- **needle**: eight varied bytes and where they are, to look for inside the payloads of delegates.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import xxhash

from blobstore.core.memory.layout import ScalarType
from blobstore.core.regions.source import CHUNK, RegionSource

__all__ = ["MIN_BYTES", "Fingerprint", "Wanted", "fingerprint", "fold_for"]

MIN_BYTES = 256
"""Smaller blobs are only compared for equality: alike by accident, and nothing to gain."""

BANDS, BAND_SIZE = 32, 8
_PROBES = 32
_PORTION = 1 << 16
_VARIED = 7  # different bytes of eight: what needs no better needle
_MOST_WORDS = 2 * BAND_SIZE  # of eight bytes in a band: elements have up to 16 bytes
_MIX = np.random.Generator(np.random.PCG64(0)).integers(0, 1 << 63, _MOST_WORDS).astype(np.uint64)
_MIX = _MIX * np.uint64(2) + np.uint64(1)

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Wanted:
    """A blob to look at.

    Attributes:
        start, stop: where it is in its file.
        scalar_type: the number of its element type; None for opaque bytes, which are taken for 4-byte floats where
            something depends on it.
        alike: whether more than the digest is wanted.
    """

    start: int
    stop: int
    scalar_type: int | None
    alike: bool

    @property
    def width(self) -> int:
        if self.scalar_type is not None:
            return ScalarType(self.scalar_type).itemsize
        return 4 if (self.stop - self.start) % 4 == 0 else 1


@dataclass(frozen=True)
class Fingerprint:
    """See the module. The fields behind `digest` are only there if they were wanted."""

    digest: str
    fold: tuple[int, int] | None = None
    repeats: str = ""
    narrow: dict[str, str] = field(default_factory=dict)
    bands: str = ""
    needle: tuple[int, int] | None = None


def fold_for(fold: tuple[int, int], width: int) -> tuple[int, int]:
    """What of a fold does not depend on the order of elements of `width` bytes."""
    xor, total = fold
    for bits in (32, 16, 8):
        if width * 8 <= bits:
            xor = (xor >> bits ^ xor) & ((1 << bits) - 1)
    return xor, total % {1: 255, 2: 65535}.get(width, 1 << 64)


def fingerprint(source: RegionSource, wanted: Wanted) -> Fingerprint:
    """Read a blob once.

    Raises:
        FileAccessError, DataChangedError: it could not be read.
    """
    size = wanted.stop - wanted.start
    if not wanted.alike or size < MIN_BYTES:
        hasher = xxhash.xxh3_128()
        for chunk in source.chunks(wanted.start, wanted.stop, CHUNK if wanted.alike else 4 * CHUNK):
            hasher.update(chunk)
        return Fingerprint(hasher.hexdigest())
    return _Pass(size, wanted).run(source, wanted)


class _Pass:
    """One pass over a blob."""

    def __init__(self, size: int, wanted: Wanted) -> None:
        self.width = wanted.width
        self.hasher = xxhash.xxh3_128()
        self.xor = self.total = 0
        self.narrowers = [_Narrower(*kind) for kind in _NARROWINGS.get(wanted.scalar_type, ()) if size % kind[1] == 0]
        self.places, self.order = _places(size // self.width)
        self.sample: Bytes = np.empty((len(self.places), self.width), np.uint8)
        self.first = b""
        self.constant = True
        self.needle: tuple[int, int] | None = None
        self.needle_variety = 0

    def run(self, source: RegionSource, wanted: Wanted) -> Fingerprint:
        position = 0
        for chunk in source.chunks(wanted.start, wanted.stop):
            self.piece(chunk, position)
            position += len(chunk)
        digest = self.hasher.hexdigest()
        if self.constant:
            return Fingerprint(digest, repeats=self.first.hex())
        narrow = {n.name: n.hasher.hexdigest() for n in self.narrowers if n.alive}
        return Fingerprint(digest, (self.xor, self.total), "", narrow, self.bands(), self.needle)

    def piece(self, chunk: memoryview, position: int) -> None:
        self.hasher.update(chunk)
        if position == 0:
            self.first = bytes(chunk[: self.width])
        data = np.frombuffer(chunk, np.uint8)
        words = data[: len(data) & ~7].view(np.uint64)
        if self.constant and not self.repeats(data, words):
            self.constant = False
            for start in range(0, position, CHUNK):  # what was not converted before, because it need not be
                self.narrow(np.frombuffer(self.first * (min(CHUNK, position - start) // self.width), np.uint8))
        self.xor ^= int(np.bitwise_xor.reduce(words)) if len(words) else 0
        self.total += int(words.view(np.uint32).sum(dtype=np.uint64))
        if tail := len(data) & 7:
            rest = int.from_bytes(bytes(data[-tail:]), "little")
            self.xor ^= rest
            self.total += (rest & 0xFFFFFFFF) + (rest >> 32)
        if not self.constant:
            self.narrow(data)
        first = position // self.width
        low, high = np.searchsorted(self.places, (first, first + len(data) // self.width))
        if low < high:
            elements = data[: len(data) // self.width * self.width].reshape(-1, self.width)
            self.sample[low:high] = elements[self.places[low:high] - first]
        if self.needle_variety < _VARIED:
            self.find_needle(chunk, position)

    def narrow(self, data: Bytes) -> None:
        for narrower in self.narrowers:
            narrower.update(data)

    def repeats(self, data: Bytes, words: npt.NDArray[np.uint64]) -> bool:
        """Whether a piece is the blob's first element again and again; most are told by their first words."""
        if (8 % self.width and self.width % 8) or len(data) % self.width:
            return False
        tail = self.first * (8 // self.width)
        word = np.frombuffer(tail or self.first, np.uint64)  # several words if the element has more than eight bytes
        rows = words.reshape(-1, len(word))
        if not (rows[:64] == word).all() or bytes(data[len(words) * 8 :]) != tail[: len(data) & 7]:
            return False
        return bool((rows == word).all())

    def find_needle(self, chunk: memoryview, position: int) -> None:
        """Keep the eight bytes that vary most, of a few that are looked at."""
        for probe in range(_PROBES):
            at = (len(chunk) - 8) * probe // (_PROBES - 1) & ~3
            if at < 0:
                return
            raw = bytes(chunk[at : at + 8])
            variety = len(set(raw))
            if variety > max(self.needle_variety, 2):
                self.needle_variety = variety
                self.needle = (position + at, int.from_bytes(raw, "little"))
                if variety >= _VARIED:
                    return

    def bands(self) -> str:
        """A 32-bit hash of each band; equal bands have equal hashes."""
        words = self.sample[self.order].reshape(BANDS, -1).view(np.uint64)
        mixed = (words * _MIX[: words.shape[1]]).sum(axis=1, dtype=np.uint64)
        mixed = (mixed ^ mixed >> np.uint64(29)) * _MIX[0]
        return bytes((mixed >> np.uint64(32)).astype("<u4")).hex()


@functools.lru_cache(maxsize=256)
def _places(elements: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Which elements are sampled, ascending, and how these are dealt to the bands.

    They depend on nothing but the number of elements.
    """
    random = np.random.Generator(np.random.PCG64(elements))
    drawn = random.integers(0, elements, BANDS * BAND_SIZE)
    places, order = np.unique(drawn, return_inverse=True)
    return places, order.reshape(-1)


class _Narrower:
    """The digest that values would have in a narrower type; dead once one of them is not representable."""

    def __init__(self, name: str, width: int) -> None:
        self.name = name
        self.source_width = width
        self.hasher = xxhash.xxh3_128()
        self.alive = True

    def update(self, data: Bytes) -> None:
        if not self.alive:
            return
        # in portions so small that the allocator reuses memory instead of returning it: several times as fast
        for start in range(0, len(data), _PORTION):
            narrow = _NARROW[self.name, self.source_width](data[start : start + _PORTION])
            if narrow is None:
                self.alive = False
                return
            self.hasher.update(np.ascontiguousarray(narrow).data)


def _float_to_half(data: Bytes) -> npt.NDArray[np.generic] | None:
    wide = data.view(np.uint32)
    if (wide & 0x1FFF).any():  # bits of the mantissa that half has no room for
        return None
    # numpy converts element by element; almost all are normal in both types, and need the exponent shifted
    magnitude = wide & 0x7FFFFFFF
    narrow = ((magnitude >> 13) - (112 << 10)).astype(np.uint16)
    narrow |= (wide >> 16).astype(np.uint16) & 0x8000
    others = np.flatnonzero(magnitude - 0x38800000 >= 0x0F000000)  # zero, subnormal, too large, infinite, no number
    if len(others):
        with np.errstate(all="ignore"):
            halves = wide[others].view(np.float32).astype(np.float16)
            back = halves.astype(np.float32)
        if not np.array_equal(back.view(np.uint32), wide[others]):
            return None
        narrow[others] = halves.view(np.uint16)
    return narrow


def _float_to_bfloat16(data: Bytes) -> npt.NDArray[np.generic] | None:
    halves = data.view(np.uint16)
    return None if halves[::2].any() else halves[1::2]


def _half_to_bfloat16(data: Bytes) -> npt.NDArray[np.generic] | None:
    with np.errstate(all="ignore"):
        wide = data.view(np.float16).astype(np.float32)
    return _float_to_bfloat16(wide.view(np.uint8))


def _double_to_float(data: Bytes) -> npt.NDArray[np.generic] | None:
    wide = data.view(np.float64)
    with np.errstate(all="ignore"):
        narrow = wide.astype(np.float32)
        back = narrow.astype(np.float64)
    return narrow if np.array_equal(back.view(np.uint64), wide.view(np.uint64)) else None


_NARROW = {
    ("half", 4): _float_to_half,
    ("bfloat16", 4): _float_to_bfloat16,
    ("bfloat16", 2): _half_to_bfloat16,
    ("float", 8): _double_to_float,
}
_NARROWINGS: dict[int | None, Sequence[tuple[str, int]]] = {
    None: (("half", 4), ("bfloat16", 4)),
    int(ScalarType.FLOAT): (("half", 4), ("bfloat16", 4)),
    int(ScalarType.HALF): (("bfloat16", 2),),
    int(ScalarType.DOUBLE): (("float", 8),),
}
