"""The fuzzed functions of what processes leave on the disk for the next one: journals of groups and of working copies."""

import contextlib
import functools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash

from blobstore import open_ptd
from blobstore.core.disk.journal import identity
from blobstore.core.disk.recovery import recover
from blobstore.core.errors import BlobStoreError
from blobstore.runtime import BlobCache, make_working_copy
from campaigns.fuzz.answers import insist, temporary_folder, tree

SOURCE = Path(__file__).parents[2] / "tests" / "data" / "golden.ptd"
"""What the working copies are made of."""
PAGE = 4096
JOURNAL = ".blobstore-0123456789abcdef01234567.journal"


class Copy:
    """A working copy, whose file beside it can be replaced again and again.

    Attributes:
        path, beside: the two files.
        old: the bytes of the working copy.
        fresh: the bytes beside, before the first commit.
    """

    def __init__(self, folder: Path) -> None:
        self.path, self.beside = folder / "copy.ptd", folder / "copy.ptd.commits"
        make_working_copy(SOURCE, self.path)
        BlobCache(self.path, "shared")
        self.old, self.fresh = self.path.read_bytes(), self.beside.read_bytes()

    def put(self, commits: bytes) -> None:
        """Replace both files in place."""
        self.path.write_bytes(self.old)
        self.beside.write_bytes(commits)

    def adopt(self, commits: bytes) -> bytes:
        """The same bytes, with what names this working copy and no other."""
        own = bytearray(commits)
        for at in _naming():
            own[at : at + 1] = self.fresh[at : at + 1] if at < len(own) else b""
        return bytes(own)


@functools.cache
def working_copy() -> tuple[Any, Copy]:
    """The working copy that all inputs use."""
    folder = temporary_folder()
    return folder, Copy(Path(folder.name))


@functools.cache
def _naming() -> tuple[int, ...]:
    """Where the bytes are that differ between the files beside two working copies of one file."""
    with temporary_folder() as folder:
        both = []
        for name in "ab":
            Path(folder, name).mkdir()
            both.append(Copy(Path(folder, name)).fresh)
    # whole words: a byte of two numbers may be equal by chance
    return tuple(at for at in range(len(both[0])) if both[0][at // 8 * 8 :][:8] != both[1][at // 8 * 8 :][:8])


def is_sealed(data: bytes) -> bool:
    """Whether some journal in the bytes has its digest."""
    words = {int.from_bytes(data[at : at + 8], "little") for at in range(0, min(len(data), PAGE), 8)}
    return any(
        is_sealed_by(data[start - PAGE :], size)
        for start in range(PAGE, len(data), PAGE)
        for size in words
        if size <= len(data) - start - 16
    )


def commits(data: bytes) -> None:
    """The file beside a working copy, which may have a journal: the weights are old or those of a whole journal."""
    _, copy = working_copy()
    copy.put(copy.adopt(data))
    try:
        cache = BlobCache(copy.path, "shared")
        values = {key: bytes(cache.get_data(key)) for key in cache}
        for key in cache:
            cache.version(key)
        if copy.path.read_bytes() != copy.old:
            insist(is_sealed(copy.adopt(data)), "a journal without its digest was replayed")
        with open_ptd(copy.path) as file:
            insist(
                values == {key: bytes(file.get_data(key)) for key in file}, "the cache has other weights than its file"
            )
        changed = {key: bytes(byte ^ 1 for byte in value) for key, value in values.items()}
        cache.update_blobs(changed)
        insist(changed == {key: bytes(cache.get_data(key)) for key in cache}, "a commit has no effect")
    except BlobStoreError:
        if not is_sealed(copy.adopt(data)):
            insist(copy.path.read_bytes() == copy.old, "weights were changed before the error")
        raise
    finally:
        insist(copy.path.stat().st_size == len(copy.old), "the working copy has another size")


def commit_seeds() -> Iterator[tuple[str, str, bytes]]:
    """What a process leaves beside a working copy: at the end, and when it is killed once its journal counts.

    The field that makes a journal count is found by trying, so no layout is needed here.
    """
    _, copy = working_copy()
    cache = BlobCache(copy.path, "shared")
    cache.update_blobs({key: bytes(byte ^ 1 for byte in cache.get_data(key)) for key in cache})
    after = copy.beside.read_bytes()
    del cache
    yield "commits", "fresh", copy.fresh
    yield "commits", "done", after
    sizes = [size for size in range(1, len(after) - PAGE - 16) if is_sealed_by(after, size)]
    for size in sizes:
        for at in range(0, 512, 8):
            killed = after[:at] + size.to_bytes(8, "little") + after[at + 8 :]
            copy.put(killed)
            with contextlib.suppress(BlobStoreError):
                BlobCache(copy.path, "shared")
            if copy.path.read_bytes() != copy.old:
                yield "commits", "killed", killed


def is_sealed_by(data: bytes, size: int) -> bool:
    """Whether a journal of this size has its digest."""
    return xxhash.xxh3_128_digest(data[PAGE : PAGE + size]) == data[PAGE + size : PAGE + size + 16]


GROUP = ("a.ptd", "sub/b.pte", "new.pte")
"""The files that the journal of a group renames; the last one is new."""
_OUTSIDE = "outside/sentinel"
_HIDDEN = re.compile(r"\.blobstore-[0-9a-f]{24}\.(tmp|journal)")


def group(folder: Path) -> dict[str, str]:
    """Make the files of an interrupted group, all without their renames; what stands for the identities in a journal."""
    stand_ins = {}
    for number, name in enumerate(GROUP):
        place = folder / "here" / name
        temporary = place.with_name(f".blobstore-{number:024x}.tmp")
        backup = place.with_name(f".blobstore-{number + 8:024x}.tmp")
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(f"new {name}")
        if name != GROUP[-1]:
            place.write_text(f"old {name}")
            os.link(place, backup)
        for when, path in (("before", place), ("after", temporary)):
            stand_ins[f"{when}{number}"] = str(list(identity(path) or [0, 0, 0]))
    for name in (_OUTSIDE, "here/other.ptd"):
        sentinel = folder / name
        sentinel.parent.mkdir(exist_ok=True)
        sentinel.write_text("old and only")
    return stand_ins


def journal(data: bytes) -> None:
    """The journal of a group: each file is the old or the new one, and no other file changes."""
    with temporary_folder() as name:
        folder = Path(name)
        # In its own field only: if an old file's identity is that of a new one, it is removed when the group is undone.
        for mark, known in group(folder).items():
            field = rf'("{mark.rstrip("0123456789")}":\s?)"{mark}"'.encode()
            data = re.sub(field, lambda match, known=known: match[1] + known.encode(), data)
        (folder / "here" / JOURNAL).write_bytes(data)
        before = tree(folder)
        try:
            recover(folder / "here")
        finally:
            after = tree(folder)
            insist(after.get(_OUTSIDE) == b"old and only", "a file outside was changed")
            for path in ("here/other.ptd", *(f"here/{one}" for one in GROUP[:2])):
                insist(path in after, f"{path} is gone")
                insist(after[path] in before.values(), f"{path} has bytes that no file had")
            hidden = [path for path in after if _HIDDEN.fullmatch(Path(path).name)]
            insist(set(hidden) <= before.keys(), "there are more hidden files")
