"""Progress callbacks are checked before the work, not after the first gigabyte."""

import pytest

from blobstore.core.disk.progress import check_progress
from blobstore.errors import UnsupportedDataError


@pytest.mark.parametrize("progress", [None, print, lambda *steps: None, lambda what, done, total, more=1: None])
def test_callables_with_three_arguments_are_accepted(progress):
    """Also functions written in C, which may have no signature."""
    check_progress(progress)


@pytest.mark.parametrize("progress", [5, "text", lambda: None, lambda what, done: None, lambda a, b, c, d: None])
def test_anything_else_is_refused_with_the_expected_call(progress):
    """The message shows how it would be called."""
    with pytest.raises(UnsupportedDataError, match=r"callable as progress\(what, done, total\)"):
        check_progress(progress)
