"""Our store, writer and reader behind the interfaces that ExecuTorch's tests use."""

import io
import math
from typing import Any

from executorch.exir._serialize._cord import Cord, FileBackedData
from executorch.exir._serialize._named_data_store import NamedDataStoreOutput
from executorch.exir._serialize.data_serializer import DataEntry, DataPayload
from executorch.exir.scalar_type import ScalarType as EtScalarType
from executorch.exir.tensor_layout import TensorLayout as EtLayout

from blobstore import BlobStore
from blobstore.core.formats.ptd.reader import PtdDataMap
from blobstore.core.formats.ptd.writer import write_ptd
from blobstore.core.memory.layout import ScalarType, TensorLayout
from blobstore.lowering import to_named_data


def _ours(layout: Any) -> TensorLayout | None:
    if layout is None:
        return None
    return TensorLayout(ScalarType(int(layout.scalar_type)), tuple(layout.sizes), tuple(layout.dim_order))


def _theirs(layout: TensorLayout | None) -> EtLayout | None:
    if layout is None:
        return None
    return EtLayout(EtScalarType(int(layout.scalar_type)), list(layout.sizes), list(layout.dim_order))


class Store:
    """A `BlobStore` as a NamedDataStore."""

    def __init__(self) -> None:
        self.store = BlobStore()

    def add_named_data(
        self, key: str, data: Any, alignment: int | None = 1, external_tag: str | None = None, tensor_layout: Any = None
    ) -> None:
        self.store.add(key, data, alignment=alignment or 1, tag=external_tag, layout=_ours(tensor_layout))

    def merge_named_data_store(self, other: NamedDataStoreOutput) -> None:
        self.store.merge(other)

    def get_named_data_store_output(self) -> NamedDataStoreOutput:
        return to_named_data(self.store)


class Serializer:
    """The writer and the reader of `.ptd` files as a FlatTensorSerializer."""

    def __init__(self, config: Any) -> None:
        self.alignment = config.segment_alignment

    def serialize(self, data: DataPayload) -> Cord:
        store = BlobStore()
        for key, entry in data.named_data.items():
            # all segments must have this alignment, so every key requests it
            alignment = math.lcm(max(1, entry.alignment), self.alignment)
            blob = data.buffers[entry.buffer_index]
            if isinstance(blob, FileBackedData):
                blob = blob.prefix(len(blob))
            store.add(key, blob, alignment=alignment, layout=_ours(entry.tensor_layout))
        file = io.BytesIO()
        write_ptd(file, store.entries(), {})
        return Cord(file.getvalue())

    def deserialize(self, blob: Cord) -> DataPayload:
        data_map = PtdDataMap("conformance.ptd", data=memoryview(bytes(blob)))
        buffers: dict[int, bytes] = {}
        named = {}
        for key in data_map:
            buffers.setdefault(data_map.segment_of(key), data_map.bytes(key))
            index = list(buffers).index(data_map.segment_of(key))
            named[key] = DataEntry(index, 1, _theirs(data_map.get_tensor_layout(key)))
        return DataPayload(list(buffers.values()), named)

    def deserialize_to_named_data_store_output(self, blob: bytes, name: str) -> NamedDataStoreOutput:
        payload = self.deserialize(Cord(blob))
        return NamedDataStoreOutput(payload.buffers, {}, {name: payload.named_data})
