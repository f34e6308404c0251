"""Merging adapters into the weights of a cache, and taking them out again."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from blobstore.adapters.adapter_file import check_scale, read_adapter
from blobstore.adapters.fit import check_shape
from blobstore.adapters.lora_names import Pair, find_pairs, no_adapter, quoted, raise_first, weight_names
from blobstore.adapters.on_cache import check_foundation, check_open_cache, named_origin, turn
from blobstore.errors import AdapterError, KeyNotFoundError, UnsupportedDataError, UpdateError
from blobstore.logical import steps
from blobstore.logical.steps import Plain
from blobstore.memory.digest import Digest, digest
from blobstore.memory.dtypes import FLOATS
from blobstore.memory.layout import ScalarType

if TYPE_CHECKING:
    from blobstore.runtime import BlobCache

__all__ = ["MergedAdapter", "merge_adapter"]


class MergedAdapter:
    """An adapter that `merge_adapter` added to the weights of a cache.

    Attributes:
        cache: the cache.
        weights: the names of the weights that were changed.
        generation: the generation of the commit that changed them.
    """

    def __init__(
        self,
        cache: BlobCache,
        weights: tuple[str, ...],
        generation: int,
        after: dict[str, Digest],
        before: dict[str, bytes] | None,
    ) -> None:
        self.cache = cache
        self.weights = weights
        self.generation = generation
        self._after = after
        self._before = before  # None if reverting restores them
        self._undone = False

    def undo(self) -> int:
        """Restore the exact bytes that the weights had before, in one commit.

        Adapters that were merged into the same weights must be undone in reverse order, those in different weights in
        any order.

        Returns:
            The new generation.

        Raises:
            AdapterError: the adapter was undone already, or the weights were changed since by an update or by another
                merge that is not undone. Nothing was changed.
        """
        with turn(self.cache):
            if self._undone:
                raise AdapterError(f"{self.cache.name}: the adapter was already taken out of {quoted(self.weights)}")
            with self.cache.reading():
                changed = [key for key, found in self._after.items() if digest(self.cache.get_data(key)) != found]
            if changed:
                raise AdapterError(
                    f"{self.cache.name}: {quoted(changed)} changed after the adapter was merged in generation "
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
    """Add an adapter to the weights of programs that have no adapter of their own, in one commit.

    Each adapted weight `W` of shape (out, in) becomes `W + alpha * scale * (lora_b @ lora_a)`, computed in float32 (in
    float64 for float64 weights) and rounded once. To undo it, the previous bytes are kept in memory for weights that
    already differed from the cache's file; all other weights are restored from the file.

    Other merges wait from the reading of the weights until the commit. An update of the same weights by another thread
    or process does not wait; the caller must prevent it.

    Args:
        cache: must own the weights; weights of its `base` are changed through the base.
        adapter: a file that records its foundation; or tensors by name, of which only the shapes are checked.
        alpha: how much of the adapter to add: 1 adds all of it, a negative number subtracts.
        scale: alpha / rank of the adapter; the default is what the file records, and 1 for tensors.
        names: maps modules to the names of their weights, for those other than `<module>.weight`,
            `<module>.base.weight` and `<module>.base_layer.weight`.
        weights: maps names in the cache to the float tensors to start from, for weights that the cache stores quantized
            or combined with others. They are quantized again with the recorded scales.

    Returns:
        An object whose `undo` restores the weights.

    Raises:
        FileAccessError, InvalidFileError, IntegrityError: the file cannot be opened or trusted.
        DataChangedError: a file of the cache was overwritten in place after it was opened, so its foundation is
            unknown.
        AdapterError: the adapter is for another foundation or does not record one; a tensor of a pair is missing; or
            there are tensors that are not LoRA's, which cannot be merged. Nothing was changed; the same holds for all
            errors below.
        KeyNotFoundError: a module has no weight in this cache's files.
        LayoutError: a weight has another shape.
        UpdateError: a weight is quantized or combined with others, and `weights` does not have it; a loaded program has
            the weight where no update reaches it; or the result has infinities or NaN.
        UnsupportedDataError: a value is not a tensor, `cache` is not a `BlobCache`, or `names` or `weights` is not a
            mapping.
    """
    check_open_cache(cache)
    origin, tensors, recorded = _read(cache, adapter)
    for what, given in (("names", names), ("weights", weights)):
        if given is not None and not isinstance(given, Mapping):
            raise UnsupportedDataError(f"{what} must be a mapping by name, not a {type(given).__qualname__}")
    factor = check_scale(alpha, "alpha") * check_scale(recorded if scale is None else scale)
    pairs = _checked_pairs(origin, tensors)
    with turn(cache), named_origin(origin):
        with cache.reading():
            merged = {}
            for pair in pairs:
                name = _find_weight(cache, pair, names or {})
                if name in merged:
                    raise AdapterError(f"two modules have the weight '{name}'")
                start = _start(cache, name, weights or {})
                if (misfit := check_shape(origin, pair, name, start[0].shape)) is not None:
                    raise misfit
                total = _add_product(start, factor, tensors[pair.b], tensors[pair.a])
                own = cache.tensors[name].scalar_type if name in cache.tensors else start[1]
                with np.errstate(over="ignore"):
                    merged[name] = steps.tensor_of(steps.cast(total, own))
            keys = list(dict.fromkeys(key for name in merged for key in _keys(cache, name)))
            before = _before(cache, keys)
        cache.tensors.check_reach(merged)
        generation = cache.update(merged, finite=True)
        with cache.reading():
            after = {key: digest(cache.get_data(key)) for key in keys}
        return MergedAdapter(cache, tuple(merged), generation, after, before)


def _read(cache: BlobCache, adapter: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[str, dict[str, Plain], float]:
    """The adapter's name in messages, its tensors, and its scale."""
    if isinstance(adapter, Mapping):
        return "the adapter", {name: steps.plain(tensor) for name, tensor in adapter.items()}, 1.0
    if not isinstance(adapter, str | os.PathLike):
        raise UnsupportedDataError(
            f"expected an adapter's file or tensors by name, found a {type(adapter).__qualname__}"
        )
    file = read_adapter(adapter)
    check_foundation(cache, file)
    file.check()
    return str(file.path), {name: file.value(name) for name in file.contents}, 1.0 if file.scale is None else file.scale


def _checked_pairs(origin: str, tensors: Mapping[str, Plain]) -> list[Pair]:
    """The pairs among tensors, which must all belong to one."""
    pairs, problems = find_pairs({name: value.shape for name, (value, _) in tensors.items()}, origin)
    raise_first(problems)
    others = tensors.keys() - {name for pair in pairs for name in (pair.a, pair.b)}
    if others:
        raise AdapterError(f"{origin}: {quoted(others)} belong to no pair, so there is no weight to merge them into")
    if not pairs:
        raise no_adapter(origin)
    return pairs


def _find_weight(cache: BlobCache, pair: Pair, names: Mapping[str, str]) -> str:
    """The name of the weight that a pair adapts."""
    candidates = [names[pair.module]] if pair.module in names else weight_names(pair.module)
    for name in candidates:
        if name in cache.tensors:
            return cache.tensors[name].name  # tied weights are one weight, under any of their names
        if name in cache:
            return name
    raise KeyNotFoundError(f"module '{pair.module}' has no weight in {cache.name}: {quoted(candidates)}")


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
    if value is None or value[1] not in FLOATS:
        raise UpdateError(
            f"an adapter cannot be merged into '{name}' as it is: {reason}; give its float tensor by weights="
        )
    return value


def _add_product(weight: Plain, factor: float, b: Plain, a: Plain) -> Plain:
    """`weight + factor * (b @ a)`, not yet rounded to the weight's dtype."""
    kind = ScalarType.DOUBLE if weight[1] is ScalarType.DOUBLE else ScalarType.FLOAT
    base, left, right = (steps.cast(tensor, kind)[0] for tensor in (weight, b, a))
    with np.errstate(over="ignore", invalid="ignore"):  # the commit refuses infinities and NaN
        return base + base.dtype.type(factor) * (left @ right), kind


def _keys(cache: BlobCache, name: str) -> list[str]:
    """The keys of the blobs that an update of a name changes."""
    if name not in cache.tensors:
        return [name]
    tensor = cache.tensors[name]
    return [key for key in dict.fromkeys((tensor.name, *tensor.aliases, *tensor.keys)) if key in cache]


def _before(cache: BlobCache, keys: Iterable[str]) -> dict[str, bytes] | None:
    """Copies of blobs; None if none of them is dirty, so that reverting restores them."""
    if cache.mode != "shared" and not set(keys) & set(cache.dirty):
        return None
    return {key: bytes(cache.get_data(key)) for key in keys}
