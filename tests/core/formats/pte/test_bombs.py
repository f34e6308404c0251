"""Small programs cost the Python reader little (B5)."""

from pathlib import Path

import pytest

from tests.helpers.bombs import BOMBS, check_cost, write

pytestmark = pytest.mark.long


@pytest.mark.slow
@pytest.mark.parametrize("name", BOMBS)
def test_small_programs_cost_little(name: str, tmp_path: Path) -> None:
    """Below 1 MB: at most 2 s and 300 MB, however often the program refers to the same bytes (R1)."""
    read = "from blobstore.core.formats.pte.program import read_program"
    check_cost(write(name, tmp_path), read, "read_program(path)")
