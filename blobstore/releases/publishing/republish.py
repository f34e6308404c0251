"""Release folders of the first format, whose data files were a foundation and deltas, as release folders of today."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from blobstore.core.constants import INDEX_LIMIT
from blobstore.core.disk.names import is_plain_path
from blobstore.core.disk.progress import Progress, check_progress
from blobstore.core.errors import InvalidFileError, ReleaseError
from blobstore.core.formats.ptd.reader import open_ptd
from blobstore.core.formats.ptd.writer import write_ptd
from blobstore.core.memory.mapped_file import as_path, named
from blobstore.releases.index.index import Name, Sha256, Size, Struct, check_file_name, parse_json
from blobstore.releases.index.overlay import newest_entries
from blobstore.releases.publishing.publish import Published, publish
from blobstore.releases.sources.source import FILES, INDEX, LATEST, read_small

__all__ = ["republish"]

_FIRST = "blobstore.release.1"


class _File(Struct, frozen=True):
    name: str
    sha256: Sha256
    size: Size


class _DataSet(Struct, frozen=True):
    name: str
    files: tuple[str, ...]


class _Index(Struct, frozen=True):
    """What is read of an index in the first format."""

    format: str
    name: Name
    version: Name
    published: Size
    executorch: str
    files: tuple[_File, ...]
    data: tuple[_DataSet, ...] = ()


@dataclass(frozen=True)
class _Old:
    """An old release: its files by the names that they get, each the objects that it is made of, the oldest first."""

    index: _Index
    files: dict[str, list[Path]]


def republish(
    old: str | os.PathLike[str],
    new: str | os.PathLike[str],
    *,
    sign: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> list[Published]:
    """Publish every release of a folder in the first format again, in a new folder, the oldest first.

    Names, versions and the order stay; indexes, and so their digests and signatures, are new. A data file that was a
    foundation and deltas is one file. Releases that the new folder has already are left out, so a call that was interrupted
    can be repeated.

    Args:
        old: the old release folder; it stays as it is.
        new: the new one, or the URL of one in a bucket.
        sign: the file of a private key.
        progress: called with every step.

    Raises:
        ReleaseError: the folder has no release of the first format.
        FileAccessError, InvalidFileError, IntegrityError: a file cannot be read, or is malformed.
    """
    check_progress(progress)
    root = as_path(old)
    releases = sorted(_releases(root), key=lambda one: one.index.published)
    if not releases:
        raise ReleaseError(f"{root}: there is no release in the format {_FIRST} here")
    done = []
    with tempfile.TemporaryDirectory(prefix="blobstore-") as made:
        for number, release in enumerate(releases):
            folder = Path(made, str(number))
            _lay_out(release, folder)
            try:
                published = publish(
                    [folder],
                    new,
                    name=release.index.name,
                    version=release.index.version,
                    executorch=release.index.executorch,
                    sign=sign,
                    progress=progress,
                )
            except ReleaseError as error:
                if "was published already" not in str(error):
                    raise
                continue
            done.append(published)
    return done


def _releases(root: Path) -> Iterator[_Old]:
    with named(root):
        places = sorted(root.glob(f"*/*/{INDEX}"))
    for place in places:
        if place.parent.name == LATEST:
            continue
        data = read_small(place, INDEX_LIMIT)
        if _FIRST.encode() not in data:
            continue
        index = parse_json(data, _Index, str(place), "an index of a release")
        yield _Old(index, dict(_files(index, root / FILES, str(place))))


def _files(index: _Index, objects: Path, where: str) -> Iterator[tuple[str, list[Path]]]:
    by_name = {file.name: objects / file.sha256 for file in index.files}
    in_sets: set[str] = set()
    for data in index.data:
        missing = [name for name in data.files if name not in by_name]
        if missing or not data.files or not is_plain_path(data.name):
            raise InvalidFileError(where, f"the data set {data.name!r} lists no files of the release")
        in_sets.update(data.files)
        yield data.name, [by_name[name] for name in data.files]
    for name, path in by_name.items():
        if name not in in_sets:
            check_file_name(name)
            yield name, [path]


def _lay_out(release: _Old, folder: Path) -> None:
    """Make the files of a release in a folder: a copy of what is one object, and one file of a foundation with its deltas."""
    for name, paths in release.files.items():
        place = folder / name
        with named(place):
            place.parent.mkdir(parents=True, exist_ok=True)
            if len(paths) == 1:
                shutil.copyfile(paths[0], place)
                continue
        maps = [open_ptd(path, verify=True) for path in paths]
        with named(place), place.open("wb") as file:
            write_ptd(file, newest_entries(maps), maps[-1].metadata)
