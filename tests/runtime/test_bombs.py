"""Small programs need little time and memory in the native reader."""

from pathlib import Path

import pytest

from tests.helpers.bombs import BOMBS, check_cost, write

pytestmark = pytest.mark.long

PREPARE = """
import numpy as np
from blobstore import save_file
from blobstore.runtime import BlobCache, Program
from tests.helpers.bombs import LONG
save_file({LONG: np.zeros(1, np.float32)}, path + ".ptd")
cache = BlobCache(path + ".ptd") if KNOWN else BlobCache()
"""


@pytest.mark.slow
@pytest.mark.parametrize("known", [False, True], ids=["keys missing", "keys there"])
@pytest.mark.parametrize("name", BOMBS)
def test_small_programs_cost_little(name: str, known: bool, tmp_path: Path) -> None:
    """Programs below 1 MB need at most 2 s and 300 MB, however often they refer to the same bytes (B5)."""
    check_cost(write(name, tmp_path), PREPARE.replace("KNOWN", str(known)), "Program(path, cache)")
