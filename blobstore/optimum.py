"""optimum-executorch through blobstore: the recipe `xnnpack-blobstore`.

Its command finds the recipe once this module is imported, which `python -m blobstore.optimum` does before it runs the
command with the arguments that it gets:

    python -m blobstore.optimum export executorch -m DIR --recipe xnnpack-blobstore -o out
    blobstore fuse out/model.pte out/model.ptd -o single/model.pte

The recipe is that of XNNPACK, but for two things: delegates are lowered through `BlobStorePartitioner`, and all weights
go to `model.ptd`, by their names in the model. optimum's own loader takes one file, which `fuse` makes; it needs
`import blobstore.runtime` before it, for the delegate.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from typing import Any

from blobstore.core.errors import MissingDependencyError

__all__ = ["RECIPE", "main", "register"]

RECIPE = "xnnpack-blobstore"
"""The name of the recipe."""

_TAG = "model"
_lock = threading.Lock()


def register() -> None:
    """Register the recipe with optimum-executorch, again if need be.

    Raises:
        MissingDependencyError: optimum-executorch is not installed.
    """
    _recipes().register_recipe(RECIPE)(_export)


def _recipes() -> Any:
    try:
        return importlib.import_module("optimum.exporters.executorch.recipe_registry")
    except ImportError as error:
        raise MissingDependencyError(
            f"the recipe needs optimum-executorch: pip install optimum-executorch ({error})"
        ) from None


def _export(model: Any, **options: Any) -> Any:
    """optimum's recipe for XNNPACK, with our partitioner and with weights in a file of their own; options as for the
    recipe."""
    from blobstore.lowering import BlobStorePartitioner

    theirs: Any = importlib.import_module("optimum.exporters.executorch.recipes.xnnpack")

    def partitioner(*arguments: Any, **keywords: Any) -> Any:
        return BlobStorePartitioner(stock_partitioner(*arguments, **keywords), tag=_TAG)

    with _lock:  # the recipe looks both up in its module
        stock_partitioner, stock_config = theirs.XnnpackPartitioner, theirs.ExecutorchBackendConfig
        theirs.XnnpackPartitioner = partitioner
        theirs.ExecutorchBackendConfig = functools.partial(stock_config, external_constants=lambda node: _TAG)
        try:
            return theirs.export_to_executorch_with_xnnpack(model, **options)
        finally:
            theirs.XnnpackPartitioner, theirs.ExecutorchBackendConfig = stock_partitioner, stock_config


def main() -> None:
    """Run optimum's command line, in which the recipe is registered; exits with 1 if optimum is not installed."""
    try:
        register()
    except MissingDependencyError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(1)
    command = importlib.import_module("optimum.commands.optimum_cli")
    sys.argv[0] = "optimum-cli"
    command.main()


if __name__ == "__main__":
    main()
else:
    register()
