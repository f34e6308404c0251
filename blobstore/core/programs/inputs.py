"""The input files of a run, and the places of their outputs."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from pathlib import Path

from blobstore.core.errors import FileAccessError
from blobstore.core.programs.deployed import tree

__all__ = ["checkpoints_beside", "expand", "output_places"]

_CHECKPOINTS = (".safetensors", ".ptd")


def expand(paths: Sequence[Path], directory: Path) -> list[tuple[Path, Path]]:
    """The input files, each once, with its place below the folder that was given; for a single file, its name.

    Files in `directory`, the output folder, are not taken, unless it is one of the inputs itself.
    """
    output = os.path.realpath(directory)
    files: dict[str, tuple[Path, Path]] = {}
    for path in paths:
        if os.path.isdir(path):  # noqa: PTH112 - Path.is_dir raises an error for a name that is too long
            for file in _files_in(path, output):
                files.setdefault(os.path.realpath(file), (file, file.relative_to(path)))
        else:
            files.setdefault(os.path.realpath(path), (path, Path(path.name)))
    return list(files.values())


def _files_in(folder: Path, output: str) -> list[Path]:
    """The programs and data files in a folder and below it, without those in the output folder below it."""
    files = tree(folder, (".pte", ".ptd"))
    if output != os.path.realpath(folder):
        files = [file for file in files if not Path(os.path.realpath(file)).is_relative_to(output)]
    if not files:
        raise FileAccessError(folder, "there is neither a .pte nor a .ptd in this folder")
    return files


def output_places(inputs: Sequence[tuple[Path, Path]]) -> list[Path]:
    """The place of each program below the output folder; where two would be the same, with more parent folders."""
    depths = [len(place.parts) for _, place in inputs]
    full = [Path(os.path.abspath(path)).parts[1:] for path, _ in inputs]  # noqa: PTH100 - links stay as they are
    while True:
        outputs = [Path(*parts[-depth:]) for parts, depth in zip(full, depths, strict=True)]
        times = Counter(outputs)
        same = [i for i, output in enumerate(outputs) if times[output] > 1 and depths[i] < len(full[i])]
        if not same:
            return outputs
        for i in same:
            depths[i] += 1


def checkpoints_beside(folders: Iterable[Path], known: Container[str]) -> list[Path]:
    """Checkpoints in some folders, and in those above, that are not among the `known` ones, whose paths have no links."""
    own = list(folders)
    every = dict.fromkeys([*own, *(folder.parent for folder in own)])
    beside = [path for folder in every for suffix in _CHECKPOINTS for path in sorted(folder.glob(f"*{suffix}"))]
    return [path for path in beside if path.is_file() and os.path.realpath(path) not in known]
