"""What changed since an earlier report, as text."""

from __future__ import annotations

from collections.abc import Iterator

from blobstore.core.text import size
from blobstore.reporting.find import Changes
from blobstore.reporting.show.words import FINDINGS

__all__ = ["change_lines"]


def change_lines(changes: Changes) -> Iterator[str]:
    """What changed, a line each; the first is a sentence about all of it."""
    grew = f"the files {'grew' if changes.bytes > 0 else 'shrank'} by {size(abs(changes.bytes))}"
    files = grew if changes.bytes else "the files have as many bytes as before"
    waste = f"{size(abs(changes.saves))} {'more' if changes.saves > 0 else 'less'} can be saved"
    yield f"Since the baseline: {files}; {waste if changes.saves else 'as much can be saved as before'}."
    for path in changes.added:
        yield f"  new file: {path}"
    for path in changes.removed:
        yield f"  no longer there: {path}"
    for path, difference in changes.resized:
        yield f"  {'grew' if difference > 0 else 'shrank'} by {size(abs(difference))}: {path}"
    for what, findings in (("new", changes.new), ("gone", changes.gone)):
        for kind, (number, nbytes) in findings.items():
            yield f"  {what}: {number:,} x {FINDINGS[kind]}, {size(nbytes)}"
