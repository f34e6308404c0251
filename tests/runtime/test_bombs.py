"""The native reader: small programs cost little."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.formats.pte.bombs import BOMBS, check_cost

PREPARE = """
import numpy as np
from blobstore import save_file
from blobstore.runtime import BlobCache, Program
from tests.formats.pte.bombs import LONG
save_file({LONG: np.zeros(1, np.float32)}, path + ".ptd")
cache = BlobCache(path + ".ptd") if KNOWN else BlobCache()
"""


@pytest.mark.parametrize("known", [False, True], ids=["keys missing", "keys there"])
@pytest.mark.parametrize("name", BOMBS)
def test_small_programs_cost_little(name: str, known: bool, tmp_path: Path) -> None:
    """Below 1 MB: at most 2 s and 300 MB, however often the program refers to the same bytes (R1)."""
    check_cost(name, tmp_path, PREPARE.replace("KNOWN", str(known)), "Program(path, cache)")
