"""The memory of this process, as Linux counts it."""

from pathlib import Path


def memory() -> dict[str, int]:
    """All of it under Linux's names, in kilobytes."""
    rows = (line.split() for line in Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()[1:])
    return {name.rstrip(":"): int(kilobytes) for name, kilobytes, _ in rows}


def mapped_memory(path: Path, what: str) -> int:
    """Bytes of the maps of a file under one of Linux's names, such as `Rss` and `Anonymous`."""
    found = 0
    lines = iter(Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines())
    for line in lines:
        if line.endswith(str(path)):
            found += next(1024 * int(text.split()[1]) for text in lines if text.startswith(f"{what}:"))
    return found
