"""Several programs, and the data files that they need, as one program."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from blobstore.core.disk.kinds import Format, detect_format
from blobstore.core.disk.progress import Progress
from blobstore.core.disk.staging import Staging, refuse_inputs
from blobstore.core.errors import (
    InvalidFileError,
    KeyConflictError,
    KeyNotFoundError,
    MethodNotFoundError,
    UnsupportedDataError,
)
from blobstore.core.formats.delegate_keys import keys_of
from blobstore.core.formats.flatbuffer import Span
from blobstore.core.formats.keys import KEY_PREFIX, check_key
from blobstore.core.formats.ptd.reader import PtdDataMap, open_ptd
from blobstore.core.formats.pte.description import describe
from blobstore.core.formats.pte.fuse import FusedBlob, FusedProgram, Fusion
from blobstore.core.formats.pte.program import ProgramFile, read_program
from blobstore.core.memory.buffers import same_bytes
from blobstore.core.memory.mapped_file import Paths, as_path, as_paths
from blobstore.core.programs.deployed import delegated_keys, named_by, weights_among
from blobstore.core.reprs import count, fields_line, line
from blobstore.core.text import size

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

    __repr__ = fields_line

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
        missing: keys that programs take from data files that were not given, as far as the payloads of their delegates
            can be read; see `fuse_programs`.
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

    def __repr__(self) -> str:
        sizes = f"{size(self.bytes_before)} to {size(self.bytes_after)}"
        missing = f"{len(self.missing):,} keys missing" if self.missing else ""
        return line("FuseResult", self.path, count(len(self.methods), "method"), sizes, missing)


def fuse_programs(
    inputs: Paths,
    output: str | os.PathLike[str],
    *,
    methods: Mapping[str, str] | None = None,
    named_data: Mapping[str, str] | None = None,
    keep_external: bool = False,
    force: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> FuseResult:
    """Write one program with the methods of several, which the stock runtime loads from one path.

    Each distinct blob is stored once: constants, initial states, payloads of delegates and their named data. What the
    programs take from the given data files becomes part of the program. Outputs are identical to the bit. With one
    program, its own duplicates are merged.

    If two programs have a method of one name, and both methods are equal in every part, also in what their delegates look
    up by key, one of them is taken. If they differ, `methods` must give one of them another name.

    The keys that delegates look up are known for XNNPACK and for blobstore's own backend. Only the backend itself can read
    other payloads: a data file that such a delegate needs is not missed here, and the program fails when it is loaded.

    Args:
        inputs: programs (`.pte`), and data files (`.ptd`) that they need.
        output: the `.pte` to write.
        methods: new names: maps `"program:method"` to a name, or to "" to leave the method out. `"program"` alone stands
            for its only method, or else for its method `forward`. A program is called by its path, its file name, or its
            file name without `.pte`. The methods that ExecuTorch's training adds to a method are renamed with it.
        named_data: new keys for what the application keeps in programs: maps `"program:key"` to a key, or to "" to leave it
            out. Keys that delegates look up stay as they are.
        keep_external: allow programs to need data files that are not given. None of the programs may have a key of these
            files inside.
        force: replace a file of any format.
        dry_run: check everything, and write nothing.
        progress: called after every write.

    Raises:
        FileAccessError, InvalidFileError: a file cannot be read or written, or is malformed.
        UnsupportedProgramError: two different methods have one name, or a program has fields of a later ExecuTorch.
        KeyConflictError: two programs or data files have different bytes or layouts under one key, or one program has a
            key inside that must stay outside for another one.
        KeyNotFoundError: a program needs a key that is neither in it nor in a data file, and `keep_external` is not set.
        LayoutError: a tensor in a data file is not what a program expects.
        MethodNotFoundError: `methods` names a program or a method that is not there.
        KeyNotFoundError: `named_data` names a program or a key that is not there.
        InvalidKeyError: a new name of a method or a new key is not possible.
        UnsupportedDataError: an input is neither a program nor a data file, or there is no program; or `named_data` names a
            key that a delegate looks up.
        OutputPathError: the output is an input, or a file of another format.
            After any of these errors, an existing file is unchanged.
    """
    target, paths = as_path(output), as_paths(inputs)
    refuse_inputs([target], paths)
    programs, data_maps = _read(paths)
    names = _names(programs, _renamed(methods, "methods"))
    keys = _keys_of_application(programs, _renamed(named_data, "named_data"))
    blobs = _blobs(data_maps)
    given = [data_map.path for data_map in data_maps]
    missing = _missing(programs, names, keys, blobs, given, keep_external=keep_external)
    names, left_out = _without_equal_methods(programs, names, blobs)
    parts = [_part(*one, blobs) for one in zip(programs, names, keys, strict=True) if one[1]]
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
        given = "".join(f"{path}: " for path in paths[:1])
        raise UnsupportedDataError(f"{given}there is no program to fuse")
    return programs, data_maps


def _renamed(given: Mapping[str, str] | None, what: str) -> Mapping[str, str]:
    """The new names, if they are names."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(text, str) for item in given.items() for text in item):
        raise UnsupportedDataError(f"expected {what} as a mapping of names to names, found {given!r}")
    return given


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


def _keys_of_application(programs: list[ProgramFile], renamed: Mapping[str, str]) -> list[dict[str, str]]:
    """For each program the keys that no delegate looks up, with their new keys; "" for what is left out."""
    weights = [weights_among(program) for program in programs]
    keys = [{blob.key: blob.key for blob in program.named_data} for program in programs]
    for what, new in renamed.items():
        number, key = _find_named_data(programs, keys, what)
        if key in weights[number]:
            raise UnsupportedDataError(
                f"{programs[number].path}: a delegate looks for the key {key!r}, so it must stay"
            )
        if new:
            check_key(new)
        keys[number][key] = new
    return [{key: new for key, new in own.items() if key not in of} for own, of in zip(keys, weights, strict=True)]


def _find_named_data(programs: list[ProgramFile], keys: list[dict[str, str]], what: str) -> tuple[int, str]:
    """The program and the key of its named data that are called so."""
    found = [(number, key) for number, key in _called(programs, what) if key is not None and key in keys[number]]
    if len(found) != 1:
        raise KeyNotFoundError(
            f"{what!r} names named data of {len(found)} of the programs {_listed(programs)}; it is called PROGRAM:KEY "
            "(--named-data PROGRAM:KEY=NAME)"
        )
    return found[0]


def _called(programs: list[ProgramFile], what: str) -> list[tuple[int, str | None]]:
    """The programs that `what` calls by name, each with what follows behind a colon; None if nothing does."""
    matches: dict[tuple[int, str | None], None] = {}
    for number, program in enumerate(programs):
        for called in (str(program.path), program.path.name, program.path.stem):
            if what == called:
                matches[number, None] = None
            elif what.startswith(f"{called}:"):
                matches[number, what[len(called) + 1 :]] = None
    return list(matches)


def _listed(programs: list[ProgramFile]) -> str:
    return ", ".join(str(program.path) for program in programs)


def _find(programs: list[ProgramFile], what: str) -> tuple[int, str]:
    """The program and the method that are called so."""
    matches = []
    for number, method in _called(programs, what):
        only = programs[number].methods[0] if len(programs[number].methods) == 1 else "forward"
        matches.append((number, only if method is None else method))
    if len({number for number, _ in matches}) > 1:
        raise MethodNotFoundError(f"{what!r} may be a method of several programs; call them by their paths")
    if not matches:
        raise MethodNotFoundError(
            f"{what!r} names none of the programs {_listed(programs)}; a method is called PROGRAM:METHOD, and that of a program "
            "with one method PROGRAM (--method PROGRAM=NAME)"
        )
    number, method = next(((n, m) for n, m in matches if m in programs[n].methods), matches[0])
    if method not in programs[number].methods:
        program = programs[number]
        listed = ", ".join(map(repr, program.methods))
        raise MethodNotFoundError(
            f"{program.path} has no method {method!r}, but {listed} (--method {program.path.stem}:{program.methods[0]}=NAME)"
        )
    return number, method


def _missing(
    programs: list[ProgramFile],
    names: list[dict[str, str]],
    keys: list[dict[str, str]],
    blobs: Mapping[str, FusedBlob],
    given: list[Path],
    *,
    keep_external: bool,
) -> list[str]:
    """The keys that methods need and that are neither in their program nor in a data file, if that is allowed."""
    needed: dict[str, ProgramFile] = {}
    inside: dict[str, ProgramFile] = {}
    for program, chosen, renamed in zip(programs, names, keys, strict=True):
        for key in _needed(program, chosen):
            needed.setdefault(key, program)
        if chosen:
            inside |= {renamed.get(blob.key, blob.key): program for blob in program.named_data}
    missing = {key: program for key, program in needed.items() if key not in blobs}
    if missing and not keep_external:
        raise _not_given(missing, given)
    for key, program in missing.items():
        if key in inside:  # the runtime would take these bytes, whatever the data file has
            raise KeyConflictError(
                f"{program.path}: the key {key!r} must come from a data file that was not given, and cannot stay outside, "
                f"because {inside[key].path} has bytes under this key; give the data file, too"
            )
    return list(missing)


def _needed(program: ProgramFile, methods: Collection[str]) -> list[str]:
    """The keys that some methods of a program take from data files."""
    own = {blob.key for blob in program.named_data}
    tensors = [one.key for one in program.externals if one.use.method in methods]
    return tensors + [key for key in _looked_up(program, methods) if key not in own]


def _not_given(missing: Mapping[str, ProgramFile], given: list[Path]) -> KeyNotFoundError:
    """The error for keys that are in none of the data files that were given."""
    key, program = next(iter(missing.items()))
    others = len(missing) - 1
    more = f" and {others} more key{'s' if others > 1 else ''}" if others else ""
    where = (
        f"none of the data files that were given has it: {', '.join(map(str, given))}"
        if given
        else "no data file was given with the programs"
    )
    return KeyNotFoundError(
        f"{program.path}: {key!r}{more} must come from a data file, and {where}; "
        "to keep it outside, use keep_external (--keep-external)"
    )


def _looked_up(program: ProgramFile, methods: Collection[str]) -> dict[str, None]:
    """The keys that the delegates of some methods look up.

    If a payload cannot be read, these may be all keys of the program's named data; those of data files remain unknown.
    """
    wanted: dict[str, None] = {}
    for payload in {(one.backend, one.span): None for one in program.delegates if one.method in methods}:
        keys = _keys_in(program, *payload)
        if keys is None:
            return dict.fromkeys([*wanted, *(blob.key for blob in program.named_data)])
        wanted |= dict.fromkeys(keys)
    return wanted


def _keys_in(program: ProgramFile, backend: str, payload: Span) -> Collection[str] | None:
    """The keys that a delegate looks up; None if its payload cannot be read."""
    try:
        return keys_of(backend, program.data[payload.start : payload.stop])
    except InvalidFileError:  # damaged, or of a later version, which the runtime may know
        return None


def _without_equal_methods(
    programs: list[ProgramFile], names: list[dict[str, str]], blobs: Mapping[str, FusedBlob]
) -> tuple[list[dict[str, str]], list[FusedMethod]]:
    """Leave out each method that is equal to one of the same name before it."""
    first: dict[str, tuple[int, str]] = {}
    described: dict[int, dict[str, dict[str, list[str]]]] = {}
    equal: dict[tuple[int, int], list[str]] = {}

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
                equal.setdefault((number, other), []).append(old)
                left_out.append(FusedMethod(new, programs[number].path, old))
            else:
                kept[-1][old] = new
    for (number, other), methods in equal.items():
        _check_same_data(programs[number], methods, programs[other], blobs)
    return kept, left_out


def _check_same_data(
    program: ProgramFile, methods: Collection[str], other: ProgramFile, blobs: Mapping[str, FusedBlob]
) -> None:
    """Fail unless the delegates of methods find the same bytes as those of equal methods in another program."""
    mine, its = _found_by_delegates(program, blobs), _found_by_delegates(other, blobs)
    for key in _looked_up(program, methods):
        if key in mine and key in its and not same_bytes(mine[key], its[key]):
            raise KeyConflictError(
                f"{program.path}: the key {key!r} has other bytes than for {other.path}; programs with equal keys for "
                "different weights cannot become one"
            )


def _found_by_delegates(program: ProgramFile, blobs: Mapping[str, FusedBlob]) -> dict[str, memoryview]:
    """What the delegates of a program find under each key."""
    given = {key: blob.data for key, blob in blobs.items()}
    return given | {blob.key: program.data[blob.span.start : blob.span.stop] for blob in program.named_data}


def _methods_of(program: ProgramFile) -> dict[str, dict[str, list[str]]]:
    """The description of each method, without its name."""
    by_method: dict[str, dict[str, list[str]]] = {name: {} for name in program.methods}
    for part, lines in describe(program).items():
        method, _, what = part.removeprefix("method ").rpartition(": ")
        if method in by_method:
            by_method[method][what] = lines
    return by_method


def _blobs(data_maps: list[PtdDataMap]) -> dict[str, FusedBlob]:
    """The contents of all data files, without blobstore's own records, which programs do not look up."""
    blobs: dict[str, FusedBlob] = {}
    for data_map in data_maps:
        for key in data_map:
            if not key.startswith(KEY_PREFIX):
                blob = FusedBlob(data_map.get_data(key), data_map.get_tensor_layout(key), data_map.alignment(key))
                first = blobs.setdefault(key, blob)
                if first.layout != blob.layout or not same_bytes(first.data, blob.data):
                    raise KeyConflictError(
                        f"{data_map.name}: the key {key!r} has other bytes or another layout in another data file"
                    )
    return blobs


def _part(
    program: ProgramFile, methods: dict[str, str], application: dict[str, str], blobs: Mapping[str, FusedBlob]
) -> FusedProgram:
    """A program with what it takes from the data files."""
    taken = {one.key: blobs[one.key] for one in program.externals if one.use.method in methods and one.key in blobs}
    named = {key: blobs[key] for key in sorted(delegated_keys(program, blobs.keys(), methods))}
    own = [blob.key for blob in program.named_data]
    unneeded = named_by(program, own, set(program.methods) - set(methods)) - _looked_up(program, methods).keys()
    for blob in program.named_data:
        if blob.key in named and not same_bytes(program.data[blob.span.start : blob.span.stop], named[blob.key].data):
            raise KeyConflictError(
                f"{program.path}: the key {blob.key!r} has other bytes in a data file that was given"
            )
    return FusedProgram(program, methods, tensors=taken, named_data=named, unneeded=unneeded, application=application)
