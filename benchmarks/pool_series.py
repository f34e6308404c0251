"""The mixed series in a pool and in other stores: what each version adds to them, one after the other."""

from __future__ import annotations

import filecmp
import re
import resource
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import Row
from benchmarks.mixed_series import Version, versions
from benchmarks.release_peers import COMPRESSING
from blobstore.pool import Pool

__all__ = ["OURS", "PEERS", "Taken", "measure", "row_of", "rows"]

TITLE = "A mixed series"
OURS, PEERS = "pool", ("borg", "restic", "casync", "hf-xet")
COLUMNS = ("kind", "MB", OURS, *PEERS, "bar", "")

_CUTTING = ("casync", "hf-xet")
_WORTH = 1.1
_ARRANGED = re.compile("vocabulary|a layer|renamed|in three|another task|MLP|query|tensor par|layers|all in one|its ")
_SHARES = (  # of the bytes of a version
    (re.compile("by `torch.save`|fp8|gguf"), 0.01),
    (re.compile("float32 of a tune that is there"), 0.52),
    (re.compile("float32 of a tune that is not"), 0.60),
)


@dataclass(frozen=True)
class Taken:
    """What a version of the series took.

    Attributes:
        version: of the series.
        nbytes: of its files.
        stores: bytes that each store has more by it.
    """

    version: Version
    nbytes: int
    stores: dict[str, int]


def rows(folder: Path) -> Iterator[Row]:
    (folder / "series").mkdir()
    taken = list(measure(folder, versions(folder / "series")))
    by_kind: dict[str, list[Taken]] = {}
    for one in taken:
        by_kind.setdefault(one.version.kind, []).append(one)
    for alike in by_kind.values():
        yield row_of(alike, _bar(alike))
    nbytes = sum(one.nbytes for one in taken)
    totals = {OURS: _size(folder / OURS), **{name: sum(one.stores[name] for one in taken) for name in _there(taken)}}
    figures = [f"{totals[name] / 1e6:.0f}" if name in totals else "" for name in (OURS, *PEERS)]
    least = min(totals.values())
    yield Row(
        f"all {len(taken)} versions, with tables",
        _cells(nbytes, figures, totals),
        "least" if len(totals) > 1 else "",
        totals[OURS] <= least,
    )
    yield from _rates(folder, nbytes)


def measure(folder: Path, series: Iterable[Version]) -> Iterator[Taken]:
    """Add each version of a series to all stores that are installed, below a folder.

    Raises:
        ValueError: a version does not come out of the pool as it was.
    """
    for name in PEERS:
        (folder / name).mkdir()
    before = dict.fromkeys(PEERS, 0)
    with Pool(folder / OURS, create=True) as pool:
        for version in series:
            reference = f"{version.path.name}@1"
            stores = {OURS: pool.add(version.path, reference).stored_bytes}
            pool.get(reference, folder / "restored", force=True)
            _check(version.path, folder / "restored")
            shutil.rmtree(folder / "restored")
            for name in PEERS:
                size = COMPRESSING[name]([version.path], folder / name)  # it goes on with what is there
                if size is not None:
                    stores[name], before[name] = size - before[name], size
            yield Taken(version, _size(version.path), stores)


def _check(version: Path, restored: Path) -> None:
    names = [str(path.relative_to(version)) for path in version.rglob("*")]
    _, *wrong = filecmp.cmpfiles(version, restored, names, shallow=False)
    if any(wrong):
        raise ValueError(f"{version.name}: not restored as they were: {wrong}")


def _there(taken: Sequence[Taken]) -> list[str]:
    return [name for name in PEERS if name in taken[0].stores]


def row_of(alike: Sequence[Taken], bar: tuple[str, bool]) -> Row:
    """The versions of one kind: the mean of their bytes, and the range of what they took."""
    first = alike[0]
    kind, ways = first.version.kind, [100 * one.version.distance for one in alike if one.version.distance is not None]
    if ways:
        kind += f", {_range(ways, 2 if max(ways) < 1 else 1)} % away"
    nbytes = sum(one.nbytes for one in alike) / len(alike)
    means = {name: sum(one.stores[name] for one in alike) / len(alike) for name in first.stores}
    figures = [
        _range([one.stores[name] / 1e6 for one in alike], 2) if name in first.stores else "" for name in (OURS, *PEERS)
    ]
    return Row(kind, _cells(nbytes, figures, means), *bar)


def _bar(alike: Sequence[Taken]) -> tuple[str, bool]:
    kind, there = alike[0].version.kind, alike[0].stores
    if _ARRANGED.match(kind) and all(name in there for name in _CUTTING):
        met = all(one.stores[OURS] <= _WORTH * min(one.stores[name] for name in _CUTTING) for one in alike)
        return f"{_WORTH} x the better of casync and hf-xet", met
    for pattern, share in _SHARES:
        if pattern.match(kind):
            return f"{share} of its bytes", all(one.stores[OURS] <= share * one.nbytes for one in alike)
    return "", True


def _cells(nbytes: float, figures: Sequence[str], sizes: dict[str, float] | dict[str, int]) -> str:
    """The cells of a row, of which the least is bold."""
    least = min(sizes, key=lambda name: sizes[name])
    marked = [
        f"**{figure}**" if name == least else figure for name, figure in zip((OURS, *PEERS), figures, strict=True)
    ]
    return " | ".join([f"{nbytes / 1e6:.1f}", *marked])


def _range(values: Sequence[float], digits: int) -> str:
    ends = [f"{value:.{digits}f}" for value in (min(values), max(values))]
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


def _rates(folder: Path, nbytes: int) -> Iterator[Row]:
    """MB for each processor second, of the whole series in one call, so that starting a process does not count."""

    def add() -> object:
        with Pool(folder / "at once", create=True) as pool:
            return pool.add(folder / "series", "all@1")

    rates = {OURS: nbytes / 1e6 / _processor_seconds(add)}
    for name in PEERS:
        place = folder / f"{name} at once"
        place.mkdir()
        seconds = _processor_seconds(lambda name=name, place=place: COMPRESSING[name]([folder / "series"], place))  # type: ignore[misc]
        if any(place.iterdir()):
            rates[name] = nbytes / 1e6 / seconds
    figures = [f"{rates[name]:.0f}" if name in rates else "" for name in (OURS, *PEERS)]
    best = {name: -rate for name, rate in rates.items()}
    yield Row(
        "MB added for each processor second, all at once",
        _cells(nbytes, figures, best),
        "the best" if len(rates) > 1 else "",
        rates[OURS] >= max(rates.values()),
    )


def _processor_seconds(work: Callable[[], object]) -> float:
    """Of this process and of those that it starts."""

    def spent() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return time.process_time() + used.ru_utime + used.ru_stime

    start = spent()
    work()
    return spent() - start


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
