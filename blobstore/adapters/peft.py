"""LoRA adapters of PEFT: `adapter_config.json` and `adapter_model.safetensors`, in and out without loss.

PEFT's tensors are stored as they are, under the names of the program, with zeros around them where the program has more
room; the scale stays a number in the metadata. What PEFT's files say beyond that (names, dtypes, ranks, the configuration)
is kept in the metadata too, so that `export_peft` gives back what was imported.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from blobstore.adapters.adapter_file import Adapter, read_adapter, save_plain
from blobstore.adapters.fit import inspect_adapters
from blobstore.adapters.foundation import NamedTensor, check_texts, is_text
from blobstore.adapters.lora_names import Pair
from blobstore.adapters.peft_config import CONFIG_NAME, MOST_ALPHA, PeftConfig, read_config
from blobstore.adapters.peft_names import (
    PREFIX,
    Names,
    are_heads,
    hf_name,
    is_rotated,
    params_head_dim,
    rotary_head_dim,
    rows_as_hf,
    rows_as_llama,
)
from blobstore.core.constants import PEFT_KEY
from blobstore.core.disk.folders import folders
from blobstore.core.disk.kinds import Format
from blobstore.core.disk.staging import Staging, refuse_inputs
from blobstore.core.errors import (
    AdapterError,
    InvalidFileError,
    KeyNotFoundError,
    LayoutError,
    UnsupportedDataError,
    UpdateError,
)
from blobstore.core.formats.ptd.reader import open_ptd
from blobstore.core.formats.safetensors import SafetensorsDataMap, write_safetensors
from blobstore.core.memory.arrays import DTYPES, Plain, raw, same_tensors
from blobstore.core.memory.dtypes import FLOATS, SAFETENSORS
from blobstore.core.memory.layout import ScalarType, TensorLayout
from blobstore.core.memory.mapped_file import Paths, as_path, as_paths

__all__ = ["MODEL_NAME", "PeftPair", "export_peft", "import_peft", "read_peft"]

MODEL_NAME = "adapter_model.safetensors"
_RECORD = PEFT_KEY
"""Metadata of an adapter that was imported: JSON, see `_Record`."""

_MOST_EXPONENT = 1000  # of a factor, so that its reciprocal is a float too
_WEIGHTS = (".linear.weight", ".base.weight", ".base_layer.weight", ".weight")
_HALF = re.compile(r"(.+)\.lora_([AB])\.weight", re.DOTALL)
_STRAY = {
    ".lora_embedding_": "an adapter of an embedding",
    ".lora_magnitude_vector": "the magnitude of use_dora",
    ".lora_B.bias": "the bias of lora_bias",
    ".base_layer.": "a weight or a bias of the base model",
    ".modules_to_save": "a module of modules_to_save",
}


@dataclass(frozen=True)
class PeftPair:
    """The two tensors of a module in PEFT's files.

    Attributes:
        module: what Hugging Face's model calls the module.
        a, b: the tensors, of shapes (rank, in) and (out, rank).
        a_key, b_key: their keys in the file.
        scale: the factor of their product.
    """

    module: str
    a: Plain
    b: Plain
    a_key: str
    b_key: str
    scale: float

    @property
    def rank(self) -> int:
        """The rank."""
        return int(self.a[0].shape[0])


def read_peft(directory: str | os.PathLike[str]) -> tuple[PeftConfig, list[PeftPair]]:
    """Read and check an adapter that PEFT saved.

    Args:
        directory: the folder with `adapter_config.json` and `adapter_model.safetensors`.

    Returns:
        The configuration and the pairs, in the order of the file. The arrays are views of the mapped file.

    Raises:
        FileAccessError, InvalidFileError: a file cannot be opened, or is malformed.
        AdapterError: a field of the configuration or a tensor cannot be honoured; it is named.
        LayoutError: the shapes of a pair do not match.
        UnsupportedDataError: a tensor has another dtype than a float.
        UpdateError: a tensor has infinities or NaN.
    """
    folder = as_path(directory)
    config = read_config(folder / CONFIG_NAME)
    path = folder / MODEL_NAME
    if not path.exists() and (folder / "adapter_model.bin").exists():
        raise AdapterError(
            f"{folder}: adapter_model.bin is a pickle, which may run code; save it with safe_serialization=True"
        )
    data_map = SafetensorsDataMap(path)
    halves: dict[str, dict[str, str]] = {}
    for key in data_map:
        match = _HALF.fullmatch(key)
        if match is None:
            # Whatever is not understood is refused: an adapter without its DoRA vectors, say, computes something else.
            what = next((what for part, what in _STRAY.items() if part in key), "no part of a LoRA pair")
            raise AdapterError(f"{path}: '{key}' cannot be honoured: it is {what}")
        # Some files have the names without the prefix.
        both = halves.setdefault(match[1].removeprefix(PREFIX), {})
        if match[2] in both:
            raise AdapterError(f"{path}: '{both[match[2]]}' and '{key}' belong to one module")
        both[match[2]] = key
    if not halves:
        raise AdapterError(f"{path}: there are no LoRA tensors")
    return config, [_read_pair(data_map, config, module, both) for module, both in halves.items()]


def _read_pair(data_map: SafetensorsDataMap, config: PeftConfig, module: str, keys: Mapping[str, str]) -> PeftPair:
    for half, other in ("AB", "BA"):
        if half not in keys:
            raise AdapterError(f"{data_map.name}: '{keys[other]}' has no lora_{half} beside it")
    a, b = (_plain(data_map, keys[half]) for half in "AB")
    if a[0].ndim != 2 or b[0].ndim != 2 or a[0].shape[0] != b[0].shape[1]:
        raise LayoutError(
            f"{data_map.name}: '{keys['A']}' {list(a[0].shape)} and '{keys['B']}' {list(b[0].shape)} must be matrices with "
            "one rank"
        )
    rank = int(a[0].shape[0])
    return PeftPair(module, a, b, keys["A"], keys["B"], config.scale(module, rank))


def _plain(data_map: SafetensorsDataMap, key: str) -> Plain:
    from blobstore.logical.steps import check_finite  # here, because it imports the native module

    layout = data_map.get_tensor_layout(key)
    if layout is None or layout.scalar_type not in FLOATS:
        raise UnsupportedDataError(f"{data_map.name}: '{key}' has dtype {data_map.dtypes[key]}, expected a float")
    tensor = np.frombuffer(data_map.get_data(key), DTYPES[layout.scalar_type]).reshape(layout.sizes), layout.scalar_type
    if not check_finite(tensor):
        raise UpdateError(f"{data_map.name}: '{key}' has values that are not finite")
    return tensor


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
    quotient, which must be a power of two, so that no number of a tensor is rounded. Scales that differ only because
    alpha / r was rounded count as one.

    Args:
        source: the folder that PEFT wrote.
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
        round_values: allow numbers to be rounded to the dtypes of `like`.

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
    folder, output = as_path(source), as_path(target)
    files = as_paths(foundation)
    refuse_inputs([output], [*files, *([] if like is None else [as_path(like)])])
    given = {name.removeprefix(PREFIX): module for name, module in check_texts(names, "names").items()}
    told = None if params is None else params_head_dim(params)
    config, pairs = read_peft(folder)
    if unknown := given.keys() - {pair.module for pair in pairs}:
        raise KeyNotFoundError(f"{folder}: names has '{min(unknown)}', but {MODEL_NAME} has no such module")
    base = _Base(files)
    template = None if like is None else _Template(read_adapter(like))
    modules_of_program = Names(
        base.modules if template is None else template.pairs, base.name if template is None else template.name
    )
    # The file of an adapter has one scale; what other modules need goes into their lora_b.
    scale, factors = _common_scale(pairs, config)
    record = _Record(dict(config.fields), {})

    def size_of_head() -> int | None:
        return base.head_dim if params is None else told

    tensors: dict[str, Plain] = {}
    for pair in pairs:
        module = given[pair.module] if pair.module in given else modules_of_program.find(pair.module)
        # Two modules of PEFT may be tied in the program, and only one adapter can be there.
        if module in record.modules:
            raise AdapterError(
                f"{folder}: two modules of PEFT are module '{module}' of the program, one is '{pair.module}'"
            )
        base.check_product(folder, module, pair, known=template is not None)
        head_dim = rotary_head_dim(folder, module, pair.module, pair.b[0].shape[0], size_of_head, base.name)
        factor = factors[pair.module]
        kinds = (pair.a[1], pair.b[1])
        record.modules[module] = _Origin(pair.a_key, pair.b_key, pair.rank, kinds, factor, head_dim)
        b = pair.b
        if head_dim:
            b = (rows_as_llama(b[0], head_dim), b[1])
        b = _times(b, factor, f"{folder}: '{pair.b_key}'")
        if template is None:
            tensors[f"{module}.lora_a.weight"], tensors[f"{module}.lora_b.weight"] = pair.a, b
        else:
            tensors.update(template.filled(folder, module, pair, b, round_values))
    if template is not None:
        tensors = template.complete(tensors)
    return save_plain(output, tensors, foundation=files, scale=scale, metadata={_RECORD: record.to_json()})


class _Base:
    """What a foundation says about the weights of its modules."""

    def __init__(self, files: list[Path]) -> None:
        info = inspect_adapters(files, []).foundation
        self.name = " + ".join(map(str, files))
        self.files = files
        self.modules: dict[str, NamedTensor] = {}
        for tensor in info.tensors:
            for name, end in itertools.product((tensor.name, *tensor.aliases), _WEIGHTS):
                # LoRA of convolutions is written in another shape, and is not supported.
                if name.endswith(end) and len(tensor.sizes) == 2:
                    self.modules.setdefault(name.removesuffix(end), tensor)
        self._rotary = [tensor for tensor in info.tensors if re.search(r"(^|\.)freqs_cos$", tensor.name)]

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

    @functools.cached_property
    def head_dim(self) -> int | None:
        """What the tables of the rotary embedding say, as `params_head_dim`; None without tables.

        Hugging Face's have the cosines of all elements of a head, twice the same half. Llama's have one for each two
        neighbours. The first row is that of position 0, where all are 1, so later ones are compared.
        """
        dimensions = set()
        for tensor in self._rotary:
            for path in self.files:
                data_map = open_ptd(path)
                if tensor.name in data_map and tensor.scalar_type is ScalarType.FLOAT and len(tensor.sizes) == 2:
                    table = np.frombuffer(data_map.get_data(tensor.name), np.float32).reshape(tensor.sizes)
                    # One position, or one pair of elements, looks the same in both layouts.
                    if table.shape[0] < 2 or table.shape[1] < 2:
                        continue
                    half = table.shape[1] // 2
                    twice = table.shape[1] % 2 == 0 and np.array_equal(table[:, :half], table[:, half:])
                    dimensions.add(0 if twice else 2 * table.shape[1])
        return dimensions.pop() if len(dimensions) == 1 else None


class _Template:
    """The adapter that the programs were lowered with: what a new one must have."""

    def __init__(self, adapter: Adapter) -> None:
        adapter.check()
        self.name = str(adapter.path)
        self.pairs: dict[str, Pair] = {pair.module: pair for pair in adapter.pairs}
        self._kinds = {name: tensor.scalar_type for name, tensor in adapter.contents.items()}
        halves = {name for pair in adapter.pairs for name in (pair.a, pair.b)}
        if others := [name for name in adapter.contents if name not in halves]:
            listed = ", ".join(map(repr, others))
            raise AdapterError(f"{adapter.path}: the programs also take {listed} from an adapter, which PEFT's has not")
        for name, kind in self._kinds.items():
            if kind not in FLOATS:
                raise AdapterError(f"{adapter.path}: '{name}' is {kind.name.lower()}, and adapters are floats")

    def filled(self, source: Path, module: str, pair: PeftPair, b: Plain, round_values: bool) -> dict[str, Plain]:
        """The tensors of a module, with zeros up to the rank that the programs have."""
        if module not in self.pairs:
            raise AdapterError(f"{source}: module '{pair.module}': the programs have no adapter at '{module}'")
        room = self.pairs[module]
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
        for room in self.pairs.values():
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


def _common_scale(pairs: Iterable[PeftPair], config: PeftConfig) -> tuple[float, dict[str, float]]:
    """The scale that most pairs have, and for each module the factor that makes up for another one, a power of two."""
    scales = {pair.module: pair.scale for pair in pairs}
    common = Counter(scales.values()).most_common(1)[0][0]
    factors = {}
    for module, scale in scales.items():
        factors[module] = 1.0 if scale == common else _power_of_two(scale / common) if common else 0.0
        if not factors[module]:
            raise AdapterError(
                f"{config.path}: rank_pattern and alpha_pattern give module '{module}' the scale {scale!r}, others have "
                f"{common!r}; an adapter's file has one scale, and the quotient is no power of two, so numbers would be rounded"
            )
    return common, factors


def _same_scale(one: float, other: float) -> bool:
    """Whether two scales are equal but for the rounding of alpha and of alpha / r.

    Not every float is a quotient with every rank: no alpha divided by 3 is the 1.6 that 8 / 5 is. The nearest quotient is at
    most one unit in the last place away, so two of them are at most two apart.
    """
    return math.isclose(one, other, rel_tol=4 * sys.float_info.epsilon)


def _power_of_two(quotient: float) -> float:
    """The power of two that a quotient of scales equals, up to rounding; 0 for any other quotient."""
    mantissa, exponent = math.frexp(quotient)
    for power in (0.5, 1.0):
        if _same_scale(abs(mantissa), power) and abs(exponent) <= _MOST_EXPONENT:
            return math.copysign(math.ldexp(power, exponent), quotient)
    return 0.0


def _times(tensor: Plain, factor: float, what: str) -> Plain:
    """A tensor times a power of two, which must not round.

    Raises:
        AdapterError: a number would become too large or too small.
    """

    if factor == 1:
        return tensor
    made = _product(tensor, factor)
    if not same_tensors(_product(made, 1 / factor), tensor):
        raise AdapterError(f"{what} cannot be multiplied by {factor!r}, the quotient of its scale, without rounding")
    return made


def _product(tensor: Plain, factor: float) -> Plain:
    from blobstore.logical.steps import cast

    kind = tensor[1]
    wide = cast(tensor, ScalarType.DOUBLE)
    with np.errstate(all="ignore"):
        return cast((wide[0] * np.float64(factor), ScalarType.DOUBLE), kind)


@dataclass(frozen=True)
class _Origin:
    """Where the tensors of a module came from: their keys, rank and dtypes in PEFT's file, and what was done to lora_b."""

    a_key: str
    b_key: str
    rank: int
    kinds: tuple[ScalarType, ScalarType]
    factor: float
    head_dim: int


@dataclass(frozen=True)
class _Record:
    """What the metadata of an imported adapter says: PEFT's configuration, and each module of the program that has one."""

    config: dict[str, Any]
    modules: dict[str, _Origin]

    def to_json(self) -> str:
        modules = {
            module: [one.a_key, one.b_key, one.rank, *(kind.name for kind in one.kinds), one.factor, one.head_dim]
            for module, one in self.modules.items()
        }
        return json.dumps({"config": self.config, "modules": modules}, separators=(",", ":"))

    @classmethod
    def of(cls, adapter: Adapter) -> _Record | None:
        """That of an adapter; None if it has none.

        Raises:
            InvalidFileError: it is malformed.
        """
        text = adapter.metadata.get(_RECORD)
        if text is None:
            return None
        try:
            record = json.loads(text)
            config, modules = PeftConfig.of(record["config"], adapter.path), record["modules"]
            return cls(dict(config.fields), {str(module): _origin(*fields) for module, fields in modules.items()})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, AdapterError) as error:
            raise InvalidFileError(adapter.path, f"the metadata {_RECORD} is malformed: {error}") from None


def _origin(a_key: str, b_key: str, rank: int, a_kind: str, b_kind: str, factor: float, head_dim: int) -> _Origin:
    if not (is_text(a_key) and is_text(b_key) and type(rank) is int and type(head_dim) is int):
        raise TypeError("the fields of a module have other types")
    if rank <= 0 or head_dim < 0 or head_dim % 2:
        raise ValueError(f"the rank {rank} or the size of a head {head_dim} of '{a_key}' is impossible")
    number = type(factor) in (int, float) and 0 < abs(factor) <= 2**_MOST_EXPONENT  # not every int fits a float
    if not number or _power_of_two(float(factor)) != factor:
        raise ValueError(f"the factor of '{b_key}' must be a power of two, found {factor!r}")
    kinds = ScalarType[a_kind], ScalarType[b_kind]
    if not FLOATS.issuperset(kinds):
        raise ValueError("the dtypes of a module are no floats")
    return _Origin(a_key, b_key, rank, kinds, float(factor), head_dim)


def export_peft(
    source: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    base_model: str | None = None,
    params: Mapping[str, Any] | str | os.PathLike[str] | None = None,
) -> int:
    """Write an adapter as PEFT does: `adapter_config.json` and `adapter_model.safetensors`.

    An adapter of `import_peft` becomes what was imported, to the bit: names, ranks, dtypes and configuration. If it was
    trained since, and uses room that was filled up with zeros, the ranks become those of the program, with
    `rank_pattern` and `alpha_pattern` so that the scale stays, up to one unit in the last place: not every scale is alpha
    divided by a rank. The same if the file records another scale than it was imported with.

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
    # Without a record, PEFT did not write it, and the configuration is made of the tensors.
    record = _Record.of(adapter)
    config = dict(record.config) if record is not None else _new_config(adapter)
    if base_model is not None:
        config["base_model_name_or_path"] = base_model
    tensors: dict[str, Plain] = {}
    used: dict[str, tuple[int, float]] = {}
    added = grown = False
    for pair in adapter.pairs:
        recorded = None if record is None else record.modules.get(pair.module)
        rank = _used_rank(adapter, pair, pair.rank if record is None else 0 if recorded is None else recorded.rank)
        if rank == 0:
            continue  # the program has room for a module that PEFT's adapter has not
        origin = recorded or _new_origin(adapter, pair, rank, head_dim)
        # The metadata is text of a file: two of its modules may claim the same keys.
        halves_of_pair = _as_imported(adapter, pair, origin, rank)
        if tensors.keys() & halves_of_pair.keys() or len(halves_of_pair) != 2:
            raise InvalidFileError(adapter.path, f"the metadata {_RECORD} does not fit module '{pair.module}'")
        tensors |= halves_of_pair
        used[_module_of(origin.a_key)] = rank, adapter.scale * origin.factor
        added, grown = added or recorded is None, grown or rank != origin.rank
    if not tensors:
        raise AdapterError(f"{adapter.path}: all its tensors are zero")
    _note_ranks(adapter.path, config, used, always=record is None or added or grown)
    if added and record is not None:
        config |= {"target_modules": sorted({_module_of(key) for key in tensors})}
        config |= dict.fromkeys(("exclude_modules", "layers_to_transform", "layers_pattern"))
    return _write(as_path(directory), config, tensors, adapter)


def _as_imported(adapter: Adapter, pair: Pair, origin: _Origin, rank: int) -> dict[str, Plain]:
    """The two tensors of a pair under PEFT's keys, in the rank, the dtypes and the order of rows that they came in."""
    if origin.head_dim and not are_heads(pair.out_features, origin.head_dim):
        raise InvalidFileError(adapter.path, f"the metadata {_RECORD} does not fit module '{pair.module}'")
    a, b = (adapter.value(name) for name in (pair.a, pair.b))
    b = (np.ascontiguousarray(b[0][:, :rank]), b[1])
    b = _times(b, 1 / origin.factor, f"{adapter.path}: '{pair.b}'")
    if origin.head_dim:
        b = (rows_as_hf(b[0], origin.head_dim), b[1])
    return {
        origin.a_key: _narrowed((np.ascontiguousarray(a[0][:rank]), a[1]), origin.kinds[0]),
        origin.b_key: _narrowed(b, origin.kinds[1]),
    }


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


def _new_config(adapter: Adapter) -> dict[str, Any]:
    """A configuration for an adapter that PEFT did not write."""
    widest = max(adapter.pairs, key=lambda pair: pair.rank)
    modules = sorted(hf_name(_program_name(pair.module)) for pair in adapter.pairs)
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": None,
        "r": widest.rank,
        "lora_alpha": _alpha(adapter.path, widest.module, adapter.scale or 0.0, widest.rank, widest.rank),
        "target_modules": modules,
        "bias": "none",
        "inference_mode": True,
    }


def _new_origin(adapter: Adapter, pair: Pair, rank: int, size_of_head: int | None) -> _Origin:
    module = _program_name(pair.module)
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
    return _Origin(f"{PREFIX}{name}.lora_A.weight", f"{PREFIX}{name}.lora_B.weight", rank, kinds, 1.0, head_dim)


def _program_name(module: str) -> str:
    return module.removeprefix(PREFIX)


def _note_ranks(path: Path, config: dict[str, Any], used: Mapping[str, tuple[int, float]], *, always: bool) -> None:
    """Write the patterns of a configuration anew if it does not give each module of PEFT its scale, or always.

    The first entry that matches counts, and PEFT sorts them when it saves an adapter again. So none of the older entries is
    kept, and a new one matches one module only.

    Args:
        path: the adapter, for messages.
        config: the configuration, which is changed.
        used: for each module its rank and its scale.
        always: write them also if the scales are right, because the ranks may not be.

    Raises:
        AdapterError: an alpha would be too large.
    """
    said = PeftConfig.of(config, path)
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for module, (rank, scale) in used.items():
        key = "^" + re.sub(r"[^\w-]", lambda match: "\\" + match[0], module)
        alpha = said.alpha_of(module)
        if not _same_scale(alpha / said.divisor(rank), scale):
            alpha, always = _alpha(path, module, scale, rank, said.divisor(rank)), True
        if rank != said.rank:
            ranks[key] = rank
        if alpha != said.alpha:
            alphas[key] = alpha
    if always:
        for name, pattern in (("rank_pattern", ranks), ("alpha_pattern", alphas)):
            if pattern or config.get(name):
                config[name] = pattern


def _alpha(path: Path, module: str, scale: float, rank: int, divisor: float) -> float | int:
    alpha = scale * divisor
    if abs(alpha) > MOST_ALPHA:
        raise AdapterError(
            f"{path}: module '{module}' with scale {scale!r} and rank {rank} needs an alpha of {alpha!r}, expected at most "
            f"{MOST_ALPHA:g}"
        )
    return _tidy(alpha)


def _module_of(key: str) -> str:
    """The module of a tensor in PEFT's file, as its configuration names it."""
    match = _HALF.fullmatch(key)
    return (key if match is None else match[1]).removeprefix(PREFIX)


def _tidy(number: float) -> float | int:
    """A whole number as PEFT writes it."""
    return int(number) if number.is_integer() and abs(number) < 2**53 else number


def _write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Plain], adapter: Adapter) -> int:

    layouts = {key: TensorLayout(kind, array.shape) for key, (array, kind) in tensors.items()}
    if unknown := [layout for layout in layouts.values() if layout.scalar_type not in SAFETENSORS.values()]:
        raise UnsupportedDataError(f"{adapter.path}: a .safetensors cannot name {unknown[0]}")
    # sorted as PEFT does, but for the patterns, where the first entry that matches counts
    text = json.dumps(dict(sorted(config.items())), indent=2).encode()
    total = sum(layout.nbytes for layout in layouts.values())
    refuse_inputs([folder / MODEL_NAME, folder / CONFIG_NAME], [adapter.path])
    with folders([folder]), Staging() as staging:
        with staging.open(folder / MODEL_NAME, total, kind=Format.SAFETENSORS) as file:
            write_safetensors(file, layouts, lambda key: raw(tensors[key][0]), {"format": "pt"})
            size = file.tell()
        with staging.open(folder / CONFIG_NAME, len(text)) as file:
            file.write(text)
    return size + len(text)
