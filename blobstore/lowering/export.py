"""Exporting a model and lowering it in one call, without the noise of the libraries."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from blobstore.core.errors import MissingDependencyError, UnsupportedDataError

if TYPE_CHECKING:
    from executorch.exir import ExecutorchProgramManager

__all__ = ["lower", "quiet"]


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


def lower(
    methods: dict[str, tuple[nn.Module, tuple[Any, ...]]],
    *,
    partitioners: Callable[[], Sequence[Any]] | None = None,
    **config: Any,
) -> ExecutorchProgramManager:
    """Export methods and lower them to one program; warnings of the libraries are silenced, as by `quiet`.

    Args:
        methods: for each method name a module, in evaluation mode, and its example inputs.
        partitioners: a function that returns new partitioners; it is called once for each method, before anything is
            exported. Left out, everything that XNNPACK takes is delegated to it; `list` delegates nothing.
        config: fields of ExecuTorch's `ExecutorchBackendConfig`, such as `external_constants`.

    Returns:
        The program, for `save_programs` or with ExecuTorch's own `write_to_file` and `write_tensor_data_to_file`.

    Raises:
        MissingDependencyError: executorch is not installed.
        UnsupportedDataError: `partitioners` is not a function, but a list or a partitioner.
    """
    with quiet(), torch.no_grad():
        try:
            from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
            from executorch.exir import ExecutorchBackendConfig, to_edge_transform_and_lower
        except ImportError as error:
            raise MissingDependencyError("lowering needs executorch: pip install 'blobstore[executorch]'") from error

        make = partitioners if partitioners is not None else lambda: [XnnpackPartitioner()]
        if not callable(make) or hasattr(make, "partition"):  # a partitioner can be called, too, with a program
            raise UnsupportedDataError(
                "partitioners must be a function that returns new partitioners, found a "
                f"{type(make).__qualname__}; write partitioners=lambda: [...]"
            )
        made = {name: list(make()) for name in methods}
        exported = {
            name: torch.export.export(module, inputs, strict=True) for name, (module, inputs) in methods.items()
        }
        edge = to_edge_transform_and_lower(exported, partitioner=made)
        return edge.to_executorch(ExecutorchBackendConfig(**config))
