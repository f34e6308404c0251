"""Freeing what no release needs any more, and leading devices around what moved.

The pool is collected first (see `blobstore.pool.collecting`). That may condemn packs, which stay for a while. The ways of
each release are then written anew where they lead to such a pack, and what is beside the pool goes (see `beside`).
"""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import dataclass

from blobstore.core.errors import FileAccessError, ReleaseError
from blobstore.core.reprs import fields_line
from blobstore.pool import Collected
from blobstore.pool.collecting import collect
from blobstore.publishing.beside import DAY, read_unused, remove_unused
from blobstore.publishing.publish import opened

__all__ = ["Swept", "sweep"]


@dataclass(frozen=True)
class Swept:
    """What `sweep` did.

    Attributes:
        withdrawn: releases whose version was dropped from the pool, and that are gone now.
        rewritten: releases whose ways were written anew.
        objects, freed: how many objects beside the pool were removed, and their bytes.
        waiting: objects that a later call will remove.
        pool: what was collected in the pool.
    """

    __repr__ = fields_line

    withdrawn: int
    rewritten: int
    objects: int
    freed: int
    waiting: int
    pool: Collected


def sweep(releases: str | os.PathLike[str], *, grace: float = 7 * DAY, keep: float = DAY) -> Swept:
    """Free what no release needs. It may be killed at any time; the next call goes on.

    Args:
        releases: the release folder, or its URL.
        grace: seconds after which a version that is being added to the pool is given up.
        keep: seconds for which what is no longer referred to stays, for devices that looked it up before. It must be longer
            than caches keep `ways.json.zst`, and than publishing takes.

    Raises:
        PoolError, ReleaseError: there is no release folder.
        FileAccessError, TransferError: the store refuses.
    """
    for name, seconds in (("grace", grace), ("keep", keep)):
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
            raise ReleaseError(f"{name} must be a number of seconds, not {seconds!r}")
    with opened(releases) as pool:
        objects = pool.objects
        collected = objects.with_reserve(lambda: collect(objects, pool.tables, grace=grace, keep=keep))
        rounds = remove_unused(pool, read_unused(objects), keep)
        with contextlib.suppress(FileAccessError):
            objects.reserve()
        return Swept(
            sum(one.withdrawn for one in rounds),
            sum(one.rewritten for one in rounds),
            sum(one.removed for one in rounds),
            sum(one.freed for one in rounds),
            rounds[-1].waiting,
            collected,
        )
