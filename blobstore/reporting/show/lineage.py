"""Which files come from another one, judged by their keys: "base and lm_head.weight", "base with other values in one tensor"."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from blobstore.core.text import printable
from blobstore.reporting.find import is_nameless
from blobstore.reporting.model import FileReport
from blobstore.reporting.report_data import ReportData

__all__ = ["Descent", "descent_title", "find_lineage"]

_LEAST = 2
"""Tensors that a base has at least."""

_Shape = tuple[int, ...]
_Tensors = Mapping[str, tuple[str, str, _Shape]]
"""By its key the digest, the type and the sizes of each tensor."""


@dataclass(frozen=True)
class Descent:
    """A file, and what it is of another one.

    Attributes:
        file: its number in the report.
        base: that of the other one.
        words: how it differs, as "in half", or "and lm_head.weight".
    """

    file: int
    base: int
    words: str


def descent_title(descents: Sequence[Descent]) -> str:
    return "1 file comes from another" if len(descents) == 1 else f"{len(descents)} files come from others"


def find_lineage(report: ReportData) -> list[Descent]:
    """For each file the file that it comes from, if one has half of its tensors under the same names, with the same sizes.

    Of several, it is the one with most equal contents. Files with fewer tensors, and of these those that have more in common
    with others, are bases first. A base has none itself, so a family has one. The work grows with the number of tensors.
    """
    tensors = [_tensors(file) for file in report.files]
    number = Counter(item for of_file in tensors for item in of_file.items())
    shared = [sum(number[item] for item in of_file.items()) for of_file in tensors]
    bases: dict[tuple[str, _Shape], list[int]] = defaultdict(list)
    found: list[Descent] = []
    for f in sorted(range(len(tensors)), key=lambda f: (_is_narrow(tensors[f]), len(tensors[f]), -shared[f], f)):
        base = _base_of(tensors, f, bases)
        if base is not None:
            found.append(Descent(f, base, _words(tensors[base], tensors[f])))
        elif len(tensors[f]) >= _LEAST:
            for key, (_, _, sizes) in tensors[f].items():
                bases[key, sizes].append(f)
    return sorted(found, key=lambda one: (one.base, one.file))


def _tensors(file: FileReport) -> _Tensors:
    """The named tensors of a file; a key that is a digest or a position names none."""
    named = [region for region in file.regions if region.kind.is_blob and not is_nameless(region)]
    names = ((name, region) for region in named for name in ([region.tensor] if region.tensor else region.keys))
    return {name: (r.digest, r.element_type, r.layout.sizes) for name, r in names if r.layout}


def _is_narrow(tensors: _Tensors) -> bool:
    """Whether most of it is in a narrower type than float32, which such a file comes from."""
    return 2 * sum(dtype != "float" for _, dtype, _ in tensors.values()) > len(tensors)


def _base_of(tensors: Sequence[_Tensors], f: int, bases: Mapping[tuple[str, _Shape], Iterable[int]]) -> int | None:
    alike: Counter[int] = Counter()
    equal: Counter[int] = Counter()
    for key, (digest, _, sizes) in tensors[f].items():
        for base in bases.get((key, sizes), ()):
            alike[base] += 1
            equal[base] += tensors[base][key][0] == digest
    fitting = [base for base, number in alike.items() if 2 * number >= max(len(tensors[f]), len(tensors[base]))]
    return max(fitting, key=lambda base: (equal[base], alike[base], -base), default=None)


def _words(base: _Tensors, own: _Tensors) -> str:
    both = [key for key in own if key in base]
    types = Counter(own[key][1] for key in both if own[key][1] != base[key][1])
    parts = {
        "with other values in": [key for key in both if _differ(base[key], own[key])],
        "with other sizes of": [key for key in both if base[key][2] != own[key][2]],
        "and": list(own.keys() - base.keys()),
        "without": list(base.keys() - own.keys()),
    }
    words = [f"in {dtype}" for dtype, _ in types.most_common(1)]
    words += [f"{how} {_named(keys, len(both))}" for how, keys in parts.items() if keys]
    return ", ".join(words) or "the same tensors"


def _differ(one: tuple[str, str, _Shape], other: tuple[str, str, _Shape]) -> bool:
    """Whether two tensors of one type and size have other values."""
    return one[0] != other[0] and one[1:] == other[1:]


def _named(keys: Sequence[str], of: int) -> str:
    """One by its name; several by their number and the module that has them all."""
    if len(keys) == 1:
        return printable(keys[0])
    if len(keys) == of:
        return f"all {of} tensors"
    modules = zip(*(key.split(".")[:-1] for key in keys), strict=False)
    common = ".".join(names[0] for names in takewhile(lambda names: len(set(names)) == 1, modules))
    return f"{len(keys)} tensors{f' of {printable(common)}' if common else ''}"
