"""The native module: importing it, its errors as those of `blobstore.errors`, and its values as those of Python.

This is the only module that imports the native package `executorch-blobstore-runtime`. It works without torch.
"""

from __future__ import annotations

import ctypes
import importlib.util
import operator
import os
import sys
from pathlib import Path
from typing import Any

from blobstore.core import errors
from blobstore.core.distribution import install
from blobstore.core.memory.layout import ScalarType, TensorLayout
from blobstore.core.memory.mapped_file import as_path
from blobstore.core.memory.tensors import as_bytes, in_dim_order, to_numpy, to_torch
from blobstore.core.requirements import check_runtime

__all__ = [
    "NativeLayout",
    "NotATensorError",
    "as_count",
    "decode_text",
    "is_utf8",
    "layout_of",
    "native",
    "native_layout",
    "native_path",
]

_LIBRARIES = (
    "libexecutorch",
    "libexecutorch_threadpool",
    "libexecutorch_kernels_optimized",
    "libexecutorch_kernels_quantized",
    "libexecutorch_backend_xnnpack",
    "libexecutorch_backend_openvino",  # registers itself; the engine is loaded when a program needs it
)


def _import_native() -> Any:
    """Import the native module, linked to the same libraries that `executorch` uses in this process.

    If executorch is not installed, the module is linked to the copies that its own package has.
    """
    check_runtime()
    try:
        spec = importlib.util.find_spec("executorch")
        for folder in spec.submodule_search_locations or () if spec else ():
            for name in _LIBRARIES:
                # loaded by path, because the two packages need not be installed side by side
                if (path := Path(folder, "lib", name + (".dylib" if sys.platform == "darwin" else ".so"))).exists():
                    ctypes.CDLL(str(path))
        _name_openvino()
        from blobstore_runtime import _native
    except (ImportError, OSError) as error:  # OSError: a library of executorch does not load
        if importlib.util.find_spec("blobstore_runtime") is None:
            message = f"running programs needs the native package: {install('runtime')} ({error})"
        else:
            message = (
                f"the native package is installed and does not load ({error}). To install it again: "
                f"{install('runtime', '--force-reinstall', '--no-deps')}"
            )
        raise errors.MissingDependencyError(message) from error
    return _native


def _name_openvino() -> None:
    """Tell ExecuTorch's OpenVINO backend where the engine of the openvino package is, as `executorch` does on import."""
    if "OPENVINO_LIB_PATH" not in os.environ and (spec := importlib.util.find_spec("openvino")) is not None:
        for folder in spec.submodule_search_locations or ():
            for path in sorted(Path(folder, "libs").glob("libopenvino_c.so*"))[-1:]:
                os.environ["OPENVINO_LIB_PATH"] = str(path)


def _make_error(name: str, path: bytes, reason: bytes, number: int) -> Exception:
    """The Python exception of a class for a native error. The native module calls it."""
    where, why = os.fsdecode(path), decode_text(reason)
    kind: type[Exception] = getattr(errors, name)
    if issubclass(kind, errors.InvalidFileError):  # IntegrityError, too
        return kind(where, why)
    if kind is errors.FileAccessError:
        return kind(where, OSError(number, why))
    return kind(f"{where}: {why}" if where else why)


def decode_text(text: bytes) -> str:
    """A native message as a string; bytes that are not UTF-8 are escaped."""
    return text.decode(errors="backslashreplace")


def is_utf8(value: object) -> bool:
    """Whether a value is a string that can be encoded as UTF-8, as the native module requires."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def native_path(path: str | os.PathLike[str]) -> bytes:
    """A path as the native module takes it."""
    return os.fsencode(as_path(path))


def as_count(value: object, what: str) -> int:
    """A number that fits the native module's unsigned sizes and indices; InputError for anything else, which the message
    calls `what`."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise errors.InputError(f"{what} must be an integer, not {value!r}") from None
    if not 0 <= number <= sys.maxsize:
        raise errors.InputError(f"{what} {number} is out of range")
    return number


NativeLayout = tuple[int, tuple[int, ...], tuple[int, ...]]
"""A layout as the native module takes and returns it: scalar type, sizes, dim order."""


def layout_of(native: NativeLayout | None) -> TensorLayout | None:
    """A native layout as a `TensorLayout`; None, for opaque bytes, stays None."""
    return None if native is None else TensorLayout(ScalarType(native[0]), native[1], native[2])


def native_layout(layout: TensorLayout) -> NativeLayout:
    """A `TensorLayout` as the native module takes it."""
    return int(layout.scalar_type), layout.sizes, layout.dim_order


class NotATensorError(errors.InputError):
    """An argument of a call is neither a tensor nor an array nor a plain value.

    Attributes:
        value: the argument; the native module does not say which one it was.
    """

    def __init__(self, value: object) -> None:
        super().__init__(f"expected a tensor or an array, not a {type(value).__qualname__}")
        self.value = value


def _argument_bytes(value: Any, wanted: NativeLayout | None) -> tuple[memoryview, NativeLayout]:
    """The bytes of an argument of a call, in the dim order that the method takes. The native module calls it."""
    data, layout = as_bytes(value) if hasattr(value, "dtype") else (None, None)
    if data is None or layout is None:
        raise NotATensorError(value)
    if wanted is not None and len(layout.sizes) == len(wanted[1]):
        data = in_dim_order(data, layout, wanted[2])
        layout = TensorLayout(layout.scalar_type, layout.sizes, wanted[2])
    return data, native_layout(layout)


def _other_shape(value: Any, wanted: NativeLayout) -> str | None:
    """The shape of an argument of a call if it is larger than the method takes. The native module calls it."""
    try:
        shape = value.shape
    except Exception:
        return None
    sizes = wanted[1]
    if operator.length_hint(shape) == len(sizes) and all(
        (size <= most) is True for size, most in zip(shape, sizes, strict=True)
    ):
        return None
    return str(shape)


def _list_map(data_map: Any) -> tuple[bytes, list[str]]:
    """The name and the keys of a data map. The native module calls it."""
    return data_map.name.encode("utf-8", "surrogateescape"), list(data_map)


def _read_map(data_map: Any, key: str) -> tuple[memoryview, NativeLayout | None]:
    """A blob of a data map and its layout. The native module calls it."""
    data, layout = data_map.get_data(key), data_map.get_tensor_layout(key)
    return data, None if layout is None else native_layout(layout)


native: Any = _import_native()
native.set_helpers(
    _argument_bytes,
    lambda view, layout: to_numpy(memoryview(view), layout_of(layout)),
    lambda view, layout: to_torch(memoryview(view), layout_of(layout)),
    _make_error,
    _other_shape,
    _list_map,
    _read_map,
)
