"""How the sources of the native library are arranged, and what is not in the builds that users get."""

import re
from pathlib import Path

import blobstore_runtime._native
import pytest

from tests.native_build import LIBRARY, missing
from tests.runtime.application import install_library

SOURCES = LIBRARY / "src"
# Includes go down this list, never up.
ROOMS = ("facade", "training", "adapters", "logical", "program", "delegate", "packed", "cache", "format", "os")
# The system, the compiler's library, or what a tool makes of them
SYSTEM = re.compile(
    r"#\s*(?:el)?if.*\b(?:__linux__|__APPLE__|_WIN32|__ANDROID__|__unix__|__GLIBC__|__SANITIZE_\w+__|MADV_\w+)"
)
# Names of hooks, as they would stand in a binary
HOOKS = (b"crash_at", b"crash_point", b"crash_here", b"CrashPoint", b"DataMapProbe")

FILES = sorted([*SOURCES.rglob("*.cpp"), *SOURCES.rglob("*.h")])


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCES)))
def test_includes_go_down_the_list_of_rooms(path):
    here = path.relative_to(SOURCES).parts[0]
    for name in re.findall(r'#include "([^"]+)"', path.read_text(encoding="utf-8")):
        assert (SOURCES / name).is_file(), f"{name} is not in a room"
        assert ROOMS.index(name.split("/")[0]) >= ROOMS.index(here), f"{here} includes {name}, which is above it"


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
        if SYSTEM.search(line) or re.search(r"#\s*ifn?def __", line)
    ]
    assert found == []


def test_every_source_is_built():
    listed = re.findall(r"^  (src/\S+\.cpp)$", (LIBRARY / "CMakeLists.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert listed == sorted(listed)
    assert set(listed) == {str(path.relative_to(LIBRARY)) for path in FILES if path.suffix == ".cpp"}


def test_the_wheel_has_no_hooks_of_tests(hooks):
    """What only tests use is in test builds alone; those do have it, so this would find it."""
    wheel = Path(blobstore_runtime._native.__file__).read_bytes()
    assert [name for name in HOOKS if name in wheel] == []
    [built] = (hooks / "blobstore_runtime").glob("_native*")
    assert b"crash_at" in built.read_bytes()


def test_the_installed_library_has_no_hooks_of_tests():
    if reason := missing():
        pytest.skip(reason)
    [library] = install_library().rglob("libblobstore_runtime.a")
    content = library.read_bytes()
    assert [name for name in HOOKS if name in content] == []
