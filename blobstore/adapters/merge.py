"""Merging adapters into the weights of a cache, and taking them out again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from blobstore.adapters.adapter_file import check_scale, native_tensors
from blobstore.adapters.foundation import check_texts, library
from blobstore.adapters.on_cache import native_tensors_of
from blobstore.adapters.peft_folder import adapter_path
from blobstore.core.errors import UnsupportedDataError
from blobstore.core.reprs import count, line

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

    def __init__(self, cache: BlobCache, native: Any) -> None:
        self.cache = cache
        self.weights: tuple[str, ...] = tuple(native.weights)
        self.generation = int(native.generation)
        self._native = native

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
        return int(self._native.undo())

    def __repr__(self) -> str:
        undone = "undone" if self._native.undone else ""
        return line("MergedAdapter on", self.cache._title(), count(len(self.weights), "weight"), undone)


def merge_adapter(
    cache: BlobCache,
    adapter: str | os.PathLike[str] | Mapping[str, Any],
    alpha: float = 1.0,
    *,
    scale: float | None = None,
    names: Mapping[str, str] | None = None,
    weights: Mapping[str, Any] | None = None,
    tied: bool = False,
) -> MergedAdapter:
    """Add an adapter to the weights of programs that have no adapter of their own, in one commit.

    Each adapted weight `W` of shape (out, in) becomes `W + alpha * scale * (lora_b @ lora_a)`, computed in float32 (in
    float64 for float64 weights) and rounded once. To undo it, the previous bytes are kept in memory for weights that
    already differed from the cache's file; all other weights are restored from the file.

    Other merges wait from the reading of the weights until the commit. An update of the same weights by another thread
    or process does not wait; the caller must prevent it.

    Args:
        cache: must own the weights; weights of its `base` are changed through the base.
        adapter: a file that records its foundation; a folder of PEFT, or its name on the Hub, as for `load_adapter`; or
            tensors by name, of which only the shapes are checked.
        alpha: how much of the adapter to add: 1 adds all of it, a negative number subtracts.
        scale: alpha / rank of the adapter; the default is what the file records, and 1 for tensors.
        names: maps modules, in a folder those of PEFT, to the names of their weights, for those other than `<module>.weight`,
            `<module>.linear.weight`, `<module>.base.weight` and `<module>.base_layer.weight`.
        weights: maps names in the cache to the float tensors to start from, for weights that the cache stores quantized
            or combined with others. They are quantized again with the recorded scales.
        tied: also add the adapter to a weight that the model uses in several places, such as an embedding that is tied to
            `lm_head`: it then changes in all of them, although the adapter was trained for one.

    Returns:
        An object whose `undo` restores the weights.

    Raises:
        FileAccessError, InvalidFileError, IntegrityError: the file cannot be opened or trusted.
        DataChangedError: a file of the cache was overwritten in place after it was opened, so its foundation is
            unknown.
        AdapterError: the adapter is for another foundation or does not record one; a tensor of a pair is missing; there are
            tensors that are not LoRA's, which cannot be merged; or the model uses a weight in other places, too, and `tied`
            does not allow that. Nothing was changed; the same holds for all errors below.
        KeyNotFoundError: a module has no weight in this cache's files.
        LayoutError: a weight has another shape.
        UpdateError: a weight is quantized or combined with others, and `weights` does not have it; a loaded program has
            the weight where no update reaches it; or the result has infinities or NaN.
        UnsupportedDataError: a value is not a tensor, `cache` is not a `BlobCache`, or `names` or `weights` is not a
            mapping.
    """
    tensors = native_tensors_of(cache)
    source: bytes | list[Any]
    if isinstance(adapter, Mapping):
        source = native_tensors(adapter)
    elif isinstance(adapter, str | os.PathLike):
        source = os.fsencode(adapter_path(adapter))
    else:
        raise UnsupportedDataError(
            f"expected an adapter's file or tensors by name, found a {type(adapter).__qualname__}"
        )
    if weights is not None and not isinstance(weights, Mapping):
        raise UnsupportedDataError(f"weights must be a mapping by name, not a {type(weights).__qualname__}")
    options = (
        check_scale(alpha, "alpha"),
        None if scale is None else check_scale(scale),
        list(check_texts(names, "names").items()),
        native_tensors({name: one for name, one in (weights or {}).items() if name in cache.tensors or name in cache}),
        bool(tied),
    )
    return MergedAdapter(cache, library().merge_adapter(tensors, source, *options))
