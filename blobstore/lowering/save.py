"""Saving freshly lowered programs: ExecuTorch writes them with their data files, and a run over the folder takes them in."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blobstore.core.disk.progress import Progress
from blobstore.core.disk.recovery import ScratchFolder
from blobstore.core.errors import KeyConflictError, UnsupportedDataError
from blobstore.core.formats.data_map import MergedDataMap
from blobstore.core.formats.opening import Names, open_names
from blobstore.core.formats.ptd.reader import PtdDataMap, open_ptd
from blobstore.core.formats.pte.program import ProgramFile, read_program
from blobstore.core.memory.mapped_file import as_path
from blobstore.core.programs.folder import output_folder
from blobstore.core.programs.namespaces import namespaces
from blobstore.core.programs.options import DATA_NAME, Options
from blobstore.core.programs.results import DedupResult
from blobstore.core.programs.run import run
from blobstore.core.programs.targets import Given, ProgramJob
from blobstore.core.store import check_tag, file_name

if TYPE_CHECKING:
    from blobstore.lowering.lowered import LoweredProgram

__all__ = ["save_program", "save_programs"]


def save_programs(
    programs: Mapping[str, LoweredProgram],
    directory: str | os.PathLike[str],
    *,
    data_name: str | None = None,
    keep_small: int = 0,
    names: Names | None = None,
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
            the file of that tag, which all programs share as well; a UserWarning says so if that is all data. By default, if all tags name one file, everything goes
            there; otherwise what has no tag goes to `shared.ptd`.
        keep_small, names, prune, force, progress: as in `dedup_programs`.

    Returns:
        What the run did. The `source` of a program is its name, and `bytes_before` counts what ExecuTorch would have
        written.

    Raises:
        As `dedup_programs`.
    """
    options = Options(
        DATA_NAME if data_name is None else data_name,
        keep_small,
        open_names(names),
        prune=prune,
        force=force,
        progress=progress,
    )
    _check_managers(programs)
    places = {name: Path(name if name.endswith(".pte") else f"{name}.pte") for name in programs}
    result = _save(programs, places, as_path(directory), options, one_file=data_name is None)
    written = [path.name for path in result.data_files]
    if data_name is not None and written and file_name(data_name) not in written:
        warnings.warn(
            f"data_name={data_name!r} had no effect: all data was tagged for {' and '.join(written)} while it was lowered, and "
            "the tag wins; lower with another tag, or leave data_name out",
            stacklevel=2,
        )
    return result


def save_program(
    program: LoweredProgram,
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
    programs: Mapping[str, LoweredProgram],
    places: Mapping[str, Path],
    directory: Path,
    options: Options,
    *,
    one_file: bool = False,
) -> DedupResult:
    with output_folder(directory), ScratchFolder(directory) as scratch:
        written: dict[str, _Written] = {}
        for number, (name, manager) in enumerate(programs.items()):
            written[name] = _Written(manager, scratch / str(number), places[name].name)
            _check_methods(name, manager, written[name].data)
        tagged = {data_map.path.name for one in written.values() for data_map in one.data}
        if one_file and len(tagged) == 1:
            # Small constants that no tag was asked for would need a second file, which a cache would have to be given.
            options = replace(options, data_name=tagged.pop())
        stores = namespaces({name: one.data for name, one in written.items()})
        jobs = [ProgramJob(one.program, directory / places[name], stores[name]) for name, one in written.items()]
        given = [
            Given(data_map, data_map.path.name, stores[name]) for name, one in written.items() for data_map in one.data
        ]
        inputs = [path for one in written.values() for path in one.files]
        try:
            result = run(jobs, given, directory, inputs, options)
        except KeyConflictError as error:  # the user knows the programs by name, not these files
            message = str(error)
            for name, one in written.items():
                message = message.replace(f"{one.folder}{os.sep}", f"{name}: ")
            raise KeyConflictError(message) from None
        results = [replace(one, source=Path(name)) for one, name in zip(result.programs, programs, strict=True)]
        return replace(result, programs=results, data_inputs=[])  # those were temporary


def _check_managers(programs: Mapping[str, LoweredProgram]) -> None:
    if not isinstance(programs, Mapping):
        raise UnsupportedDataError(f"expected programs by name, found a {type(programs).__qualname__}")
    for name, manager in programs.items():
        check_tag(name)
        if not hasattr(manager, "write_to_file") or not hasattr(manager, "write_tensor_data_to_file"):
            raise UnsupportedDataError(
                f"{name}: expected an ExecutorchProgramManager, which to_executorch() returns, found a "
                f"{type(manager).__qualname__}"
            )


def _check_methods(name: str, manager: Any, data: Sequence[PtdDataMap]) -> None:
    """Raise KeyConflictError if methods have different tensors of one name; the data files would lose one of them."""
    if len(manager.methods) > 1:
        from blobstore.lowering.methods import check_constants
        from blobstore.runtime.tensors import LogicalTensors

        check_constants({method: manager.exported_program(method) for method in sorted(manager.methods)}, name)
        LogicalTensors(MergedDataMap(data)).check_stored(name)


class _Written:
    """A program and its data files as ExecuTorch writes them, in a folder of their own, and read again."""

    def __init__(self, manager: LoweredProgram, folder: Path, program: str) -> None:
        self.folder = folder
        folder.mkdir()
        with (folder / program).open("wb") as file:
            manager.write_to_file(file)
        self.files = [folder / program, *_write_data(manager, folder)]
        self.program: ProgramFile = read_program(folder / program)
        self.data: list[PtdDataMap] = [open_ptd(path) for path in self.files[1:]]


def _write_data(manager: Any, folder: Path) -> list[Path]:
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
