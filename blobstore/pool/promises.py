"""What a pool trusts a store with, and tries before it writes to one.

A version appears, and a collection goes on, by objects that only one of several can make: commits of tables. Some gateways and
emulators ignore that condition of a request and answer that all is well; then a later commit replaces an earlier one, and
versions are lost without a word. That a look shows what was there before it is what the rest of a pool stands on.
"""

from __future__ import annotations

import contextlib
import os
import uuid

from blobstore.core.errors import BlobStoreError, FileAccessError, PoolError
from blobstore.storage.objects import TEMPORARY, Objects

__all__ = ["try_new", "try_writing"]


def try_new(objects: Objects) -> None:
    """Try all that a pool needs of a store, in a place without one, with a small object that is removed again.

    Raises:
        PoolError: it does something else; the message says what.
        FileAccessError, TransferError: the store refuses.
    """
    path, content = f"packs/new/{TEMPORARY}{uuid.uuid4().hex}", uuid.uuid4().bytes
    try:
        objects.create(path, content)
        _try_create(objects, path, content)
        found = objects.read(path, 3, 5)
        if found is None or bytes(found) != content[3:8]:
            _refuse(
                objects,
                path,
                f"bytes 3 to 7 of an object that was stored are {content[3:8]!r}",
                repr(found and bytes(found)),
            )
        if path not in {entry.path for entry in objects.list("packs/new")}:
            _refuse(objects, path, "a list has an object that was stored", "it is missing")
    finally:
        with contextlib.suppress(BlobStoreError):  # who may not delete may add; a collection removes it by its name
            objects.delete(path)


def try_writing(objects: Objects, path: str) -> None:
    """Try whether a store makes no object that is there already. If it does, it is what it was: nothing is left to remove.

    Args:
        path: of an object that never changes.

    Raises:
        PoolError: it does, or has no such object.
        FileAccessError, TransferError: the store refuses.
    """
    content = objects.get(path)
    if content is None:
        raise PoolError(f"{objects.name(path)}: it is missing; this is no pool, or a part of one")
    _try_create(objects, path, content)


def _try_create(objects: Objects, path: str, content: bytes) -> None:
    if objects.folder is None:
        made = objects.makes(path, content) is not None
    else:  # as the engines of tables do; and where the disk is full, what frees it must not fail here
        place = objects.folder / path
        try:
            os.link(place, place)
            made = True
        except FileExistsError:
            made = False
        except OSError as error:
            raise FileAccessError(place, f"a pool needs hard links: {error.strerror}") from None
    if made:
        _refuse(
            objects,
            path,
            "a conditional write (If-None-Match: *) of an object that is there fails, with 412 or 409",
            "the store says that it made it",
        )


def _refuse(objects: Objects, path: str, expected: str, found: str) -> None:
    raise PoolError(
        f"{objects.name(path)}: a pool would lose versions on this store: expected that {expected}, found that {found}"
    )
