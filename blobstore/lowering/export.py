"""Exporting a model and lowering it in one call, without the noise of the libraries."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from blobstore.core.errors import BlobStoreError, UnsupportedDataError
from blobstore.core.requirements import needed
from blobstore.lowering.names import check
from blobstore.lowering.planning import Planning, input_names

if TYPE_CHECKING:
    from executorch.exir import ExecutorchBackendConfig
    from torch.fx import Node

    from blobstore.lowering.lowered import LoweredProgram
    from blobstore.runtime.executorch import Partitioner

__all__ = ["first_line", "last_line", "lower", "quiet", "refusing"]


@contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings and log messages of torch and executorch inside a `with` block.

    They are about the libraries' own deprecations and optional kernels, which callers cannot change. Logging up to
    level WARNING is disabled for the whole process, so do not use this while other threads must log.
    """
    level = logging.root.manager.disable
    logging.disable(max(level, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


@contextmanager
def refusing(what: str, reason: Callable[[BaseException], str], more: str = "") -> Iterator[None]:
    """Turn what torch and ExecuTorch raise inside a `with` block into one of our errors, but for a lack of memory.

    The message says what they cannot do, what of their error comes behind it (`first_line` or `last_line`), and `more`.
    """
    try:
        yield
    except (BlobStoreError, MemoryError):
        raise
    except Exception as error:  # they have no common class
        raise UnsupportedDataError(f"{what}: {reason(error)}{more}") from error


def first_line(error: BaseException) -> str:
    """What torch says of a module; where in its code follows in further lines."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def last_line(error: BaseException) -> str:
    """The first cause of an error in one line; ExecuTorch adds whole graphs to its messages."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__


def lower(
    model: nn.Module | Mapping[str, tuple[nn.Module, Sequence[Any]]],
    args: Sequence[Any] | torch.Tensor | None = None,
    *,
    tag: str | None = None,
    partitioners: Callable[[], Sequence[Partitioner]] | None = None,
    external_constants: bool | Callable[[Node], str | None] | None = None,
    config: ExecutorchBackendConfig | None = None,
) -> LoweredProgram:
    """Export methods and lower them to one program; warnings of the libraries are silenced, as by `quiet`.

        program = lower(model, (x,), tag="model")  # all weights go to model.ptd, and can be updated by name
        program = lower({"encode": (encoder, (x,)), "decode": (decoder, (y,))}, tag="model")

    Args:
        model: a module in evaluation mode, which becomes the method `forward`; or, for each method, a module and its
            example inputs.
        args: the example inputs of a single module; one tensor need not be in a tuple.
        tag: the data file, with or without `.ptd`, of all weights whose file nothing else names. It is the tag of the
            partitioner below, and the `external_constants` of what no delegate takes. Without it, weights stay in the
            program.
        partitioners: a function that returns new partitioners; it is called once for each method, before anything is
            exported. By default everything that XNNPACK takes is delegated to it, with a `tag` through
            `BlobStorePartitioner`; `list` delegates nothing.
        external_constants: as ExecuTorch takes it in place of `tag`, for the constants that no delegate takes.
        config: other options of `to_executorch()`.

    Returns:
        The program, for `save_programs` or with ExecuTorch's own `write_to_file` and `write_tensor_data_to_file`.

    Raises:
        MissingDependencyError: torch or executorch is not installed, or has another version than the supported one.
        InvalidTagError: `tag` is not a plain file name.
        UnsupportedDataError: `model` is neither a module with `args` nor methods; `partitioners` is not a function, but a
            list or a partitioner; torch cannot export a module with its inputs; or ExecuTorch cannot lower it.
    """
    methods = _methods(model, args)
    file = check(tag)
    with quiet(), torch.no_grad():
        with needed("lowering needs all of executorch", "executorch"):
            from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
            from executorch.exir import ExecutorchBackendConfig, to_edge_transform_and_lower

        def through_xnnpack() -> Sequence[Partitioner]:
            if file is None:
                return [XnnpackPartitioner()]
            from blobstore.lowering.plugin import BlobStorePartitioner

            return [BlobStorePartitioner(XnnpackPartitioner(), tag=file)]

        make = partitioners if partitioners is not None else through_xnnpack
        if not callable(make) or hasattr(make, "partition"):  # a partitioner can be called, too, with a program
            raise UnsupportedDataError(
                "partitioners must be a function that returns new partitioners, found a "
                f"{type(make).__qualname__}; write partitioners=lambda: [...]"
            )
        made = {name: list(make()) for name in methods}
        exported = {}
        for name, (module, inputs) in methods.items():
            with refusing(f"method {name!r} cannot be exported with these inputs", first_line):
                exported[name] = torch.export.export(module, inputs, strict=True)
        refusal = f"ExecuTorch cannot lower {' and '.join(type(module).__name__ for module, _ in methods.values())}"
        with refusing(refusal, last_line):
            edge = to_edge_transform_and_lower(exported, partitioner=made)
        options = config if config is not None else ExecutorchBackendConfig()
        if external_constants is not None:
            options = replace(options, external_constants=external_constants)
        elif file is not None:
            options = replace(options, external_constants=lambda node: file)
        planning = options.memory_planning_pass
        passes = planning if isinstance(planning, dict) else dict.fromkeys(methods, planning)
        planned = {
            name: Planning(
                passes.get(name, ExecutorchBackendConfig().memory_planning_pass), input_names(module, exported[name])
            )
            for name, (module, _) in methods.items()
        }
        with refusing(refusal, last_line):
            program: LoweredProgram = edge.to_executorch(replace(options, memory_planning_pass=planned))
        return program


def _methods(model: Any, args: Any) -> dict[str, tuple[nn.Module, tuple[Any, ...]]]:
    """The modules and the example inputs of methods, as `lower` takes them."""
    if isinstance(model, nn.Module):
        if args is None:
            raise UnsupportedDataError("a module needs example inputs: lower(model, (x,))")
        model, args = {"forward": (model, (args,) if isinstance(args, torch.Tensor) else args)}, None
    if not isinstance(model, Mapping) or args is not None:
        raise UnsupportedDataError(
            "expected a module and its example inputs, or methods as {'forward': (module, inputs)}, found a "
            f"{type(model).__qualname__}{'' if args is None else ' with inputs'}"
        )
    methods = {}
    for name, method in model.items():
        if not isinstance(method, tuple | list) or len(method) != 2 or not isinstance(method[0], nn.Module):
            raise UnsupportedDataError(
                f"method {name!r}: expected (module, inputs), found a {type(method).__qualname__}"
            )
        module, inputs = method
        if not isinstance(inputs, tuple | list):
            raise UnsupportedDataError(
                f"method {name!r}: expected a tuple of example inputs, found a {type(inputs).__qualname__}"
            )
        methods[name] = (module, tuple(inputs))
    return methods
