"""What the records in a data map say: which tensors there are, which blobs are made of them, and what cannot be changed."""

from __future__ import annotations

from dataclasses import replace

from blobstore.errors import InvalidFileError, KeyConflictError
from blobstore.formats.data_map import NamedDataMap
from blobstore.formats.keys import KEY_PREFIX
from blobstore.logical.records import STATE, Record, Records, Source, is_records, records_key

__all__ = ["EMBEDDED", "Index"]

EMBEDDED = (
    "no data file has it under its name: it is a constant inside the program, or save_programs moved it under a key of its "
    "contents; pass ExecutorchBackendConfig(external_constants=lambda node: 'model') to to_executorch() to have it in "
    "model.ptd under its name"
)
"""The refusal of a tensor that is in no data file."""


class Index:
    """The tensors and blobs that the records in a data map describe.

    One tensor can have several names, which programs may each have kept a different one of. The *canonical* name is the
    one that was seen first; all attributes but `names` use it.

    Attributes:
        blobs: the data map.
        names: each name of a tensor to the canonical one.
        sources: the tensors, with all their names.
        records: the records of blobs, by key.
        using: for each tensor that can be changed, the records of the blobs made of it.
        refusals: for each tensor that cannot be changed, why.
        auxiliary: tensors that a state dict need not have.

    Args:
        blobs: the data map, with the records and the blobs.

    Raises:
        InvalidFileError: records are damaged.
        KeyConflictError: two records of one blob contradict each other.
    """

    def __init__(self, blobs: NamedDataMap) -> None:
        self.blobs = blobs
        self.names: dict[str, str] = {}
        self.sources: dict[str, Source] = {}
        self.records: dict[str, Record] = {}
        self.using: dict[str, list[Record]] = {}
        self.refusals: dict[str, str] = {}
        self.auxiliary: set[str] = set()
        self._ambiguous: dict[str, str] = {}
        delegates = self._read()
        for delegate in delegates:
            self._know(delegate)
        self._find_uses()
        self._refuse_ambiguous()
        for delegate in delegates:
            for record in delegate.records:
                if record.refusal:
                    self._refuse(record)
        self._refuse_embedded({self.names.get(name, name) for delegate in delegates for name in delegate.shared})
        self._find_auxiliary(delegates)
        self._refuse_companions()

    def own_keys(self, name: str) -> list[str]:
        """The keys under which a tensor is stored as it is, without a delegate's layout."""
        return [key for key in (name, *self.sources[name].aliases) if key in self.blobs]

    def _read(self) -> list[Records]:
        """The records of each delegate."""
        found = []
        for key in self.blobs:
            if key.startswith(KEY_PREFIX) and is_records(key, data := self.blobs.get_data(key)):
                if key != records_key(bytes(data)):
                    raise InvalidFileError(
                        self.blobs.name, f"the records of a delegate do not have the digest in '{key}'"
                    )
                found.append(Records.parse(data, self.blobs.name))
        return found

    def _know(self, delegate: Records) -> None:
        """Take in the tensors and the blobs that a delegate's records describe."""
        for record in delegate.records:
            for source in record.sources:
                self._name(source)
            if not record.refusal:
                known = self.records.setdefault(record.key, record)
                if (known.steps, known.nbytes) != (record.steps, record.nbytes):
                    raise KeyConflictError(f"{self.blobs.name}: two records describe '{record.key}' differently")
        for source in delegate.outside:
            self._name(source)

    def _name(self, source: Source) -> None:
        """Take in a tensor under all its names, which may connect tensors that seemed to be several."""
        groups = dict.fromkeys(self.names[n] for n in (source.name, *source.aliases) if n in self.names)
        name, *others = groups or [source.name]
        known = self.sources.get(name, source)
        names = dict.fromkeys((name, *known.aliases))
        for more in (*(self.sources.pop(other) for other in others), source):
            names.update(dict.fromkeys((more.name, *more.aliases)))
            if more.sizes != known.sizes:
                self._ambiguous[name] = _two_shapes(known.sizes, more.sizes)
        self.sources[name] = replace(known, name=name, aliases=tuple(names)[1:])
        self.names.update(dict.fromkeys(names, name))

    def _find_uses(self) -> None:
        for record in self.records.values():
            for name in dict.fromkeys(self.names[source.name] for source in record.sources):
                self.using.setdefault(name, []).append(record)

    def _refuse_ambiguous(self) -> None:
        """Refuse names under which there are tensors of different shapes."""
        for name, source in self.sources.items():
            for layout in map(self.blobs.get_tensor_layout, self.own_keys(name)):
                if layout is not None and layout.sizes != source.sizes:
                    self._ambiguous[name] = _two_shapes(source.sizes, layout.sizes)
        for name, reason in self._ambiguous.items():
            self.refusals[self.names[name]] = reason
            self.using.pop(self.names[name], None)

    def _refuse(self, record: Record) -> None:
        """Note why the sources of a record cannot be changed; state of one method may be a constant of another."""
        for name in (self.names[source.name] for source in record.sources):
            if record.refusal == STATE and (name in self.using or self.own_keys(name)):
                continue
            self.refusals.setdefault(name, record.refusal)
            if record.auxiliary:
                self.auxiliary.add(name)

    def _refuse_embedded(self, shared: set[str]) -> None:
        """Refuse what is in no data file, or would change in a delegate only; `shared`: the program uses it, too."""
        for name in self.sources:
            if not self.own_keys(name) and (name not in self.using or name in shared):
                self.refusals.setdefault(name, EMBEDDED)

    def _find_auxiliary(self, delegates: list[Records]) -> None:
        """Find out which tensors no state dict has, by all records of each."""
        self.auxiliary -= {name for name in self.auxiliary if name in self.using or self.own_keys(name)}
        self.auxiliary |= {name for name, using in self.using.items() if all(record.auxiliary for record in using)}
        outside = [
            (self.names[source.name], source.name in delegate.transient)
            for delegate in delegates
            for source in delegate.outside
        ]
        self.auxiliary |= {name for name, is_transient in outside if is_transient} - self.using.keys()
        self.auxiliary -= {name for name, is_transient in outside if not is_transient and self.own_keys(name)}

    def _refuse_companions(self) -> None:
        """Refuse what is stored in one blob with a tensor that cannot be changed."""
        waiting, seen = list(self.refusals), set()
        while waiting:
            refused = waiting.pop()
            for record in self.using.get(refused, ()):
                for name in (self.names[source.name] for source in record.sources if record.key not in seen):
                    if name not in self.refusals:
                        self.refusals[name] = (
                            f"it is stored together with '{refused}', which cannot be changed: {self.refusals[refused]}"
                        )
                        waiting.append(name)
                seen.add(record.key)


def _two_shapes(one: tuple[int, ...], other: tuple[int, ...]) -> str:
    return f"programs have tensors of different shapes with this name, {list(one)} and {list(other)}; open a cache for each"
