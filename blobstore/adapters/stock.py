"""Adapters for programs of ExecuTorch's own exporter, whose delegates look weights up by digests and not by names.

`export_llm` writes the tensors of an adapter to a file of their own, each under the SHA-256 of its bytes
(`NodeVisitor.get_serialized_buffer_index` in `executorch/backends/xnnpack/operators/node_visitor.py`). A program has no
names for them. But the adapter that it was exported with has both: names, and the bytes that the keys are made of. So
another adapter gets the keys of that one, and the stock runtime takes its file instead of the old one.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from blobstore.adapters.params_json import params_head_dim
from blobstore.adapters.peft_folder import CONFIG_NAME, adapter_path, read_peft
from blobstore.adapters.peft_names import Names, llama_name, rotary_head_dim
from blobstore.adapters.peft_pair import PeftPair
from blobstore.core.disk.staging import refuse_inputs
from blobstore.core.errors import AdapterError, LayoutError, UpdateError
from blobstore.core.formats.alignment import TENSOR_ALIGNMENT
from blobstore.core.formats.pte.program import ProgramFile, read_program
from blobstore.core.memory.arrays import Plain, raw
from blobstore.core.memory.layout import ScalarType
from blobstore.core.memory.mapped_file import as_path
from blobstore.core.programs.deployed import mentioned
from blobstore.core.store import BlobStore

__all__ = ["import_for_program"]

_KINDS = (ScalarType.FLOAT, ScalarType.HALF, ScalarType.BFLOAT16)
"""The dtypes that the exporter stores float weights in."""


def import_for_program(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    program: str | os.PathLike[str],
    exported_with: str | os.PathLike[str],
    params: Mapping[str, Any] | str | os.PathLike[str] | None = None,
) -> int:
    """Write an adapter of PEFT with the keys that a program of ExecuTorch's own exporter looks up.

    The program then runs with this file instead of the one that was written with it, in the stock runtime too. Its factor
    is that of the adapter that it was exported with; the numbers of `lora_b` are multiplied to make up for another one,
    and rounded once. Smaller ranks and missing modules are filled up with zeros.

    Args:
        source: the folder that PEFT wrote, or its name on the Hub, as in `import_peft`.
        target: the .ptd to write; an existing one is replaced.
        program: the `.pte`, with its adapter in a data file of its own.
        exported_with: the folder of the adapter that the program was exported with.
        params: the `params.json` that the program was exported with, or its contents; needed for the q and k of a Llama,
            see `import_peft`.

    Returns:
        The size of the file in bytes.

    Raises:
        FileAccessError, InvalidFileError: a file cannot be opened, is malformed or cannot be written.
        AdapterError: something in PEFT's files cannot be honoured, and is named; the program does not look up a tensor of
            the adapter that it was exported with, or one key for two tensors; or a rank is too large.
        KeyNotFoundError: the other adapter has no such module.
        LayoutError: a module has other features.
        UpdateError: a number becomes infinite or NaN.
        OutputPathError: the target is one of the inputs.
        MissingDependencyError: the native package is not installed.
    """
    output, folder, old_folder = as_path(target), adapter_path(source), adapter_path(exported_with)
    head_dim = None if params is None else params_head_dim(params)
    opened = read_program(program)
    refuse_inputs([output], [opened.path])
    old = read_peft(old_folder)
    # The exporter ignores use_rslora and the patterns: it multiplies all products with alpha / r.
    scale, old_pairs = old.scale, old.pairs
    if scale == 0:
        raise AdapterError(f"{old_folder / CONFIG_NAME}: lora_alpha is 0, so no adapter has an effect on the program")
    rooms = {pair.module: pair for pair in old_pairs}
    rooms_by_name = Names(rooms, str(old_folder))
    by_room: dict[str, PeftPair] = {}
    for pair in read_peft(folder).pairs:
        room = rooms_by_name.find(pair.module)
        if room in by_room:
            raise AdapterError(f"{folder}: two modules are '{room}'")
        by_room[room] = pair
    store, keys = BlobStore(), _keys(opened, old_folder, old_pairs)
    for room, before in rooms.items():
        for (key, kind), tensor in zip(
            keys[room], _tensors(folder, by_room.get(room), before, scale, head_dim, opened.path), strict=True
        ):
            store.add(key, _bytes(tensor, kind, folder, room), alignment=TENSOR_ALIGNMENT)
    return store.write_ptd(output)


def _keys(
    program: ProgramFile, folder: Path, pairs: Sequence[PeftPair]
) -> dict[str, tuple[tuple[str, ScalarType], tuple[str, ScalarType]]]:
    """For each module the keys of its two tensors in the program, with the dtypes that they have there."""
    halves = [half for pair in pairs for half in ((pair.a_key, pair.a), (pair.b_key, pair.b))]
    digests = {name: _digests(tensor) for name, tensor in halves}
    wanted = {key for keys in digests.values() for key in keys}
    looked_up: set[str] = set()
    for delegate in program.delegates:
        looked_up |= mentioned(program.data[delegate.span.start : delegate.span.stop], wanted)
    users: dict[str, str] = {}
    taken: dict[str, tuple[str, ScalarType]] = {}
    for name, keys in digests.items():
        key = next((key for key in keys if key in looked_up), None)
        if key is None:
            raise AdapterError(
                f"{program.path}: the program does not look up '{name}' of {folder}: it was exported with another "
                "adapter, or stores it quantized"
            )
        if key in users:
            raise AdapterError(
                f"{program.path}: '{users[key]}' and '{name}' have one key, because their bytes were equal at "
                "export (lora_b of an untrained adapter is zero); export the program with a trained adapter"
            )
        users[key] = name
        taken[name] = key, keys[key]
    return {pair.module: (taken[pair.a_key], taken[pair.b_key]) for pair in pairs}


def _digests(tensor: Plain) -> dict[str, ScalarType]:
    """The keys that the exporter may have given a tensor, by the dtype that it stored."""
    from blobstore.logical.steps import cast

    keys: dict[str, ScalarType] = {}
    for kind in _KINDS:
        keys.setdefault(hashlib.sha256(raw(cast(tensor, kind)[0])).hexdigest(), kind)
    return keys


def _tensors(
    folder: Path,
    pair: PeftPair | None,
    room: PeftPair,
    scale: float,
    size_of_head: int | None,
    program: Path,
) -> tuple[Plain, Plain]:
    """The tensors of a module with the rank of the program, in float64."""
    from blobstore.logical.steps import cast

    a: npt.NDArray[np.float64] = np.zeros(room.a[0].shape)
    b: npt.NDArray[np.float64] = np.zeros(room.b[0].shape)
    if pair is not None:
        rank = pair.rank
        new_a, new_b = (cast(one, ScalarType.DOUBLE)[0] for one in (pair.a, pair.b))
        if (new_a.shape[1], new_b.shape[0]) != (a.shape[1], b.shape[0]):
            raise LayoutError(
                f"{folder}: module '{pair.module}' takes {new_a.shape[1]} and gives {new_b.shape[0]} features, in "
                f"{program} {a.shape[1]} and {b.shape[0]}"
            )
        if rank > room.rank:
            raise AdapterError(
                f"{folder}: module '{pair.module}' has rank {rank}, but {program} has room for {room.rank} only"
            )
        head_dim = rotary_head_dim(
            folder, llama_name(pair.module), pair.module, new_b.shape[0], lambda: size_of_head, program
        )
        a[:rank] = new_a
        b[:, :rank] = cast(pair.ordered(head_dim), ScalarType.DOUBLE)[0] * (pair.scale / scale)
    return (a, ScalarType.DOUBLE), (b, ScalarType.DOUBLE)


def _bytes(tensor: Plain, kind: ScalarType, folder: Path, module: str) -> memoryview:
    from blobstore.logical.steps import cast, check_finite

    made = cast(tensor, kind)
    if not check_finite(made):
        raise UpdateError(f"{folder}: a tensor of module '{module}' has values that are not finite")
    return raw(made[0])
