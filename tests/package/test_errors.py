"""Errors in another process: every class survives pickle, so a worker's error reaches the process that waits for it (B5)."""

import copy
import importlib
import inspect
import multiprocessing
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blobstore import errors, open_ptd
from blobstore.errors import BlobStoreError

ARGUMENTS: dict[str, Any] = {
    "path": "folder/weights é.ptd",
    "reason": "expected 1, found 2",
    "cause": OSError(28, "No space left on device"),
    "message": "key 'w': expected 1, found 2",
    "asked": 2.5,
    "retry_after": 90,
    "version": "1.4",
    "key": "w",
    "source": Path("a.pte"),
    "error": errors.KeyConflictError("the key 'w' has other bytes"),
    "delegate": True,
    "value": "text",
}
"""An argument for every parameter that a class of the tree has."""


def classes() -> list[type[BlobStoreError]]:
    """All classes of the tree, also those that modules derive for themselves."""
    package = Path(errors.__file__).parent
    for path in package.rglob("*.py"):
        if re.search(r"^class \w+Error\(", path.read_text(encoding="utf-8"), re.MULTILINE):
            importlib.import_module(".".join(["blobstore", *path.relative_to(package).with_suffix("").parts]))
    found, waiting = [], [BlobStoreError]
    while waiting:
        found.append(kind := waiting.pop())
        waiting += kind.__subclasses__()
    return sorted({kind for kind in found if kind.__module__.startswith("blobstore.")}, key=lambda kind: kind.__name__)


def made(kind: type[BlobStoreError]) -> BlobStoreError:
    """An error of a class, made as the library makes it."""
    if kind.__init__ is Exception.__init__ or not inspect.isfunction(kind.__init__):
        return kind(ARGUMENTS["message"])
    parameters = list(inspect.signature(kind).parameters.values())
    positional = [ARGUMENTS[one.name] for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    return kind(*positional, **{one.name: ARGUMENTS[one.name] for one in parameters if one.kind is one.KEYWORD_ONLY})


def told(error: BaseException) -> dict[str, Any]:
    """All that an error says; errors inside it by their text."""
    names = [name for name in dir(error) if not name.startswith("_") and not callable(getattr(error, name, print))]
    attributes = {name: getattr(error, name) for name in names} | vars(error)
    shown = {name: repr(value) if isinstance(value, BaseException) else value for name, value in attributes.items()}
    return shown | {"type": type(error), "text": str(error), "repr": repr(error)}


def copies(error: BlobStoreError) -> Iterator[BlobStoreError]:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        yield pickle.loads(pickle.dumps(error, protocol))  # noqa: S301 - our own
    yield copy.copy(error)
    yield copy.deepcopy(error)


def test_every_class_survives_pickle() -> None:
    kinds = classes()
    assert {kind.__name__ for kind in kinds} >= set(errors.__all__)
    for kind in kinds:
        error = made(kind)
        error.add_note("while a worker wrote it")
        error.added = {"by": "the caller"}  # type: ignore[attr-defined]
        for again in copies(error):
            assert told(again) == told(error)


def test_every_native_error_survives_pickle() -> None:
    native = importlib.import_module("blobstore.runtime.native")
    for kind in ("InvalidFileError", "IntegrityError", "FileAccessError", "KeyNotFoundError", "UpdateError"):
        for path in (b"", b"w.ptd", b"not UTF-8 \xff.ptd"):
            error = native._make_error(kind, path, b"expected 1, \xff found 2", 13)
            for again in copies(error):
                assert told(again) == told(error)


def missing(path: str) -> int:
    return len(open_ptd(path))


def test_a_worker_reports_a_file_that_is_missing() -> None:
    """The thread of a pool that takes results must not end with an error of its own: the pool would wait for ever."""
    with (
        multiprocessing.get_context("spawn").Pool(1) as pool,
        pytest.raises(errors.FileAccessError, match=r"nope\.ptd: No such file") as found,
    ):
        pool.apply_async(missing, ("nope.ptd",)).get(timeout=120)
    assert (found.value.errno, found.value.filename, found.value.path) == (2, "nope.ptd", Path("nope.ptd"))
