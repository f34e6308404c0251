"""How the sources of the native library are arranged, and what is not in the builds that users get."""

import platform
import re
import subprocess
from pathlib import Path

import pytest

from blobstore.runtime.native import native
from tests.helpers.native_build import LIBRARY, missing
from tests.runtime.application import install_library

SOURCES = LIBRARY / "src"
# The system, the compiler's library, or what a tool makes of them
SYSTEM = re.compile(
    r"#\s*(?:el)?if.*\b(?:__linux__|__APPLE__|_WIN32|__ANDROID__|__unix__|__GLIBC__|__SANITIZE_\w+__|MADV_\w+)"
)
# Names of hooks, as they would stand in a binary
HOOKS = (b"crash_at", b"crash_point", b"crash_here", b"CrashPoint", b"DataMapProbe")

# Functions that put values into texts, with the position of the text among their arguments
FORMATS = {"format": 0, "throw_format_error": 0, "throw_error": 1, "throw_error_in": 2}

FILES = sorted([*SOURCES.rglob("*.cpp"), *SOURCES.rglob("*.h")])


# How Python spells an argument or a value, which a C++ developer does not know
OF_PYTHON = re.compile(r"\b[a-z_]+=(?:$|[\s;,.)]|'\w+'|True|False|None)|\b(?:True|False)\b|pip install|mode='")
# Programs are lowered and saved in Python only, so advice about that is in its words.
AHEAD_OF_TIME = ("to_executorch()", "save_programs()")


def test_messages_have_no_words_of_python():
    """Messages fit callers in C++, too (N1); arguments have the same names in both languages."""
    found = []
    for path in FILES:
        text = re.sub(r"^\s*(?://.*|#include.*)$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        for parts in re.findall(r'(?:"(?:[^"\\\n]|\\.)*"\s*)+', text):
            message = "".join(re.findall(r'"((?:[^"\\\n]|\\.)*)"', parts))
            if OF_PYTHON.search(message) and not any(word in message for word in AHEAD_OF_TIME):
                found.append(f"{path.relative_to(SOURCES)}: {message}")
    assert found == []


def test_only_the_room_of_the_system_asks_which_system_it_is():
    public = [
        *(LIBRARY / "include").rglob("*.h"),
        *(LIBRARY / "python").rglob("*.cpp"),
        *(LIBRARY / "python").rglob("*.h"),
    ]
    others = [path for path in (*FILES, *public) if path.relative_to(LIBRARY).parts[:2] != ("src", "os")]
    found = [
        f"{path}:{number}"
        for path in others
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if SYSTEM.search(line) or re.search(r"#\s*ifn?def __(?!cplusplus)", line)
    ]
    assert found == []


def arguments(text: str) -> list[str]:
    """The arguments of a call, from behind its opening parenthesis."""
    found, depth = [""], 0
    for part in re.findall(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'|.', text, re.DOTALL):
        depth += (part in "([{") - (part in ")]}")
        if depth < 0:
            return [argument.strip() for argument in found]
        if part == "," and depth == 0:
            found.append("")
        else:
            found[-1] += part
    raise AssertionError("the call does not end")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCES)))
def test_texts_have_a_place_for_each_value(path):
    """Only texts of the source are formats: one that came from a file could have a {} without a value."""
    text = path.read_text(encoding="utf-8")
    if path.name in ("text.h", "format_error.h"):  # where the functions are
        return
    for call in re.finditer(rf"\b({'|'.join(FORMATS)})\(", text):
        given = arguments(text[call.end() :])
        reason, values = given[FORMATS[call[1]]], given[FORMATS[call[1]] + 1 :]
        where = f"{path}:{text.count(chr(10), 0, call.start()) + 1}"
        assert re.fullmatch(r'(?:"(?:\\.|[^"\\])*"\s*)+', reason), f"{where}: {reason} is not a literal"
        assert reason.count("{}") == len(values), f"{where}: {len(values)} values for {reason}"


def test_every_source_is_built():
    text = (LIBRARY / "CMakeLists.txt").read_text(encoding="utf-8")
    rooms = " ".join(re.findall(r"^ *blobstore_rooms\(\w+ ([\w ]+)\)", text, re.MULTILINE)).split()
    assert sorted([*rooms, "facade"]) == sorted(folder.name for folder in (LIBRARY / "src").iterdir())
    facade = {path.name for path in FILES if path.parent.name == "facade" and path.suffix == ".cpp"}
    assert set(re.findall(r"src/facade/(\w+\.cpp)", text)) == facade


@pytest.mark.long
def test_the_wheel_has_no_hooks_of_tests(hooks):
    """What only tests use is in test builds alone; those do have it, so this would find it."""
    wheel = Path(native.__file__).read_bytes()
    assert [name for name in HOOKS if name in wheel] == []
    [built] = (hooks / "blobstore_runtime").glob("_native*")
    assert b"crash_at" in built.read_bytes()


@pytest.mark.native
def test_the_installed_library_has_no_hooks_of_tests():
    if reason := missing():
        pytest.skip(reason)
    libraries = sorted(install_library().rglob("libblobstore_*.a"))
    assert {"libblobstore_core.a", "libblobstore_runtime.a"} <= {library.name for library in libraries}
    assert [(library.name, name) for library in libraries for name in HOOKS if name in library.read_bytes()] == []


@pytest.mark.skipif(platform.libc_ver() != ("glibc", "2.36"), reason="wheels are built with Debian 12")
def test_what_manylinux_2_28_does_not_have_is_replaced():
    """The module of a wheel defines what it would take from a newer glibc or libstdc++ (N4)."""
    text = (LIBRARY / "python" / "manylinux_2_28.cpp").read_text(encoding="utf-8")
    command = ["nm", "--dynamic", "--undefined-only", native.__file__]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    taken = re.findall(r" U (\w+)@(GLIBC|GLIBCXX)_([\d.]+)$", lines, re.MULTILINE)
    assert taken
    last = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24)}
    newer = [name for name, of, version in taken if tuple(map(int, version.split("."))) > last[of]]
    assert [name for name in newer if not re.search(rf"\b{name}\b", text)] == []
