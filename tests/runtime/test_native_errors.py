"""The kinds of errors of the native library and the classes of blobstore/core/errors.py are one list."""

import re

from blobstore import errors
from blobstore.runtime import native
from tests.helpers.native_build import LIBRARY

HEADER = LIBRARY / "include" / "blobstore" / "error.h"
NAMES = LIBRARY / "python" / "errors.cpp"
RENAMED = {"Unsupported": "UnsupportedOperation"}


def kinds():
    """The enumerators of ErrorKind, as the header has them."""
    body = re.search(r"enum class ErrorKind \{(.*?)\};", HEADER.read_text(encoding="utf-8"), re.DOTALL)[1]
    return re.findall(r"^\s*(\w+),", body, re.MULTILINE)


def in_python(kind):
    """`InvalidFile` is `InvalidFileError` there."""
    return f"{RENAMED.get(kind, kind)}Error"


def test_the_native_module_names_each_kind_as_the_header_does():
    table = re.search(r"kNames\[\] = \{(.*?)\};", NAMES.read_text(encoding="utf-8"), re.DOTALL)[1]
    assert re.findall(r'"(\w+)"', table) == [in_python(kind) for kind in kinds()]


def test_each_kind_of_the_header_is_one_class_in_python():
    """Paths and reasons may have bytes that are not UTF-8."""
    assert len(kinds()) > 10
    for kind in kinds():
        error = native._make_error(in_python(kind), b"/some/file\xff", b"a reason \xff", 5)
        assert type(error) is getattr(errors, in_python(kind))
        assert "/some/file" in str(error) and "a reason" in str(error)
