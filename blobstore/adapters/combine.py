"""Several adapters as one: on a cache while programs run, and as a file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from blobstore.adapters.adapter_file import check_scale, read_adapter, save_plain
from blobstore.adapters.foundation import foundation_fingerprint, library, plain_of
from blobstore.adapters.on_cache import native_tensors_of
from blobstore.adapters.peft_folder import adapter_path
from blobstore.core.disk.staging import refuse_inputs
from blobstore.core.errors import AdapterError, UnsupportedDataError
from blobstore.core.memory.mapped_file import Paths, as_path, as_paths

if TYPE_CHECKING:
    from blobstore.runtime import BlobCache

__all__ = ["Shares", "combine_adapters", "load_adapters", "set_adapter_strengths"]

Path: TypeAlias = "str | os.PathLike[str]"
Shares: TypeAlias = "Iterable[Path | tuple[Path, float]] | Mapping[Path, float]"
"""Adapters, each a path or a pair of a path and how much of it, 1 by default; or a mapping from paths to that."""


def load_adapters(cache: BlobCache, adapters: Shares, *, program_scale: float | None = None) -> int:
    """Run the programs on a cache with the sum of several adapters, in one commit.

    Each has a scale and a strength of its own. Their ranks lie behind each other, so together they must not exceed that of
    the programs. Where no adapter has anything, there are zeros: ranks may be smaller than those of the programs, modules
    may be missing, and without adapters (`[]`) the programs compute what the foundation alone does.

        load_adapters(cache, ["german.ptd", ("polite.ptd", 0.5)])
        set_adapter_strengths(cache, [1, 0.7])
        load_adapters(cache, [])  # none

    Args:
        cache: must already have the tensors of an adapter: that of the lowering or any other.
        adapters: files that record their foundation, or folders of PEFT, each with its strength: 1 is what it was trained
            for.
        program_scale: the factor that the programs multiply the products with. The default is the scale that the cache's
            files record, or else that of the adapters, if it is one.

    Returns:
        The new generation of the cache. `cache.revert()` restores the adapter in the cache's file.

    Raises:
        FileAccessError, InvalidFileError, IntegrityError: a file cannot be opened or trusted.
        DataChangedError: a file of the cache was overwritten in place after it was opened, so its foundation is
            unknown.
        AdapterError: an adapter is for another foundation or does not record one; it has tensors that belong to no pair;
            the ranks together are too large; or the scale of the programs is not known. Nothing was changed; the same
            holds for all errors below.
        KeyNotFoundError: the programs lack a module.
        LayoutError: a module has other features.
        UpdateError: a tensor has infinities or NaN, is stored quantized, or does not reach all loaded programs.
        UnsupportedDataError: `cache` is not a `BlobCache`, or `adapters` is something else.
    """
    tensors = native_tensors_of(cache)
    scale = None if program_scale is None else check_scale(program_scale, "program_scale")
    return int(library().load_adapters(tensors, _rows(adapters), scale))


def set_adapter_strengths(cache: BlobCache, strengths: Iterable[float]) -> int:
    """Change how much of each adapter that `load_adapters` loaded last the programs use, in one commit.

    Only each `lora_b` is written, from the files, which stay mapped. So repeated changes add up no rounding.

    Args:
        cache: the cache that the adapters were loaded into.
        strengths: one number for each adapter, in the order of `load_adapters`.

    Returns:
        The new generation of the cache.

    Raises:
        AdapterError: no adapter was loaded, there are more or fewer of them, tensors were changed or reverted since, a
            strength is not a finite number, or the foundation is another one now, for which only strength 0 is possible. Nothing was changed; the same holds for all errors below.
        UpdateError: the result has infinities or NaN.
        FileAccessError, IntegrityError: a file was truncated or overwritten in place.
        UnsupportedDataError: `cache` is not a `BlobCache`.
    """
    tensors = native_tensors_of(cache)
    numbers = _listed(strengths, "one strength for each adapter")
    return int(library().set_adapter_strengths(tensors, [check_scale(one, "strength") for one in numbers]))


def combine_adapters(adapters: Shares, target: Path, *, foundation: Paths, like: Path | None = None) -> int:
    """Write several adapters as one, which adds what each of them adds.

    Args:
        adapters: files that record their foundation and scale, each with its strength; without `like` at least one.
        target: the file to write; an existing one is replaced.
        foundation: the `.ptd` that all are for, or several that are used together.
        like: an adapter of the programs. The result then has the same tensors and scale, with zeros where no adapter has
            anything. Without it, the result has the scale of the first, and for each module the sum of the ranks.

    Returns:
        The size of the file in bytes.

    Raises:
        AdapterError: an adapter is for another foundation, or records none or no scale; it has tensors that belong to no
            pair; or the ranks together exceed that of `like`.
        KeyNotFoundError: `like` lacks a module.
        LayoutError: a module has other features.
        UpdateError: a tensor has infinities or NaN, or is stored quantized.
        OutputPathError: the target is one of the inputs.
        UnsupportedDataError: `adapters` is something else.
        FileAccessError, InvalidFileError, IntegrityError: a file cannot be opened, trusted or written.
    """

    rows, files = _rows(adapters), as_paths(foundation)
    paths = [as_path(path) for path, _ in rows]
    refuse_inputs([as_path(target)], [*paths, *files, *([] if like is None else [as_path(like)])])
    if like is None and not rows:
        raise AdapterError("there is no adapter to combine; for one that changes nothing, give like=")
    expected = foundation_fingerprint(files)
    for path in paths:
        recorded = read_adapter(path).foundation
        if recorded != expected:
            made = (
                "records no foundation; bind_adapter() adds it"
                if recorded is None
                else f"made for foundation {recorded}"
            )
            raise AdapterError(f"{path}: {made}, but {' + '.join(map(str, files))} is {expected}")
    scale, made_tensors = library().combine_adapters(rows, None if like is None else os.fsencode(as_path(like)))
    tensors = {name: plain_of(tensor) for name, tensor in made_tensors}
    return save_plain(target, tensors, foundation=files, scale=scale, metadata={})


def _rows(adapters: Shares) -> list[tuple[bytes, float]]:
    """Paths and strengths as the native module takes them."""
    given = adapters.items() if isinstance(adapters, Mapping) else adapters
    rows = []
    for one in _listed(given, "a list of adapters, or of pairs of an adapter and a strength"):
        path, strength = one if isinstance(one, tuple) and len(one) == 2 else (one, 1.0)
        rows.append((os.fsencode(adapter_path(path)), check_scale(strength, "strength")))
    return rows


def _listed(values: Any, expected: str) -> list[Any]:
    """What can be iterated over, as a list. Some types say that they can, and raise an error."""
    if not isinstance(values, str | bytes | os.PathLike):
        try:
            return list(values)
        except (TypeError, ValueError):
            pass
    raise UnsupportedDataError(f"expected {expected}, found {values!r}")
