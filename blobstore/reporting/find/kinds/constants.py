"""Blobs that are one value again and again."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from blobstore.core.memory.dtypes import native_dtype
from blobstore.reporting.find.catalog import Catalog, Content
from blobstore.reporting.find.kinds.building import in_programs, make, whole
from blobstore.reporting.model import Finding, FindingKind

__all__ = ["find"]


def find(catalog: Catalog) -> Iterator[Finding]:
    """All but one element of each such blob, wherever it is."""
    for content in catalog.contents:
        if content.is_constant:
            element = bytes.fromhex(content.print.repeats)
            yield make(
                FindingKind.CONSTANT,
                content.places,
                whole(catalog, content.places, len(element)),
                detail=_value(content, element),
                advice="compute it in the model (torch.zeros, torch.full), or leave it out if it has no effect"
                if in_programs(catalog, content.places)
                else "leave it out, and make it after loading (torch.zeros, torch.full)",
            )


def _value(content: Content, element: bytes) -> str:
    if not any(element):
        return "all zeros"
    dtype = None if content.layout is None else native_dtype(content.layout.scalar_type)
    if dtype is not None:
        return f"all {np.frombuffer(element, dtype)[0]}"
    return f"all 0x{element[::-1].hex()}"
