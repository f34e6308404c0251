"""The main job: several programs that contain the same weights become slim programs and one shared data file.

`inputs` finds the files, `found` and `deployed` what an earlier run left in the folder; `run` is one run over the folder, in
which `planning` decides what leaves the programs, and `targets` where it goes. `series` has the data files of a folder that is only appended to.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from blobstore.core.disk.progress import Progress
from blobstore.core.errors import BlobStoreError, UnsupportedDataError
from blobstore.core.formats.data_map import NamedDataMap
from blobstore.core.formats.keys import OF_PROGRAMS
from blobstore.core.formats.opening import Format, Names, detect_format, open_any, open_names
from blobstore.core.formats.ptd.reader import PtdDataMap, open_ptd
from blobstore.core.formats.pte.program import read_program
from blobstore.core.memory.mapped_file import Paths, as_path, as_paths
from blobstore.core.programs.deployed import data_files
from blobstore.core.programs.folder import output_folder
from blobstore.core.programs.inputs import checkpoints_beside, expand, output_places
from blobstore.core.programs.options import DATA_NAME, Options
from blobstore.core.programs.results import DataResult, DedupResult, KeyResult, ProgramResult
from blobstore.core.programs.run import run
from blobstore.core.programs.targets import Given, ProgramJob
from blobstore.core.store import BlobStore

__all__ = ["DATA_NAME", "DataResult", "DedupResult", "KeyResult", "ProgramResult", "data_files", "dedup_programs"]


def dedup_programs(
    inputs: Paths,
    directory: str | os.PathLike[str],
    *,
    data_name: str = DATA_NAME,
    keep_small: int = 0,
    names: Names | None = None,
    names_beside: bool = False,
    prune: bool = False,
    append: bool = False,
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
        names: tensors by name: a checkpoint, or several, or their paths. A moved tensor that equals exactly one of them, to
            the byte, gets its name as key. All others get keys made of their contents.
        names_beside: without `names`, take the checkpoints (`.safetensors`, and `.ptd` that were not written with programs)
            in the folders of the programs and in those above, as `report` does. What cannot be read gives no names.
        prune: drop the keys of earlier runs that no program in the folder takes any more.
        append: leave the data files of the folder as they are, and write what is new to another one: `shared-2.ptd` and so
            on. No other program of the folder is read, so this costs what the new programs cost, and reading the keys
            of the data files. A program then takes several data files (`data_files`), and `kept` of the result is empty. To make one
            data file of all, deduplicate the whole folder into another one.
        force: replace inputs, files of another format, and programs that cannot be read; and extend a data file of
            unknown origin.
        dry_run: check and compute everything, and write nothing. What a killed run left in the folder stays, too.
        progress: called with every step.

    Returns:
        What the run did; of a dry run what it would do.

    Raises:
        FileAccessError, InvalidFileError, IntegrityError: an input or a file of an earlier run cannot be read, is
            malformed or damaged; or an output cannot be written.
        UnsupportedDataError: an input is neither a program nor a data file, `keep_small`, `names` or `progress` has the
            wrong type, or both `prune` and `append` are set.
        UnsupportedProgramError: a program contains something that the rewrite would lose.
        KeyConflictError: two inputs, or an input and a program in the folder, have different contents under a key that
            delegates look up; or two data files have different contents under one key.
        OutputPathError: an output would replace an input, a file of another format, or a data file that was not written
            together with programs; or the folder was appended to, and this run would extend its first data file.
        InvalidTagError: `data_name` is not a file name.
        In every case the directory is as it was before.
    """
    given = open_names(names)
    options = Options(data_name, keep_small, given, prune, append, force, progress, dry_run)
    directory = as_path(directory)
    sources = as_paths(inputs)
    with output_folder(directory, dry_run=dry_run):
        files = expand(sources, directory)
        kinds = [detect_format(path) for path, _ in files]
        for (path, _), kind in zip(files, kinds, strict=True):
            if kind not in {Format.PTE, Format.PTD}:
                raise UnsupportedDataError(f"{path}: expected a .pte or a .ptd, found {kind.value}")
        programs = [one for one, kind in zip(files, kinds, strict=True) if kind is Format.PTE]
        data = [path for (path, _), kind in zip(files, kinds, strict=True) if kind is Format.PTD]
        places = output_places(programs)
        if names_beside and names is None:
            known = [*(path for path, _ in files), directory / options.data_name]
            options = replace(options, names_beside=_open_beside([path for path, _ in programs], known))
        store = BlobStore()
        jobs = [
            ProgramJob(read_program(path), directory / place, store)
            for (path, _), place in zip(programs, places, strict=True)
        ]
        given_data = [Given(open_ptd(path, verify=True), options.data_name, store) for path in data]
        return run(jobs, given_data, directory, [path for path, _ in files], options)


def _open_beside(programs: Iterable[Path], known: Iterable[Path]) -> list[NamedDataMap]:
    """The checkpoints beside programs, but for files that are `known`."""
    folders = dict.fromkeys(Path(os.path.abspath(path)).parent for path in programs)  # noqa: PTH100 - of a link, its own
    found: list[NamedDataMap] = []
    for path in checkpoints_beside(folders, {os.path.realpath(one) for one in known}):
        with contextlib.suppress(BlobStoreError):
            data_map = open_any(path)
            if not isinstance(data_map, PtdDataMap) or not OF_PROGRAMS.items() <= data_map.metadata.items():
                found.append(data_map)
    return found
