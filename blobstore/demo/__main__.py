"""`python -m blobstore.demo [DIRECTORY]`."""

import sys
from pathlib import Path

from rich.console import Console

from blobstore.core.errors import BlobStoreError
from blobstore.demo import run_demo

if __name__ == "__main__":
    try:
        run_demo(Path(sys.argv[1] if len(sys.argv) > 1 else "demo-output"), Console(width=100))
    except BlobStoreError as error:
        sys.exit(f"error: {error}")
