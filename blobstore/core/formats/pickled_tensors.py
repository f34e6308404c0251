"""The tensors that a pickle of `torch.save` names, without unpickling: nothing is imported, called or made.

The operations of the pickle move inert values over a stack. A call of torch's functions that rebuild a tensor becomes the
record of one; what any other call would make is only where further tensors may be.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

__all__ = ["PickledTensor", "tensors_of"]

_TENSOR = {"torch._utils _rebuild_tensor", "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3"}
_OF_A_TENSOR = {"torch._utils _rebuild_parameter", "torch._utils _rebuild_parameter_with_state"}
_INSIDE_MODULES = {"_parameters", "_buffers", "_modules"}
"""Attributes of a module that are not part of the names in its state_dict."""


class PickledTensor(NamedTuple):
    """A tensor as a pickle describes it; nothing of it is checked.

    Attributes:
        storage: which of the file's storages has its elements.
        dtype: as torch spells it, such as "float32"; of other types, the name of its storage.
        offset: of its first element, in elements.
        sizes, strides: as torch has them, in elements.
    """

    storage: str
    dtype: str
    offset: int
    sizes: tuple[Any, ...]
    strides: tuple[Any, ...]


class _Global(str):
    """A function or a class: its module, a blank, and its name."""

    __slots__ = ()


class _Storage(NamedTuple):
    kind: str
    key: str


class _Inert:
    """What a call would make: its arguments, its state and its items are all that is known of it."""

    __slots__ = ("parts",)

    def __init__(self, *parts: Any) -> None:
        self.parts = list(parts)


_DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Bool": "bool",
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}


def tensors_of(pickle: bytes) -> dict[str, PickledTensor]:
    """The tensors of a pickle by name: of a state dict, the names in it; deeper ones are joined by dots. A tensor alone is "0".

    Raises:
        ValueError: it is no pickle that `torch.save` writes.
    """
    try:
        return _named(_Machine().run(pickle), 4 * len(pickle) + (1 << 16))
    except (LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


class _Machine:
    """The stack of a pickle; each method is one of its operations."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self, pickle: bytes) -> Any:
        for operation, argument, _ in pickletools.genops(pickle):
            name = operation.name
            if name in _WITH_ARGUMENT:
                _WITH_ARGUMENT[name](self, argument)
            elif name in _PUSHING:
                self.stack.append(argument)
            else:
                _PLAIN[name](self)
        return self.stack[-1]

    def since_mark(self) -> list[Any]:
        mark = self.marks.pop()
        taken = self.stack[mark:]
        del self.stack[mark:]
        return taken

    def last(self, count: int) -> tuple[Any, ...]:
        if count > len(self.stack):
            raise IndexError("the stack is empty")
        taken = tuple(self.stack[-count:])
        del self.stack[-count:]
        return taken

    def remember(self, place: int) -> None:
        self.memo[place] = self.stack[-1]

    def set_items(self, items: list[Any]) -> None:
        pairs = zip(items[::2], items[1::2], strict=True)
        found = {str(key): value for key, value in pairs if isinstance(key, str | int)}
        target = self.stack[-1]
        if isinstance(target, dict):
            target.update(found)
        else:
            target.parts.append(found)

    def extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        (target if isinstance(target, list) else target.parts).extend(items)

    def call(self) -> None:
        function, arguments = self.last(2)
        self.stack.append(_made(function, arguments))

    def build(self) -> None:
        (state,) = self.last(1)
        if isinstance(self.stack[-1], _Inert):
            self.stack[-1].parts.append(state)

    def persistent(self) -> None:
        (identity,) = self.last(1)
        _, kind, key, *_ = identity
        if not (isinstance(kind, _Global) and isinstance(key, str)):
            raise TypeError("a storage without a type or a key")
        self.stack.append(_Storage(kind, key))


def _made(function: Any, arguments: Any) -> Any:
    if not isinstance(function, _Global):  # which may be nested too deeply for what looks into it
        raise TypeError("a call of what is no function")
    if function == "collections OrderedDict" and not arguments:
        return {}
    if function in _TENSOR:
        storage, offset, sizes, strides, *rest = arguments
        kind = rest[2] if function.endswith("_v3") else storage.kind
        if isinstance(storage, _Storage) and isinstance(kind, _Global):
            name = kind.removeprefix("torch.storage ").removeprefix("torch ")
            return PickledTensor(storage.key, _DTYPES.get(name.removesuffix("Storage"), name), offset, sizes, strides)
    if function in _OF_A_TENSOR:
        return arguments[0]
    return _Inert(arguments)


_Operation = Callable[[_Machine], None]
_PUSHING = {
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES"),
    *("BINBYTES8", "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
}
_WITH_ARGUMENT: dict[str, Callable[[_Machine, Any], None]] = {
    "PROTO": lambda machine, version: None,
    "FRAME": lambda machine, size: None,
    "GLOBAL": lambda machine, name: machine.stack.append(_Global(name)),
    "BINPUT": _Machine.remember,
    "LONG_BINPUT": _Machine.remember,
    "BINGET": lambda machine, place: machine.stack.append(machine.memo[place]),
    "LONG_BINGET": lambda machine, place: machine.stack.append(machine.memo[place]),
}
_PLAIN: dict[str, _Operation] = {
    "STOP": lambda machine: None,
    "MARK": lambda machine: machine.marks.append(len(machine.stack)),
    "NONE": lambda machine: machine.stack.append(None),
    "NEWTRUE": lambda machine: machine.stack.append(True),
    "NEWFALSE": lambda machine: machine.stack.append(False),
    "EMPTY_DICT": lambda machine: machine.stack.append({}),
    "EMPTY_LIST": lambda machine: machine.stack.append([]),
    "EMPTY_SET": lambda machine: machine.stack.append([]),
    "EMPTY_TUPLE": lambda machine: machine.stack.append(()),
    "TUPLE": lambda machine: machine.stack.append(tuple(machine.since_mark())),
    "TUPLE1": lambda machine: machine.stack.append(machine.last(1)),
    "TUPLE2": lambda machine: machine.stack.append(machine.last(2)),
    "TUPLE3": lambda machine: machine.stack.append(machine.last(3)),
    "APPEND": lambda machine: machine.extend(list(machine.last(1))),
    "APPENDS": lambda machine: machine.extend(machine.since_mark()),
    "ADDITEMS": lambda machine: machine.extend(machine.since_mark()),
    "SETITEM": lambda machine: machine.set_items(list(machine.last(2))),
    "SETITEMS": lambda machine: machine.set_items(machine.since_mark()),
    "MEMOIZE": lambda machine: machine.remember(len(machine.memo)),
    "STACK_GLOBAL": lambda machine: machine.stack.append(_Global(" ".join(machine.last(2)))),
    "REDUCE": _Machine.call,
    "NEWOBJ": _Machine.call,
    "BUILD": _Machine.build,
    "BINPERSID": _Machine.persistent,
}


def _named(root: Any, most: int) -> dict[str, PickledTensor]:
    """The tensors below a value, by name; `most` bounds the characters of all names, which nesting multiplies."""
    found: dict[str, PickledTensor] = {}
    seen: set[int] = set()
    left: list[tuple[str, Any]] = [("", root)]
    while left:
        name, value = left.pop()
        if isinstance(value, PickledTensor):
            found.setdefault(name or "0", value)
        elif id(value) not in seen:
            seen.add(id(value))
            inside = []
            for key, child in _children(value):
                inside.append((_joined(name, key), child))
                most -= len(inside[-1][0])
                if most < 0:
                    raise ValueError("it nests names too deeply")
            left += reversed(inside)
    return found


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, _Inert):
        for part in value.parts:
            yield "", part
    elif isinstance(value, list | tuple):
        yield from ((str(index), inside) for index, inside in enumerate(value))


def _joined(name: str, key: str) -> str:
    if not key or key in _INSIDE_MODULES:
        return name
    return f"{name}.{key}" if name else key
