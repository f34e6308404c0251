"""A report in parts: those of an earlier one are kept as they are, unless one of their files changed or has to do with one that did.

What was kept is looked at part by part, so this takes memory for what changed, and little for each file.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from blobstore.core.errors import DataChangedError
from blobstore.reporting.cache import Cache, LostError, Snapshot, lasting_stamp
from blobstore.reporting.commands import Output, complete
from blobstore.reporting.engine import Engine, Scanned
from blobstore.reporting.fingerprint import Fingerprint
from blobstore.reporting.listing import Listing
from blobstore.reporting.model import FileReport, Finding, Problem
from blobstore.reporting.partition import Links, divide, links_of
from blobstore.reporting.parts import (
    Options,
    Part,
    beside,
    find_in,
    folder_of,
    named_again,
    plain_findings,
    read_findings,
)
from blobstore.reporting.savings import in_order
from blobstore.reporting.source import is_url
from blobstore.reporting.summary import Summary, digest, summarize
from blobstore.reporting.view import Report

__all__ = ["Made", "Survey"]

_ATTEMPTS = 5

Made = TypeVar("Made", Report, Summary)

_Loaded = tuple[FileReport, Sequence[Fingerprint | None], int]
"""A file, its fingerprints and its stamp."""


class Survey:
    """All parts of a set of files, those of an earlier report and new ones.

    Args:
        listing: the files.
        engine: reads and compares.
        cache: has the parts of an earlier report, and takes those of this one.
        scope: tells reports with other paths or options apart; None for one of which no part is kept.
        options: what to look for.

    Attributes:
        used_names: whether `Options.names` had a name for something.
    """

    def __init__(self, listing: Listing, engine: Engine, cache: Cache, scope: str | None, options: Options) -> None:
        self._listing, self._engine, self._cache, self._options = listing, engine, cache, options
        self._scope = scope
        self._number_of = listing.numbers
        self.used_names = False
        self._begin()

    def summary(self, top: int) -> Summary:
        """The report in short, with `top` groups of findings."""
        return self._made(lambda snapshot: self._summary(snapshot, top))

    def report(self) -> Report:
        """The whole report."""
        return self._made(self._report)

    def _made(self, make: Callable[[Snapshot | None], Made]) -> Made:
        for attempt in range(_ATTEMPTS):
            # What cannot be read of an earlier report is made again, and what changes meanwhile is looked at again.
            snapshot = self._cache.snapshot(self._scope) if attempt < _ATTEMPTS - 1 else None
            try:
                self._begin()
                self._update(snapshot)
                made = make(snapshot)
                if snapshot is not None:
                    self._keep(snapshot)
                return made
            except LostError as error:
                self._cache.lost(error.__cause__ if isinstance(error.__cause__, Exception) else error)
            except DataChangedError:
                if snapshot is None:
                    raise
            finally:
                if snapshot is not None:
                    snapshot.close()
        raise AssertionError("the last attempt has no snapshot")

    def _begin(self) -> None:
        self._current: set[int] = set()
        self._gone: list[int] = []
        self._next = 0
        self._parts: list[Part] = []
        self._digests: list[dict[str, Any]] = []
        self._links: list[Links] = []
        self._unread: dict[str, Problem] = {}
        self._damaged: dict[str, Problem] = {}

    # ------------------------------------------------------------------------------------------------ what has changed

    def _update(self, snapshot: Snapshot | None) -> None:
        """Find out which parts are as they were, and make the others anew."""
        loose = set(self._number_of)
        programs: set[str] = set()
        data_folders: dict[int, tuple[set[str], set[str]]] = {}
        for number, part in snapshot.digests() if snapshot is not None else ():
            self._next = number + 1
            if not self._is_current(part):
                self._gone.append(number)
                continue
            self._current.add(number)
            programs.update(part["program_folders"])
            if part["data_folders"]:
                data_folders[number] = set(part["data_folders"]), set(part["beside_programs"])
            loose.difference_update(part["paths"])
        loaded = self._load(sorted(loose, key=self._number_of.__getitem__))
        programs.update(folder_of(file.path) for file, _, _ in loaded if file.format == "pte")
        links = [links_of(file, prints) for file, prints, _ in loaded]
        stale = {number for number, (of, lost) in data_folders.items() if of & programs != lost}
        if snapshot is not None and loaded and self._current:
            finder = Links.together(links).finder()
            stale |= {n for n, part in self._kept(snapshot.digests()) if finder.holds(part["payload"], part["tensor"])}
            stale |= {
                n for n, tokens in self._kept(snapshot.tokens()) if finder.shares(np.frombuffer(tokens, np.uint64))
            }
        if snapshot is not None and stale:
            again = {path: None for n, part in self._kept(snapshot.digests()) if n in stale for path in part["paths"]}
            self._current -= stale
            self._gone += sorted(stale)
            more = self._load(again)
            loaded += more
            links += [links_of(file, prints) for file, prints, _ in more]
        self._divide(loaded, links, programs)

    def _divide(self, loaded: list[_Loaded], links: list[Links], programs: set[str]) -> None:
        """Make the parts of files anew."""
        order = sorted(range(len(loaded)), key=lambda i: self._number_of[loaded[i][0].path])
        left = {number: (loaded[i], links[i]) for number, i in enumerate(order)}
        parts = divide([of_file for _, of_file in left.values()])
        loaded.clear()
        links.clear()
        for members in parts:
            some = [left.pop(number) for number in members]  # so that what is done takes no memory
            self._add([file for file, _ in some], Links.together([of_file for _, of_file in some]), programs)

    def _kept(self, rows: Iterable[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
        return ((number, row) for number, row in rows if number in self._current)

    def _is_current(self, part: Mapping[str, Any]) -> bool:
        """Whether each file of a part, and what lies beside it, is as it was."""
        stamp_of = self._listing.stamp_of
        same = all(was and was == stamp_of(path) for path, was in zip(part["paths"], part["stamps"], strict=True))
        if same:  # and they come in the order in which they were; that of shards is in a file
            numbers = [self._number_of[path] for path in part["paths"]]
            same = numbers == sorted(numbers)
        return (
            same
            and part["beside"] == beside(part["nameless"], lambda: self._real)
            and all(was for _, was in part["beside"])
        )

    @cached_property
    def _real(self) -> frozenset[str]:
        """The paths of all files, without links."""
        return frozenset(os.path.realpath(path) for path in self._number_of if not is_url(path))

    # ------------------------------------------------------------------------------------------------- what is new

    def _load(self, paths: Iterable[str]) -> list[_Loaded]:
        """Read files, as far as the cache does not know them."""
        scanned: list[Scanned] = []
        wanted = list(paths)
        begun = time.time_ns()
        for path, result in zip(wanted, self._engine.scan(wanted), strict=True):
            if isinstance(result, Problem):
                self._unread[path] = result
            else:
                scanned.append(result)
        loaded: list[_Loaded] = []
        prints = self._engine.fingerprint(scanned, not self._options.exact_only)
        for file, of_file in zip(scanned, prints, strict=True):
            if isinstance(of_file, Problem):
                self._damaged[file.path] = of_file
            else:
                loaded.append((file.report(of_file), of_file, lasting_stamp(file.identity, begun)))
        return loaded

    def _add(self, loaded: Sequence[_Loaded], links: Links, programs: set[str]) -> None:
        files, prints = [file for file, _, _ in loaded], [of_file for _, of_file, _ in loaded]
        part = find_in(files, prints, self._engine, self._options, programs, lambda: self._real)
        self.used_names |= part.used_names
        self._parts.append(part)
        self._links.append(links)
        self._digests.append(
            {
                **digest(part.data),
                "stamps": [mark for _, _, mark in loaded],
                "outputs": part.outputs,
                "program_folders": sorted({folder_of(file.path) for file in files if file.format == "pte"}),
                "data_folders": part.data_folders,
                "beside_programs": [folder for folder in part.data_folders if folder in programs],
                "nameless": part.nameless,
                "beside": part.beside,
                "payload": links.payload,
                "tensor": links.tensor,
            }
        )

    def _keep(self, snapshot: Snapshot) -> None:
        if self._gone or self._parts:
            rows = (
                (of, plain_findings(part.data), links.tokens.tobytes())
                for of, part, links in zip(self._digests, self._parts, self._links, strict=True)
            )
            self._cache.set_parts(snapshot, self._gone, rows, self._next)

    # ------------------------------------------------------------------------------------------------- all together

    def _all_digests(self, snapshot: Snapshot | None) -> Iterator[Mapping[str, Any]]:
        if snapshot is not None:
            yield from (part for _, part in self._kept(snapshot.digests()))
        yield from self._digests

    def _whole_commands(self, snapshot: Snapshot | None) -> dict[str, str]:
        outputs = (Output(*output) for part in self._all_digests(snapshot) for output in part["outputs"])
        return complete(outputs, self._number_of)

    def _problems(self) -> tuple[Problem, ...]:
        unread, damaged = (
            [of[path] for path in sorted(of, key=self._number_of.__getitem__)] for of in (self._unread, self._damaged)
        )
        return (*self._listing.problems, *unread, *damaged)

    def _summary(self, snapshot: Snapshot | None, top: int) -> Summary:
        whole = self._whole_commands(snapshot)
        parts = self._all_digests(snapshot)
        return summarize(parts, self._number_of, whole, top, self._problems())

    def _report(self, snapshot: Snapshot | None) -> Report:
        whole = self._whole_commands(snapshot)
        files = {self._number_of[file.path]: file for part in self._parts for file in part.data.files}
        kept = list(self._kept(snapshot.digests())) if snapshot is not None else []
        findings_of = dict(self._kept(snapshot.findings())) if snapshot is not None else {}
        again = {file.path: (file, mark) for file, _, mark in self._load(p for _, part in kept for p in part["paths"])}
        plain = []
        for number, part in kept:
            for path, mark in zip(part["paths"], part["stamps"], strict=True):
                if path not in again or again[path][1] != mark:
                    self._listing.stamps[self._number_of[path]] = 0
                    raise DataChangedError(f"{path}: the file changed while it was read")
            named = named_again([again[path][0] for path in part["paths"]], findings_of[number])
            files.update((self._number_of[file.path], file) for file in named)
            plain.append((findings_of[number], part["paths"]))
        plain += [(plain_findings(part.data), [file.path for file in part.data.files]) for part in self._parts]
        index = {number: i for i, number in enumerate(sorted(files))}
        findings: list[Finding] = []
        for of_part, paths in plain:
            findings += read_findings(of_part, [index[self._number_of[path]] for path in paths])
        aliases = self._listing.aliases
        return Report(
            tuple(replace(files[n], aliases=tuple(aliases.get(files[n].path, ()))) for n in sorted(files)),
            tuple(
                finding if finding.command is None else replace(finding, command=whole[finding.command])
                for finding in sorted(findings, key=in_order)
            ),
            self._problems(),
        )
