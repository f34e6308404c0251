"""Several programs, and the data files that they need, as one program."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from blobstore.disk.kinds import Format, detect_format
from blobstore.disk.progress import Progress
from blobstore.disk.staging import Staging, refuse_inputs
from blobstore.errors import KeyConflictError, KeyNotFoundError, MethodNotFoundError, UnsupportedDataError
from blobstore.formats.keys import KEY_PREFIX
from blobstore.formats.ptd.reader import PtdDataMap, open_ptd
from blobstore.formats.pte.description import describe
from blobstore.formats.pte.fuse import Blob, Fusion, Part
from blobstore.formats.pte.program import ProgramFile, read_program
from blobstore.memory.buffers import same_bytes
from blobstore.memory.mapped_file import Paths, as_path, as_paths
from blobstore.programs.deployed import delegated_keys

__all__ = ["FuseResult", "FusedMethod", "fuse_programs"]

_OF_TRAINING = re.compile(r"__et_training_(?:gradients_index|parameters_index|fqn)_(.+)", re.DOTALL)


@dataclass(frozen=True)
class FusedMethod:
    """A method of a fused program.

    Attributes:
        name: its name there.
        program: the file that it came from; the first one, if several have the same method.
        method: its name there.
    """

    name: str
    program: Path
    method: str


@dataclass(frozen=True)
class FuseResult:
    """What `fuse_programs` wrote.

    Attributes:
        path: the file.
        methods: its methods, in order.
        left_out: methods that are equal to one of the same name in an earlier program, and are stored once.
        missing: keys that programs take from data files that were not given.
        bytes_before: of all inputs together.
        bytes_after: of the file.
        shared: bytes of blobs that were met again and are stored once.
    """

    path: Path
    methods: tuple[FusedMethod, ...]
    left_out: tuple[FusedMethod, ...]
    missing: tuple[str, ...]
    bytes_before: int
    bytes_after: int
    shared: int


def fuse_programs(
    inputs: Paths,
    output: str | os.PathLike[str],
    *,
    methods: Mapping[str, str] | None = None,
    keep_external: bool = False,
    force: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> FuseResult:
    """Write one program with the methods of several, which the stock runtime loads from one path.

    Each distinct blob is stored once: constants, initial states, payloads of delegates and their named data. What the
    programs take from the given data files becomes part of the program. Outputs are identical to the bit. With one
    program, its own duplicates are merged.

    If two programs have a method of one name, and both methods are equal in every part, one of them is taken. If they
    differ, `methods` must give one of them another name.

    Args:
        inputs: programs (`.pte`), and data files (`.ptd`) that they need.
        output: the `.pte` to write.
        methods: new names: maps `"program:method"` to a name, or to "" to leave the method out. `"program"` alone stands
            for its only method, or else for its method `forward`. A program is called by its path, its file name, or its
            file name without `.pte`. The methods that ExecuTorch's training adds to a method are renamed with it.
        keep_external: allow programs to need data files that are not given.
        force: replace a file of any format.
        dry_run: check everything, and write nothing.
        progress: called after every write.

    Raises:
        FileAccessError, InvalidFileError: a file cannot be read or written, or is malformed.
        UnsupportedProgramError: two different methods have one name, or a program has fields of a later ExecuTorch.
        KeyConflictError: two programs or data files have different bytes under one key.
        KeyNotFoundError: a program needs a key that is in no data file, and `keep_external` is not set.
        LayoutError: a tensor in a data file is not what a program expects.
        MethodNotFoundError: `methods` names a program or a method that is not there.
        InvalidKeyError: a new name of a method is not possible.
        UnsupportedDataError: an input is neither a program nor a data file, or there is no program.
        OutputPathError: the output is an input, or a file of another format.
            After any of these errors, an existing file is unchanged.
    """
    target, paths = as_path(output), as_paths(inputs)
    refuse_inputs([target], paths)
    programs, data_maps = _read(paths)
    names = _names(programs, _renamed(methods))
    names, left_out = _without_equal_methods(programs, names)
    blobs = _blobs(data_maps)
    parts = [_part(program, chosen, blobs) for program, chosen in zip(programs, names, strict=True) if chosen]
    missing = dict.fromkeys(
        one.key
        for part in parts
        for one in part.program.externals
        if one.use.method in part.methods and one.key not in part.tensors
    )
    if missing and not keep_external:
        more = f" and {len(missing) - 1} more keys" if len(missing) > 1 else ""
        raise KeyNotFoundError(
            f"{next(iter(missing))!r}{more} must come from a data file, and no such file was given with the programs; "
            "to keep it outside, use keep_external (--keep-external)"
        )
    fusion = Fusion(parts)
    with (
        Staging(progress, force=force, dry_run=dry_run) as staging,
        staging.open(target, fusion.nbytes, kind=Format.PTE) as file,
    ):
        fusion.write(file)
    return FuseResult(
        path=target,
        methods=tuple(FusedMethod(new, part.program.path, old) for part in parts for old, new in part.methods.items()),
        left_out=tuple(left_out),
        missing=tuple(missing),
        bytes_before=sum(path.stat().st_size for path in paths),
        bytes_after=fusion.nbytes,
        shared=fusion.shared,
    )


def _read(paths: list[Path]) -> tuple[list[ProgramFile], list[PtdDataMap]]:
    programs, data_maps = [], []
    for path in paths:
        kind = detect_format(path)
        if kind is Format.PTE:
            programs.append(read_program(path))
        elif kind is Format.PTD:
            data_maps.append(open_ptd(path, verify=True))
        else:
            raise UnsupportedDataError(f"{path}: this is {kind.value}; programs and their data files can be fused")
    if not programs:
        raise UnsupportedDataError("there is no program to fuse")
    return programs, data_maps


def _renamed(methods: Mapping[str, str] | None) -> Mapping[str, str]:
    """The new names, if they are names."""
    if methods is None:
        return {}
    if not isinstance(methods, Mapping) or not all(isinstance(text, str) for item in methods.items() for text in item):
        raise UnsupportedDataError(f"expected methods as a mapping of names to names, found {methods!r}")
    return methods


def _names(programs: list[ProgramFile], renamed: Mapping[str, str]) -> list[dict[str, str]]:
    """For each program its methods with their new names; methods that are left out are not there."""
    names = [{method: method for method in program.methods} for program in programs]
    for what, new in renamed.items():
        number, method = _find(programs, what)
        beside = [
            other
            for other in programs[number].methods
            if (match := _OF_TRAINING.fullmatch(other)) and match[1] == method and names[number].get(other) == other
        ]
        for one in (method, *beside):
            if new:
                names[number][one] = one.removesuffix(method) + new
            else:
                names[number].pop(one, None)
    if not any(names):
        raise UnsupportedDataError("all methods are left out, so there is nothing to fuse")
    return names


def _find(programs: list[ProgramFile], what: str) -> tuple[int, str]:
    """The program and the method that are called so."""
    found = []
    for number, program in enumerate(programs):
        for called in {str(program.path), program.path.name, program.path.stem}:
            if what == called:
                several = len(program.methods) > 1
                found.append((number, "forward" if several else program.methods[0]))
            elif what.startswith(f"{called}:"):
                found.append((number, what[len(called) + 1 :]))
    if len({number for number, _ in found}) > 1:
        raise MethodNotFoundError(f"{what!r} may be a method of several programs; call them by their paths")
    if not found:
        listed = ", ".join(str(program.path) for program in programs)
        raise MethodNotFoundError(f"{what!r} names none of the programs {listed}")
    number, method = next(((n, m) for n, m in found if m in programs[n].methods), found[0])
    if method not in programs[number].methods:
        listed = ", ".join(map(repr, programs[number].methods))
        raise MethodNotFoundError(f"{programs[number].path} has no method {method!r}, but {listed}")
    return number, method


def _without_equal_methods(
    programs: list[ProgramFile], names: list[dict[str, str]]
) -> tuple[list[dict[str, str]], list[FusedMethod]]:
    """Leave out each method that is equal to one of the same name before it."""
    first: dict[str, tuple[int, str]] = {}
    described: dict[int, dict[str, dict[str, list[str]]]] = {}

    def describing(number: int, method: str) -> dict[str, list[str]]:
        if number not in described:
            described[number] = _methods_of(programs[number])
        return described[number][method]

    kept: list[dict[str, str]] = []
    left_out = []
    for number, chosen in enumerate(names):
        kept.append({})
        for old, new in chosen.items():
            other, its = first.setdefault(new, (number, old))
            if other != number and describing(other, its) == describing(number, old):
                left_out.append(FusedMethod(new, programs[number].path, old))
            else:
                kept[-1][old] = new
    return kept, left_out


def _methods_of(program: ProgramFile) -> dict[str, dict[str, list[str]]]:
    """The description of each method, without its name."""
    found: dict[str, dict[str, list[str]]] = {name: {} for name in program.methods}
    for part, lines in describe(program).items():
        for name in sorted(program.methods, key=len, reverse=True):
            if part.startswith(f"method {name}: "):
                found[name][part.removeprefix(f"method {name}: ")] = lines
                break
    return found


def _blobs(data_maps: list[PtdDataMap]) -> dict[str, Blob]:
    """The contents of all data files, without blobstore's own records, which programs do not look up."""
    blobs: dict[str, Blob] = {}
    for data_map in data_maps:
        for key in data_map:
            if not key.startswith(KEY_PREFIX):
                blob = Blob(data_map.get_data(key), data_map.get_tensor_layout(key), data_map.alignment(key))
                known = blobs.setdefault(key, blob)
                if known.layout != blob.layout or not same_bytes(known.data, blob.data):
                    raise KeyConflictError(f"{data_map.name}: the key {key!r} has other bytes in another data file")
    return blobs


def _part(program: ProgramFile, methods: dict[str, str], blobs: Mapping[str, Blob]) -> Part:
    """A program with what it takes from the data files."""
    taken = {one.key: blobs[one.key] for one in program.externals if one.use.method in methods and one.key in blobs}
    named = {key: blobs[key] for key in sorted(delegated_keys(program, blobs.keys()))}
    return Part(program, methods, tensors=taken, named_data=named)
