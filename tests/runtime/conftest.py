"""Without the native package these tests are left out; `make test` builds it."""

from __future__ import annotations

import importlib.util

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("blobstore_runtime") else ["test_*.py"]


@pytest.fixture(scope="session")
def foundation(tmp_path_factory):
    """A .ptd with blobs of all sizes: parts of a page, pages, several megabytes, ties, opaque ones and empty ones."""
    from tests.runtime.blobs import write_foundation

    return write_foundation(tmp_path_factory.mktemp("foundation") / "foundation.ptd")
