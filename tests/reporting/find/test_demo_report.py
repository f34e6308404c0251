"""The demo's programs, before and after, against what deduplicating them really saves."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

import blobstore
from tests.reporting.find.test_planted import accounted

pytestmark = pytest.mark.slow


def test_the_report_of_the_demo_is_what_the_demo_saves(tmp_path: Path) -> None:
    from examples.demo import run_demo

    with (tmp_path / "log").open("w") as log:
        result = run_demo(tmp_path / "demo", Console(file=log))
    before = blobstore.report([tmp_path / "demo" / "before"])
    accounted(before)
    assert not before.problems
    assert before.total_bytes == result.bytes_before
    saved = result.bytes_before - result.bytes_after
    assert before.command_saves == pytest.approx(saved, rel=0.001)  # tables of the outputs are the difference

    after = blobstore.report([tmp_path / "demo" / "after"])
    accounted(after)
    assert after.total_bytes == result.bytes_after
    assert after.total_saves < 0.001 * after.total_bytes

    both = blobstore.report([tmp_path / "demo"])
    # all weights are in the files after; what stays are these, and each program's own structure and payloads
    weights = sum(r.nbytes for f in both.files for r in f.regions if r.kind.is_blob)
    unique = {(r.digest, r.nbytes) for f in both.files for r in f.regions if r.kind.is_blob}
    exact = sum(f.counted for f in both.findings if f.kind.value.startswith("duplicate"))
    assert weights - exact == sum(nbytes for _, nbytes in unique)
