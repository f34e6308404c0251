"""The options that `dedup_programs` and `save_programs` share."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from blobstore.core.disk.progress import Progress, check_progress
from blobstore.core.errors import UnsupportedDataError
from blobstore.core.formats.data_map import NamedDataMap
from blobstore.core.store import check_tag

__all__ = ["DATA_NAME", "Options"]

DATA_NAME = "shared.ptd"
"""The default file name of the shared data."""


@dataclass(frozen=True)
class Options:
    """How a run works; `dedup_programs` describes each option.

    Raises:
        InvalidTagError: `data_name` is not a plain file name.
        UnsupportedDataError: `keep_small` or `progress` has the wrong type, or `prune` and `append` are set.

    Attributes:
        names: the checkpoints that give names.
        names_beside: those that were found beside the programs.
        metadata: free text to keep with data files, by the name of the file.
    """

    data_name: str = DATA_NAME
    keep_small: int = 0
    names: Sequence[NamedDataMap] = ()
    prune: bool = False
    append: bool = False
    force: bool = False
    progress: Progress | None = None
    dry_run: bool = False
    metadata: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    names_beside: Sequence[NamedDataMap] = ()

    def __post_init__(self) -> None:
        check_tag(self.data_name)
        try:
            operator.index(self.keep_small)
        except TypeError:
            raise UnsupportedDataError(f"keep_small must be an integer, got {self.keep_small!r}") from None
        if self.prune and self.append:
            raise UnsupportedDataError("prune writes data files anew, and append leaves them as they are; choose one")
        check_progress(self.progress)
