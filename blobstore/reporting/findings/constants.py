"""Blobs that are one value again and again."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from blobstore.memory.layout import ScalarType
from blobstore.reporting.catalog import Catalog, Content
from blobstore.reporting.findings.building import make, whole
from blobstore.reporting.model import Finding, FindingKind

__all__ = ["find"]

_NUMPY = {
    ScalarType.BYTE: "<u1",
    ScalarType.CHAR: "<i1",
    ScalarType.SHORT: "<i2",
    ScalarType.INT: "<i4",
    ScalarType.LONG: "<i8",
    ScalarType.HALF: "<f2",
    ScalarType.FLOAT: "<f4",
    ScalarType.DOUBLE: "<f8",
    ScalarType.BOOL: "?",
}


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
                advice="compute it in the model (torch.zeros, torch.full), or leave it out if it has no effect",
            )


def _value(content: Content, element: bytes) -> str:
    if not any(element):
        return "all zeros"
    if content.layout is not None and content.layout.scalar_type in _NUMPY:
        return f"all {np.frombuffer(element, _NUMPY[content.layout.scalar_type])[0]}"
    return f"all 0x{element[::-1].hex()}"
