"""Export a model and lower it in one call, and quietly."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from blobstore.errors import MissingDependencyError

if TYPE_CHECKING:
    from executorch.exir import ExecutorchProgramManager

__all__ = ["lower", "quiet"]


@contextmanager
def quiet() -> Iterator[None]:
    """Silence what the libraries say while they export: their own deprecations, optional kernels not found.

    None of it is about the caller's model or something that the caller could change.
    """
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
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
    """Export each method with its example inputs and lower all of them to one program.

    Args:
        methods: method name to module, in evaluation mode, and example inputs.
        partitioners: makes the partitioners of one method; XNNPACK when not given, `list` for none.
        config: what else ExecuTorch's `ExecutorchBackendConfig` is given, such as `external_constants`.
    """
    with quiet(), torch.no_grad():
        try:
            from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
            from executorch.exir import ExecutorchBackendConfig, to_edge_transform_and_lower
        except ImportError as error:
            raise MissingDependencyError("lowering needs executorch: pip install 'blobstore[executorch]'") from error

        exported = {
            name: torch.export.export(module, inputs, strict=True) for name, (module, inputs) in methods.items()
        }
        make = partitioners if partitioners is not None else lambda: [XnnpackPartitioner()]
        edge = to_edge_transform_and_lower(exported, partitioner={name: list(make()) for name in exported})
        return edge.to_executorch(ExecutorchBackendConfig(**config))
