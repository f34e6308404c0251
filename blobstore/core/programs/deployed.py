"""What earlier runs left in a folder: programs, their data files, and which program takes which key."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from blobstore.core.constants import BACKEND_ID
from blobstore.core.disk.kinds import Format, check_replaceable, detect_format
from blobstore.core.errors import BlobStoreError, FileAccessError, InvalidFileError, OutputPathError
from blobstore.core.formats.flatbuffer import Span
from blobstore.core.formats.keys import KEY_PREFIX, OF_PROGRAMS
from blobstore.core.formats.ptd.reader import PtdDataMap, open_ptd
from blobstore.core.formats.pte.program import ProgramFile, read_program
from blobstore.core.memory.mapped_file import as_path

__all__ = [
    "FLATBUFFERS",
    "USERS",
    "data_files",
    "data_files_of",
    "delegated_keys",
    "describing",
    "mentioned",
    "named_by",
    "old_data",
    "old_programs",
    "other_data",
    "place_of",
    "taken_by",
    "taken_from",
    "tree",
    "users_of",
    "weights_among",
]

USERS = "blobstore.programs.names"
"""Metadata of a data file if other data files in the folder have some of its keys: JSON, the paths of the programs that
were written to take this file. The keys alone do not show which file a program takes."""

FLATBUFFERS = {"XnnpackBackend", BACKEND_ID}
"""Backends whose payloads contain the keys that they look up as text."""

_TEXT = re.compile(rb'[^\0-\x1f"]+')
_SEARCHED = 1 << 24  # bytes


def old_programs(directory: Path, replaced: Collection[Path]) -> list[ProgramFile]:
    """The programs in a folder and below it, without those that will be replaced.

    Raises:
        FileAccessError, InvalidFileError: a folder or a program cannot be read, so the keys that it takes are unknown.
    """
    if not directory.exists():
        return []
    gone = {os.path.realpath(path) for path in replaced}
    programs: list[ProgramFile] = []
    for path in tree(directory, (".pte",)):
        if os.path.realpath(path) not in gone and _is(path, Format.PTE):
            programs.append(read_program(path))
    return programs


def old_data(paths: Iterable[Path], *, force: bool) -> list[PtdDataMap]:
    """The data files among `paths`, which will be written, that exist already.

    With `force`, those of unknown origin, too, but for malformed ones.

    Raises:
        OutputPathError: one is a file of another format, or was not written together with programs.
    """
    data_maps: list[PtdDataMap] = []
    for path in paths:
        check_replaceable(path, Format.PTD, force=force)
        if _is(path, Format.PTD):
            try:
                data_map = open_ptd(path)
            except InvalidFileError:
                if force:
                    continue
                raise
            if not force and not OF_PROGRAMS.items() <= data_map.metadata.items():
                raise OutputPathError(
                    f"{path}: this data file is of unknown origin, because it was not written together with programs; choose "
                    "another name, or use force (--force) to add to it"
                )
            data_maps.append(data_map)
    return data_maps


def other_data(directory: Path, paths: Collection[Path]) -> list[PtdDataMap]:
    """The data files in a folder that were written together with programs, without `paths` and unreadable ones."""
    data_maps = []
    for path in sorted(directory.glob("*.ptd")):
        if path not in paths:
            with contextlib.suppress(BlobStoreError):
                data_map = open_ptd(path)
                if OF_PROGRAMS.items() <= data_map.metadata.items():
                    data_maps.append(data_map)
    return data_maps


def _is(path: Path, kind: Format) -> bool:
    """Whether a file exists and has this format."""
    try:
        return detect_format(path) is kind
    except InvalidFileError:  # the file is empty
        return False
    except FileAccessError as error:
        if error.errno != errno.ENOENT:
            raise
        return False


def tree(directory: Path, endings: tuple[str, ...]) -> list[Path]:
    """The files in a folder and below it with these endings, in order, without hidden ones and those behind folder links.

    Raises:
        FileAccessError: a folder cannot be read.
    """

    def fail(error: OSError) -> None:
        raise FileAccessError(error.filename or directory, error)

    files: list[Path] = []
    for folder, folders, names in os.walk(directory, onerror=fail):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        files += [Path(folder, name) for name in sorted(names) if name.endswith(endings) and not name.startswith(".")]
    return files


def taken_by(program: ProgramFile, keys: Collection[str]) -> set[str]:
    """Those of `keys` that a program looks up in its data files.

    The keys of tensors are in the program. The keys of delegates are in payloads that only their backends understand.
    Payloads of known backends contain the keys as text; a delegate of any other backend may take every key.
    """
    tensors = {external.key for external in program.externals}
    left = set(keys) - tensors
    return set(keys) - left | delegated_keys(program, left)


def delegated_keys(program: ProgramFile, keys: Collection[str], methods: Collection[str] | None = None) -> set[str]:
    """Those of `keys` that the delegates of a program, or of some of its methods, look up; see `taken_by`."""
    known = FLATBUFFERS.issuperset(_payloads(program, methods).values())
    return named_by(program, keys, methods) if known else set(keys)


def named_by(program: ProgramFile, keys: Collection[str], methods: Collection[str] | None = None) -> set[str]:
    """Those of `keys` that the payloads of a program, or of some of its methods, name as text, of whichever backend."""
    left = set(keys)
    for span, backend in _payloads(program, methods).items():
        if left:
            payload = program.data[span.start : span.stop]
            left -= mentioned(payload, left) if backend in FLATBUFFERS else _written_in(payload, left)
    return set(keys) - left


def _payloads(program: ProgramFile, methods: Collection[str] | None) -> dict[Span, str]:
    """The payloads of a program, or of some of its methods, each with its backend."""
    return {one.span: one.backend for one in program.delegates if methods is None or one.method in methods}


def weights_among(program: ProgramFile) -> set[str]:
    """The keys of a program's own named data that its delegates look up, and of blobstore's records for them.

    What no payload names is the application's, which reads it from the program (`Program::get_named_data_map`) and would
    not find it in a data file. So it stays inside. A delegate of an unknown backend that names none of its keys finds
    them there, too.
    """
    keys = {blob.key for blob in program.named_data}
    return named_by(program, keys) | {key for key in keys if key.startswith(KEY_PREFIX)}


def taken_from(program: ProgramFile, files: Mapping[str, PtdDataMap], directory: Path) -> dict[str, set[str]]:
    """The keys that a program in a folder takes from each of the data files there, by file name.

    If several files have a key, the program may take it from any of them. But if the files that list the program among
    their users have all keys that it takes, it takes them from these.
    """
    keys = taken_by(program, set(itertools.chain(*files.values())))
    place = place_of(program.path, directory)
    listed = [name for name, data_map in files.items() if place in users_of(data_map.metadata)]
    homes = listed if keys <= set(itertools.chain(*(files[name] for name in listed))) else files
    return {name: keys & set(files[name]) for name in homes}


def data_files(path: str | os.PathLike[str], directory: str | os.PathLike[str] | None = None) -> list[Path]:
    """The data files that a program of a folder takes, for the runtime to load it with.

    Args:
        path: the program.
        directory: the folder that it was written to; by default the one that it lies in.

    Returns:
        Those data files of the folder, written together with programs, that have keys which it takes, by name. If several
        have a key, and none of them says that it is for this program, all are returned.

    Raises:
        FileAccessError, InvalidFileError: the program cannot be read.
    """
    program = as_path(path)
    return data_files_of([program], program.parent if directory is None else Path(directory))[program]


def data_files_of(programs: Iterable[Path], directory: Path) -> dict[Path, list[Path]]:
    """What `data_files` returns, for several programs of a folder."""
    files = {data_map.path.name: data_map for data_map in other_data(directory, ())}
    taken = {path: taken_from(read_program(path), files, directory) for path in programs}
    return {path: [directory / name for name, keys in sorted(of.items()) if keys] for path, of in taken.items()}


def users_of(metadata: Mapping[str, str]) -> set[str]:
    """The programs that a data file lists as its users; empty if it has no valid list."""
    try:
        names = json.loads(metadata.get(USERS, "[]"))
    except (ValueError, RecursionError):
        return set()
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()


def place_of(path: Path, directory: Path) -> str:
    """The path of a program below a folder, as the data files of the folder list it."""
    return path.relative_to(directory).as_posix()


def describing(data_map: PtdDataMap, taken: Collection[str]) -> set[str]:
    """The keys of records that describe a key in `taken`, or no key at all. Programs do not look up records by key."""
    keys = set(data_map)
    records = set()
    for key in keys:
        if key.startswith(KEY_PREFIX):
            about = mentioned(data_map.get_data(key), keys)
            if not about or about.intersection(taken):
                records.add(key)
    return records


def _written_in(payload: memoryview, keys: Collection[str]) -> set[str]:
    """Those of `keys` that occur in a payload between quotes or control characters, as in flatbuffers, JSON and lines.

    Large payloads are not searched, because they have their weights in themselves.
    """
    if len(payload) > _SEARCHED:
        return set()
    texts = {key.encode(): key for key in keys}
    return {texts[match[0]] for match in _TEXT.finditer(payload) if match[0] in texts}


def mentioned(data: memoryview, keys: Collection[str]) -> set[str]:
    """Those of `keys` that occur in the data as text of a flatbuffer: the length in four bytes, the text, and a NUL."""
    texts = {key.encode(): key for key in keys}
    longest = max(map(len, texts), default=0)
    wanted = np.zeros(longest + 2, bool)
    wanted[[len(text) for text in texts]] = True
    occurring: set[str] = set()
    # A flatbuffer aligns the lengths of its texts, but may itself begin anywhere in a payload.
    for shift in range(4):
        words: npt.NDArray[np.uint32] = np.frombuffer(data[shift : shift + (len(data) - shift) // 4 * 4], "<u4")
        (short,) = np.nonzero(words <= longest)
        for at in short[wanted[words[short]]].tolist():
            start = shift + 4 * at + 4
            text = bytes(data[start : start + int(words[at]) + 1])
            if text[-1:] == b"\0" and (key := texts.get(text[:-1])) is not None:
                occurring.add(key)
    return occurring
