"""Programs and their methods on a cache."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, overload

from blobstore.core import errors
from blobstore.core.formats.pte.signature import Signature, ValueInfo, methods_table, values_table
from blobstore.core.memory.mapped_file import Paths, as_path, as_paths
from blobstore.core.memory.tensors import AnyTensor, Array
from blobstore.core.notebook import block, heading, shown
from blobstore.core.reprs import count, joined, line, listed, shorten
from blobstore.core.text import quoted
from blobstore.runtime.cache import BlobCache, check_cache
from blobstore.runtime.native import NativeLayout, NotATensorError, as_count, is_utf8, layout_of, native, native_path
from blobstore.runtime.packed import PackedStore, as_packed

if TYPE_CHECKING:
    import torch

__all__ = ["Method", "Program", "ValueInfo"]


Plain: TypeAlias = "int | float | bool | str | None"
"""An input that is not a tensor."""


class Method:
    """A loaded method. Calling it returns its output, or a list if it has several; `execute` always returns a list.

    Type checkers see one tensor, which can be unpacked like the list.

        logits = method(tokens)
        logits = method(tokens=tokens)  # by the names in `inputs`, which are those of the module's `forward`

    A method keeps its weights and its program's memory alive, even without its `Program`. That memory is freed when
    both are gone.

    Inputs are torch tensors, arrays, or plain values. The outputs are torch tensors if any input is one, otherwise
    numpy arrays; they own their memory. An input is read in place if it is writable, its dim order is the method's, and
    the program's memory plan permits it. An input that the method changes, such as a key/value cache, changes in the
    caller's memory, if that is writable and the plan lays no other tensor over the input. Calls from several threads take
    turns and release the interpreter lock; different methods run at the same time. A call sees one generation of the
    cache.

    Calling it raises:
        InputError: the inputs have the wrong number, kind, dtype or shape.
        ExecutionError: the method failed.
    """

    def __init__(self, native: Any, path: Path) -> None:
        # Not the Program, which holds its methods: the cycle would keep weights until the garbage collector runs.
        self._native = native
        self.path = path
        self.name: str = native.name
        self._run = native.__call__
        self._run_first = native.call_first

    # One output is what most methods have, so it is the type of a call. Tensors and arrays can be unpacked, too. Without any
    # tensor the outputs are arrays, so this one comes first.
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, *inputs: Array | Plain, **named: Array | Plain
    ) -> Array: ...
    @overload
    def __call__(self, *inputs: torch.Tensor | Plain, **named: torch.Tensor | Plain) -> torch.Tensor: ...
    @overload
    def __call__(self, *inputs: object, **named: object) -> AnyTensor: ...
    def __call__(self, *inputs: Any, **named: Any) -> Any:
        outputs: list[Any] = self.execute(*inputs, **named)
        return outputs[0] if len(outputs) == 1 else outputs

    @overload
    def execute(  # type: ignore[overload-overlap]
        self, *inputs: Array | Plain, **named: Array | Plain
    ) -> list[Array]: ...
    @overload
    def execute(self, *inputs: torch.Tensor | Plain, **named: torch.Tensor | Plain) -> list[torch.Tensor]: ...
    @overload
    def execute(self, *inputs: object, **named: object) -> list[AnyTensor]: ...
    def execute(self, *inputs: Any, **named: Any) -> list[Any]:
        """Call the method, and return its outputs as a list, however many there are.

        An output that is a plain value, such as an int, is returned as one.
        """
        if named:
            inputs = self._in_order(inputs, named)
        try:
            return self._run(*inputs)  # type: ignore[no-any-return]
        except errors.InputError as error:
            raise self._named(inputs, error) from None

    def _in_order(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        """All inputs in the order of the method.

        Raises:
            InputError: a name is unknown or given twice, or an input is missing.
        """
        where, names = f"{self.path}: method {self.name!r}", [info.name for info in self.inputs]
        for name in named:
            if name not in names:
                raise errors.InputError(f"{where}: no input {name!r}; the names are: {_named_inputs(names)}")
            if name in names[: len(inputs)]:
                raise errors.InputError(f"{where}: input {name!r} is given twice")
        for index in range(len(inputs), len(names)):
            if names[index] not in named:
                raise errors.InputError(f"{where}: input {repr(names[index]) if names[index] else index} is missing")
        return (*inputs, *(named[name] for name in names[len(inputs) :]))

    @overload
    def call_first(self, count: int, *inputs: Array | Plain) -> list[Array]: ...  # type: ignore[overload-overlap]
    @overload
    def call_first(self, count: int, *inputs: torch.Tensor | Plain) -> list[torch.Tensor]: ...
    @overload
    def call_first(self, count: int, *inputs: object) -> list[AnyTensor]: ...
    def call_first(self, count: int, *inputs: Any) -> list[Any]:
        """As `execute`, but only the first `count` outputs are copied and returned."""
        number = as_count(count, "the number of outputs")
        try:
            return self._run_first(number, *inputs)  # type: ignore[no-any-return]
        except errors.InputError as error:
            raise self._named(inputs, error) from None

    def _named(self, inputs: tuple[Any, ...], error: errors.InputError) -> errors.InputError:
        """The error, with the names of inputs where the native module does not know what is wrong with which."""
        if isinstance(error, NotATensorError):
            return self._wrong_kind(inputs, error)
        names = [info.name for info in self.inputs]
        if len(inputs) == len(names) or not any(names):
            return error
        return errors.InputError(f"{error}; the names are: {_named_inputs(names)}")

    def _wrong_kind(self, inputs: tuple[Any, ...], error: NotATensorError) -> errors.InputError:
        """The error for an input that no method takes, such as a list; of other wrong kinds the native module says it."""
        where, wanted = f"{self.path}: method {self.name!r}", self.inputs
        index = next(i for i, value in enumerate(inputs) if value is error.value)
        if index >= len(wanted):
            return errors.InputError(f"{where}: input {index}: {error}")
        kind = wanted[index].kind
        expected = {"int": "an int", "none": "None", "str": "a string", "other": "a list"}.get(kind, f"a {kind}")
        which = f"input {index}" + (f" ({wanted[index].name!r})" if wanted[index].name else "")
        return errors.InputError(f"{where}: {which} is {expected}, not a {type(error.value).__qualname__}")

    def output_memory(self, index: int) -> torch.Tensor:
        """A tensor over the memory that the method writes an output to. It is the same memory in every call.

        The tensor is valid before the first call: an output that is a parameter then has its initial value, any other
        output is zero. The tensor keeps the memory alive. It may be written to, but nothing synchronizes such writes
        with calls from other threads.

        Raises:
            InputError: the output is not a tensor, or there is no such output.
            UnsupportedOperationError: the program has no planned memory for it.
        """
        return self._native.output_memory(as_count(index, "the index of an output"))  # type: ignore[no-any-return]

    def state_memory(self) -> dict[str, torch.Tensor]:
        """Tensors by name over the state that the method keeps in its own memory: its mutable buffers, and parameters
        that were exported with `external_mutable_weights`. Ownership is as for `output_memory`."""
        return self._native.state_memory()  # type: ignore[no-any-return]

    @property
    def inputs(self) -> tuple[ValueInfo, ...]:
        """The inputs, in order."""
        return _infos(self._native.inputs())

    @property
    def outputs(self) -> tuple[ValueInfo, ...]:
        """The outputs, in order."""
        return _infos(self._native.outputs())

    def __repr__(self) -> str:
        return line("Method", f"'{self.name}' of {self.path}", lambda: str(self._signature()))

    def _repr_html_(self) -> str:
        return shown(self, lambda: block(heading(f"Method {self.name}", self.path), values_table(self._signature())))

    def _signature(self) -> Signature:
        return Signature(self.name, self.inputs, self.outputs, ())


class Program:
    """A `.pte` on a cache.

    Blobs are looked up in the cache first and then in the program, so a blob of the cache overrides an embedded blob
    with the same key.

    Args:
        path: the program.
        cache: holds its weights. A cache may serve any number of programs; all of them see its commits.
        data: data files for a cache that is private to this program; if `cache` is given too, it becomes the base.
        packed: a `PackedStore` or its folder: where this program keeps packed weights. By default where the cache says,
            or nowhere.

    Attributes:
        path: the program, as given.
        cache: the cache that the program runs on.
        packed: the `PackedStore`, or None.
        method_names: the names of its methods.

    Raises:
        FileAccessError, InvalidFileError: the program cannot be opened, or is malformed.
        KeyNotFoundError: the cache lacks tensors that the program needs; the message names all of them.
        LayoutError: a tensor has another shape or dtype in the cache.
        UnsupportedDataError: `cache` is not a `BlobCache`, or `packed` is neither a store nor a path.
        As `BlobCache` for `data`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        cache: BlobCache | None = None,
        *,
        data: Paths = (),
        packed: PackedStore | str | os.PathLike[str] | None = None,
    ) -> None:
        self.path = as_path(path)
        files = as_paths(data)
        if cache is not None:
            check_cache(cache, "cache")
        self.cache = BlobCache(files, base=cache) if files or cache is None else cache
        self.packed = as_packed(packed) or self.cache.packed
        store = self.packed._native if self.packed is not None else None
        try:
            self._native: Any = native.Program.load(native_path(path), self.cache._native, store)
        except errors.KeyNotFoundError as error:
            raise self._with_other_files(error) from None
        self.method_names: tuple[str, ...] = tuple(self._native.methods)
        self._methods: dict[str, Method] = {}

    def method(self, name: str = "forward") -> Method:
        """A method, loaded at the first request and then kept.

        Raises:
            MethodNotFoundError: the program has no such method; the message names those that it has.
            MissingBackendError: the backend of a delegate is not registered in this process.
            KeyNotFoundError: a delegate needs a blob that neither the cache nor the program has.
            ProgramError: ExecuTorch cannot load the method.
        """
        method = self._methods.get(self._checked(name))
        if method is None:
            method = self._methods.setdefault(name, self.load_method(name))
        return method

    def load_method(self, name: str = "forward") -> Method:
        """Like `method`, but loads a new one each time, so that several threads can run it at once."""
        try:
            return self._wrap(self._native.load_method(self._checked(name)))
        except errors.KeyNotFoundError as error:
            raise self._with_other_files(error) from None

    def _with_other_files(self, error: errors.KeyNotFoundError) -> errors.KeyNotFoundError:
        """An error for missing keys that says which data files beside the program have keys that it takes."""
        from blobstore.core.programs.deployed import data_files

        given = {os.path.realpath(source) for source in self.cache.sources}
        try:
            others = [path for path in data_files(self.path) if os.path.realpath(path) not in given]
        except errors.BlobStoreError:  # it is about a file that the caller did not name
            others = []
        if not others:
            return error
        return errors.KeyNotFoundError(f"{error}; give the data files beside it, too: {', '.join(map(str, others))}")

    def _load_training(self, name: str) -> Any:
        """The native training program of a method; see blobstore.training."""
        return native.TrainingProgram.load(self._native, self._checked(name))

    def _wrap(self, method: Any) -> Method:
        """A native method of this program as a `Method`."""
        return Method(method, self.path)

    def _checked(self, name: str) -> str:
        if not is_utf8(name):
            names = ", ".join(map(repr, self.method_names))
            raise errors.MethodNotFoundError(f"{self.path}: no method {name!r}; there are {names}")
        return name

    def __getitem__(self, name: str) -> Method:
        return self.method(name)

    def inputs(self, method: str = "forward") -> tuple[ValueInfo, ...]:
        """The inputs of a method, without loading it."""
        return _infos(self._native.inputs(self._checked(method)))

    def outputs(self, method: str = "forward") -> tuple[ValueInfo, ...]:
        """The outputs of a method, without loading it."""
        return _infos(self._native.outputs(self._checked(method)))

    def external_keys(self, method: str = "forward") -> tuple[str, ...]:
        """The keys of the tensors that a method takes from data files. Blobs of its delegates are not included."""
        return tuple(self._native.needs(self._checked(method)))

    def backends(self, method: str = "forward") -> tuple[str, ...]:
        """The backends that parts of a method are delegated to."""
        return tuple(self._native.backends(self._checked(method)))

    @property
    def packed_cache_path(self) -> str | None:
        """What a process that has ExecuTorch only can give it as ``packed_cache_path``, to share this program's packed weights.

        The file of the packed store that XNNPACK's own delegates use, those of the stock partitioner. It has the weights
        of the methods that were loaded. It stays at least as long as one of them lives. None if there is no such file.
        """
        return os.fsdecode(self._native.packed_cache_path()) or None

    def __repr__(self) -> str:
        methods = f"{count(len(self.method_names), 'method')} ({listed(self.method_names)})"
        return line("Program", self.path, methods, f"on {shorten(self.cache._title(), 32)}")

    def _repr_html_(self) -> str:
        return shown(self, self._as_html)

    def _as_html(self) -> str:
        cache = f"on {self.cache._title()}: {joined(self.cache._facts())}"
        methods = [
            Signature(name, self.inputs(name), self.outputs(name), self.backends(name)) for name in self.method_names
        ]
        return block(heading(f"Program {self.path}", cache), methods_table(methods))

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *exception: object) -> None:
        self._methods.clear()


def _named_inputs(names: Sequence[str]) -> str:
    return quoted(filter(None, names), most=20) or "the program records none"


def _infos(native: list[tuple[str, NativeLayout | None, str]]) -> tuple[ValueInfo, ...]:
    return tuple(ValueInfo(kind, layout_of(layout), name) for kind, layout, name in native)
