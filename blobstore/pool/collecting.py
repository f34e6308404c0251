"""Removing what no version needs, while others add and read.

A blob is needed if a version that is there needs it, one that is being added, or a needed blob that is stored against it.
A collection

1. gives up versions that were begun long ago and never appeared. The event that says so and the one that lets a
   version appear exclude each other: a commit of the events carries the id of the version as a mark, once.
2. reads the versions, and marks all rows of blobs that none of them needs.
3. reads the versions *again*, and removes the marks of rows that are needed by now.
4. copies what is needed out of packs that are mostly unused, and condemns these packs. It reads the versions once more,
   copies what came to be needed meanwhile, and deletes the rows of condemned packs.
5. condemns packs that have no rows and are old. A pack is deleted some time after it was condemned, if it has no rows.

Whoever adds appends the rows of the parts before looking up blobs, and treats rows as missing if they are marked or if
their pack is condemned. If the parts were there before step 3, they count there. If they came later, the look-up came
after the marks, and what is marked is stored again. The same holds of step 4: a version may be dropped after step 3, and
another one with the same contents begun; it looked up before the pack was condemned, and then its parts are read after
that, or it looks up later, and stores its contents again. In the same way, rows of a pack that was condemned before they came
are seen by the look-up that follows their commit. So what is deleted is needed by nobody, without any lock or clock; times
only decide how long is waited. A collection that dies leaves marks: readers ignore them, and the next collection removes
those of needed rows. Names of packs are random, and a condemned one stays condemned.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from blobstore.core.errors import FileAccessError
from blobstore.core.reprs import fields_line
from blobstore.pool.contents import Blobs
from blobstore.pool.objects import FULL, TEMPORARY, Objects
from blobstore.pool.packs import Stored, copy_pack, pack_path
from blobstore.pool.tables import BLOBS, EVENTS, MARKS, PARTS, Tables, TakenError

__all__ = ["UNUSED", "Collected", "collect"]

UNUSED = "releases.json"
"""What a pool has from which releases are published: which objects beside it nothing refers to, and since when. It is
collected together with these.
"""

_MOSTLY = 0.5
"""A pack of which no more than this share is needed is written anew."""

_LISTED = 500
"""Values in a condition."""

_KEPT = """
    WITH needed AS (
        SELECT DISTINCT digest FROM parts WHERE id NOT IN (SELECT id FROM events WHERE kind <> 'add')
    ),
    usable AS (
        SELECT digest, pack, base, length FROM blobs
        WHERE pack NOT IN (SELECT pack FROM marks WHERE digest IS NULL)
    ),
    related AS (SELECT DISTINCT base FROM usable WHERE base IS NOT NULL AND digest IN (SELECT digest FROM needed)),
    chosen AS (
        SELECT digest, pack, base FROM usable WHERE digest IN (SELECT digest FROM needed)
        QUALIFY 1 = row_number() OVER (
            PARTITION BY digest
            ORDER BY base IS NOT NULL AND digest IN (SELECT base FROM related), length, pack
        )
    ),
    bases AS (
        SELECT digest, pack FROM usable
        WHERE base IS NULL AND digest IN (SELECT base FROM chosen)
        AND digest NOT IN (SELECT digest FROM chosen WHERE base IS NULL)
        QUALIFY 1 = row_number() OVER (PARTITION BY digest ORDER BY length, pack)
    ),
    kept AS (SELECT digest, pack FROM chosen UNION ALL SELECT digest, pack FROM bases)
"""
"""One row of each content that a version needs which is there or being added, and of each base of these rows.

A content that may be a base keeps a row in which it is whole; any other the shortest one.
"""


_COLUMNS = 'b.digest, b.size, b.dtype, b.shape, b.encoding, b.base, b.pack, b."offset", b.length, b.time, b.check, b.sketch, b.near_sketch'

_STRANDED = f"""
    SELECT {_COLUMNS} FROM blobs b
    WHERE b.pack IN (SELECT pack FROM marks WHERE digest IS NULL) AND b.digest IN (SELECT digest FROM needed) AND (
        b.digest NOT IN (SELECT digest FROM usable)
        OR b.digest NOT IN (SELECT digest FROM usable WHERE base IS NULL)
        AND b.base IS NULL AND b.digest IN (SELECT base FROM blobs WHERE base IS NOT NULL)
    )
    QUALIFY 1 = row_number() OVER (PARTITION BY b.digest ORDER BY b.base IS NOT NULL, b.length, b.pack)
"""
"""After `_KEPT`: rows of condemned packs of contents that are needed, and nowhere else, or not whole."""


@dataclass(frozen=True)
class Collected:
    """What a collection did.

    Attributes:
        abandoned: versions that were begun and given up.
        unused: rows of blobs that nothing needs, in packs that are mostly needed.
        packs: how many packs were deleted.
        freed: bytes of these packs.
        waiting: packs that a later collection will delete.
    """

    __repr__ = fields_line

    abandoned: int
    unused: int
    packs: int
    freed: int
    waiting: int


def collect(objects: Objects, tables: Tables, *, grace: float, keep: float) -> Collected:
    """Collect.

    Args:
        objects, tables: the pool.
        grace: seconds after which a version that was begun is given up, and a file that nothing refers to is removed.
        keep: seconds for which a pack stays after it was condemned, for readers that looked it up before.

    Raises:
        FileAccessError, TransferError: the store refuses. What was not done is done by the next collection.
    """
    now = time.time()
    tables.fresh()
    abandoned = _give_up(tables, now - grace)
    tables.fresh()
    _mark(tables, int(now))
    tables.fresh()
    _unmark(tables)
    tables.fresh()
    _empty_packs(objects, tables, int(now))
    packs, freed, waiting = _sweep(objects, tables, now - grace, now - keep)
    _forget(tables)
    tables.tidy()
    tables.fresh()
    ((unused,),) = tables.query("SELECT count(*) FROM marks WHERE digest IS NOT NULL")
    return Collected(abandoned, unused, packs, freed, waiting)


def _give_up(tables: Tables, before: float) -> int:
    """End versions that were begun and did not appear."""
    begun = tables.query(
        "SELECT DISTINCT id, name, version FROM parts WHERE begun <= ? AND id NOT IN (SELECT id FROM events)",
        int(before),
    )
    ended = 0
    for identity, name, version in begun:
        tables.fresh(EVENTS)
        if not tables.seen(EVENTS, f"end {identity}"):
            try:
                row = (identity, "abandon", name, version, int(time.time()), "[]")
                tables.append(EVENTS, [row], once=[f"end {identity}"])
            except TakenError:  # it appeared in this moment
                continue
            ended += 1
    return ended


def _mark(tables: Tables, now: int) -> None:
    unused = tables.query(
        f"{_KEPT} SELECT digest, pack FROM blobs EXCEPT SELECT digest, pack FROM kept EXCEPT SELECT digest, pack FROM marks"
    )
    tables.append(MARKS, [(digest, pack, now) for digest, pack in unused])


def _unmark(tables: Tables) -> None:
    needed = tables.query(f"{_KEPT} SELECT digest, pack FROM marks INTERSECT SELECT digest, pack FROM kept")
    by_pack: dict[bytes, list[bytes]] = defaultdict(list)
    for digest, pack in needed:
        by_pack[pack].append(digest)
    for pack, digests in by_pack.items():
        for listed in _lists(digests):
            tables.delete(MARKS, f"pack = {_literal(pack)} AND digest IN ({listed})")


def _empty_packs(objects: Objects, tables: Tables, now: int) -> None:
    """Copy what is needed out of packs that are mostly unused, condemn them, copy what is needed by now, delete their rows."""
    rows = tables.query(
        f"{_KEPT} SELECT b.pack, sum(b.length), coalesce(sum(b.length) FILTER (k.digest IS NOT NULL), 0) "
        "FROM (SELECT DISTINCT digest, pack, length FROM blobs) b LEFT JOIN kept k ON k.digest = b.digest AND k.pack = b.pack GROUP BY b.pack "
        "HAVING count(k.digest) < count(*)"
    )
    emptied = []
    for pack in [pack for pack, total, needed in rows if needed <= _MOSTLY * total]:
        kept = tables.query(
            f"{_KEPT} SELECT DISTINCT {_COLUMNS} FROM blobs b "
            "JOIN kept k ON k.digest = b.digest AND k.pack = b.pack WHERE b.pack = ?",
            pack,
        )
        try:
            _copy(objects, tables, [Stored.read(row) for row in kept])
        except FileAccessError as error:
            if error.errno not in FULL:
                raise
            continue  # it stays; packs of which nothing is needed make room for it
        emptied.append(pack)
    tables.append(MARKS, [(None, pack, now) for pack in emptied])
    tables.fresh()
    _copy(objects, tables, [Stored.read(row) for row in tables.query(f"{_KEPT} {_STRANDED}")])
    condemned = tables.query("SELECT DISTINCT b.pack FROM blobs b JOIN marks m ON m.pack = b.pack AND m.digest IS NULL")
    for listed in _lists([pack for (pack,) in condemned]):
        tables.delete(BLOBS, f"pack IN ({listed})")
        tables.delete(MARKS, f"digest IS NOT NULL AND pack IN ({listed})")


def _copy(objects: Objects, tables: Tables, rows: Sequence[Stored]) -> None:
    """Store blobs in a pack of their own, too."""
    if rows:
        blobs = Blobs(objects, tables, [row.digest for row in rows])
        for row in rows:
            blobs.read(row.digest)  # damage is not copied: it is an error here
        tables.append(BLOBS, [row.row() for row in copy_pack(objects, rows)])


def _sweep(objects: Objects, tables: Tables, stale: float, condemned_before: float) -> tuple[int, int, int]:
    """Condemn packs without rows, and delete those that were condemned long ago."""
    there: dict[bytes, tuple[int, int]] = {}
    for entry in objects.list("packs"):
        name = entry.path.rpartition("/")[2]
        if name.startswith(TEMPORARY):
            if entry.stored < stale:
                objects.delete(entry.path)
        elif len(name) == 64:
            there[bytes.fromhex(name)] = (entry.size, entry.stored)
    tables.fresh(BLOBS, MARKS)
    used = {pack for (pack,) in tables.query("SELECT DISTINCT pack FROM blobs")}
    condemned = dict(tables.query("SELECT pack, min(time) FROM marks WHERE digest IS NULL GROUP BY pack"))
    orphans = [
        pack for pack, (_, stored) in there.items() if pack not in used and pack not in condemned and stored < stale
    ]
    tables.append(MARKS, [(None, pack, int(time.time())) for pack in orphans])
    deleted = [pack for pack in there if pack not in used and condemned.get(pack, time.time()) <= condemned_before]
    for pack in deleted:
        objects.delete(pack_path(pack))
    waiting = sum(pack in condemned or pack in orphans for pack in there) - len(deleted)
    return len(deleted), sum(there[pack][0] for pack in deleted), waiting


def _forget(tables: Tables) -> None:
    """Delete the parts of versions that are gone."""
    ended = tables.query("SELECT DISTINCT id FROM parts WHERE id IN (SELECT id FROM events WHERE kind <> 'add')")
    for start in range(0, len(ended), _LISTED):
        listed = ", ".join("'" + identity.replace("'", "''") + "'" for (identity,) in ended[start : start + _LISTED])
        tables.delete(PARTS, f"id IN ({listed})")


def _lists(values: Sequence[bytes]) -> list[str]:
    distinct = list(dict.fromkeys(values))
    return [", ".join(map(_literal, distinct[at : at + _LISTED])) for at in range(0, len(distinct), _LISTED)]


def _literal(value: bytes) -> str:
    """Bytes as the conditions of a Delta table have them."""
    return f"X'{value.hex()}'"
