"""The library in the forms that a C++ application can take: static, shared, and inside of its own build (X2, N3)."""

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from blobstore import save_file
from tests.helpers import native_build
from tests.helpers.native_build import LIBRARY, MOST_BYTES, ROOT, stripped
from tests.runtime.application import install_library

HEADERS = sorted((LIBRARY / "include" / "blobstore").glob("*.h"))


@pytest.fixture(scope="module")
def prefix():
    if reason := native_build.missing():
        pytest.skip(reason)
    return install_library()


def build(prefix, how):
    """The application that links the library in this way, installed."""
    source = ROOT / "tests" / "runtime" / "linking"
    with native_build.folder(f"linking-{how}") as directory:
        options = (
            "-DCMAKE_BUILD_TYPE=Debug",
            "-DCMAKE_UNITY_BUILD=ON",
            f"-DHOW={how}",
            f"-DCMAKE_PREFIX_PATH={prefix}",
        )
        native_build.build(source, directory / "build", *options)
        native_build.run("cmake", "--install", directory / "build", "--prefix", directory / "prefix")
        installed = [path.name for path in (directory / "prefix").rglob("*") if path.is_file()]
        assert installed == ["linking"], "only what the application installs"
        return directory / "build" / "linking"


@pytest.mark.native
@pytest.mark.parametrize("how", ["static", "shared", "fetched"])
def test_an_application_links_the_library(how, prefix, tmp_path):
    """It opens a file, asks for a type and catches an error (X2); only the shared form needs a library at run time."""
    program = build(prefix, how)
    save_file({"a": np.zeros(3, np.float32), "b": np.ones(3, np.float32)}, tmp_path / "w.ptd")
    (tmp_path / "bad.ptd").write_bytes(b"no tensors in here")
    found = [
        subprocess.run([program, tmp_path / name], capture_output=True, text=True, check=True).stdout
        for name in ("w.ptd", "bad.ptd")
    ]
    assert found[0] == "2 keys\n" and re.fullmatch(r"\d+\n", found[1])
    needed = subprocess.run(["readelf", "-d", program], capture_output=True, text=True, check=True).stdout  # noqa: S607
    assert ("libblobstore_runtime.so.0.1" in needed) == (how == "shared")
    command = ["nm", "-C", "--defined-only", program]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert ("blobstore::BlobCache::open(" in names) == (how != "shared")
    assert "blobstore::BlobCache::load_all(" not in names, "the application does not use it, so the linker drops it"


@pytest.mark.parametrize("compiler", ["c++", "clang++"])
@pytest.mark.parametrize("how", ["added", "fetched"])
def test_an_application_compiles_the_headers_with_its_own_warnings_as_errors(how, compiler):
    """Every public header, in a project that takes the sources; nothing of the library is compiled for it (X2, N2)."""
    if (reason := native_build.missing()) or (compiler == "clang++" and not shutil.which(compiler)):
        pytest.skip(reason or "needs clang++")
    source = ROOT / "tests" / "runtime" / "linking"
    with native_build.folder(f"headers-{how}-{compiler}") as directory:
        options = (f"-DHOW={how}", f"-DCMAKE_CXX_COMPILER={shutil.which(compiler)}")
        native_build.build(source, directory, *options, target="headers")
        text = (directory / "headers.cpp").read_text(encoding="utf-8")
        assert text.splitlines() == [f"#include <blobstore/{path.name}>" for path in HEADERS]
        assert [path for path in directory.rglob("*.o") if "src" in path.parts] == []


@pytest.mark.native
def test_what_is_installed_knows_nothing_of_the_machine_that_built_it(prefix):
    """No path to search libraries in, but for those beside the file itself (N4)."""
    import blobstore_runtime

    built = [path for path in prefix.rglob("*.so*") if not path.is_symlink()]
    built += Path(blobstore_runtime.__file__).parent.glob("*.so")
    assert len(built) >= 2
    for path in built:
        command = ["readelf", "-d", path]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found = re.findall(r"\((?:RUNPATH|RPATH)\).*\[(.*)\]", text)
        paths = [part for line in found for part in line.split(":") if part]
        assert [part for part in paths if not part.startswith("$ORIGIN")] == [], path


@pytest.fixture(scope="module")
def shared_library(prefix):
    [library] = [path for path in prefix.rglob("libblobstore_runtime.so*") if not path.is_symlink()]
    return library


@pytest.mark.native
def test_the_shared_library_is_not_much_larger_than_documented(shared_library, tmp_path):
    """It is built for its size and stripped; docs/platforms.md has the number."""
    assert stripped(shared_library, tmp_path).stat().st_size <= MOST_BYTES["x86_64, GCC"]


@pytest.mark.native
def test_the_shared_library_exports_the_public_names_alone(shared_library):
    command = ["nm", "-DC", "--defined-only", shared_library]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    names = [re.sub(r"^(?:typeinfo name|typeinfo|vtable) for ", "", line.split(maxsplit=2)[2]) for line in lines]
    assert "blobstore::Error" in names
    assert [name for name in names if not re.match(r"blobstore::(?!internal::)", name)] == []


def test_what_the_sources_define_is_exported():
    """Clang goes by the namespace that a function is defined in, not by the one of its declaration (X2)."""
    for path in (LIBRARY / "src").rglob("*.cpp"):
        opened = re.findall(
            r"^namespace blobstore(?!::internal\b).*\{$", path.read_text(encoding="utf-8"), re.MULTILINE
        )
        assert set(opened) <= {"namespace blobstore BLOBSTORE_API {"}, path


@pytest.mark.parametrize("path", [path for path in HEADERS if path.name != "export.h"], ids=lambda path: path.name)
def test_what_a_public_header_declares_is_exported(path):
    text = path.read_text(encoding="utf-8")
    assert re.findall(r"^namespace blobstore\b.*\{$", text, re.MULTILINE) == ["namespace blobstore BLOBSTORE_API {"]
    assert "#include <blobstore/export.h>" in text
