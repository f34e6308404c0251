"""Chunks of contents, made one by one in their order, or ahead of it by threads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Executor, Future
from typing import NamedTuple

from blobstore.core.codec.blobs import CHUNK
from blobstore.pool.executors import batches

__all__ = ["Chunk", "made"]

_TOGETHER = CHUNK
"""Bytes that a thread makes at a time, up to one chunk more; handing over a small content takes longer than making it."""

_AHEAD = 4 * CHUNK
"""Bytes that are made before their turn, and no more contents than one that is made as a whole."""


class Chunk(NamedTuple):
    """A chunk of a content that is not made yet.

    Attributes:
        size: its bytes.
        make: called with memory for a chunk of the content, and one of its base, makes it; there, or in memory of its own.
    """

    size: int
    make: Callable[[memoryview, memoryview], memoryview]


_Numbered = tuple[int, Chunk]
_Bytes = tuple[int, memoryview]


class _Rooms(threading.local):
    """Memory for a chunk of a base, for each thread."""

    def __init__(self) -> None:
        self.base = memoryview(bytearray(CHUNK))


def made(chunks: Iterable[_Numbered], threads: Executor | None) -> Generator[_Bytes]:
    """The bytes of chunks in their order, each valid until the next one.

    Args:
        chunks: with the numbers of their contents.
        threads: make them ahead, in about 25 MB and one content that is made as a whole; None: each is made when it is asked
            for, by this thread.
    """
    if threads is None:
        content, base = memoryview(bytearray(CHUNK)), memoryview(bytearray(CHUNK))
        for number, chunk in chunks:
            yield number, chunk.make(content, base)
        return
    rooms, free = _Rooms(), deque[memoryview]()

    def work(batch: list[_Numbered], room: memoryview) -> list[_Bytes]:
        done, at = [], 0
        for number, chunk in batch:
            done.append((number, chunk.make(room[at : at + CHUNK], rooms.base)))
            at += min(chunk.size, CHUNK)
        return done

    coming: deque[tuple[Future[list[_Bytes]], memoryview, int]] = deque()
    ahead = 0
    try:
        for batch in batches(chunks, lambda chunk: chunk[1].size, _TOGETHER):
            room = free.pop() if free else memoryview(bytearray(_TOGETHER + CHUNK))
            nbytes = sum(chunk.size for _, chunk in batch)
            coming.append((threads.submit(work, batch, room), room, nbytes))
            ahead += nbytes
            while ahead > _AHEAD:
                done, room, nbytes = coming.popleft()
                yield from done.result()
                free.append(room)
                ahead -= nbytes
        while coming:
            yield from coming.popleft()[0].result()
    finally:
        for done, _, _ in coming:
            done.cancel()
