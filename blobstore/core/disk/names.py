"""Names of files: hidden ones that the library writes itself, and those that come from elsewhere."""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

__all__ = ["JOURNAL", "TEMPORARY", "is_plain_path", "journal_name", "temporary_beside"]

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


def is_plain_path(name: str, *, anywhere: bool = True) -> bool:
    """Whether a path with `/` leads into a folder, and to no file of the library itself: `anywhere`, or on this system,
    because only Windows forbids characters such as `\\` and `:`."""
    parts = name.split("/")
    odd = '\\:*?"<>|' if anywhere or os.name == "nt" else ""
    bad = any(ord(c) < 32 or c in f"{odd}\x7f" for c in name) or any(
        not part or part in {".", ".."} or part.startswith(".blobstore-") or (odd and _is_odd(part)) for part in parts
    )
    try:
        return not bad and all(len(part.encode()) <= 255 for part in parts) and len(parts) <= 32
    except UnicodeEncodeError:
        return False


def _is_odd(part: str) -> bool:
    """Whether Windows changes a name."""
    return part != part.strip() or part.endswith(".")
