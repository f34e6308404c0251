"""Without the native package these tests are left out; `make test` builds it."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("blobstore_runtime") else ["test_*.py"]
