"""Measuring whether a process grows."""

import os
import statistics
from pathlib import Path

from blobstore.runtime import delegate_stats

ALLOWED = {"anonymous KiB": 8192, "descriptors": 8, "maps": 16, "delegates": 2, "packed names": 16}
"""By how much the median of the last third may exceed that of the middle third. A shared cache keeps two descriptors
for each call that ever ran at the same time as others."""


def sample() -> dict[str, int]:
    """What this process holds at the moment."""
    status = Path("/proc/self/status").read_text()
    anonymous = next(line for line in status.splitlines() if line.startswith("RssAnon"))
    delegates = delegate_stats()
    return {
        "anonymous KiB": int(anonymous.split()[1]),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "maps": Path("/proc/self/maps").read_bytes().count(b"\n"),
        "delegates": delegates.handles,
        "packed names": delegates.names,
    }


def growth(samples: list[dict[str, int]]) -> dict[str, tuple[float, float]]:
    """For everything that grew by more than allowed, the medians of the middle and the last third of the time."""
    third = len(samples) // 3
    if third < 3:
        return {}
    grown = {}
    for what, allowed in ALLOWED.items():
        middle = statistics.median(one[what] for one in samples[third : 2 * third])
        last = statistics.median(one[what] for one in samples[2 * third :])
        if last > middle + allowed:
            grown[what] = (middle, last)
    return grown
