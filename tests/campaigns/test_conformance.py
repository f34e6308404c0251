"""ExecuTorch's own tests on this library: the part of `make conformance` that needs no other version."""

import pytest

from blobstore.lowering.export import quiet


@pytest.mark.long
def test_every_test_passes_or_is_listed_with_the_reason() -> None:
    with quiet():
        from campaigns.conformance import suites
    lines: list[str] = []
    assert suites.run(lines.append) == 0, "\n".join(lines)
    assert sum("tests pass" in line for line in lines) == len(suites.SUITES), "\n".join(lines)
