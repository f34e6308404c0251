"""Tensors of a checkpoint that lie inside payloads of delegates, which deduplicating cannot reach."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from blobstore.core.formats.data_map import NamedDataMap
from blobstore.core.formats.pte.program import ProgramFile
from blobstore.core.programs.deployed import FLATBUFFERS

__all__ = ["tensors_inside"]

_LEAST = 64
"""Smaller tensors may be there by accident."""


def tensors_inside(program: ProgramFile, names: Sequence[NamedDataMap]) -> tuple[int, tuple[str, ...]]:
    """How many bytes of a program's payloads are tensors of checkpoints, each once a payload, and of which backends.

    Backends that look up their weights by key are left out.
    """
    total, backends = 0, dict[str, None]()
    if not names:
        return 0, ()
    delegates = {d.span: d.backend for d in program.delegates if d.backend not in FLATBUFFERS}
    for span, backend in delegates.items():
        payload = bytes(program.data[span.start : span.stop])
        for _, data in itertools.chain(*(one.views() for one in names)):
            if len(data) >= _LEAST and _has(payload, data):
                total += len(data)
                backends[backend] = None
    return total, tuple(backends)


def _has(payload: bytes, data: memoryview) -> bool:
    head, at = bytes(data[:_LEAST]), -1
    while (at := payload.find(head, at + 1)) >= 0:
        if payload[at : at + len(data)] == data:
            return True
    return False
