"""Without the native package these tests are left out; `make test` builds it."""

from __future__ import annotations

import importlib.util

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("blobstore_runtime") else ["test_*.py"]


@pytest.fixture(scope="session")
def foundation(tmp_path_factory):
    """A .ptd with blobs of many sizes: less than a page, whole pages, several megabytes, tied, opaque and empty."""
    from tests.runtime.blobs import write_foundation

    return write_foundation(tmp_path_factory.mktemp("foundation") / "foundation.ptd")
