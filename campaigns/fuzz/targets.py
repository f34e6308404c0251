"""The fuzzed functions: each uses the library on the bytes of a file as an application would.

A target returns, or raises `BlobStoreError` for bytes that are refused. Every other exception is a finding, including
`DisagreementError`: two readers disagree about a file.
"""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from blobstore import BlobStore, open_ptd
from blobstore.core.errors import BlobStoreError, UnsupportedDataError
from blobstore.core.formats.data_map import NamedDataMap
from blobstore.core.formats.keys import KEY_PREFIX
from blobstore.core.formats.payload import split
from blobstore.core.formats.pte.data_map import open_pte
from blobstore.core.formats.pte.program import ProgramFile
from blobstore.core.formats.pte.rewrite import Rewrite
from blobstore.core.formats.safetensors import SafetensorsDataMap
from blobstore.logical.records import records_key
from blobstore.reporting import report
from blobstore.reporting.find import compare_reports
from blobstore.reporting.json_output import load_report
from blobstore.runtime import BlobCache, PackedStore, Program
from blobstore.runtime.native import layout_of, native_path
from blobstore.runtime.native import native as native_module
from blobstore.runtime.tensors import LogicalTensors
from blobstore.testing import strategies  # noqa: F401 - imported here, so that no input waits for it
from campaigns.fuzz import adapters, chunks, disk, releases
from campaigns.fuzz.answers import DisagreementError, MemoryFile, agree, answer, temporary_folder


def _everything(data_map: NamedDataMap) -> dict[str, Any]:
    """Everything in a data map, by key."""
    return {
        key: (bytes(data_map.get_data(key)), data_map.get_tensor_layout(key), data_map.alignment(key))
        for key in data_map
    }


def ptd(data: bytes) -> None:
    """A `.ptd`: Python and C++ accept the same files, read the same from them, and agree on whether they are damaged."""
    with MemoryFile(data) as path:

        def python() -> Any:
            data_map = open_ptd(path)
            return _everything(data_map), list(data_map), answer(data_map.verify).__class__ is bool

        def native() -> Any:
            cache = BlobCache(path, "copy")
            return _everything(cache), list(cache), answer(cache.verify).__class__ is bool

        agree(answer(python), answer(native), "a .ptd")
        open_ptd(path)


def pte(data: bytes) -> None:
    """A `.pte`: it is read, everything movable is moved, and the result is read again. C++ accepts it or refuses it."""
    with MemoryFile(data) as path:
        answer(lambda: Program(path).method_names)
        answer(lambda: _everything(open_pte(path)))
    program = ProgramFile("fuzz.pte", memoryview(data))
    moves = {item: item.key for item in program.movable()}
    file = io.BytesIO()
    Rewrite(program, moves).write(file)
    ProgramFile("slim.pte", memoryview(file.getvalue()))


class _Blobs(NamedDataMap):
    """A data map of one blob of records."""

    name = "fuzz"

    def __init__(self, data: bytes) -> None:
        self._key = records_key(data)
        self._blob = memoryview(data)

    def _key_list(self) -> list[str]:
        return [self._key]

    def _view(self, key: str) -> memoryview:
        return {self._key: self._blob}[key]

    def _layout(self, key: str) -> None:
        return None


def records(data: bytes) -> None:
    """The records of a delegate, and the tensors that they describe."""
    list(LogicalTensors(_Blobs(data)).items())


def payload(data: bytes) -> None:
    """The payload of a delegate."""
    split(data)


def packed(data: bytes) -> None:
    """A file of packed weights in a store, which says of a damaged one what is wrong and never raises."""
    with temporary_folder() as folder:
        Path(folder, "fuzz.packed").write_bytes(data)
        [file] = PackedStore(folder).verify()
        [listed] = PackedStore(folder).list()
        if listed.problem and not file.problem:
            raise DisagreementError(f"the table is damaged: {listed.problem}")


def safetensors(data: bytes) -> None:
    """A `.safetensors`: Python and C++ accept the same files, and read the same from them."""

    def python() -> Any:
        data_map = SafetensorsDataMap("fuzz.safetensors", data=memoryview(data))
        return {key: (data_map.get_tensor_layout(key), bytes(data_map.get_data(key))) for key in data_map}

    def native() -> Any:
        try:
            tensors = native_module.load_state_dict(native_path(path))
        except UnsupportedDataError:  # a valid file, with tensors that ExecuTorch does not have
            return one
        return {key: (layout_of(layout), data) for key, (*layout, data) in tensors.items()}

    one = answer(python)
    if data[6:9] == b"\0\0{":  # which C++ takes for such a file
        with MemoryFile(data) as path:
            agree(one, answer(native), "a .safetensors")
    SafetensorsDataMap("fuzz.safetensors", data=memoryview(data))


def checkpoint(data: bytes) -> None:
    """The list in a checkpoint; the rest of the file is valid."""
    import torch
    import xxhash

    from blobstore.training import checkpoint as module

    store = BlobStore()
    store.add("w", torch.ones(2, 3))
    store.add("optimizer.0.w", torch.zeros(2, 3))
    store.add(KEY_PREFIX + xxhash.xxh3_128_hexdigest(data), data)
    with MemoryFile(b"") as path:
        with path.open("wb") as file:
            from blobstore.core.formats.ptd.writer import write_ptd

            write_ptd(file, list(store.entries()), {})
        module.read(path, [])


def baseline(data: bytes) -> None:
    """An earlier report, compared with another."""
    with MemoryFile(data) as path:
        old = load_report(path)
    compare_reports(old, report([]))


def report_of(data: bytes) -> None:
    """A report on one file of any kind."""
    with MemoryFile(data) as path:
        report([path])


TARGETS: dict[str, Callable[[bytes], None]] = {
    "ptd": ptd,
    "pte": pte,
    "records": records,
    "payload": payload,
    "packed": packed,
    "safetensors": safetensors,
    "checkpoint": checkpoint,
    "baseline": baseline,
    "report": report_of,
    "index": releases.index,
    "parts": releases.parts,
    "ways": releases.ways,
    "encoded": releases.encoded,
    "chunk": chunks.chunk,
    "http": releases.http,
    "journal": disk.journal,
    "commits": disk.commits,
    "adapter": adapters.adapter,
    "peft": adapters.peft,
}

PREPARATIONS: dict[str, Callable[[], Any]] = {
    "parts": releases.published,
    "ways": releases.published,
    "commits": disk.working_copy,
    "adapter": adapters.foundation,
    "peft": adapters.foundation,
}
"""What a target makes once and uses for all inputs."""


def check(name: str, data: bytes) -> bool:
    """Whether a target accepts the bytes; raises for a finding."""
    try:
        TARGETS[name](data)
    except BlobStoreError as error:
        str(error)
        return False
    return True
