"""Removing what no version needs, while any number of others add, drop, collect and read.

A blob is needed if a version needs it that is there or that is being added, or if a needed blob is stored against it. A
collection

1. gives up versions that were begun long ago and never appeared. The event that says so and the one that lets a
   version appear exclude each other: a commit of the events carries the id of the version as a mark, once.
2. condemns packs that are mostly unused: whoever adds treats their rows as missing from now on.
3. notes which packs are condemned by now, by whomever, and then looks at the tables: blobs, parts, events, marks. What
   is needed and can only be read from condemned packs is copied into a new pack, and it looks again. When there is nothing to
   copy, it deletes the rows of the packs that it noted before this look. If the disk is too full to copy, it deletes the rows
   of those alone that have nothing that is needed.
4. condemns packs that have no rows and are old, and deletes those that were condemned some time ago and have no rows. For
   that it looks at the marks first, and at the blobs after them.

Whoever adds appends its parts, looks at the blobs and then at the marks, stores what is missing, and looks again after that.
Each table is looked at in one moment, all of them never are. The order makes up for it:

- Condemned packs stay condemned. So a look that trusts a row, because it saw the row and then a mark was missing, is earlier
  than the condemnation, and whoever deletes the rows of that pack began to look later. It sees the parts that were there before
  the trusting look, the row and its base. What is needed of them it copies, or it trusts other rows, in packs that are not
  condemned at the end of its look. They are condemned later than what it deletes, if ever, and so the same holds of whoever
  deletes these: two that collect never each delete what the other one trusts, and of any number no ring does.
- A pack is deleted if it was condemned and had no rows after that. A row that is trusted was there before; so somebody
  deleted it, as above. Rows that come after the condemnation are trusted by nobody, not by whoever wrote them: it looks again.
- A version that is given up never appears, and one that was dropped never comes back. So what only their parts name is free.

So what is deleted is needed by nobody, without any lock or clock; times only decide how long is waited. Whoever dies leaves
condemned packs or such without rows, and the next collection goes on with them. `tests/pool/protocol.py` is this protocol as
a model; every order of the steps of several actors is tried there, also with each of these rules left out. For readers it is
enough to look at the events first: what a version needs was there before it. They read condemned packs, too.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

from blobstore.core.errors import FileAccessError, PoolError
from blobstore.core.reprs import fields_line
from blobstore.pool.contents import Blobs
from blobstore.pool.packs import Reader, Stored, pack_of, pack_path
from blobstore.pool.tables import BLOBS, EVENTS, MARKS, PARTS, Tables, TakenError
from blobstore.storage.objects import FULL, TEMPORARY, Entry, Objects

__all__ = ["UNUSED", "Collected", "collect"]

UNUSED = "releases.json"
"""What a pool has from which releases are published: which objects beside it nothing refers to, and since when. It is
collected together with these.
"""

_LISTED = 500
"""Values in a condition."""

_ROUNDS = 10

_KEPT = """
    WITH needed AS (
        SELECT DISTINCT digest FROM parts WHERE id NOT IN (SELECT id FROM events WHERE kind <> 'add')
    ),
    condemned AS (SELECT DISTINCT pack FROM marks WHERE digest IS NULL AND pack IS NOT NULL),
    whole AS (SELECT digest, pack, length FROM blobs WHERE base IS NULL),
    near AS (
        SELECT digest, pack, length, base FROM blobs
        WHERE base IN (SELECT digest FROM whole) AND digest NOT IN (SELECT digest FROM whole)
    ),
    usable_whole AS (SELECT DISTINCT digest FROM whole WHERE pack NOT IN (SELECT pack FROM condemned)),
    usable AS (
        SELECT digest FROM usable_whole
        UNION
        SELECT digest FROM near
        WHERE pack NOT IN (SELECT pack FROM condemned) AND base IN (SELECT digest FROM usable_whole)
    ),
    related AS (SELECT DISTINCT base FROM blobs WHERE base IS NOT NULL AND digest IN (SELECT digest FROM needed)),
    chosen AS (
        SELECT digest, pack, base FROM blobs
        WHERE digest IN (SELECT digest FROM needed)
        AND (base IS NULL OR base IN (SELECT digest FROM whole) OR base IN (SELECT digest FROM near))
        QUALIFY 1 = row_number() OVER (
            PARTITION BY digest
            ORDER BY pack IN (SELECT a FROM gone), pack IN (SELECT pack FROM condemned)
            OR (base IS NOT NULL AND base NOT IN (SELECT digest FROM usable)),
            base IS NOT NULL AND digest IN (SELECT base FROM related), length, pack
        )
    ),
    near_bases AS (
        SELECT digest, pack, base FROM near WHERE digest IN (SELECT base FROM chosen)
        QUALIFY 1 = row_number() OVER (
            PARTITION BY digest
            ORDER BY pack IN (SELECT a FROM gone), pack IN (SELECT pack FROM condemned)
            OR base NOT IN (SELECT digest FROM usable_whole), length, pack
        )
    ),
    bases AS (
        SELECT digest, pack FROM whole
        WHERE digest IN (SELECT base FROM chosen UNION SELECT base FROM near_bases)
        AND digest NOT IN (SELECT digest FROM chosen WHERE base IS NULL)
        QUALIFY 1 = row_number() OVER (
            PARTITION BY digest
            ORDER BY pack IN (SELECT a FROM gone), pack IN (SELECT pack FROM condemned), length, pack
        )
    ),
    kept AS (
        SELECT digest, pack FROM chosen UNION SELECT digest, pack FROM near_bases UNION SELECT digest, pack FROM bases
    )
"""
"""One row of each content that a version needs which is there or being added, and of each base of these rows. A base has a row in
which it is whole, or if it has none, one as a difference to a base that has.

Rows in packs that are not condemned come before others. Of these, a content that may be a base keeps a row in which it is
whole; any other the shortest one.
"""

_MOSTLY_UNUSED = """
    SELECT b.pack FROM (SELECT DISTINCT digest, pack, length FROM blobs WHERE pack NOT IN (SELECT pack FROM condemned)) b
    LEFT JOIN kept k ON k.digest = b.digest AND k.pack = b.pack GROUP BY b.pack
    HAVING count(k.digest) < count(*) AND coalesce(sum(b.length) FILTER (k.digest IS NOT NULL), 0) <= 0.5 * sum(b.length)
"""
"""After `_KEPT`: packs that are written anew, because no more than half of one is needed."""

_UNNEEDED = """
    SELECT DISTINCT pack FROM blobs WHERE pack NOT IN (
        SELECT pack FROM blobs WHERE digest IN (SELECT digest FROM needed) OR digest IN (SELECT digest FROM kept)
    )
"""
"""After `_KEPT`: packs with nothing that is needed, whether other packs have it, too, or not."""

_COLUMNS = 'b.digest, b.size, b.dtype, b.shape, b.encoding, b.base, b.pack, b."offset", b.length, b.time, b.check, b.sketch, b.near_sketch, b.piece_keys, b.piece_places'


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
        grace: seconds after which a version that was begun is given up, and a file that nothing refers to is removed.
        keep: seconds for which a pack stays after it was condemned, for readers that looked it up before.

    Raises:
        FileAccessError, TransferError: the store refuses. What was not done is done by the next collection.
    """
    now = time.time()
    tables.fresh()
    tables.prove()
    abandoned = _give_up(tables, now - grace)
    tables.fresh()
    _empty_packs(objects, tables, int(now))
    packs, freed, waiting = _sweep(objects, tables, now - grace, now - keep)
    _forget(tables)
    tables.tidy()
    tables.fresh()
    ((unused,),) = _query(
        tables,
        "SELECT count(*) FROM (SELECT digest, pack FROM blobs WHERE pack NOT IN (SELECT pack FROM condemned) "
        "EXCEPT SELECT digest, pack FROM kept)",
    )
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


def _empty_packs(objects: Objects, tables: Tables, now: int) -> None:
    """Condemn packs that are mostly unused, copy what is needed out of all condemned ones, and delete their rows."""
    tables.append(MARKS, [(None, pack, now) for (pack,) in _query(tables, _MOSTLY_UNUSED)])
    gone: set[bytes] = set()
    for _ in range(_ROUNDS):
        # before the look: of a pack that is condemned during it, the look may lack parts that need its rows
        condemned = tables.query(
            "SELECT DISTINCT b.pack FROM blobs b JOIN marks m ON m.pack = b.pack AND m.digest IS NULL"
        )
        if not condemned:
            return
        tables.fresh()
        stranded = _stranded(tables, gone)
        if not stranded:
            _delete_rows(tables, condemned)
            return
        try:
            # what it is copied to may be condemned by now, so there is another look
            gone |= _copy(objects, tables, stranded, gone)
        except FileAccessError as error:
            unneeded = set(condemned) & set(_query(tables, _UNNEEDED, gone)) if error.errno in FULL else set()
            if not unneeded:
                raise
            _delete_rows(tables, unneeded)  # they make room, and the next collection copies
            return


def _delete_rows(tables: Tables, packs: Iterable[tuple[bytes]]) -> None:
    _delete(tables, BLOBS, "pack", (pack for (pack,) in packs))


def _stranded(tables: Tables, gone: Iterable[bytes]) -> list[Stored]:
    """Rows of condemned packs that have what is needed and cannot be read without them; of packs that are gone, if there
    are no others."""
    rows = _query(
        tables,
        f"SELECT DISTINCT {_COLUMNS} FROM blobs b JOIN kept k ON k.digest = b.digest AND k.pack = b.pack "
        "WHERE b.pack IN (SELECT pack FROM condemned)",
        gone,
    )
    return [Stored.read(row) for row in rows]


def _query(tables: Tables, text: str, gone: Iterable[bytes] = ()) -> list[tuple[Any, ...]]:
    """A query over `_KEPT`."""
    return tables.query(f"{_KEPT} {text}", gone=[(pack,) for pack in gone] or [(b"",)])


def _copy(objects: Objects, tables: Tables, rows: Sequence[Stored], gone: Set[bytes]) -> set[bytes]:
    """Store blobs in a pack of their own, too. Damage is not copied: it is an error.

    Returns:
        If nothing was copied: which further packs another collection deleted.
    """
    try:
        _copy_proved(objects, tables, rows)
    except PoolError:
        if not (missing := {row.pack for row in rows if objects.size(pack_path(row.pack)) is None} - gone):
            raise
        return missing
    return set()


def _copy_proved(objects: Objects, tables: Tables, rows: Sequence[Stored]) -> None:
    blobs, reader = Blobs(objects, tables, {row.base for row in rows if row.base is not None}), Reader(objects)

    def proved() -> Iterator[tuple[Stored, memoryview]]:
        for base, own in itertools.groupby(sorted(rows, key=lambda row: row.base or b""), key=lambda row: row.base):
            data = None if base is None else blobs.read(base)
            for row in own:
                stored = reader.stored(row)
                reader.read(row, data, {row.range: stored})
                yield row, stored  # these bytes, and no others that are read again

    tables.append(BLOBS, [row.row() for row in pack_of(objects, proved())])


def _sweep(objects: Objects, tables: Tables, stale: float, condemned_before: float) -> tuple[int, int, int]:
    """Condemn packs without rows, and delete those that were condemned long ago."""
    there = dict(_packs(objects, stale))
    tables.fresh(MARKS, BLOBS)  # in this order: of a condemned pack, no row is missed that was there before
    unused = there.keys() - {pack for (pack,) in tables.query("SELECT DISTINCT pack FROM blobs")}
    condemned = dict(tables.query("SELECT pack, min(time) FROM marks WHERE digest IS NULL GROUP BY pack"))
    orphans = {pack for pack in unused - condemned.keys() if there[pack].stored < stale}
    tables.append(MARKS, [(None, pack, int(time.time())) for pack in sorted(orphans)])
    deleted = [pack for pack in sorted(unused & condemned.keys()) if condemned[pack] <= condemned_before]
    for pack in deleted:
        objects.delete(pack_path(pack))
    waiting = len(there.keys() & (orphans | condemned.keys())) - len(deleted)
    return len(deleted), sum(there[pack].size for pack in deleted), waiting


def _packs(objects: Objects, stale: float) -> Iterator[tuple[bytes, Entry]]:
    """The packs that are there; files of somebody who died long ago while writing one are removed."""
    for entry in objects.list("packs"):
        name = entry.path.rpartition("/")[2]
        if name.startswith(TEMPORARY):
            if entry.stored < stale:
                objects.delete(entry.path)
        elif len(name) == 64:
            yield bytes.fromhex(name), entry


def _forget(tables: Tables) -> None:
    """Delete the parts of versions that are gone."""
    ended = tables.query("SELECT DISTINCT id FROM parts WHERE id IN (SELECT id FROM events WHERE kind <> 'add')")
    _delete(tables, PARTS, "id", (identity for (identity,) in ended))


def _delete(tables: Tables, table: str, column: str, values: Iterable[bytes | str]) -> None:
    """Delete the rows that have one of these values."""
    literals = list(dict.fromkeys(map(_literal, values)))
    for start in range(0, len(literals), _LISTED):
        tables.delete(table, f"{column} IN ({', '.join(literals[start : start + _LISTED])})")


def _literal(value: bytes | str) -> str:
    """A value as the conditions of a Delta table have it."""
    return f"X'{value.hex()}'" if isinstance(value, bytes) else "'" + value.replace("'", "''") + "'"
