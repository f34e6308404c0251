"""What a device remembers of asking for its newest release.

    indexes/SHA256.etag      what to send to a server to ask for another index than this one, and when the server gave it
    indexes/had              the digests of indexes that were current when a server was asked, the newest last

Nothing here is trusted: a tag saves fetching an index that is here, and a digest only tells an old answer from a foreign one.
"""

from __future__ import annotations

import contextlib
import re
import time

from blobstore.core.disk.staging import Staging
from blobstore.core.errors import BlobStoreError
from blobstore.core.memory.digest import sha256
from blobstore.releases.device.installed import Installed
from blobstore.releases.sources.source import INDEXES, Found, Source, read_small

__all__ = ["Polls"]

_HAD = "had"
_MOST = 1000
_LIMIT = 1 << 17
_LIFE = 30 * 86_400
"""Seconds after which an index is fetched whole again: a server whose tags never change would hide every release."""
_TAG = re.compile(r'([0-9a-f]{16}) ([0-9]{1,16}) ((?:W/)?"[!#-~]{0,200}")\n')


class Polls:
    """What a folder remembers of earlier questions.

    Args:
        installed: the folder.
        source: who is asked.
    """

    def __init__(self, installed: Installed, source: Source) -> None:
        self._installed, self._folder = installed, installed.folder / INDEXES
        self._source = sha256(source.name.encode(errors="surrogateescape"))[:16]

    def tag(self, known: str) -> str | None:
        """What to send to ask for another index than this one; None if all of it must be fetched."""
        match = _TAG.fullmatch(self._read(f"{known}.etag"))
        if match is None or match[1] != self._source or not 0 <= time.time() - int(match[2]) < _LIFE:
            return None
        return match[3]

    def keep(self, found: Found) -> None:
        """Remember the tag of an index that is here now."""
        if found.unchanged or found.tag is None or found.tag == self.tag(found.sha256):
            return
        self._write(f"{found.sha256}.etag", f"{self._source} {int(time.time())} {found.tag}\n")

    def note(self, current: str) -> None:
        """Remember that an index is the current one."""
        had = self._had()
        if current not in had:
            self._write(_HAD, "".join(f"{one}\n" for one in [*had, current][-_MOST:]))

    def had(self, index: str) -> bool:
        """Whether an index was the current one, or is here."""
        if index in self._had():
            return True
        with contextlib.suppress(BlobStoreError):
            return bool(self._installed.index_bytes(index))
        return False

    def _had(self) -> list[str]:
        return self._read(_HAD).splitlines()

    def _read(self, name: str) -> str:
        with contextlib.suppress(BlobStoreError):
            return read_small(self._folder / name, _LIMIT).decode("ascii", "replace")
        return ""

    def _write(self, name: str, text: str) -> None:
        with (
            contextlib.suppress(BlobStoreError),  # a folder that is read-only can still be asked about
            Staging(force=True, follow=False) as staging,
            staging.open(self._folder / name) as file,
        ):
            file.write(text.encode())
