"""A file of weights that the tests change, and its contents."""

from pathlib import Path

import numpy as np

from blobstore import BlobStore


def foundation_arrays() -> dict[str, np.ndarray]:
    """The contents of the file; "tied" and "again" share their bytes with other keys."""
    rng = np.random.default_rng(7)
    arrays = {
        "small": rng.standard_normal(3).astype(np.float32),
        "row": rng.standard_normal((2, 5)).astype(np.float32),
        "page": rng.integers(0, 255, 4096).astype(np.uint8),
        "pages": rng.standard_normal((64, 64)).astype(np.float32),
        "large": rng.standard_normal((1024, 1024)).astype(np.float32),
        "long": rng.integers(0, 100, 777).astype(np.int64),
        "empty": np.zeros((0, 4), np.float32),
        "opaque": rng.integers(0, 255, 100).astype(np.uint8),
    }
    arrays["tied"] = arrays["pages"].copy()
    arrays["again"] = arrays["small"].copy()
    return arrays


def write_foundation(path: Path) -> Path:
    """Write the file."""
    store = BlobStore()
    for key, array in foundation_arrays().items():
        store.add(key, array.tobytes() if key == "opaque" else array, alignment=16)
    store.write_ptd(path)
    return path
