"""What `make dist` checks of wheels for Macs, on small libraries that zig links (N4)."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.helpers.native_build import ROOT

pytest.importorskip("macholib", reason="the extra `dist` has it")
pytest.importorskip("ziglang", reason="the extra `dist` has it")
pytestmark = pytest.mark.long

NAME = "x-1-cp311-cp311-macosx_14_0_arm64.whl"


@pytest.fixture(autouse=True)
def packaging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "packaging")


def linked(folder: Path, name: str, code: str, *options: object, target: str = "aarch64-macos.14.0") -> Path:
    source = folder / f"{name}.c"
    source.write_text(code, encoding="utf-8")
    command = [sys.executable, "-m", "ziglang", "cc", "-target", target, "-dynamiclib", source, "-o", folder / name]
    subprocess.run([*map(str, command), *map(str, options)], check=True, capture_output=True, cwd=folder)
    return folder / name


def wheel(folder: Path, *libraries: Path, name: str = NAME) -> Path:
    with zipfile.ZipFile(folder / name, "w") as opened:
        for library in libraries:
            opened.write(library, f"package/{library.name}")
    return folder / name


@pytest.fixture
def library(tmp_path: Path) -> Path:
    return linked(
        tmp_path, "libexecutorch.dylib", "int executorch_here;", "-Wl,-install_name,@rpath/libexecutorch.dylib"
    )


def module(folder: Path, library: Path, *options: str) -> Path:
    code = "extern int executorch_here; int *where(void) { return &executorch_here; }"
    return linked(folder, "_native.so", code, library, *options)


def test_a_whole_wheel_passes(library: Path, tmp_path: Path) -> None:
    import macos

    macos.check(wheel(tmp_path, library, module(tmp_path, library, "-Wl,-rpath,@loader_path")))


def test_what_a_mac_would_not_load_is_refused(library: Path, tmp_path: Path) -> None:
    """Each is one error that names the library and the reason."""
    import macos

    own = module(tmp_path, library, "-Wl,-rpath,@loader_path")
    (tmp_path / "bare").mkdir()
    bare = linked(tmp_path / "bare", library.name, "int other;", "-Wl,-install_name,@rpath/libexecutorch.dylib")
    (tmp_path / "intel").mkdir()
    intel = linked(tmp_path / "intel", "_native.so", "int x;", target="x86_64-macos.14.0")
    (tmp_path / "lost").mkdir()
    lost = module(tmp_path / "lost", library, "-Wl,-rpath,@loader_path/lib")
    (tmp_path / "built").mkdir()
    built = module(tmp_path / "built", library, "-Wl,-rpath,/home/me/lib")
    for files, reason in (
        ((own,), "_native.so asks for a library that it does not find: libexecutorch.dylib"),
        ((library, lost), "_native.so asks for a library that it does not find: libexecutorch.dylib"),
        ((own, bare), "_native.so takes a symbol that its library does not have: _executorch_here"),
        ((intel,), "_native.so is not for arm64"),
        ((library, built), "_native.so looks for libraries in /home/me/lib"),
    ):
        with pytest.raises(SystemExit, match=reason.replace(".", r"\.")):
            macos.check(wheel(tmp_path, *files))
    with pytest.raises(SystemExit, match="not named after"):
        macos.check(wheel(tmp_path, library, name="x-1-cp311-cp311-linux_x86_64.whl"))
