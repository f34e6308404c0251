"""The data files of a folder that was appended to: `shared.ptd`, then `shared-2.ptd` and so on. A key is in one of them."""

from __future__ import annotations

import contextlib
from pathlib import Path

from blobstore.core.errors import BlobStoreError, OutputPathError
from blobstore.core.formats.ptd.reader import PtdDataMap, open_ptd
from blobstore.core.programs.deployed import old_data

__all__ = ["APPENDED_TO", "Series"]

APPENDED_TO = "blobstore.programs.appended_to"
"""Metadata of all files of a series but the first: the file name of the first."""


class Series:
    """What earlier runs left of one series: the files after the first."""

    def __init__(self, directory: Path, data_name: str, *, force: bool) -> None:
        self._first = directory / data_name
        self._force = force
        self.appended: list[PtdDataMap] = []
        stem, end = self._first.stem, self._first.suffix
        for path in sorted(directory.glob("*" + end)):
            if path.stem.startswith(stem + "-"):
                with contextlib.suppress(BlobStoreError):
                    data_map = open_ptd(path)
                    if data_map.metadata.get(APPENDED_TO) == data_name:
                        self.appended.append(data_map)

    def by_key(self) -> dict[str, PtdDataMap]:
        """The file that has each key; errors as of `old_data`."""
        base = old_data([self._first], force=self._force)
        return {key: data_map for data_map in [*self.appended, *base] for key in data_map}

    def next_name(self) -> str:
        """The file name for what is new."""
        path, number = self._first, 1
        while path.exists() or path.is_symlink():
            number += 1
            path = self._first.with_stem(f"{self._first.stem}-{number}")
        return path.name

    def check_extensible(self) -> None:
        """Raise OutputPathError if the first file must not get more keys, because a later one may have them already."""
        if self.appended:
            raise OutputPathError(
                f"{self._first}: the folder was appended to, so {self.appended[0].path.name} belongs to it; use append "
                "(--append) again, or deduplicate the whole folder into another one, which makes one data file of all"
            )
