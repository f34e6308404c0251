"""From which blob that is stored whole a new one follows by a recipe: in another type, quantized, scaled, or in another layout.

A sketch has every so many elements of a base. Where a layout puts these is known, and the new blob is a file that is at
hand, so both are compared without reading what is stored. Opaque bytes, such as the constants that XNNPACK has in a program,
have no type and no shape: they are taken as each type that their size allows, and the shape is that of the base.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from blobstore.core.codec.elements import cast, element, widen
from blobstore.pool.blocks import BLOCKS, block_values
from blobstore.pool.derived import OPEN_FLOAT8, QUANT, SCALE
from blobstore.pool.distances import Few, Numbers, bits, few, numbers, signatures, size, smallest, unit, values
from blobstore.pool.float8 import float8_values
from blobstore.pool.layouts import Layout, layouts
from blobstore.pool.packs import Stored
from blobstore.pool.pruned import is_pruned, magnitudes
from blobstore.pool.quantized import BYTES, likeness, meanings
from blobstore.pool.scan import FileRange, ScannedPart, sketched

__all__ = ["QUANTIZED", "Candidate", "Derivation", "Derivations", "Kind", "base_kinds", "base_signatures"]

QUANTIZED = {*BYTES, *BLOCKS, *OPEN_FLOAT8}
"""Types of weights that others in float32 give."""

_ALIKE = 0.5  # correlation; of unrelated blobs, that of a sketch is below a third
_HOPELESS = 0.8  # of the bits of an element: of many bases and layouts, one may be a little closer by chance
_NEAR = 0.25  # of the bits of an element; what quantizing leaves is about as much
_FAR = 0.5  # of these bits; what is nearer has no factors
_SCALED = 0.9  # taken for what remains where there may be factors
_SAME = 0.9  # of the weights that a pruned blob has
_TRIED = 8  # bases that are about as alike
_AS_ALIKE = 0.98
_SHORT = 8  # pairs of a base and a layout that are compared whole
_NARROW = ("bfloat16", "half")
_SHAPE = re.compile(r"[0-9]{1,15}(,[0-9]{1,15})*", re.ASCII)
_TYPES = ("float", *_NARROW, *sorted(BYTES))  # that opaque bytes may have


Kind = tuple[str, str, int]
"""Type, shape and size."""


class Candidate(NamedTuple):  # there are thousands
    """A blob that is stored whole, or will be, and can be a base.

    Attributes:
        steps: that make the type of its elements that of the new blob.
        shape: as in the tables.
    """

    digest: bytes
    where: FileRange | Stored
    sketch: bytes
    dtype: str
    shape: str
    size: int
    steps: tuple[str, ...] = ()


@dataclass(frozen=True)
class Derivation:
    """What a new blob follows from.

    Attributes:
        base: of the recipe.
        steps: of it, with `QUANT` or `SCALE` for what is found when the base is read.
        shape: of the base, as it lies in memory.
        share: bits of an element that remain, of those that it has, as far as that is known.
    """

    base: Candidate
    steps: tuple[str, ...]
    shape: str
    share: float


@dataclass(frozen=True)
class _Way:
    """How bases of a type and a size may make a new blob: by steps, after which elements have the type `target`."""

    dtype: str
    size: int
    steps: tuple[str, ...]
    target: str


def base_kinds(parts: Iterable[ScannedPart]) -> set[tuple[str, int]]:
    """The types and sizes of bases from which new blobs may follow."""
    return {(way.dtype, way.size) for part in parts for way in _ways(part)}


def base_signatures(parts: Iterable[ScannedPart], kinds: Iterable[Kind]) -> dict[Kind, set[int]]:
    """For each type, shape and size of bases, the signatures of those from which new blobs certainly follow.

    Raises:
        FileAccessError: a file is gone.
    """
    found: dict[Kind, set[int]] = {kind: set() for kind in kinds}
    shapes: dict[tuple[str, int], list[str]] = defaultdict(list)
    for dtype, shape, nbytes in found:
        shapes[dtype, nbytes].append(shape)
    groups: dict[tuple[_Way, str], _LikeBases] = {}
    for part in parts:
        view = part.source.view()
        for way in _ways(part):
            for shape in shapes[way.dtype, way.size]:
                if (way, shape) not in groups:
                    groups[way, shape] = _LikeBases(way, shape)
                found[way.dtype, shape, way.size].update(groups[way, shape].signatures(view, part))
    return found


_Alike = tuple[float, Derivation]


class Derivations:
    """Finds from what new blobs follow."""

    def __init__(self, stored: Iterable[Candidate]) -> None:
        self._stored: dict[tuple[str, int], list[Candidate]] = defaultdict(list)
        self._new: dict[tuple[str, int], list[Candidate]] = defaultdict(list)
        for one in stored:
            self._stored[one.dtype, one.size].append(one)
        self._stored_sets: dict[_Way, _Sets] = {}
        self._new_sets: dict[_Way, _Sets] = {}

    def add(self, candidate: Candidate) -> None:
        """A new blob will be stored whole."""
        self._new[candidate.dtype, candidate.size].append(candidate)

    def find(self, part: ScannedPart) -> list[Derivation]:
        """What a new blob may follow from, the most likely first; none if that is nothing.

        Raises:
            FileAccessError: its file is gone.
        """
        view = part.source.view()
        groups = list(itertools.chain.from_iterable(map(self._groups, _ways(part))))
        weights = [group for group in groups if not group.is_quantized]
        quantized = [group for group in groups if group.is_quantized]
        return _nearest(group.pruned(view, part) for group in weights) or _closest(weights, quantized, view, part)

    def _groups(self, way: _Way) -> Iterator[_LikeBases]:
        for candidates, sets in ((self._stored, self._stored_sets), (self._new, self._new_sets)):
            if there := candidates.get((way.dtype, way.size)):
                yield from sets.setdefault(way, _Sets(way)).of(there)


def _share(derived: Derivation) -> float:
    return derived.share


def _closest(
    weights: Sequence[_LikeBases], quantized: Sequence[_LikeBases], view: memoryview, part: ScannedPart
) -> list[Derivation]:
    near = next(iter(_nearest(group.near(view, part) for group in weights)), None)
    alike = _most_alike(found for group in quantized for found in group.quantized(view, part))
    if alike and (near is None or near.share > _NEAR):
        return alike
    if near is not None and near.share < _FAR:
        return [near]
    scaled = _most_alike(found for group in weights for found in group.scaled(view, part))
    # if it is not scaled, the worker takes it as it is
    if near is not None and not (scaled and near.base is scaled[0].base):
        return [near]
    return scaled[:1]


def _nearest(found: Iterable[Derivation | None]) -> list[Derivation]:
    return sorted(filter(None, found), key=_share)


def _most_alike(found: Iterable[_Alike]) -> list[Derivation]:
    """Those that are about as alike as the most alike one: weights in float32 and in bfloat16, or before and after a few steps."""
    ordered = sorted(found, key=lambda one: one[0], reverse=True)[:_TRIED]
    return [derived for alike, derived in ordered if alike > _AS_ALIKE * ordered[0][0]]


def _ways(part: ScannedPart) -> Iterator[_Way]:
    if not part.sketch:
        return
    for target in (part.dtype,) if part.dtype else _TYPES:
        yield from _ways_to(target, part.size)
    if part.dtype and element(part.dtype)[0] == element("")[0]:
        yield _Way("", part.size, (), part.dtype)
    if part.dtype in {"", *BYTES}:
        for numbers_in_byte in (1, 2):
            count = numbers_in_byte * part.size
            yield from _ways_from_floats(count, QUANT)
    if part.dtype in OPEN_FLOAT8:
        yield from _ways_from_floats(part.size, OPEN_FLOAT8[part.dtype])
    if part.dtype in BLOCKS:
        yield from _ways_from_floats(32 * (part.size // BLOCKS[part.dtype].size), f"gguf:{part.dtype}")


def _ways_from_floats(count: int, step: str) -> Iterator[_Way]:
    """How bases with as many weights may make a blob by a step that takes float32."""
    yield _Way("float", 4 * count, (step,), "float")
    yield from (_Way(narrow, 2 * count, (f"widen:{narrow}", step), "float") for narrow in _NARROW)


def _ways_to(dtype: str, size: int) -> Iterator[_Way]:
    """How bases make a blob of this type and size, if it is not one of quantized weights."""
    yield _Way(dtype, size, (), dtype)
    if dtype == "float" and size % 2 == 0:
        yield from (_Way(narrow, size // 2, (f"widen:{narrow}",), dtype) for narrow in _NARROW)
    if dtype in _NARROW:
        yield _Way("float", 2 * size, (f"cast:{dtype}",), dtype)
        others = (narrow for narrow in _NARROW if narrow != dtype)
        yield from (_Way(narrow, size, (f"widen:{narrow}", f"cast:{dtype}"), dtype) for narrow in others)


class _LikeBases:
    """Bases of one type, shape and size, of which elements are known.

    Args:
        way: how they may make a new blob.
        shape: of all of them.
        bases: these; their sketches have the same length.
    """

    def __init__(self, way: _Way, shape: str, bases: Sequence[Candidate] = ()) -> None:
        self._way, self._bases = way, list(bases)
        self._count = way.size // element(way.dtype)[0]
        self._positions = sketched(self._count)  # elements of the type that the way gives them
        self._shape = shape if not shape or _count(shape) == self._count else str(self._count)
        self._sketches = _typed(b"".join(one.sketch for one in bases), way)
        self._tried: dict[tuple[str, bool], tuple[Sequence[Layout], npt.NDArray[np.int64]]] = {}

    def add(self, bases: Sequence[Candidate]) -> None:
        """Further ones, whose sketches have the same length."""
        sketches = _typed(b"".join(one.sketch for one in bases), self._way)
        if "_numbers" in self.__dict__:  # what is expensive grows; the rest is made again
            rows = numbers(self._way.target, sketches, len(sketches) // len(bases))
            self._few = np.concatenate((self._few, few(rows)), axis=1)
            self._numbers = np.concatenate((self._numbers, rows))
        self.__dict__.pop("_units", None)
        self.__dict__.pop("_unit_sizes", None)
        self._bases += bases
        self._sketches += sketches

    @property
    def is_quantized(self) -> bool:
        """Whether a new blob is one of quantized weights."""
        return any(step.partition(":")[0] in {QUANT, "float8", "gguf"} for step in self._way.steps)

    @functools.cached_property
    def _numbers(self) -> Numbers:
        return numbers(self._way.target, self._sketches, len(self._sketches) // len(self._bases))

    @functools.cached_property
    def _few(self) -> Few:
        return few(self._numbers)

    @functools.cached_property
    def _units(self) -> Numbers:
        with np.errstate(all="ignore"):
            return unit(np.nan_to_num(self._floats.astype(np.float64)))

    @functools.cached_property
    def _unit_sizes(self) -> Numbers:
        return unit(_sizes(self._floats))

    @property
    def _floats(self) -> npt.NDArray[np.float32]:
        return np.frombuffer(self._sketches, "<f4").reshape(len(self._bases), -1)

    def near(self, view: memoryview, part: ScannedPart) -> Derivation | None:
        """The base that is the closest to a new blob in one of its layouts; None if none is close."""
        possible, places = self._layouts(part)
        if not possible:
            return None
        width = element(self._way.target)[0]
        own = np.frombuffer(view, f"<u{width}")[places]
        samples = numbers(self._way.target, own.tobytes(), own.shape[1] * width)
        sizes = np.stack([size(self._few, sample) for sample in few(samples).T])
        layouts, rows = np.divmod(smallest(sizes, _SHORT), len(self._bases))
        shares = bits(self._numbers[rows], samples[layouts]) / (8 * width)
        best = int(np.argmin(shares))
        # what is nearly another narrow type comes from a wide one, which is the better base of what is quantized from it
        if not shares[best] < _HOPELESS or (len(self._way.steps) > 1 and shares[best] > 0):
            return None
        return self._origin(int(rows[best]), possible[int(layouts[best])], float(shares[best]))

    def pruned(self, view: memoryview, part: ScannedPart) -> Derivation | None:
        """The base that has the weights of a new blob where these are not zero; None if it is not pruned, or there is none."""
        if not part.dtype or self._way.target != part.dtype or _count(part.shape) != self._count:
            return None
        own = np.frombuffer(view, f"<u{element(part.dtype)[0]}")[self._positions]
        kept = magnitudes(own) != 0
        if not is_pruned(own) or not kept.any():
            return None
        stored = np.frombuffer(self._sketches, own.dtype).reshape(len(self._bases), -1)
        equal = (stored[:, kept] == own[kept]).mean(1)
        row = int(np.argmax(equal))
        share = float(1 - equal[row])
        return Derivation(self._bases[row], self._way.steps, self._shape, share) if equal[row] > _SAME else None

    def quantized(self, view: memoryview, part: ScannedPart) -> list[_Alike]:
        """The bases that a new blob may be quantized from, and how alike they are."""
        if part.dtype not in BYTES and part.dtype:
            return [
                (alike, Derivation(self._bases[row], self._way.steps, self._shape, 0.0))
                for alike, _, row in _largest(unit(self._weights(view, part.dtype)) @ self._units.T)
            ]
        possible, own = self._bytes(view, part)
        return [
            (float(alike), self._origin(row, possible[layout], 0.0))
            for alike, layout, row in (_largest(likeness(own, self._units)) if possible else ())
        ]

    def signatures(self, view: memoryview, part: ScannedPart) -> list[int]:
        """Those of bases that have the weights of a new blob in one of its layouts."""
        if part.dtype not in BYTES and part.dtype and self.is_quantized:
            return signatures(self._weights(view, part.dtype)).tolist()  # type: ignore[no-any-return]
        if self.is_quantized:
            possible, own = self._bytes(view, part)
            samples = meanings(own)
        else:
            possible, places = self._layouts(part)
            weights = np.frombuffer(view, f"<u{element(self._way.target)[0]}")[places]
            samples = [values(self._way.target, weights.tobytes()).reshape(weights.shape)]
        return [one for some in samples for one in signatures(some).tolist()] if possible else []

    def _bytes(self, view: memoryview, part: ScannedPart) -> tuple[Sequence[Layout], npt.NDArray[np.uint8]]:
        """The layouts that may make quantized weights, and for each a row: the bytes that have the elements of sketches."""
        data = np.frombuffer(view, np.uint8)
        possible, places = self._layouts(part)
        if self._count != 2 * len(data):
            return possible, data[places]
        places = places[:1]  # the first layout changes nothing
        own = data[places // 2]
        return possible, np.where(places % 2 == 0, own, own >> 4 | own << 4)  # the same half of each byte

    def _weights(self, view: memoryview, dtype: str) -> npt.NDArray[np.float64]:
        """The weights, as a row, for which the elements of sketches stand in a type whose bytes say that."""
        decoded = block_values if dtype in BLOCKS else float8_values
        with np.errstate(all="ignore"):
            own = decoded(view, dtype, self._positions).astype(np.float64)
            return np.nan_to_num(own, posinf=0.0, neginf=0.0)[None]

    def scaled(self, view: memoryview, part: ScannedPart) -> list[_Alike]:
        """The base whose channels a new blob may have with factors, and how alike they are, if there is one."""
        possible, places = self._layouts(part)
        if not possible or self._way.target != "float":
            return []
        own = np.frombuffer(view, "<f4")[places]
        alike = unit(_sizes(own)) @ self._unit_sizes.T
        layout, row = divmod(int(np.argmax(alike)), len(self._bases))
        most = float(alike[layout, row])
        return [(most, self._origin(row, possible[layout], _SCALED, SCALE))] if most > _ALIKE else []

    def _layouts(self, part: ScannedPart) -> tuple[Sequence[Layout], npt.NDArray[np.int64]]:
        """The layouts that may make a new blob, and for each a row: where they put the elements of sketches."""
        if not self._shape and _count(part.shape) != self._count:
            return (), self._positions[:0]
        same = self._way.dtype == part.dtype and self._shape == part.shape
        key = part.shape if not self._shape else "", same
        if key not in self._tried:
            # what does not move is found elsewhere
            possible = [one for one in layouts(self._shape, part.shape) if not (same and one.is_trivial)]
            places = [one.places(self._positions) for one in possible]
            self._tried[key] = possible, np.stack(places) if places else self._positions[:0]
        return self._tried[key]

    def _origin(self, row: int, layout: Layout, share: float, *open_steps: str) -> Derivation:
        steps = (*self._way.steps, *open_steps, *(() if layout.is_trivial else (layout.recipe,)))
        return Derivation(self._bases[row], steps, self._shape, share)


def _largest(alike: npt.NDArray[Any]) -> list[tuple[float, int, int]]:
    """The largest of likenesses, if it is enough, and those about as large, with their rows and columns."""
    found = [(float(alike.flat[at]), *divmod(int(at), alike.shape[1])) for at in smallest(-alike, _TRIED)]
    return [one for one in found if one[0] > _ALIKE]


def _sizes(weights: npt.NDArray[np.float32]) -> Numbers:
    """The magnitudes of weights, of which factors that differ do not hide the order."""
    with np.errstate(all="ignore"):
        return np.nan_to_num(np.sqrt(np.sqrt(np.abs(weights.astype(np.float64)))), posinf=0.0)


def _count(shape: str) -> int:
    """The elements of a shape; 0 if it is none, as tables may have."""
    if not shape:
        return 1
    return math.prod(map(int, shape.split(","))) if _SHAPE.fullmatch(shape) else 0


def _typed(sketches: bytes, way: _Way) -> bytes:
    """Sketches after the steps that give their elements another type."""
    for step in way.steps:
        kind, _, dtype = step.partition(":")
        if kind == "widen":
            sketches = bytes(widen(memoryview(sketches), dtype))
        elif kind == "cast":
            sketches = bytes(cast(memoryview(sketches), dtype))
    return sketches


class _Sets:
    """Candidates of one kind by their shapes, which become more.

    Args:
        way: how they may make a new blob.
    """

    def __init__(self, way: _Way) -> None:
        self._way = way
        self._seen = 0
        self._by_shape: dict[str, _LikeBases] = {}

    def of(self, candidates: Sequence[Candidate]) -> Iterable[_LikeBases]:
        """The sets of candidates, of which the first ones are those of the last call."""
        width = element(self._way.dtype)[0]
        wanted = width * len(sketched(self._way.size // width))
        more: dict[str, list[Candidate]] = defaultdict(list)
        for one in candidates[self._seen :]:
            if len(one.sketch) == wanted:
                more[one.shape].append(one)
        self._seen = len(candidates)
        for shape, bases in more.items():
            if shape in self._by_shape:
                self._by_shape[shape].add(bases)
            else:
                self._by_shape[shape] = _LikeBases(self._way, shape, bases)
        return self._by_shape.values()
