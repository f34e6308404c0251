"""The library in the forms that a C++ application can take: static, shared, and inside of its own build (X2, N3)."""

import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from blobstore import save_file
from blobstore.runtime import BlobCache, Program
from tests.helpers import models, native_build
from tests.helpers.native_build import JAVA, LIBRARY, MOST_BYTES, ROOT, SMALLEST, stripped
from tests.runtime.application import install_library

HEADERS = sorted((LIBRARY / "include" / "blobstore").glob("*.h"))


@pytest.fixture(scope="module")
def prefix():
    native_build.need()
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


@pytest.mark.native
def test_a_minimal_library_runs_programs_and_changes_their_weights(tmp_path):
    """Without what it leaves out, in an application of documented size; its two sums are those of Python."""
    native_build.need()
    with native_build.folder("minimal") as directory:
        options = ("-DCMAKE_BUILD_TYPE=MinSizeRel", "-DBLOBSTORE_MINIMAL=ON", "-DBLOBSTORE_SHARED=OFF")
        native_build.build(LIBRARY, directory / "library", *options)
        native_build.run("cmake", "--install", directory / "library", "--prefix", directory / "prefix")
        found = (f"-DCMAKE_PREFIX_PATH={directory / 'prefix'}", "-DCMAKE_BUILD_TYPE=MinSizeRel")
        for target in ("two_programs", "with_cache"):
            native_build.build(ROOT / "examples" / "cpp", directory / "apps", *found, target=target)
        with pytest.raises(AssertionError, match=r"BLOBSTORE_MINIMAL;\s+Java\s+needs"):
            native_build.configure(JAVA, tmp_path / "java", *found)
        small = stripped(directory / "apps" / "with_cache", tmp_path)
        assert small.stat().st_size <= MOST_BYTES[SMALLEST]
        command = ["nm", "-C", directory / "apps" / "with_cache"]
        names = subprocess.run(command, capture_output=True, text=True, check=True)
        assert re.search(r"PackedFolder::(?!~)|load_adapter|TrainingProgram", names.stdout) is None
        pte = models.mlp(external=True).write(tmp_path)
        data = tmp_path / "_default_external_constant.ptd"
        command = [directory / "apps" / "two_programs", pte, pte, data, "second.weight"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    cache = BlobCache(data)
    method, x = Program(pte, cache).method(), np.ones((3, 16), np.float32)
    before = float(method(x).sum())
    cache.update({"second.weight": np.zeros((16, 32), np.float32)})
    sums = [[float(n) for n in re.findall(r"-?\d+\.\d+", line)] for line in done.stdout.splitlines()]
    np.testing.assert_allclose(sums, [[before] * 2, [float(method(x).sum())] * 2], atol=1e-3)


@pytest.mark.native
def test_an_application_links_the_library_by_pkg_config(prefix, tmp_path):
    """Where it was moved to, too, and without CMake."""
    if shutil.which("pkg-config") is None:
        pytest.skip("needs pkg-config")
    moved = shutil.copytree(prefix, tmp_path / "moved", symlinks=True)
    [file] = moved.rglob("blobstore.pc")
    command = ["pkg-config", "--cflags", "--libs", file]
    flags = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    folders = [flag[2:] for flag in flags if flag.startswith("-L")]
    source = ROOT / "tests" / "runtime" / "linking" / "main.cpp"
    rpaths = [f"-Wl,-rpath,{folder}" for folder in folders]
    native_build.run("c++", "-Werror", source, *flags, *rpaths, "-o", tmp_path / "linking")
    save_file({"a": np.zeros(3, np.float32)}, tmp_path / "w.ptd")
    done = subprocess.run([tmp_path / "linking", tmp_path / "w.ptd"], capture_output=True, text=True, check=True)
    assert done.stdout == "1 keys\n"
    assert str(prefix) not in " ".join(flags)


@pytest.mark.native
def test_a_project_that_takes_the_sources_can_install_them():
    """With BLOBSTORE_INSTALL=ON; another project finds the package there (X2)."""
    native_build.need()
    source = ROOT / "tests" / "runtime" / "linking"
    with native_build.folder("linking-installs") as directory:
        options = ("-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_UNITY_BUILD=ON")
        native_build.build(source, directory / "whole", *options, "-DHOW=fetched", "-DBLOBSTORE_INSTALL=ON")
        native_build.run("cmake", "--install", directory / "whole", "--prefix", directory / "prefix")
        found = f"-DCMAKE_PREFIX_PATH={directory / 'prefix'}"
        native_build.build(source, directory / "build", *options, "-DHOW=shared", found, target="linking")


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "optimized"), [((), True), (("-DCMAKE_BUILD_TYPE=Debug",), False), (("-DCMAKE_CXX_FLAGS=-Og",), False)]
)
def test_in_a_project_without_a_build_type_the_library_is_optimized(options, optimized, tmp_path):
    """CMake compiles without -O then, and says nothing. What a project asks for stays so."""
    native_build.need()
    source = ROOT / "tests" / "runtime" / "linking"
    native_build.configure(source, tmp_path, "-DHOW=added", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON", *options)
    commands = json.loads((tmp_path / "compile_commands.json").read_text(encoding="utf-8"))
    flags = {"-O3" in one["command"].split() for one in commands if (LIBRARY / "src") in Path(one["file"]).parents}
    assert flags == {optimized}
    assert {"-O3" in one["command"].split() for one in commands if Path(one["file"]).name == "main.cpp"} == {False}


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "compiler"), [*itertools.product(("added", "fetched"), ("c++", "clang++")), ("git", "c++")]
)
def test_an_application_compiles_the_headers_with_its_own_warnings_as_errors(how, compiler):
    """Every public header, in a project that takes the sources; nothing of the library is compiled for it (X2, N2)."""
    if (reason := native_build.missing()) or (compiler == "clang++" and not shutil.which(compiler)):
        pytest.skip(reason or "needs clang++")
    source = ROOT / "tests" / "runtime" / "linking"
    head = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)  # noqa: S607
    if how == "git" and head.returncode != 0:
        pytest.skip("needs the repository")
    with native_build.folder(f"headers-{how}-{compiler}") as directory:
        options = [f"-DHOW={how}", f"-DTAG={head.stdout.strip()}", f"-DCMAKE_CXX_COMPILER={shutil.which(compiler)}"]
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
    assert {path: search_paths(path) - {"$ORIGIN", "$ORIGIN/lib"} for path in built} == {path: set() for path in built}


@pytest.mark.long
def test_the_face_for_java_does_not_take_the_sources_where_a_library_is_named(tmp_path):
    native_build.need(java=True)
    with pytest.raises(AssertionError, match="blobstore"):
        native_build.configure(JAVA, tmp_path / "build", f"-Dblobstore_DIR={tmp_path}")


@pytest.mark.native
def test_the_face_for_java_takes_the_sources_beside_it():
    """Where no library is installed; it installs two files, which know nothing of this machine, either (X2, N4)."""
    native_build.need(java=True)
    with native_build.folder("java-sources") as directory:
        options = ("-DCMAKE_BUILD_TYPE=MinSizeRel", "-DCMAKE_UNITY_BUILD=ON")
        native_build.build(JAVA, directory / "build", *options)
        native_build.run("cmake", "--install", directory / "build", "--prefix", directory / "prefix")
        installed = {path.name: path for path in (directory / "prefix").rglob("*") if path.is_file()}
        assert set(installed) == {"blobstore.jar", "libblobstore_jni.so"}
        assert search_paths(installed["libblobstore_jni.so"]) == {"$ORIGIN"}


def search_paths(library):
    """The folders that a library looks for others in, as it says itself."""
    command = ["readelf", "-d", library]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"\((?:RUNPATH|RPATH)\).*\[(.*)\]", text)
    return {part for line in found for part in line.split(":") if part}


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
