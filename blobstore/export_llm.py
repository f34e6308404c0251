"""`python -m blobstore.export_llm`: ExecuTorch's `export_llm`, with the same arguments and YAML files.

    python -m blobstore.export_llm --config model.yaml
    python -m blobstore.export_llm base.model_class=llama3_2 base.checkpoint=... backend.xnnpack.enabled=true ...

See `blobstore.llm.export_llm` for what becomes of the weights.
"""

from __future__ import annotations

import sys
from typing import Any

from blobstore.core.errors import BlobStoreError

__all__ = ["main"]


def main() -> None:
    """Export as the arguments of the process say; exits with 1 after one of the library's own errors."""
    try:
        _main()
    except BlobStoreError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(1)


def _main() -> None:
    from blobstore.llm import export_llm
    from blobstore.runtime.executorch import export_llm as stock

    failures: list[BlobStoreError] = []

    def export(config: Any) -> None:
        try:
            export_llm(config)
        except BlobStoreError as error:
            failures.append(error)  # hydra would print it with a traceback
            sys.exit(1)

    original, stock.export_llama = stock.export_llama, export
    try:
        stock.main()
    except SystemExit:
        if failures:
            raise failures[0] from None
        raise
    finally:
        stock.export_llama = original


if __name__ == "__main__":
    main()
