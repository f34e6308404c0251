"""Adapters on a cache: exchanged while programs run, or merged into the weights and taken out again."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from blobstore.adapters.files import Adapter, check_scale, read_adapter, recorded_scale
from blobstore.adapters.fit import check_shape
from blobstore.adapters.foundation import FOUNDATION, fingerprint, named_tensors
from blobstore.adapters.names import Pair, find_pairs, is_lora, weight_names
from blobstore.errors import (
    AdapterError,
    DataChangedError,
    KeyNotFoundError,
    LayoutError,
    UnsupportedDataError,
    UpdateError,
)
from blobstore.formats.data_map import MergedDataMap
from blobstore.formats.ptd.manifest import KEY_PREFIX
from blobstore.formats.ptd.reader import PtdDataMap, open_ptd
from blobstore.logical import steps
from blobstore.logical.steps import Plain
from blobstore.memory.digest import Digest, digest
from blobstore.memory.layout import ScalarType

if TYPE_CHECKING:
    from blobstore.runtime import BlobCache

__all__ = ["MergedAdapter", "load_adapter", "merge_adapter"]

_FLOATS = (ScalarType.HALF, ScalarType.BFLOAT16, ScalarType.FLOAT, ScalarType.DOUBLE)


@dataclass(frozen=True)
class _Known:
    """What does not change while a cache lives.

    Attributes:
        foundations: fingerprints that an adapter for this cache may record.
        scales: those that adapters in its files record.
        lora: names of the LoRA tensors of its programs.
    """

    foundations: frozenset[str]
    scales: frozenset[float]
    lora: frozenset[str]


_turns: weakref.WeakKeyDictionary[BlobCache, threading.Lock] = weakref.WeakKeyDictionary()
_known: weakref.WeakKeyDictionary[BlobCache, _Known] = weakref.WeakKeyDictionary()
_known_lock = threading.Lock()


def load_adapter(cache: BlobCache, path: str | os.PathLike[str], *, program_scale: float | None = None) -> int:
    """Exchange the adapter that the programs on a cache run with, in one commit.

    The file's tensors are laid out as the programs store them, so one file serves portable programs, delegated ones,
    and, where lowering recorded their scales, quantized ones. The first call for a cache reads its files, to know their
    foundation; those that record digests are not read whole.

    Args:
        cache: it holds an adapter's tensors already, those that the program was lowered with or others.
        path: an adapter that records its foundation; see `save_adapter`, `bind_adapter`.
        program_scale: what the program multiplies the product with; left out, it must be the adapter's scale as far as
            the cache's files tell. An adapter with another scale has its `lora_b` multiplied, so that the program gives
            what the adapter was made to give.

    Returns:
        The new generation of the cache. `cache.revert()` goes back to the adapter in the cache's file.

    Raises:
        FileAccessError, InvalidFileError, IntegrityError: the file cannot be opened or trusted.
        DataChangedError: a file of the cache was replaced since, so its foundation is not known.
        AdapterError: it is for another foundation, or does not say for which; a tensor has no other beside it; it
            lacks tensors that the programs have, so that those of the last adapter would stay; its scale is another.
            Nothing was changed, here and below.
        KeyNotFoundError: the cache lacks a tensor.
        LayoutError: a tensor has another shape or dtype there.
        UpdateError: values are not finite; a tensor cannot be changed, or not in all programs that are loaded.
        UnsupportedDataError: `cache` is not a cache.
    """
    _check_cache(cache)
    adapter = read_adapter(path)
    known = _know(cache)
    _check_foundation(cache, known, adapter)
    for problem in adapter.unpaired:  # the update tells what is not finite
        raise problem
    factor = _factor(cache, known, adapter, program_scale)
    logical, stored = _values(adapter, factor)
    missing = known.lora - {cache.tensors[name].name if name in cache.tensors else name for name in adapter.contents}
    if missing:
        raise AdapterError(
            f"{adapter.path}: lacks {_list(missing)}, where {cache.name} would keep those of another adapter"
        )
    with _turn(cache), _named(adapter.path):
        if stored and logical:
            raise UpdateError(f"{_list(stored)} are quantized and others are not; lower the adapter as a whole")
        cache._check_reach(logical)
        return cache.update_blobs(stored) if stored else cache.update(logical, finite=True)


class MergedAdapter:
    """An adapter that is in the weights of a cache, as `merge_adapter` gives it.

    Attributes:
        cache: where it is.
        weights: the names of the weights that it changed.
        generation: the commit that changed them.
    """

    def __init__(
        self, cache: BlobCache, weights: tuple[str, ...], generation: int, after: dict[str, Digest], before: Any
    ) -> None:
        self.cache = cache
        self.weights = weights
        self.generation = generation
        self._after = after
        self._before: dict[str, bytes] | None = before
        self._undone = False

    def undo(self) -> int:
        """Give the weights the very bits that they had before, in one commit.

        Several adapters that are merged into the same weights are undone last in, first out; those in different
        weights in any order.

        Returns:
            The new generation.

        Raises:
            AdapterError: it was undone already; or the weights were changed since, by another merge that is not undone
                or by an update. Nothing was changed.
        """
        with _turn(self.cache):
            if self._undone:
                raise AdapterError(f"{self.cache.name}: the adapter is out of {_list(self.weights)} already")
            with self.cache.reading():
                changed = [key for key, bits in self._after.items() if digest(self.cache.get_data(key)) != bits]
            if changed:
                raise AdapterError(
                    f"{self.cache.name}: {_list(changed)} changed after the adapter was merged in generation "
                    f"{self.generation}; undo first what was merged later, or revert"
                )
            if self._before is None:
                generation = self.cache.revert(self._after)
            else:
                generation = self.cache.update_blobs(self._before)
            self._undone, self._before = True, None
            return generation

    def __repr__(self) -> str:
        return f"<MergedAdapter{' (undone)' if self._undone else ''}: {len(self.weights)} weights of {self.cache.name}>"


def merge_adapter(
    cache: BlobCache,
    adapter: str | os.PathLike[str] | Mapping[str, Any],
    alpha: float = 1.0,
    *,
    scale: float | None = None,
    names: Mapping[str, str] | None = None,
    weights: Mapping[str, Any] | None = None,
) -> MergedAdapter:
    """Add an adapter to the weights of a program that has no adapter of its own, in one commit.

    Each adapted weight `W` of shape (out, in) becomes `W + alpha * scale * (lora_b @ lora_a)`, computed in float32 (for
    float64 weights in float64) and rounded once. For the way back, what is kept in memory are the bytes of weights that
    differed from the cache's file before; weights that did not come from there again.

    Between reading the weights and the commit other merges wait; an update of the same weights by another thread or
    process does not, and is for the caller to keep apart.

    Args:
        cache: it owns the weights; those of its `base` are changed through the base.
        adapter: a file that records its foundation, or tensors by name, for which nothing is checked but their shapes.
        alpha: how much of it; 1 is all, a negative number takes away.
        scale: alpha / rank of the adapter; left out, what the file records, and 1 for tensors.
        names: module to the name of its weight, where that is none of `<module>.weight`, `<module>.base.weight` and
            `<module>.base_layer.weight`.
        weights: the float tensors to start from, by the names that the cache has, for those that it holds quantized or
            otherwise combined. They are quantized again, with the scales that are recorded.

    Returns:
        What undoes it.

    Raises:
        FileAccessError, InvalidFileError, IntegrityError: the file cannot be opened or trusted.
        DataChangedError: a file of the cache was replaced since, so its foundation is not known.
        AdapterError: it is for another foundation, or does not say for which; a tensor has no other beside it; there
            are tensors that are not LoRA's and have no place in a weight. Nothing was changed, here and below.
        KeyNotFoundError: a module has no weight in this cache's files.
        LayoutError: the weight has another shape.
        UpdateError: a weight is quantized or combined with others, and `weights` does not have it; or a loaded program
            has it where no update reaches it; or the result is not finite.
        UnsupportedDataError: something is not a tensor, `cache` is not a cache, `names` or `weights` no mapping.
    """
    _check_cache(cache)
    origin, tensors, recorded = _adapter_tensors(cache, adapter)
    for what, given in (("names", names), ("weights", weights)):
        if given is not None and not isinstance(given, Mapping):
            raise UnsupportedDataError(f"{what} is to be a mapping by name, not a {type(given).__qualname__}")
    factor = check_scale(alpha, "alpha") * check_scale(recorded if scale is None else scale)
    pairs, problems = find_pairs({name: value.shape for name, (value, _) in tensors.items()}, origin)
    others = tensors.keys() - {name for pair in pairs for name in (pair.a, pair.b)}
    if not problems and others:
        problems.append(
            AdapterError(f"{origin}: {_list(others)} belong to no pair, so there is no weight to merge them into")
        )
    if not problems and not pairs:
        problems.append(AdapterError(f"{origin}: holds no adapter: no name has a part lora_a or lora_b"))
    for problem in problems:
        raise problem
    with _turn(cache), _named(origin):
        merged: dict[str, Any] = {}
        keys: dict[str, None] = {}
        with cache.reading():
            for pair in pairs:
                name = _weight(cache, pair, names or {})
                value, kind = _start(cache, name, weights or {})
                if (misfit := check_shape(origin, pair, name, value.shape)) is not None:
                    raise misfit
                if name in merged:
                    raise AdapterError(f"two modules have the weight '{name}'")
                total = _add_product((value, kind), factor, tensors[pair.b], tensors[pair.a])
                own = cache.tensors[name].scalar_type if name in cache.tensors else kind
                with np.errstate(over="ignore"):
                    merged[name] = steps.tensor_of(steps.cast(total, own))
                keys.update(dict.fromkeys(_keys(cache, name)))
            before = _before(cache, keys)
        cache._check_reach(merged)
        generation = cache.update(merged, finite=True)
        with cache.reading():
            after = {key: digest(cache.get_data(key)) for key in keys}
        return MergedAdapter(cache, tuple(merged), generation, after, before)


def _check_cache(cache: BlobCache) -> None:
    from blobstore.runtime import check_cache  # needed only by those who have one, so it can be imported

    check_cache(cache, "cache")
    cache.get_num_keys()  # an error if it is closed


def _turn(cache: BlobCache) -> threading.Lock:
    """The lock that is held while this module reads weights and commits what it made of them."""
    with _known_lock:
        return _turns.setdefault(cache, threading.Lock())


def _know(cache: BlobCache) -> _Known:
    with _known_lock:
        known = _known.get(cache)
        if known is None:
            known = _known[cache] = _learn(cache)
        return known


def _learn(cache: BlobCache) -> _Known:
    """Read the files of a cache and of its base: a foundation may be any of them, or all together."""
    maps = _open_files(cache)
    foundations: set[str] = set()
    recorded: set[str] = set()
    scales: set[float] = set()
    for blobs in [*maps, MergedDataMap(maps)] if len(maps) > 1 else maps:
        if any(not is_lora(key) for key in named_tensors(blobs)):
            foundations.add(fingerprint(blobs))
    for blobs in maps:
        if (scale := recorded_scale(blobs)) is not None:
            scales.add(scale)
        if FOUNDATION in blobs.metadata:
            recorded.add(blobs.metadata[FOUNDATION])
    lora = {name for name, tensor in named_tensors(cache, cache.tensors).items() if is_lora(name)}
    # a program may have its foundation inside; then its adapter's file tells
    return _Known(frozenset(foundations or recorded), frozenset(scales), frozenset(lora))


def _open_files(cache: BlobCache) -> list[PtdDataMap]:
    """The files of a cache and of its base.

    Raises:
        DataChangedError: one is not what the cache was opened on any more, so it tells nothing of the cache.
    """
    maps = [open_ptd(path) for path in cache.paths]
    dirty = set(cache.dirty)
    for blobs in maps if cache.mode != "shared" else ():  # there the file is what the cache is
        for key in blobs:
            if key not in dirty and (key not in cache or cache.digest(key) != blobs.digest(key)):
                raise DataChangedError(f"{blobs.name}: the file is not the one that the cache has: '{key}' differs")
    return [*maps, *(_open_files(cache.base) if cache.base is not None else ())]


def _check_foundation(cache: BlobCache, known: _Known, adapter: Adapter) -> None:
    if adapter.foundation is None:
        raise AdapterError(
            f"{adapter.path}: nothing is recorded of the foundation that it was made for; bind_adapter() writes it anew "
            "with that"
        )
    if adapter.foundation not in known.foundations:
        have = " or ".join(sorted(known.foundations)) or "none"
        raise AdapterError(f"{adapter.path}: made for foundation {adapter.foundation}, {cache.name} has {have}")


def _factor(cache: BlobCache, known: _Known, adapter: Adapter, program_scale: float | None) -> float:
    """What `lora_b` has to be multiplied with."""
    if adapter.scale is None:
        return 1.0
    if program_scale is None:
        if known.scales - {adapter.scale}:
            have = ", ".join(map(repr, sorted(known.scales)))
            raise AdapterError(
                f"{adapter.path}: its scale is {adapter.scale!r}, that of the adapter in {cache.name} is {have}; say by "
                "program_scale= what the program multiplies with"
            )
        return 1.0
    number = check_scale(program_scale, "program_scale")
    if number == 0:
        raise AdapterError("program_scale is 0: no adapter has an effect on this program")
    return adapter.scale / number


def _values(adapter: Adapter, factor: float) -> tuple[dict[str, Any], dict[str, memoryview]]:
    """The tensors of an adapter as updates take them: by name, and, if they are quantized, the blobs by key."""
    halves = {pair.b for pair in adapter.pairs}
    logical: dict[str, Any] = {}
    try:
        for name in adapter.contents:
            value = adapter.value(name)
            if factor != 1 and name in halves:
                with np.errstate(over="ignore", invalid="ignore"):  # the update refuses what is not finite
                    value = steps.cast((steps.floats(value) * np.float32(factor), ScalarType.FLOAT), value[1])
            logical[name] = steps.tensor_of(value)
    except UpdateError:
        if factor != 1:
            raise
        return {}, {key: data for key, data in adapter.blobs.items() if not key.startswith(KEY_PREFIX)}
    return logical, {}


def _adapter_tensors(
    cache: BlobCache, adapter: str | os.PathLike[str] | Mapping[str, Any]
) -> tuple[str, dict[str, Plain], float]:
    """What to call it, its tensors, and its scale."""
    if isinstance(adapter, Mapping):
        return "the adapter", {name: steps.plain(tensor) for name, tensor in adapter.items()}, 1.0
    if not isinstance(adapter, str | os.PathLike):
        raise UnsupportedDataError(
            f"expected an adapter's file or tensors by name, found a {type(adapter).__qualname__}"
        )
    file = read_adapter(adapter)
    _check_foundation(cache, _know(cache), file)
    file.check()
    return str(file.path), {name: file.value(name) for name in file.contents}, 1.0 if file.scale is None else file.scale


def _weight(cache: BlobCache, pair: Pair, names: Mapping[str, str]) -> str:
    candidates = [names[pair.module]] if pair.module in names else weight_names(pair.module)
    for name in candidates:
        if name in cache.tensors:
            return cache.tensors[name].name  # tied weights are one, whichever of their names it is
        if name in cache:
            return name
    raise KeyNotFoundError(f"module '{pair.module}' has no weight in {cache.name}: {_list(candidates)}")


def _start(cache: BlobCache, name: str, weights: Mapping[str, Any]) -> Plain:
    """The weight that an adapter is added to."""
    aliases = cache.tensors[name].aliases if name in cache.tensors else ()
    for given in (name, *aliases):
        if given in weights:
            return steps.plain(weights[given])
    try:
        value = cache.tensors.value(name)
        reason = f"it is stored as {value[1].name.lower()}"
    except UpdateError as error:
        value, reason = None, str(error)
    if value is None or value[1] not in _FLOATS:
        raise UpdateError(
            f"an adapter cannot be merged into '{name}' as it is: {reason}; give its float tensor by weights="
        )
    return value


def _keys(cache: BlobCache, name: str) -> list[str]:
    """The blobs that an update of a name changes."""
    if name not in cache.tensors:
        return [name]
    tensor = cache.tensors[name]
    return [key for key in dict.fromkeys((tensor.name, *tensor.aliases, *tensor.keys)) if key in cache]


def _before(cache: BlobCache, keys: Iterable[str]) -> dict[str, bytes] | None:
    """The bytes of blobs; None if all of them are as in the cache's files, so that reverting brings them back."""
    if cache.mode != "shared" and not set(keys) & set(cache.dirty):
        return None
    return {key: bytes(cache.get_data(key)) for key in keys}


def _add_product(weight: Plain, factor: float, b: Plain, a: Plain) -> Plain:
    """`weight + factor * (b @ a)`, not rounded to the weight's dtype yet."""
    kind = ScalarType.DOUBLE if weight[1] is ScalarType.DOUBLE else ScalarType.FLOAT
    base, left, right = (steps.cast(tensor, kind)[0] for tensor in (weight, b, a))
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused when it is committed
        return base + base.dtype.type(factor) * (left @ right), kind


def _list(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in sorted(names))


@contextmanager
def _named(origin: object) -> Iterator[None]:
    """Errors about tensors tell the file that they came from."""
    try:
        yield
    except (AdapterError, KeyNotFoundError, LayoutError, UpdateError) as error:
        if str(error).startswith(f"{origin}: "):
            raise
        raise type(error)(f"{origin}: {error}") from error
