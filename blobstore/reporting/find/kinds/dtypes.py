"""The same values, exactly, in a narrower type."""

from __future__ import annotations

from collections.abc import Sequence

from blobstore.core.memory.layout import ScalarType
from blobstore.reporting.find.catalog import Catalog, Content
from blobstore.reporting.find.kinds.building import in_programs, make, whole
from blobstore.reporting.find.kinds.kept import Kept
from blobstore.reporting.model import Finding, FindingKind

__all__ = ["Relation", "find", "relate"]

Relation = tuple[Content, Content, str]
"""A wide content, a narrow one (or one as wide), and the type of the latter."""


def relate(catalog: Catalog) -> list[Relation]:
    """Contents that are what another becomes in a narrower type, none of its values changed.

    The digest of the converted values was taken along with that of the bytes; that the other content has this digest,
    and not another type, is the proof.
    """
    relations = []
    for content in catalog.contents:
        for name, digest in content.print.narrow.items():
            narrow = ScalarType[name.upper()]
            nbytes = content.nbytes // (content.width or 4) * narrow.itemsize
            other = catalog.by_digest.get((digest, nbytes))
            if other is not None and other is not content and _may_be_values(content, other, narrow):
                relations.append((content, other, name))
    return relations


def _may_be_values(wide: Content, narrow: Content, narrow_type: ScalarType) -> bool:
    """Whether at least one of the two is known as a tensor, and none as something else."""
    if wide.is_payload or narrow.is_payload:
        return False
    if narrow.layout is None:
        return wide.layout is not None  # or else nothing says that they are numbers
    return narrow.layout.scalar_type == narrow_type


def find(catalog: Catalog, relations: Sequence[Relation], kept: Kept) -> list[Finding]:
    """One finding for each pair; the narrower one stays."""
    findings = []
    for wide, narrow, name in relations:
        gone, stays = (narrow, wide) if kept.root(wide) is wide else (wide, narrow)
        source = wide.layout.scalar_type.name.lower() if wide.layout is not None else "float"
        verb = "export" if in_programs(catalog, catalog.places([stays, gone])) else "save both files"
        findings.append(
            make(
                FindingKind.OTHER_DTYPE,
                catalog.places([stays, gone]),
                whole(catalog, catalog.places([gone])),
                detail=f"{source} values that {name} holds exactly",
                advice=f"{verb} with {name} weights; no value changes",
            )
        )
    return findings
