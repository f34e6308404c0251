"""The table of blobs as whoever may write to a pool can make it."""

from collections.abc import Callable
from typing import Any

from blobstore.pool import Pool
from blobstore.pool.packs import Stored


def change_rows(pool: Pool, condition: str, change: Callable[[Stored], dict[str, Any]]) -> None:
    """Replace the rows that meet a condition of SQL by others, which differ in some values."""
    columns = ", ".join(f'"{name}"' for name in Stored._fields)
    rows = [Stored(*row) for row in pool.tables.query(f"SELECT {columns} FROM blobs WHERE {condition}")]  # noqa: S608
    assert rows
    pool.tables.delete("blobs", condition)
    pool.tables.append("blobs", [row._replace(**change(row)).row() for row in rows])
