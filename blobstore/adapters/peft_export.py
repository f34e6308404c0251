"""Adapters on their way to PEFT: tensors as they came in, and the configuration that they need."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from blobstore.adapters.adapter_file import Adapter, read_adapter
from blobstore.adapters.foundation import is_text
from blobstore.adapters.lora_names import Pair
from blobstore.adapters.params_json import params_head_dim
from blobstore.adapters.peft_folder import CONFIG_NAME, MODEL_NAME
from blobstore.adapters.peft_names import PREFIX, are_heads, hf_name, is_rotated, rows_as_hf
from blobstore.adapters.peft_record import RECORD, PeftOrigin, PeftRecord
from blobstore.adapters.peft_scales import divided
from blobstore.core.disk.folders import folders
from blobstore.core.disk.staging import Staging, refuse_inputs
from blobstore.core.errors import AdapterError, InvalidFileError, LayoutError, UnsupportedDataError
from blobstore.core.formats.safetensors import write_safetensors
from blobstore.core.memory.arrays import Plain, raw, same_tensors
from blobstore.core.memory.dtypes import SAFETENSORS
from blobstore.core.memory.layout import ScalarType, TensorLayout
from blobstore.core.memory.mapped_file import as_path

__all__ = ["export_peft"]

_MOST_ALPHA = 1e300
"""Larger ones, also negative ones, are refused when an adapter is read, as they leave no room to calculate with them."""


def export_peft(
    source: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    base_model: str | None = None,
    params: Mapping[str, Any] | str | os.PathLike[str] | None = None,
) -> int:
    """Write an adapter as PEFT does: `adapter_config.json` and `adapter_model.safetensors`.

    The tensors of an adapter of `import_peft` become what was imported, to the bit: names, ranks and dtypes. If it was
    trained since, and uses room that was filled up with zeros, the ranks become those of the program. The configuration is
    made of the tensors and says what PEFT needs to load them: modules, ranks and alphas, with `rank_pattern` and
    `alpha_pattern`; and the base model and the task that were imported. What PEFT uses while training only, such as
    `lora_dropout`, is not kept. Scales stay, up to one unit in the last place: not every scale is alpha divided by a rank.

    Args:
        source: an adapter that records its scale.
        directory: the folder to write to; it is made if it is missing, and the two files are replaced together.
        base_model: what the configuration names as its base; the default is what was imported.
        params: as in `import_peft`, for an adapter that was not imported and has the q or k of a Llama.

    Returns:
        The size of both files in bytes.

    Raises:
        FileAccessError, InvalidFileError, IntegrityError: a file cannot be opened, trusted or written.
        AdapterError: the file records no scale, or one that is too large for an alpha; it has tensors that belong to no
            pair, or is incomplete; or the order of the rows of q and k is not known.
        UpdateError: a tensor is quantized, or has infinities or NaN.
        LayoutError: the rows of q or k are no heads of the size in `params`.
        UnsupportedDataError: `base_model` is not a str, or .safetensors has no name for a dtype.
        OutputPathError: a file of another format is in the way.
        MissingDependencyError: the native package is not installed.
    """
    if not (base_model is None or is_text(base_model)):
        raise UnsupportedDataError(f"base_model must be a str, found {base_model!r}")
    head_dim = None if params is None else params_head_dim(params)
    adapter = read_adapter(source)
    adapter.check()
    if adapter.scale is None:
        raise AdapterError(f"{adapter.path}: records no scale; bind_adapter() adds it")
    halves = {name for pair in adapter.pairs for name in (pair.a, pair.b)}
    if others := [name for name in adapter.contents if name not in halves]:
        raise AdapterError(f"{adapter.path}: {', '.join(map(repr, others))} belong to no pair, which PEFT cannot name")
    record = PeftRecord.of(adapter)
    tensors: dict[str, Plain] = {}
    used: dict[str, tuple[int, float]] = {}
    for (a_key, b_key), parts in _pieces(adapter, record, head_dim).items():
        made = _joined(adapter, parts)
        halves_of_pair = {
            a_key: _narrowed(made.a, made.origin.kinds[0]),
            b_key: _narrowed(made.b, made.origin.kinds[1]),
        }
        # The metadata is text of a file: two of its modules may claim the same keys.
        if tensors.keys() & halves_of_pair.keys() or len(halves_of_pair) != 2:
            raise InvalidFileError(adapter.path, f"the metadata {RECORD} does not fit module '{made.module}'")
        tensors |= halves_of_pair
        used[_module_of(a_key)] = made.a[0].shape[0], adapter.scale * made.factor
    if not tensors:
        raise AdapterError(f"{adapter.path}: all its tensors are zero")
    config = _config(adapter.path, used) | ({} if record is None else record.config)
    if base_model is not None:
        config["base_model_name_or_path"] = base_model
    return _write(as_path(directory), config, tensors, adapter)


def _pieces(adapter: Adapter, record: PeftRecord | None, head_dim: int | None) -> dict[tuple[str, str], list[_Piece]]:
    """What each two keys of PEFT's file consist of."""
    pieces: dict[tuple[str, str], list[_Piece]] = {}
    for pair in adapter.pairs:
        recorded = None if record is None else record.modules.get(pair.module)
        rank = _used_rank(adapter, pair, pair.rank if record is None else 0 if recorded is None else recorded.rank)
        if rank == 0:
            continue  # the program has room for a module that PEFT's adapter has not
        origin = recorded or _new_origin(adapter, pair, rank, head_dim)
        pieces.setdefault((origin.a_key, origin.b_key), []).append(_as_imported(adapter, pair, origin, rank))
    return pieces


@dataclass(frozen=True)
class _Piece:
    """The two tensors of a module of the program on their way out, or of several that are fused in PEFT's model.

    `a` and `b` are in the rank and the order of rows that they came in. They must still be multiplied with `factor`, beside
    the scale of the adapter.
    """

    module: str
    origin: PeftOrigin
    a: Plain
    b: Plain
    factor: float = 1.0

    def divided(self) -> _Piece | None:
        """The piece with the `lora_b` that was imported; None if numbers would be rounded."""
        b = divided(self.b, self.origin.factor)
        return None if b is None else replace(self, b=b, factor=self.origin.factor)


def _as_imported(adapter: Adapter, pair: Pair, origin: PeftOrigin, rank: int) -> _Piece:
    if origin.head_dim and not are_heads(pair.out_features, origin.head_dim):
        raise InvalidFileError(adapter.path, f"the metadata {RECORD} does not fit module '{pair.module}'")
    a, b = (adapter.value(name) for name in (pair.a, pair.b))
    b = (np.ascontiguousarray(b[0][:, :rank]), b[1])
    if origin.head_dim:
        b = (rows_as_hf(b[0], origin.head_dim), b[1])
    return _Piece(pair.module, origin, (np.ascontiguousarray(a[0][:rank]), a[1]), b)


def _joined(adapter: Adapter, pieces: list[_Piece]) -> _Piece:
    """The pieces of one module of PEFT as one. If they were trained apart since, it has the ranks of all.

    Raises:
        InvalidFileError: they are not all of its rows.
    """
    pieces = sorted(pieces, key=lambda piece: piece.origin.first)
    ends = list(itertools.accumulate(piece.b[0].shape[0] for piece in pieces))
    for piece, before in zip(pieces, [0, *ends[:-1]], strict=True):
        if piece.origin.first != before:
            raise InvalidFileError(adapter.path, f"the metadata {RECORD} does not fit module '{piece.module}'")
    pieces = _divided(pieces)
    first = pieces[0]
    if all(same_tensors(piece.a, first.a) for piece in pieces):
        return replace(first, b=(np.concatenate([piece.b[0] for piece in pieces]), first.b[1]))
    if len({(piece.a[0].shape[1], piece.a[1]) for piece in pieces}) != 1:
        raise InvalidFileError(adapter.path, f"the metadata {RECORD} does not fit module '{first.module}'")
    return _with_all_ranks(pieces)


def _divided(pieces: list[_Piece]) -> list[_Piece]:
    """The pieces with the `lora_b` that were imported, in one dtype; as they are if that would round numbers."""
    from blobstore.logical.steps import cast

    exact = [piece for piece in map(_Piece.divided, pieces) if piece is not None]
    if len(exact) < len(pieces):
        exact = pieces
    if len({piece.b[1] for piece in exact}) > 1:  # rounding nothing took more bits in some of them
        exact = [replace(piece, b=cast(piece.b, ScalarType.DOUBLE)) for piece in exact]
    return exact


def _with_all_ranks(pieces: list[_Piece]) -> _Piece:
    """The pieces as one with the ranks of all: `lora_a` below each other, `lora_b` in blocks with zeros around them."""
    first, last = pieces[0], pieces[-1]
    a = np.concatenate([piece.a[0] for piece in pieces])
    wide = np.zeros((last.origin.first + last.b[0].shape[0], a.shape[0]), first.b[0].dtype)
    column = 0
    for piece in pieces:
        rows, rank = piece.b[0].shape
        wide[piece.origin.first : piece.origin.first + rows, column : column + rank] = piece.b[0]
        column += rank
    return replace(first, a=(a, first.a[1]), b=(wide, first.b[1]))


def _used_rank(adapter: Adapter, pair: Pair, rank: int) -> int:
    """The rank without what is filled up with zeros; that of the program if it is not."""
    a, b = (adapter.value(name)[0] for name in (pair.a, pair.b))
    if rank > pair.rank:
        raise InvalidFileError(
            adapter.path, f"module '{pair.module}' has rank {pair.rank}, but was imported with {rank}"
        )
    # +0.0 only, by its bits: import writes no other zero
    filled = not a[rank:].tobytes().strip(b"\0") and not np.ascontiguousarray(b[:, rank:]).tobytes().strip(b"\0")
    return rank if filled else pair.rank


def _narrowed(tensor: Plain, kind: ScalarType) -> Plain:
    """A tensor in the dtype that it was imported from, if no number needs more."""
    from blobstore.logical.steps import cast

    made = cast(tensor, kind)
    return made if same_tensors(cast(made, tensor[1]), tensor) else tensor


def _new_origin(adapter: Adapter, pair: Pair, rank: int, size_of_head: int | None) -> PeftOrigin:
    module = pair.module.removeprefix(PREFIX)
    name = hf_name(module)
    head_dim = 0
    if name != module and is_rotated(module):
        if size_of_head is None:
            raise AdapterError(
                f"{adapter.path}: the rows of module '{pair.module}' lie in another order for PEFT if the program rotates "
                "neighbouring elements; give the params.json of its export as params= (--params)"
            )
        head_dim = size_of_head
        if head_dim and not are_heads(pair.out_features, head_dim):
            raise LayoutError(
                f"{adapter.path}: '{pair.b}' has {pair.out_features} rows, which are no heads of {head_dim}"
            )
    kinds = adapter.value(pair.a)[1], adapter.value(pair.b)[1]
    return PeftOrigin(f"{PREFIX}{name}.lora_A.weight", f"{PREFIX}{name}.lora_B.weight", rank, kinds, 1.0, head_dim)


def _config(path: Path, used: Mapping[str, tuple[int, float]]) -> dict[str, Any]:
    """What PEFT needs to compute with the tensors, of the rank and the scale of each of its modules.

    PEFT takes the first entry of a pattern that matches a module, and sorts them when it saves an adapter again. So each
    entry here matches one module only.
    """
    alphas = {module: _alpha(path, module, scale, rank) for module, (rank, scale) in used.items()}
    most_ranks = Counter(rank for rank, _ in used.values()).most_common(1)[0][0]
    most_alphas = Counter(alphas.values()).most_common(1)[0][0]
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": None,
        "r": most_ranks,
        "lora_alpha": most_alphas,
        "rank_pattern": {_only(module): rank for module, (rank, _) in used.items() if rank != most_ranks},
        "alpha_pattern": {_only(module): alpha for module, alpha in alphas.items() if alpha != most_alphas},
        "target_modules": sorted(used),
        "bias": "none",
        "inference_mode": True,
    }


def _only(module: str) -> str:
    """The expression that matches one module."""
    return "^" + re.sub(r"[^\w-]", lambda match: "\\" + match[0], module)


def _alpha(path: Path, module: str, scale: float, rank: int) -> float | int:
    """The number that gives a scale when PEFT divides it by the rank, or the nearest one."""
    alpha = scale * rank
    if abs(alpha) > _MOST_ALPHA:
        raise AdapterError(
            f"{path}: module '{module}' with scale {scale!r} and rank {rank} needs an alpha of {alpha!r}, expected at most "
            f"{_MOST_ALPHA:g}"
        )
    near = (float(round(alpha)), alpha, math.nextafter(alpha, -math.inf), math.nextafter(alpha, math.inf))
    return _tidy(min(near, key=lambda one: abs(one / rank - scale)))


def _module_of(key: str) -> str:
    """The module of a tensor in PEFT's file, as its configuration names it."""
    return re.sub(r"\.lora_[AB]\.weight\Z", "", key).removeprefix(PREFIX)


def _tidy(number: float) -> float | int:
    """A whole number as PEFT writes it."""
    return int(number) if number.is_integer() and abs(number) < 2**53 else number


def _write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Plain], adapter: Adapter) -> int:
    layouts = {key: TensorLayout(kind, array.shape) for key, (array, kind) in tensors.items()}
    if unknown := [layout for layout in layouts.values() if layout.scalar_type not in SAFETENSORS.values()]:
        raise UnsupportedDataError(f"{adapter.path}: a .safetensors cannot name {unknown[0]}")
    # sorted as PEFT does
    text = json.dumps(dict(sorted(config.items())), indent=2).encode()
    refuse_inputs([folder / MODEL_NAME, folder / CONFIG_NAME], [adapter.path])
    with folders([folder]), Staging() as staging:
        metadata = {"format": "pt"}
        size = write_safetensors(staging, folder / MODEL_NAME, layouts, lambda key: raw(tensors[key][0]), metadata)
        with staging.open(folder / CONFIG_NAME, len(text)) as file:
            file.write(text)
    return size + len(text)
