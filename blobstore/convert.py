"""`.safetensors` to `.ptd` and back."""

from __future__ import annotations

import json
import os

import numpy as np

from blobstore.errors import UnsupportedDataError
from blobstore.formats import Format, detect_format
from blobstore.layout import ScalarType, TensorLayout
from blobstore.ptd.reader import open_ptd
from blobstore.safetensors import DTYPES, SafetensorsDataMap, write_safetensors
from blobstore.staging import Staging, refuse_inputs
from blobstore.store import BlobStore
from blobstore.tensors import as_bytes, to_numpy

__all__ = ["OPAQUE", "convert"]

OPAQUE = "blobstore.opaque"
"""Metadata of a .safetensors: the keys, as a JSON list, that are opaque blobs and no tensors of bytes."""


def convert(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Convert a .safetensors into a .ptd, or a .ptd into a .safetensors; which, the source's content says.

    Names, dtypes, shapes, values and metadata are kept. A .safetensors has neither dim orders nor opaque blobs: such
    tensors are made contiguous, and opaque blobs become tensors of bytes that are opaque again on the way back.

    Raises:
        FileAccessError, InvalidFileError, IntegrityError: a file cannot be read or written, or is malformed.
        UnsupportedDataError: the source is neither, or has a dtype that the target's format lacks.
        OutputPathError: the target is the source.
    """
    refuse_inputs([target], [source])
    kind = detect_format(source)
    if kind is Format.SAFETENSORS:
        _to_ptd(source, target)
    elif kind is Format.PTD:
        _to_safetensors(source, target)
    else:
        raise UnsupportedDataError(
            f"{os.fspath(source)}: {kind.value}; a .safetensors or a .ptd can be converted into the other"
        )


def _to_ptd(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    with SafetensorsDataMap(source) as data_map:
        metadata = dict(data_map.metadata)
        opaque = _opaque_keys(metadata.pop(OPAQUE, "[]"))
        store = BlobStore()
        for key, data in data_map.items():
            layout = data_map.get_tensor_layout(key)
            if layout is None:
                raise UnsupportedDataError(
                    f"{data_map.name}: tensor {key!r} has dtype {data_map.dtypes[key]}, which a .ptd cannot name"
                )
            store.add(key, data, layout=None if key in opaque else layout)
        store.write_ptd(target, metadata=metadata)


def _opaque_keys(text: str) -> set[str]:
    """The keys in the metadata; nothing if somebody else used the name for something else."""
    try:
        keys = json.loads(text)
    except ValueError:
        return set()
    return {key for key in keys if isinstance(key, str)} if isinstance(keys, list) else set()


def _to_safetensors(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    with open_ptd(source, verify=True) as data_map:
        tensors: dict[str, tuple[memoryview, TensorLayout]] = {}
        opaque = []
        for key, view in data_map.items():
            data, layout = view, data_map.get_tensor_layout(key)
            if layout is None:
                opaque.append(key)
                layout = TensorLayout(ScalarType.BYTE, (len(data),))
            elif not layout.is_contiguous:
                data, layout = as_bytes(np.ascontiguousarray(to_numpy(data, layout)))
            if layout is None or layout.scalar_type not in DTYPES.values():
                raise UnsupportedDataError(f"{data_map.name}: {key!r} is {layout}, which a .safetensors cannot name")
            tensors[key] = (data, layout)
        metadata = dict(data_map.metadata)
        if opaque:
            metadata[OPAQUE] = json.dumps(opaque)
        with Staging() as staging, staging.open(target) as file:
            write_safetensors(file, tensors, metadata)
