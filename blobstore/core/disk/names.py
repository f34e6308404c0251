"""Names of the hidden files that the library writes: temporary files, backups and journals."""

from __future__ import annotations

import re
import secrets
from pathlib import Path

__all__ = ["JOURNAL", "TEMPORARY", "journal_name", "temporary_beside"]

TEMPORARY = re.compile(r"\.blobstore-[0-9a-f]{24}\.tmp")
"""Names of temporary files and backups."""

JOURNAL = re.compile(r"\.blobstore-[0-9a-f]{24}\.journal")
"""Names of journals; all copies of one journal have the same name."""


def temporary_beside(target: Path) -> Path:
    """A new temporary name in the folder of `target`. It is short, because the target's name may have the full length."""
    return target.with_name(f".blobstore-{secrets.token_hex(12)}.tmp")


def journal_name() -> str:
    """A new name for a journal."""
    return f".blobstore-{secrets.token_hex(12)}.journal"
