"""Whether a pool would take much less than what the other commands leave, and about how much.

A pool keeps each content once. Each of these takes its bytes if zstandard is not installed: then the sum is a bound. With it,
samples of the largest contents are encoded as a pool does it: by themselves; as the rounded values of one in float32; or as
differences to one of the same name, type and sizes. The others are taken to have the average share of their type. Not
predicted are differences to tensors of other names, and weights that were quantized or scaled: then the pool takes less.
"""

from __future__ import annotations

import os
import re
import shlex
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence

from blobstore.core.regions.source import is_url
from blobstore.reporting.find.catalog import Catalog, Content
from blobstore.reporting.find.commands import free_names
from blobstore.reporting.model import FileReport, Finding, FindingKind, PoolAdvice
from blobstore.reporting.read import Engine, stored_share

__all__ = ["advise_pool"]

_LARGEST = 512  # contents of which samples are encoded
_SMALL = 4096  # a pool compares smaller ones for equality only
_ROUNDS = 4  # bases of tensors of one name
_MUCH = 0.8  # of what the commands leave
_MANY = 4  # commands that one for a pool is better than
_NARROW = {"half", "bfloat16"}
_RESERVE = 1 << 20  # of a pool in a folder
_CONTENT, _PART = 200, 100  # bytes in the tables for a content, and for a tensor of a file
_SKETCH = 256  # elements in a sketch

_Shares = dict[Content, float]


def advise_pool(
    given: Sequence[str], catalog: Catalog, findings: Sequence[Finding], engine: Engine, *, exact_only: bool
) -> PoolAdvice | None:
    """The command for a pool of all files, if most of their bytes are in checkpoints and data files, and it is worth it.

    Args:
        given: paths as the caller gave them.
        catalog: the contents of the files.
        findings: with commands, and counted.
        engine: encodes samples.
        exact_only: look for equal bytes only, so that the sum is a bound.
    """
    if not _can_be_added(given, catalog.files):
        return None
    shares = {} if exact_only else _shares(catalog, findings, engine)
    nbytes = _in_folder(catalog, shares)
    acted = {finding.command for finding in findings if finding.command}
    left = sum(file.size for file in catalog.files) - sum(f.counted for f in findings if f.command)
    if nbytes >= (left if len(acted) >= _MANY else _MUCH * left):
        return None
    words = shlex.join(f"./{path}" if path.startswith("-") else path for path in given)
    command = f"blobstore pool add {free_names(['pool'])[0]} {words} --as {_name(given)}@1"
    return PoolAdvice(command, nbytes, is_bound=not shares)


def _can_be_added(given: Sequence[str], files: Sequence[FileReport]) -> bool:
    """Whether a pool takes the same files from these paths, most of which are no programs: no URL, and no index of shards."""
    paths = {file.path for file in files}
    others = sum(-file.size if file.format == "pte" else file.size for file in files)
    local = not any(map(is_url, given)) and all(os.path.isdir(path) or path in paths for path in given)  # noqa: PTH112
    return local and others > 0 and len(files) > 1


def _name(given: Sequence[str]) -> str:
    """What a version of these files is called: as the folder, if they are one."""
    name = os.path.basename(os.path.abspath(given[0])) if len(given) == 1 else ""  # noqa: PTH100, PTH119
    return re.sub(r"^[^A-Za-z0-9]+|[^A-Za-z0-9._+-]+", "-", name).strip("-")[:100] or "models"


def _in_folder(catalog: Catalog, shares: Mapping[Content, float]) -> int:
    """Bytes of a pool in a folder with all files, where contents without a share are stored as they are."""
    stored = sum(shares.get(content, 1.0) * content.nbytes for content in catalog.contents)
    tables = sum(
        _CONTENT + (_SKETCH * (content.width or 4) if content.nbytes >= _SMALL else 0) for content in catalog.contents
    )
    regions = [region for file in catalog.files for region in file.regions]
    other = sum(region.nbytes for region in regions if not region.kind.is_blob)
    return int(stored) + tables + other + _PART * sum(map(len, (region.keys or "-" for region in regions))) + _RESERVE


# ------------------------------------------------------------------------------------------------- what contents take


def _shares(catalog: Catalog, findings: Sequence[Finding], engine: Engine) -> _Shares:
    """About which share of each content is stored; empty if that cannot be known."""
    made = _made_of_others(catalog, findings)
    left = list(_by_name(catalog, _largest(set(catalog.contents) - made)).values())
    looked_at: _Shares = {}
    for _ in range(_ROUNDS):
        pairs = _pairs(left, looked_at)
        results = engine.prove(stored_share, [_task(catalog, one, base) for one, base in pairs])
        if None in results:
            return {}
        shares = {one: result for (one, _), result in zip(pairs, results, strict=True)}
        looked_at.update((one, share) for one, (share, _) in shares.items())
        left = _without_bases(left, {one for one, (_, is_near) in shares.items() if is_near})
    return {**_extrapolated(catalog, looked_at), **dict.fromkeys(made, 0.0)} if looked_at else {}


def _pairs(groups: Sequence[Sequence[Content]], known: Container[Content]) -> list[tuple[Content, Content]]:
    """Each content with the base of its group; a base with itself, unless it is known."""
    return [(one, group[0]) for group in groups for one in group if one not in known or one is not group[0]]


def _without_bases(groups: Sequence[Sequence[Content]], near: Container[Content]) -> list[list[Content]]:
    """The contents of each group that are not near to its base, of which the first is the next base, if there are several."""
    rests = ([one for one in group[1:] if one not in near] for group in groups)
    return [rest for rest in rests if len(rest) > 1]


def _largest(contents: Iterable[Content]) -> list[Content]:
    ordered = sorted(contents, key=lambda one: (-one.nbytes, one.digest))[:_LARGEST]
    return [one for one in ordered if one.nbytes >= _SMALL]


def _made_of_others(catalog: Catalog, findings: Sequence[Finding]) -> set[Content]:
    """Contents that are another one in another layout or type."""
    kinds = {FindingKind.OTHER_LAYOUT, FindingKind.OTHER_DTYPE}
    claimed = {(c.file, c.region) for finding in findings if finding.kind in kinds for c in finding.claims}
    return {content for content in catalog.contents if claimed.intersection(content.places)}


def _by_name(catalog: Catalog, contents: Sequence[Content]) -> dict[object, list[Content]]:
    """Contents that may be near to each other, those in float32 first; what has no name is alone."""
    groups: dict[object, list[Content]] = defaultdict(list)
    for content in contents:
        keys = catalog.region(content.places[0]).keys
        sizes = content.layout and (content.layout.sizes, content.layout.dim_order)
        dtype = _dtype(catalog, content)
        family = "float" if dtype in _NARROW else dtype
        groups[(keys[0], sizes, family) if keys and sizes else content].append(content)
    for group in groups.values():
        group.sort(key=lambda content: _dtype(catalog, content) != "float")
    return groups


def _dtype(catalog: Catalog, content: Content) -> str:
    return next((kind for place in content.places if (kind := catalog.region(place).element_type)), "")


def _task(catalog: Catalog, one: Content, base: Content) -> tuple[str, tuple[object, ...]]:
    dtype, base_dtype = _dtype(catalog, one), _dtype(catalog, base)
    if one is base or base_dtype not in {dtype, "float"}:
        return f"pool:{one.digest}:{dtype}", (one.spot, dtype)
    key = f"pool:{one.digest}:{dtype}:{base.digest}:{base_dtype}"
    return key, (one.spot, dtype, base.spot, base_dtype)


def _extrapolated(catalog: Catalog, looked_at: _Shares) -> _Shares:
    """The shares of all contents: those that were not looked at have the average one of their type, or of all."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for content, share in looked_at.items():
        for kind in (_dtype(catalog, content), "every type"):
            sums[kind][0] += share * content.nbytes
            sums[kind][1] += content.nbytes
    average = {kind: stored / nbytes for kind, (stored, nbytes) in sums.items()}
    known = {one: average.get(_dtype(catalog, one), average["every type"]) for one in catalog.contents}
    return {**known, **looked_at}
