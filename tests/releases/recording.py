"""Which bytes a pull by Python asks a release folder for: the other side of what the library in C++ lists."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from blobstore.core.constants import MOST_GAP
from blobstore.releases.device.installed import Installed
from blobstore.releases.device.pull import Pulled, PullOptions, install
from blobstore.releases.device.shopping import Shopping
from blobstore.releases.device.transfer import Transfer
from blobstore.releases.index.index import Object, parse_index
from blobstore.releases.sources.source import Body, FolderSource

Asked = set[tuple[str, int, int]]
"""The SHA-256 of an object, its first byte, and the first byte behind the last one."""


class Recording(FolderSource):
    """A release folder that is read as a server is, with the gaps of C++; it notes the ranges of objects that are read."""

    remote = True

    def __init__(self, release: Path) -> None:
        super().__init__(str(release), None)
        self.asked: Asked = set()

    def gap(self, requests: int) -> int:
        return MOST_GAP

    @contextmanager
    def open(self, wanted: Object, start: int, stop: int) -> Iterator[Body]:
        self.asked.add((wanted.sha256, start, stop))
        with super().open(wanted, start, stop) as body:
            yield body


def recorded_pull(release: Path, device: Path, options: PullOptions) -> tuple[Pulled, Asked]:
    """Pull a release; what was read of its objects, without the list of parts."""
    source = Recording(release)
    done = install(source, device, options, 2, None)
    parts = parse_index((release / "index.json").read_bytes(), "index").parts.sha256
    return done, {one for one in source.asked if one[0] != parts}


def would_ask(release: Path, device: Path) -> Asked:
    """What a pull would ask for first, of lists whose objects need not be there."""
    source, installed = Recording(release), Installed(device)
    found = source.find(None)
    assert found.index is not None
    with installed.fetching(source.name) as place:
        shopping = Shopping(installed, source, place, plain=False)
        shopping.add(parse_index(found.index, source.name), found.sha256)
        transfer = Transfer(source, 1, None)
        for spool in shopping.spools:
            transfer.ask(spool, shopping.ranges.get(spool.wanted.sha256, ()))
    return {(wanted.sha256, start, stop) for wanted, start, stop in transfer.requests}
