"""One data file of all files of a data set, for runtimes that take one path and refuse overlapping keys."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, cast

from blobstore.core.disk.progress import Progress
from blobstore.core.formats.ptd.reader import open_ptd
from blobstore.core.formats.ptd.writer import write_ptd
from blobstore.releases.index.index import Object
from blobstore.releases.index.objects import ObjectWriter
from blobstore.releases.index.overlay import newest_entries

__all__ = ["merge_files"]


def merge_files(files: Path, parts: Sequence[Path], progress: Progress | None = None) -> Object:
    """Write one data file; where several have a key, the last one counts.

    Args:
        files: the folder of objects.
        parts: the data files, the oldest first.
        progress: called with every step.

    Raises:
        FileAccessError, InvalidFileError, DataChangedError: a file cannot be read or written, or is damaged.
    """
    maps = [open_ptd(path) for path in parts]
    entries = newest_entries(maps)
    with ObjectWriter(files, "merging", sum(len(entry.data) for entry in entries), progress) as writer:
        write_ptd(cast(BinaryIO, writer), entries, maps[-1].metadata)
        return writer.finish()
