"""The archive for Android that `packaging/aar.py` assembles. Its libraries are made here, by this machine's compiler."""

import re
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.helpers.native_build import JAVA, ROOT, missing

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("javac") is None, reason="needs javac"),
    pytest.mark.skipif(missing() is not None, reason="needs a C++ compiler"),
]

ANDROID = "{http://schemas.android.com/apk/res/android}"
SOURCE = 'extern "C" int used(); extern "C" int JNI_OnLoad() { return used(); }'
CALLED = re.findall(
    r"native .* (\w+)\($|native .* (\w+)\(.*;$", (JAVA / "src/dev/blobstore/Native.java").read_text(), re.M
)
NAMES = "".join(f'"{first or second}\\0"' for first, second in CALLED)
WHOLE = SOURCE + f'extern "C" const char names[] = "dev/blobstore/Native\\0" {NAMES};'


def link(folder: Path, name: str, source: str, *options: object) -> Path:
    """A shared library of one function, without anything of this machine."""
    (folder / "one.cpp").write_text(source, encoding="utf-8")
    out = folder / name
    command = ["c++", "-shared", "-fPIC", "-nostdlib", folder / "one.cpp", "-o", out, *options]
    subprocess.run([str(part) for part in command], check=True)
    return out


@pytest.fixture(scope="module")
def x86_64(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library with the marks of one for Android."""
    folder = tmp_path_factory.mktemp("libraries")
    libc = link(folder, "libc.so", 'extern "C" int used() { return 0; }', "-Wl,-soname,libc.so")
    return link(folder, "libblobstore_jni.so", WHOLE, "-Wl,-z,max-page-size=16384", libc)


@pytest.fixture(scope="module")
def arm64(x86_64: Path) -> Path:
    """The same with ELF's number of another machine."""
    path = x86_64.with_name("arm64.so")
    path.write_bytes(changed(x86_64.read_bytes(), 18, struct.pack("<H", 183)))
    return path


def changed(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


def assemble(out: Path, *libraries: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "packaging" / "aar.py", "--out", out, *libraries]
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)


def test_an_application_finds_everything(x86_64: Path, arm64: Path, tmp_path: Path) -> None:
    """The names are those that Gradle looks for, libraries are unchanged, and an application compiles on the classes."""
    done = assemble(tmp_path / "one.aar", x86_64, arm64)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(tmp_path / "one.aar") as archive:
        assert archive.testzip() is None
        assert sorted(archive.namelist()) == [
            "AndroidManifest.xml",
            "META-INF/LICENSE",
            "META-INF/com/android/build/gradle/aar-metadata.properties",
            "R.txt",
            "classes.jar",
            "jni/arm64-v8a/libblobstore_jni.so",
            "jni/x86_64/libblobstore_jni.so",
            "proguard.txt",
        ]
        archive.extractall(tmp_path / "opened")
    opened = tmp_path / "opened"
    assert (opened / "jni" / "x86_64" / "libblobstore_jni.so").read_bytes() == x86_64.read_bytes()
    assert (opened / "jni" / "arm64-v8a" / "libblobstore_jni.so").read_bytes() == arm64.read_bytes()
    manifest = ElementTree.parse(opened / "AndroidManifest.xml").getroot()  # noqa: S314 - written by this project
    assert (manifest.tag, manifest.get("package")) == ("manifest", "dev.blobstore")
    (sdk,) = manifest
    assert (sdk.tag, sdk.get(f"{ANDROID}minSdkVersion")) == ("uses-sdk", "28")
    page = (ROOT / "docs" / "java.md").read_text(encoding="utf-8")
    assert (opened / "proguard.txt").read_text(encoding="utf-8").strip() in page
    properties = opened / "META-INF" / "com" / "android" / "build" / "gradle" / "aar-metadata.properties"
    assert properties.read_text(encoding="utf-8").split() == ["aarFormatVersion=1.0", "aarMetadataVersion=1.0"]
    with zipfile.ZipFile(opened / "classes.jar") as jar:
        compiled = [name for name in jar.namelist() if name.endswith(".class")]
        assert {jar.read(name)[:8] for name in compiled} == {b"\xca\xfe\xba\xbe\0\0\0\x37"}  # of Java 11
    sources = (JAVA / "src").rglob("*.java")
    assert {f"dev/blobstore/{path.stem}.class" for path in sources} == {name for name in compiled if "$" not in name}
    application = ROOT / "examples" / "java" / "Device.java"
    command = ["javac", "-cp", str(opened / "classes.jar"), "-d", str(tmp_path / "application"), str(application)]
    subprocess.run(command, check=True)


@pytest.mark.long
def test_the_same_inputs_give_the_same_bytes(x86_64: Path, tmp_path: Path) -> None:
    for name in ("one.aar", "two.aar"):
        assert assemble(tmp_path / name, x86_64).returncode == 0
    assert (tmp_path / "one.aar").read_bytes() == (tmp_path / "two.aar").read_bytes()


def linked(source: str, pages: int, folder: Path) -> bytes:
    """A library like `x86_64` but for what is said."""
    libc = link(folder, "libc.so", 'extern "C" int used() { return 0; }', "-Wl,-soname,libc.so")
    return link(folder, "spoiled.so", source, f"-Wl,-z,max-page-size={pages}", "-Wl,--as-needed", libc).read_bytes()


SPOILED: dict[str, tuple[Callable[[bytes, Path], bytes], str]] = {
    "cut": (lambda data, _: data[:100], "not whole"),
    "text": (lambda *_: b"no library", "not a shared library for a 64-bit system"),
    "of 32 bits": (lambda data, _: changed(data, 4, b"\1"), "not a shared library for a 64-bit system"),
    "of another machine": (
        lambda data, _: changed(data, 18, struct.pack("<H", 243)),
        "for machine 243; expected 183 (arm64-v8a) or 62 (x86_64)",
    ),
    "for small pages": (
        lambda _, folder: linked(SOURCE, 4096, folder),
        "aligned to 4096 bytes; phones have pages of 16384: link with -z max-page-size=16384",
    ),
    "for Linux": (
        lambda _, folder: linked(SOURCE.replace("return used()", "return 0"), 16384, folder),
        "does not use Android's libc.so",
    ),
    # such as ExecuTorch's own for Android, which has a JNI_OnLoad
    **{
        name: (
            lambda data, _, name=name: data.replace(name.encode(), b"x" * len(name)),
            f"has no {name}, so it is not libblobstore_jni.so of version 0.1.0",
        )
        for name in ("JNI_OnLoad", "dev/blobstore/Native", "trainingPublish")
    },
}


@pytest.mark.parametrize("name", SPOILED)
def test_what_a_phone_would_not_load_is_refused(name: str, x86_64: Path, tmp_path: Path) -> None:
    """By its name and the reason; an archive that was there stays."""
    spoil, reason = SPOILED[name]
    library = tmp_path / "library.so"
    library.write_bytes(spoil(x86_64.read_bytes(), tmp_path))
    out = tmp_path / "there.aar"
    out.write_bytes(b"before")
    done = assemble(out, library)
    assert (done.returncode, done.stderr) == (1, f"{library}: {reason}\n")
    assert out.read_bytes() == b"before"
    assert not list(tmp_path.glob("*.part"))


def test_other_mistakes_are_one_line(x86_64: Path, tmp_path: Path) -> None:
    """Also what is not there, and an archive that cannot be written."""
    done = assemble(tmp_path / "one.aar", x86_64, x86_64)
    assert (done.returncode, done.stderr) == (1, f"{x86_64}: there is another library for x86_64\n")
    done = assemble(tmp_path / "one.aar", tmp_path / "gone.so")
    assert (done.returncode, done.stderr) == (1, f"{tmp_path}/gone.so: No such file or directory\n")
    file = tmp_path / "file"
    file.write_bytes(b"")
    done = assemble(file / "one.aar", x86_64)
    assert (done.returncode, done.stderr) == (1, f"{file}: File exists\n")
