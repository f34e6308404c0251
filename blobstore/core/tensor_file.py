"""`safe_open`: the tensors of one file, one by one or in parts, as the safetensors package hands them out."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar, cast, overload

import numpy as np

from blobstore.core.errors import InvalidFileError, SliceError, UnsupportedDataError
from blobstore.core.formats.data_map import NamedDataMap
from blobstore.core.formats.opening import Format, detect_format
from blobstore.core.formats.ptd.reader import PtdDataMap
from blobstore.core.formats.pte.data_map import PteDataMap
from blobstore.core.formats.pte.program import ProgramFile
from blobstore.core.formats.safetensors import SafetensorsDataMap
from blobstore.core.memory.buffers import same_bytes
from blobstore.core.memory.dtypes import SAFETENSORS
from blobstore.core.memory.layout import TensorLayout
from blobstore.core.memory.mapped_file import PrivateFile, as_path, check_length
from blobstore.core.memory.tensors import AnyTensor, Array, default_framework, to_framework
from blobstore.core.reprs import line, shorten
from blobstore.core.text import size

if TYPE_CHECKING:
    import torch

__all__ = ["Device", "Framework", "Numpy", "TensorFile", "TensorSlice", "Torch", "framework_name", "safe_open"]

_Tensor = TypeVar("_Tensor")

Torch: TypeAlias = Literal["pt", "torch", "pytorch"]
Numpy: TypeAlias = Literal["np", "numpy"]
Framework: TypeAlias = Literal[Torch, Numpy]
"""What tensors come as: torch tensors or numpy arrays, under the names that safetensors takes."""

Device: TypeAlias = "str | int | torch.device"
"""A device as torch takes it: "cpu", "cuda:0", a number, a torch.device."""

_FRAMEWORKS: dict[str, Literal["pt", "np"]] = {"pt": "pt", "torch": "pt", "pytorch": "pt", "np": "np", "numpy": "np"}
_DTYPE_NAMES = {scalar_type: name for name, scalar_type in SAFETENSORS.items()}


@overload
def safe_open(
    filename: str | os.PathLike[str], framework: Torch, device: Device = "cpu"
) -> TensorFile[torch.Tensor]: ...
@overload
def safe_open(filename: str | os.PathLike[str], framework: Numpy, device: Device = "cpu") -> TensorFile[Array]: ...
@overload
def safe_open(
    filename: str | os.PathLike[str], framework: None = None, device: Device = "cpu"
) -> TensorFile[AnyTensor]: ...
def safe_open(
    filename: str | os.PathLike[str], framework: Framework | None = None, device: Device = "cpu"
) -> TensorFile[Any]:
    """Open a .ptd, a .safetensors or a .pte to take tensors from it; a context manager.

        with safe_open("model.ptd", "pt") as file:
            rows = file.get_slice("embed.weight")[1000:2000]  # reads these rows only

    Args:
        filename: the file; its first bytes say of which format it is. Of a .pte the tensors that it embeds.
        framework: "pt" for torch tensors, "np" for numpy arrays; by default torch's if torch is installed.
        device: where torch tensors are put; numpy has "cpu" only.

    Raises:
        FileAccessError: the file cannot be read.
        InvalidFileError: the file is malformed, or of another format.
        MissingDependencyError: torch is not installed.
        UnsupportedDataError: the framework is not known, or does not know the device.
    """
    return TensorFile(filename, framework, device)


class TensorFile(Generic[_Tensor]):
    """An open file of tensors; `safe_open` makes it.

    Tensors lie in private maps of the file. Nothing is read before it is used, writing to a tensor changes neither the
    file nor another process, and tensors stay valid after `close()`. Asked twice for one name, the file hands out the
    same memory; two names have memory of their own, also where the file stores equal tensors once. What is put on
    another device is a copy.

    It can be pickled, as the path of its file: see `blobstore.core.formats.pickling`.

    Attributes:
        path: the file, as given.
        framework: "pt" or "np".
        device: where tensors are put: a `torch.device`, or "cpu".
    """

    def __init__(
        self, filename: str | os.PathLike[str], framework: Framework | None = None, device: Device = "cpu"
    ) -> None:
        self.framework = framework_name(framework)
        self.device = _device(device, self.framework)
        self.path = as_path(filename)
        kind = detect_format(self.path)
        if kind not in {Format.PTD, Format.SAFETENSORS, Format.PTE}:
            raise InvalidFileError(self.path, f"{kind.value}; expected a .ptd, .safetensors or .pte")
        self._file = PrivateFile(self.path)
        self._map = _reader(kind, self._file)
        self._base = np.frombuffer(self._file.data, np.uint8).ctypes.data
        self._memory: dict[str, memoryview] = {}
        self._owner: dict[tuple[int, int], str] = {}

    def keys(self) -> list[str]:
        """The names of the tensors, in the order of the file."""
        return list(self._map)

    def offset_keys(self) -> list[str]:
        """The names of the tensors, in the order in which their bytes lie in the file."""
        return sorted(self._map, key=self._extent)

    def metadata(self) -> dict[str, str] | None:
        """The text that the file was written with; None without any. A .pte has none."""
        self._map._check_open()
        return dict(getattr(self._map, "metadata", {})) or None

    def get_tensor(self, name: str) -> _Tensor:
        """A whole tensor; opaque bytes are uint8.

        Raises:
            KeyNotFoundError: no such name; near ones are named.
            UnsupportedDataError: the framework has no such dtype, or the device is not available.
            MissingDependencyError: numpy needs ml_dtypes for bfloat16 or float8.
            FileAccessError: the file was truncated; or the system has no more maps.
            ClosedError: the file is closed.
        """
        self._map.get_data(name)  # raises what there is to raise
        (view,) = self._views([name])
        return self._tensor(name, view)

    def get_tensors(self, *, tied: bool = False) -> dict[str, _Tensor]:
        """All tensors by name.

        Args:
            tied: give names that share their bytes in the file one memory.

        Raises:
            As `get_tensor`.
        """
        names = self.keys()
        views = [self._map.get_data(name) for name in names] if tied else self._views(names)
        return {name: self._tensor(name, view) for name, view in zip(names, views, strict=True)}

    def get_slice(self, name: str) -> TensorSlice[_Tensor]:
        """A tensor of which only those parts are read that are indexed.

        Raises:
            KeyNotFoundError: no such name; near ones are named.
            FileAccessError, ClosedError: as `get_tensor`.
        """
        self._map.get_data(name)
        (view,) = self._views([name])
        return TensorSlice(self, name, view)

    def close(self) -> None:
        """Hand out nothing more. Tensors and slices that were handed out stay valid."""
        self._map.close()
        self._file.__exit__()
        self._memory.clear()

    def __enter__(self) -> TensorFile[_Tensor]:
        self._map._check_open()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return line("TensorFile", self.path, *self._map._facts(), f"'{self.framework}'", f"device '{self.device}'")

    def __reduce__(self) -> Any:
        return _again, (self._map, self.framework, self.device)

    def shape(self, name: str) -> list[int]:
        """The sizes of a tensor; of opaque bytes their number. Nothing of the tensor is read."""
        layout = self._map.get_tensor_layout(name)
        if isinstance(self._map, SafetensorsDataMap):
            return list(self._map.shapes[name])
        return [len(self._map.get_data(name))] if layout is None else list(layout.sizes)

    def dtype(self, name: str) -> str:
        """The dtype of a tensor as safetensors spells it, "F32"; ExecuTorch's name where that has none."""
        layout = self._map.get_tensor_layout(name)
        if isinstance(self._map, SafetensorsDataMap):
            return self._map.dtypes[name]
        return "U8" if layout is None else _DTYPE_NAMES.get(layout.scalar_type, layout.scalar_type.name)

    def equal(self, name: str, other: str) -> bool:
        """Whether two tensors have the same dtype, sizes and bytes."""
        one, two = self._map.get_tensor_layout(name), self._map.get_tensor_layout(other)
        return one == two and same_bytes(self._map.get_data(name), self._map.get_data(other))

    def _views(self, names: Iterable[str]) -> list[memoryview]:
        """The bytes of tensors, for each name in memory of its own."""
        names = list(names)
        later: dict[str, tuple[int, int]] = {}
        for name in names:
            if name in self._memory:
                continue
            view = self._map.get_data(name)
            extent = self._extent(name)
            # tensors of a program may overlap in other ways than by being the same
            shared = isinstance(self._map, PteDataMap) or self._owner.setdefault(extent, name) != name
            if shared and len(view):
                later[name] = extent
            else:
                self._memory[name] = view
        self._memory.update(zip(later, self._file.again(list(later.values())), strict=True))
        return [self._memory[name] for name in names]

    def _extent(self, name: str) -> tuple[int, int]:
        """Where a tensor lies in the file: first byte, and first byte behind it."""
        if isinstance(self._map, PtdDataMap | SafetensorsDataMap):
            return self._map.byte_range(name)
        view = self._map.get_data(name)
        start = np.frombuffer(view, np.uint8).ctypes.data - self._base if len(view) else 0
        return start, start + len(view)

    def _tensor(self, name: str, view: memoryview) -> _Tensor:
        """A tensor of these bytes on the device that was asked for."""
        return cast(_Tensor, _place(to_framework(self.framework, view, self._layout(name)), self.device))

    def _layout(self, name: str) -> TensorLayout | None:
        layout = self._map.get_tensor_layout(name)
        if layout is None and isinstance(self._map, SafetensorsDataMap):
            raise UnsupportedDataError(
                f"{self.path}: {name!r} is {self._map.dtypes[name]} {list(self._map.shapes[name])}, which no "
                "tensor of a .ptd can be"
            )
        return layout


class TensorSlice(Generic[_Tensor]):
    """A tensor that is read where it is indexed; `TensorFile.get_slice` makes it.

    It takes what the framework's own tensors take: numbers, slices with steps, `...`, None, lists and masks. What is
    handed out refers to the file's private map where the framework makes a view, and to new memory elsewhere. It stays
    usable when its file is closed.

    Attributes:
        name: of the tensor.
    """

    def __init__(self, file: TensorFile[_Tensor], name: str, view: memoryview) -> None:
        self.name = name
        self._where, self._framework, self._device = str(file.path), file.framework, file.device
        self._shape, self._dtype = file.shape(name), file.dtype(name)
        self._view = view
        self._problem: UnsupportedDataError | None = None
        self._layout: TensorLayout | None = None
        try:
            self._layout = file._layout(name)
        except UnsupportedDataError as error:  # shape and dtype can be asked for all the same
            self._problem = error

    def get_shape(self) -> list[int]:
        """The sizes of the whole tensor."""
        return list(self._shape)

    def get_dtype(self) -> str:
        """The dtype as safetensors spells it: "F32"."""
        return self._dtype

    def __getitem__(self, index: Any) -> _Tensor:
        """A part of the tensor, on the device of its file.

        Raises:
            SliceError: the index is out of range, or none that the framework takes.
            FileAccessError: the file was truncated.
            UnsupportedDataError, MissingDependencyError: as `TensorFile.get_tensor`.
        """
        if self._problem is not None:
            raise self._problem
        check_length(self._view)
        whole = to_framework(self._framework, self._view, self._layout)
        try:
            # torch would take a list apart as a tuple, with a warning that it will stop doing so
            part = whole[(index,) if isinstance(index, list) else index]
        except MemoryError:
            raise
        except Exception as error:  # frameworks raise anything
            raise SliceError(f"{self._where}: {self.name!r} of shape {self._shape}: {error}") from None
        placed = _place(part if self._framework == "pt" else np.asarray(part), self._device)
        return cast(_Tensor, placed)

    def __repr__(self) -> str:
        shape = f"{self._dtype} {shorten(self._shape)}"
        return line("TensorSlice", f"'{shorten(self.name)}' of {self._where}", shape, size(len(self._view)))


def framework_name(framework: Framework | None) -> Literal["pt", "np"]:
    """A framework under its short name; None is the one that is installed.

    Raises:
        UnsupportedDataError: it is not known.
    """
    if framework is None:
        return default_framework()
    name = _FRAMEWORKS.get(framework) if isinstance(framework, str) else None
    if name is None:
        raise UnsupportedDataError(f"framework {framework!r} is not 'pt' or 'np'")
    return name


def _reader(kind: Format, file: PrivateFile) -> NamedDataMap:
    if kind is Format.PTD:
        return PtdDataMap(file.path, data=file.data)
    if kind is Format.SAFETENSORS:
        return SafetensorsDataMap(file.path, data=file.data)
    return PteDataMap(ProgramFile(file.path, file.data))


def _again(data_map: NamedDataMap, framework: Framework, device: Device) -> TensorFile[Any]:
    """A pickled file, where it arrives."""
    (path,) = data_map.sources
    return TensorFile(path, framework, device)


def _place(tensor: Any, device: Device) -> Any:
    if str(device) == "cpu":
        return tensor
    try:
        return tensor.to(device)
    except (AssertionError, NotImplementedError, RuntimeError) as error:  # torch was built without it, or it is full
        raise UnsupportedDataError(f"a tensor cannot be put on device '{device}': {error}") from None


def _device(device: Device, framework: str) -> Device:
    """A device that the framework knows; whether the machine has it shows when a tensor is put there."""
    if isinstance(device, str) and device == "cpu":
        return device  # without importing torch
    if framework == "np":
        if str(device) != "cpu":
            raise UnsupportedDataError(f"numpy has no device {device!r}, only 'cpu'")
        return "cpu"
    try:
        import torch

        return torch.device(device)
    except ImportError:
        return device  # the first tensor says what is missing
    except (TypeError, RuntimeError, ValueError, OverflowError) as error:
        raise UnsupportedDataError(f"torch knows no device {device!r}: {error}") from None
