"""OpenVINO as an inner backend: its partitioner without nncf, and what its payloads consist of.

`executorch.backends.openvino` imports nncf, which only its quantizer needs. The releases of nncf that work with the
versions of openvino which ExecuTorch 1.5 takes need an older torch. So the partitioner is imported without it.
"""

from __future__ import annotations

import importlib
import re
import struct
import sys
import types
from typing import Any

import numpy as np

from blobstore.core.distribution import OPENVINO
from blobstore.core.errors import MissingDependencyError, UnsupportedDataError
from blobstore.core.requirements import check_lowering

__all__ = ["BACKEND_ID", "comparable", "openvino_partitioner"]

BACKEND_ID = "OpenvinoBackend"

_PACKAGE = "executorch.backends.openvino"
_HEADER = struct.Struct("<6Q")
_KEY = np.frombuffer(b"0`p\x02\x04\x08?ortx\x7f", np.uint8)
_NUMBER = re.compile(rb"(?<=[A-Za-z]_)\d+|(?<=Model)\d+")


def openvino_partitioner(device: str = "CPU", **options: Any) -> Any:
    """ExecuTorch's `OpenvinoPartitioner`.

    Args:
        device: the device that OpenVINO compiles for.
        options: further arguments of the partitioner.

    Raises:
        MissingDependencyError: openvino, torch or executorch is not installed, or another version than the supported one.
        UnsupportedDataError: `device` is not a text, or the partitioner does not have one of the options.
    """
    if not isinstance(device, str) or not device:
        raise UnsupportedDataError(f"device must be the name of one, such as 'CPU', not {device!r}")
    check_lowering("lowering for OpenVINO")
    from blobstore.runtime.executorch import CompileSpec

    try:
        partitioner = _import("partitioner").OpenvinoPartitioner
    except ImportError as error:
        raise MissingDependencyError(f"lowering for OpenVINO needs more packages ({error}): {OPENVINO}") from error
    try:
        return partitioner([CompileSpec("device", device.encode())], **options)
    except TypeError as error:
        raise UnsupportedDataError(f"OpenvinoPartitioner does not take {options!r}: {error}") from error


def _import(name: str) -> Any:
    """A module of ExecuTorch's package for OpenVINO; without the quantizer, if that cannot be imported."""
    try:
        return importlib.import_module(f"{_PACKAGE}.{name}")
    except ImportError:
        stubs = {f"{_PACKAGE}.quantizer": ["quantizer"], f"{_PACKAGE}.quantizer.quantizer": ["OpenVINOQuantizer"]}
        for module, attributes in stubs.items():
            stub = types.ModuleType(module, "Stands in for what needs nncf.")
            stub.__path__ = []
            for attribute in attributes:
                setattr(stub, attribute, None)
            sys.modules[module] = stub
        try:
            return importlib.import_module(f"{_PACKAGE}.{name}")
        finally:
            for module in stubs:
                del sys.modules[module]


def comparable(payload: bytes) -> object:
    """What two payloads of a model with equal constants have in common.

    A payload consists of a header, constants, and a description in XML, scrambled with a key of 12 bytes. Names in the
    description have numbers that OpenVINO counts on in the whole process.
    """
    if len(payload) < _HEADER.size:
        return payload
    *_, start, size = header = _HEADER.unpack_from(payload)
    if start + size != len(payload):
        return payload
    scrambled = np.frombuffer(payload, np.uint8, size, start)
    description = (scrambled ^ np.resize(_KEY, size)).tobytes()
    if not description.startswith(b"<?xml"):
        return payload
    return header[:-1], payload[_HEADER.size : start], _NUMBER.sub(b"#", description)
