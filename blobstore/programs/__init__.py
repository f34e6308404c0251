"""The main job: several programs that contain the same weights become slim programs and one shared data file.

`inputs` finds the files, `deployed` what an earlier run left in the folder; `run` is one run over the folder, in which
`planning` decides what leaves the programs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from blobstore.disk.progress import Progress
from blobstore.disk.recovery import ScratchFolder
from blobstore.errors import KeyConflictError, UnsupportedDataError
from blobstore.formats.data_map import NamedDataMap
from blobstore.formats.opening import Format, detect_format
from blobstore.formats.ptd.reader import PtdDataMap, open_ptd
from blobstore.formats.pte.program import ProgramFile, read_program
from blobstore.memory.mapped_file import Paths, as_path, as_paths
from blobstore.programs.folder import output_folder
from blobstore.programs.inputs import expand, output_places
from blobstore.programs.namespaces import check_methods, namespaces
from blobstore.programs.options import DATA_NAME, Options
from blobstore.programs.results import DedupResult, ProgramResult
from blobstore.programs.run import DataInput, ProgramInput, run
from blobstore.store import check_tag, file_name

if TYPE_CHECKING:
    from executorch.exir import ExecutorchProgramManager

__all__ = ["DATA_NAME", "DedupResult", "ProgramResult", "dedup_programs", "save_program", "save_programs"]


def dedup_programs(
    inputs: Paths,
    directory: str | os.PathLike[str],
    *,
    data_name: str = DATA_NAME,
    keep_small: int = 0,
    names: NamedDataMap | None = None,
    prune: bool = False,
    force: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> DedupResult:
    """Move the weights of programs to one data file, each distinct blob once.

    The stock runtime loads `directory/A.pte` with `directory/shared.ptd` as its data file, and computes what the original
    program computes.

    The folder is a set of programs with their data files, and another run extends it. A program with the same name is
    replaced; the other programs in the folder and below it keep every key that they take. All files are the old ones or
    the new ones; the next run finishes one that was killed between two renames. A process that has an old file open
    keeps that file. Other processes that write programs into the folder wait.

    Args:
        inputs: one or several files and folders: `.pte` files, and `.ptd` files that some of them need, whose contents
            go to the shared file. A folder stands for all such files in it and below it, except those in `directory`.
        directory: where the outputs go; made if it is missing. A program keeps its file name, and one from a folder its
            place below that folder. Programs that would get the same place keep as many of their parent folders as needed.
        data_name: the file name of the shared data.
        keep_small: tensors and blobs with fewer bytes than this stay in their program. A blob in a data file takes a
            multiple of 128 bytes, and a key.
        names: tensors by name, from a checkpoint. A moved tensor that equals exactly one of them, to the byte, gets its
            name as key. All others get keys made of their contents.
        prune: drop the keys of earlier runs that no program in the folder takes any more.
        force: replace inputs, files of another format, and programs that cannot be read; and extend a data file of
            unknown origin.
        dry_run: check and compute everything, and write nothing. What a killed run left in the folder stays, too.
        progress: called with every step.

    Returns:
        What the run did; of a dry run what it would do.

    Raises:
        FileAccessError, InvalidFileError, IntegrityError: an input or a file of an earlier run cannot be read, is
            malformed or damaged; or an output cannot be written.
        UnsupportedDataError: an input is neither a program nor a data file, or `keep_small`, `names` or `progress` has
            the wrong type.
        UnsupportedProgramError: a program contains something that the rewrite would lose.
        KeyConflictError: two inputs, or an input and a program in the folder, have different contents under a key that
            delegates look up.
        OutputPathError: an output would replace an input, a file of another format, or a data file that was not written
            together with programs.
        InvalidTagError: `data_name` is not a file name.
        In every case the directory is as it was before.
    """
    options = Options(data_name, keep_small, names, prune, force, progress, dry_run)
    directory = as_path(directory)
    sources = as_paths(inputs)
    with output_folder(directory, dry_run=dry_run):
        found = expand(sources, directory)
        kinds = [detect_format(path) for path, _ in found]
        for (path, _), kind in zip(found, kinds, strict=True):
            if kind not in {Format.PTE, Format.PTD}:
                raise UnsupportedDataError(f"{path}: expected a .pte or a .ptd, found {kind.value}")
        programs = [one for one, kind in zip(found, kinds, strict=True) if kind is Format.PTE]
        data = [path for (path, _), kind in zip(found, kinds, strict=True) if kind is Format.PTD]
        places = output_places(programs)
        return run(
            [ProgramInput(read_program(path), place) for (path, _), place in zip(programs, places, strict=True)],
            [DataInput(open_ptd(path, verify=True), options.data_name) for path in data],
            directory,
            [path for path, _ in found],
            options,
        )


def save_programs(
    programs: Mapping[str, ExecutorchProgramManager],
    directory: str | os.PathLike[str],
    *,
    data_name: str = DATA_NAME,
    keep_small: int = 0,
    names: NamedDataMap | None = None,
    prune: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> DedupResult:
    """Save freshly lowered programs with their weights in shared data files.

    Keys are unique among the files that programs share. Programs that were lowered with different tags, such as an
    encoder and a decoder, can have different contents under the same keys; then one cache cannot take the files of both.

    Args:
        programs: what `to_executorch()` returned, by the name of the file to write, with or without `.pte`.
        directory: where the outputs go; made if it is missing. What an earlier run left there is extended, as by
            `dedup_programs`.
        data_name: the file name of the shared data. Data that was tagged for another file while it was lowered goes to
            the file of that tag, which all programs share as well.
        keep_small, names, prune, force, progress: as in `dedup_programs`.

    Returns:
        What the run did. The `source` of a program is its name, and `bytes_before` counts what ExecuTorch would have
        written.

    Raises:
        As `dedup_programs`.
    """
    options = Options(data_name, keep_small, names, prune, force, progress)
    _check_managers(programs)
    places = {name: Path(name if name.endswith(".pte") else f"{name}.pte") for name in programs}
    return _save(programs, places, as_path(directory), options)


def save_program(
    program: ExecutorchProgramManager,
    path: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    metadata: Mapping[str, Mapping[str, str]] | None = None,
) -> DedupResult:
    """Save one freshly lowered program, with the data files that its weights were tagged for in a folder.

    What has no tag stays in the program. Otherwise this is a run of `save_programs` over the folder.

    Args:
        program: what `to_executorch()` returned.
        path: of the program; it need not be in the folder. Later runs over the folder keep the weights of programs that
            are in it or below it.
        directory: the folder of the data files.
        metadata: free text to keep with the data files, by the name of the file.

    Returns, raises:
        As `save_programs`.
    """
    path, directory = as_path(path), as_path(directory)
    _check_managers({path.name: program})
    place = Path(os.path.relpath(os.path.realpath(path), os.path.realpath(directory)))
    options = Options(keep_small=sys.maxsize, metadata=metadata or {})
    return _save({path.name: program}, {path.name: place}, directory, options)


def _save(
    programs: Mapping[str, ExecutorchProgramManager], places: Mapping[str, Path], directory: Path, options: Options
) -> DedupResult:
    with output_folder(directory), ScratchFolder(directory) as scratch:
        written: dict[str, _Written] = {}
        for number, (name, manager) in enumerate(programs.items()):
            written[name] = _Written(manager, scratch / str(number), places[name].name)
            check_methods(name, manager, written[name].data)
        namespace = namespaces({name: one.data for name, one in written.items()})
        try:
            result = run(
                [ProgramInput(one.program, places[name], namespace[name]) for name, one in written.items()],
                [
                    DataInput(data_map, data_map.path.name, namespace[name])
                    for name, one in written.items()
                    for data_map in one.data
                ],
                directory,
                [path for one in written.values() for path in one.files],
                options,
            )
        except KeyConflictError as error:  # the user knows the programs by name, not these files
            message = str(error)
            for name, one in written.items():
                message = message.replace(f"{one.folder}{os.sep}", f"{name}: ")
            raise KeyConflictError(message) from None
        results = [replace(one, source=Path(name)) for one, name in zip(result.programs, programs, strict=True)]
        return replace(result, programs=results)


def _check_managers(programs: Mapping[str, ExecutorchProgramManager]) -> None:
    if not isinstance(programs, Mapping):
        raise UnsupportedDataError(f"expected programs by name, found a {type(programs).__qualname__}")
    for name, manager in programs.items():
        check_tag(name)
        if not hasattr(manager, "write_to_file") or not hasattr(manager, "write_tensor_data_to_file"):
            raise UnsupportedDataError(
                f"{name}: expected an ExecutorchProgramManager, which to_executorch() returns, found a "
                f"{type(manager).__qualname__}"
            )


class _Written:
    """A program and its data files as ExecuTorch writes them, in a folder of their own.

    Attributes:
        folder: the folder.
        files: the program and the data files in it.
        program: the program, read again.
        data: its data files, opened.
    """

    def __init__(self, manager: ExecutorchProgramManager, folder: Path, program: str) -> None:
        self.folder = folder
        folder.mkdir()
        with (folder / program).open("wb") as file:
            manager.write_to_file(file)
        self.files = [folder / program, *_write_data(manager, folder)]
        self.program: ProgramFile = read_program(folder / program)
        self.data: list[PtdDataMap] = [open_ptd(path) for path in self.files[1:]]


def _write_data(manager: ExecutorchProgramManager, folder: Path) -> list[Path]:
    """Write the data files of a program, and return their paths.

    The tags `model` and `model.ptd` are of one file, which ExecuTorch would write twice, each time with the weights of
    one of the tags. Here the second goes to a folder of its own, under the same name.
    """
    tags = sorted(getattr(manager, "_tensor_data", None) or {})
    twice = [tag for tag in tags if tag.endswith(".ptd") and tag.removesuffix(".ptd") in tags]
    manager.write_tensor_data_to_file(str(folder))
    paths = sorted(folder.glob("*.ptd"))
    for number, tag in enumerate(twice):
        for other, place in ((tag.removesuffix(".ptd"), folder), (tag, folder / str(number))):
            place.mkdir(exist_ok=True)
            with (place / file_name(tag)).open("wb") as file:
                manager._tensor_data[other].write_to_file(file)
        paths.append(folder / str(number) / file_name(tag))
    return paths
