"""The memory of this process in its maps of a file."""

from pathlib import Path


def mapped_memory(path: Path, what: str) -> int:
    """Bytes, as Linux counts them under names such as `Rss` and `Anonymous`."""
    found = 0
    lines = iter(Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines())
    for line in lines:
        if line.endswith(str(path)):
            found += next(1024 * int(text.split()[1]) for text in lines if text.startswith(f"{what}:"))
    return found
