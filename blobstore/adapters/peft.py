"""LoRA adapters of PEFT: `adapter_config.json` and `adapter_model.safetensors`, in and out without loss.

PEFT's tensors are stored as they are, under the names of the program, with zeros around them where the program has more
room; the scale stays a number in the metadata. What PEFT's files say of the tensors beyond that (names, dtypes, ranks) is
kept in the metadata too, so that `export_peft` gives back the tensors that were imported.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from blobstore.adapters.adapter_file import Adapter, read_adapter, save_plain
from blobstore.adapters.foundation import NamedTensor, check_texts, library, named_tensors, native_paths
from blobstore.adapters.lora_names import Pair
from blobstore.adapters.params_json import params_head_dim
from blobstore.adapters.peft_folder import MODEL_NAME, adapter_path, read_peft
from blobstore.adapters.peft_names import PREFIX, Names, fused_parts, rotary_head_dim
from blobstore.adapters.peft_pair import PeftPair
from blobstore.adapters.peft_record import RECORD, PeftOrigin, PeftRecord
from blobstore.adapters.peft_scales import common_scale, multiplied
from blobstore.core.disk.staging import refuse_inputs
from blobstore.core.errors import AdapterError, KeyNotFoundError, LayoutError
from blobstore.core.memory.arrays import DTYPES, Plain, same_tensors
from blobstore.core.memory.dtypes import FLOATS
from blobstore.core.memory.layout import ScalarType
from blobstore.core.memory.mapped_file import Paths, as_path, as_paths

__all__ = ["import_peft"]

_WEIGHTS = (".linear.weight", ".base.weight", ".base_layer.weight", ".weight")


def import_peft(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    foundation: Paths,
    like: str | os.PathLike[str] | None = None,
    params: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    names: Mapping[str, str] | None = None,
    round_values: bool = False,
) -> int:
    """Write an adapter of PEFT as one for the programs on a foundation.

    The numbers are those of PEFT. The scale, alpha / r, or alpha / sqrt(r) with `use_rslora`, is recorded; `load_adapter`
    makes up for another one in a program. If modules have scales of their own, their `lora_b` is multiplied by the
    quotient, and stored as float32 if that is needed to round no number, as for float16 times 1.5; otherwise
    `round_values` must allow it. Scales that differ only because alpha / r was rounded count as one.

    A module that is fused for PEFT and not in the programs, as `qkv_proj` and `gate_up_proj` of Phi, is split by rows:
    each part has the whole `lora_a`, and its own rows of `lora_b`.

    Args:
        source: the folder that PEFT wrote; or its name on Hugging Face's Hub, `user/name` or `user/name@revision`, if it is in
            the local cache of `huggingface_hub`.
        target: the .ptd to write; an existing one is replaced.
        foundation: the `.ptd` of the programs, or several that are used together. Its names may be those of Hugging
            Face's model or of Llama's checkpoints.
        like: an adapter of the programs, such as the one that was written when they were lowered. The new one then has
            the same tensors: smaller ranks and missing modules are filled up with zeros, and numbers get its dtypes.
            Without it, the file has the ranks, modules and dtypes of PEFT, which `load_adapters` and `merge_adapter` take.
        params: the `params.json` that a Llama was exported with, or its contents. It decides whether the rows of q and k
            are reordered (see `blobstore.adapters.peft_names`). By default the tables of the rotary embedding in the
            foundation decide.
        names: maps modules of PEFT, without `base_model.model.`, to modules of the program, for those that are not found.
        round_values: allow numbers to be rounded: to the dtypes of `like`, and where modules have scales of their own.

    Returns:
        The size of the file in bytes.

    Raises:
        FileAccessError, InvalidFileError, IntegrityError: a file cannot be opened, trusted or written.
        AdapterError: something in PEFT's files cannot be honoured, and is named: a field of the configuration, a tensor,
            a rank that is too large, or numbers that would be rounded; or the order of the rows of q and k is not known.
        UnsupportedDataError: a tensor has another dtype than a float, or `names` does not map str to str.
        KeyNotFoundError: the programs have no such module, or PEFT's files have none of that name in `names`.
        LayoutError: a weight of the foundation, or a tensor of `like`, has another shape.
        UpdateError: a tensor has infinities or NaN.
        OutputPathError: the target is one of the inputs.
        MissingDependencyError: the native package is not installed.
    """
    folder, output = adapter_path(source), as_path(target)
    files = as_paths(foundation)
    refuse_inputs([output], [*files, *([] if like is None else [as_path(like)])])
    given = check_texts(names, "names")
    told = None if params is None else params_head_dim(params)  # here, as it may be refused before anything is read
    adapter = read_peft(folder)
    pairs = adapter.pairs
    given = _without_prefix(given, pairs, folder)
    base = _Base(files, told)
    room = base if like is None else _Template(read_adapter(like))
    # The file of an adapter has one scale; what other modules need goes into their lora_b.
    scale, factors = common_scale(pair.scale for pair in pairs)
    record = PeftRecord(dict(adapter.origin), {})
    tensors: dict[str, Plain] = {}
    for module, pair, first in _placed(pairs, given, room, folder):
        # Two modules of PEFT may be tied in the program, and only one adapter can be there.
        if module in record.modules:
            raise AdapterError(
                f"{folder}: two modules of PEFT are module '{module}' of the program, one is '{pair.module}'"
            )
        base.check_product(folder, module, pair, known=room is not base)
        head_dim = rotary_head_dim(folder, module, pair.module, pair.b[0].shape[0], lambda: base.head_dim, base.name)
        factor = factors[pair.scale]
        kinds = (pair.a[1], pair.b[1])
        record.modules[module] = PeftOrigin(pair.a_key, pair.b_key, pair.rank, kinds, factor, head_dim, first)
        b = multiplied(pair.ordered(head_dim), factor, rounded=round_values) if factor else None
        if b is None:
            way_out = "; allow that with round_values=True (--round)" if factor else ", which is out of range"
            raise AdapterError(
                f"{folder}: '{pair.b_key}': rank_pattern and alpha_pattern give module '{pair.module}' the scale "
                f"{pair.scale!r}, others have {scale!r}; an adapter's file has one scale, and numbers would be rounded if "
                f"they made up for the quotient{way_out}"
            )
        tensors |= room.filled(folder, module, pair, b, round_values)
    metadata = {RECORD: record.to_json()}
    return save_plain(output, room.complete(tensors), foundation=files, scale=scale, metadata=metadata)


def _without_prefix(names: Mapping[str, str], pairs: Iterable[PeftPair], source: Path) -> dict[str, str]:
    """The names that the user gives for modules of PEFT, all of which must be there."""
    given = {name.removeprefix(PREFIX): module for name, module in names.items()}
    known = {name for pair in pairs for name in (pair.module, *fused_parts(pair.module))}
    if unknown := given.keys() - known:
        raise KeyNotFoundError(f"{source}: names has '{min(unknown)}', but {MODEL_NAME} has no such module")
    return given


def _placed(
    pairs: Iterable[PeftPair], given: Mapping[str, str], room: _Base | _Template, source: Path
) -> Iterator[tuple[str, PeftPair, int]]:
    """The modules of the program, each with its pair, and where its rows begin in a fused module of PEFT."""
    names = Names(room.modules, room.name)

    def in_program(module: str) -> str:
        return given[module] if module in given else names.find(module)

    for pair in pairs:
        parts = fused_parts(pair.module)
        # A program that has the fused module itself takes it whole.
        if not parts or pair.module in given or names.has(pair.module):
            yield in_program(pair.module), pair, 0
            continue
        modules = [in_program(part) for part in parts]
        rows, together = [room.rows_of(module) for module in modules], pair.b[0].shape[0]
        if sum(rows) != together:
            listed = " + ".join(map(str, rows))
            raise LayoutError(
                f"{source}: '{pair.b_key}' gives {together} features, and its parts in the program {listed}"
            )
        for module, part, count, end in zip(modules, parts, rows, itertools.accumulate(rows), strict=True):
            yield module, replace(pair.part(end - count, count), module=part), end - count


class _Base:
    """What a foundation says about the weights of its modules; `told` is the size of a head, if the user gave it.

    Without a template, an adapter gets its tensors as PEFT has them.
    """

    def __init__(self, files: list[Path], told: int | None) -> None:
        *_, rows, by_tables = library().describe_foundation(native_paths(files))
        self.name = " + ".join(map(str, files))
        self.head_dim: int | None = by_tables if told is None else told  # as `params_head_dim`; None without tables
        self.modules: dict[str, NamedTensor] = {}
        for tensor in named_tensors(rows).values():
            for name, end in itertools.product((tensor.name, *tensor.aliases), _WEIGHTS):
                # LoRA of convolutions is written in another shape, and is not supported.
                if name.endswith(end) and len(tensor.sizes) == 2:
                    self.modules.setdefault(name.removesuffix(end), tensor)

    def rows_of(self, module: str) -> int:
        """How many features a module gives; 0 if its weight is not here."""
        weight = self.modules.get(module)
        return weight.sizes[0] if weight is not None else 0

    def check_product(self, source: Path, module: str, pair: PeftPair, *, known: bool) -> None:
        """Raise LayoutError unless the weight of a module has the shape of the pair's product, and KeyNotFoundError if
        there is no such weight and the module is not known otherwise."""
        weight = self.modules.get(module)
        if weight is None and not known:
            raise KeyNotFoundError(f"{source}: module '{module}' for '{pair.module}' is not in {self.name}")
        product = (pair.b[0].shape[0], pair.a[0].shape[1])
        if weight is not None and weight.sizes != product:
            raise LayoutError(
                f"{source}: '{pair.b_key}' and '{pair.a_key}' make {list(product)}, but '{weight.name}' in {self.name} is "
                f"{list(weight.sizes)}"
            )

    def filled(self, _source: Path, module: str, pair: PeftPair, b: Plain, _round_values: bool) -> dict[str, Plain]:
        """The tensors of a module."""
        return {f"{module}.lora_a.weight": pair.a, f"{module}.lora_b.weight": b}

    def complete(self, tensors: dict[str, Plain]) -> dict[str, Plain]:
        """All tensors of the adapter."""
        return tensors


class _Template:
    """The adapter that the programs were lowered with: what a new one must have."""

    def __init__(self, adapter: Adapter) -> None:
        adapter.check()
        self.name = str(adapter.path)
        self.modules: dict[str, Pair] = {pair.module: pair for pair in adapter.pairs}
        self._kinds = {name: tensor.scalar_type for name, tensor in adapter.contents.items()}
        halves = {name for pair in adapter.pairs for name in (pair.a, pair.b)}
        if others := [name for name in adapter.contents if name not in halves]:
            listed = ", ".join(map(repr, others))
            raise AdapterError(f"{adapter.path}: the programs also take {listed} from an adapter, which PEFT's has not")
        for name, kind in self._kinds.items():
            if kind not in FLOATS:
                raise AdapterError(f"{adapter.path}: '{name}' is {kind.name.lower()}, and adapters are floats")

    def rows_of(self, module: str) -> int:
        """How many features a module gives; 0 if the programs have no adapter there."""
        return self.modules[module].out_features if module in self.modules else 0

    def filled(self, source: Path, module: str, pair: PeftPair, b: Plain, round_values: bool) -> dict[str, Plain]:
        """The tensors of a module, with zeros up to the rank that the programs have."""
        if module not in self.modules:
            raise AdapterError(f"{source}: module '{pair.module}': the programs have no adapter at '{module}'")
        room = self.modules[module]
        have = (pair.a[0].shape[1], b[0].shape[0])
        if have != (room.in_features, room.out_features):
            raise LayoutError(
                f"{source}: '{pair.a_key}' takes {have[0]} and '{pair.b_key}' gives {have[1]} features, in {self.name} they "
                f"are {room.in_features} and {room.out_features}"
            )
        if pair.rank > room.rank:
            raise AdapterError(
                f"{source}: module '{pair.module}' has rank {pair.rank}, but the programs have room for {room.rank} only"
            )
        more = room.rank - pair.rank
        wide = (np.pad(pair.a[0], ((0, more), (0, 0))), pair.a[1]), (np.pad(b[0], ((0, 0), (0, more))), b[1])
        return {
            name: self._as_stored(source, key, name, one, round_values)
            for name, key, one in zip((room.a, room.b), (pair.a_key, pair.b_key), wide, strict=True)
        }

    def complete(self, tensors: Mapping[str, Plain]) -> dict[str, Plain]:
        """All tensors that the programs take, in the order of the template; missing ones are zero."""
        complete: dict[str, Plain] = {}
        for room in self.modules.values():
            shapes = {room.a: (room.rank, room.in_features), room.b: (room.out_features, room.rank)}
            for name, sizes in shapes.items():
                complete[name] = tensors[name] if name in tensors else _zeros(sizes, self._kinds[name])
        return complete

    def _as_stored(self, source: Path, key: str, name: str, tensor: Plain, round_values: bool) -> Plain:
        from blobstore.logical.steps import cast

        kind = self._kinds[name]
        made = cast(tensor, kind)
        # Narrowing may well be harmless, but only the user knows.
        if not round_values and not same_tensors(cast(made, tensor[1]), tensor):
            raise AdapterError(
                f"{source}: '{key}' is {tensor[1].name.lower()}, and would be rounded to the {kind.name.lower()} of '{name}'; "
                "allow that with round_values=True (--round)"
            )
        return made


def _zeros(sizes: tuple[int, ...], kind: ScalarType) -> Plain:
    return np.zeros(sizes, DTYPES[kind]), kind
