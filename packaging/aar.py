"""Assemble an Android archive: the classes for Java and Kotlin, and libraries that were built with the NDK.

    python packaging/aar.py --out blobstore.aar build/arm64/libblobstore_jni.so build/x86_64/libblobstore_jni.so

Each library goes to the folder of its ABI. What an application would only find out on a phone is refused: a library for
another system, one that phones with pages of 16 KiB do not load, or one without a function that the classes call. The same inputs give the same bytes. Needs `javac`.
"""

from __future__ import annotations

import argparse
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).parents[1]
JAVA = ROOT / "java"
LIBRARY = "libblobstore_jni.so"
RUNTIME = ROOT / "runtime_bindings" / "CMakeLists.txt"
VERSION = re.findall(r"project\(blobstore_runtime VERSION ([0-9.]+)", RUNTIME.read_text(encoding="utf-8"))[0]
API = 28
PAGE = 16384
ABIS = {183: "arm64-v8a", 62: "x86_64"}  # ELF's numbers of machines, and the names of those that the library is for
WHEN = (1980, 1, 1, 0, 0, 0)  # the first moment that an archive can tell

MANIFEST = f"""<?xml version="1.0" encoding="utf-8"?>
<manifest xmlns:android="http://schemas.android.com/apk/res/android" package="dev.blobstore">
    <uses-sdk android:minSdkVersion="{API}" />
</manifest>
"""
# The library finds classes and members by their names
KEEP = "-keep class dev.blobstore.** { *; }\n"
METADATA = "aarFormatVersion=1.0\naarMetadataVersion=1.0\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="packaging/aar.py", description=__doc__)
    parser.add_argument("libraries", nargs="+", type=Path, metavar=LIBRARY, help="one for each ABI")
    parser.add_argument("--out", type=Path, required=True, help="the archive")
    options = parser.parse_args()
    assemble(options.libraries, options.out)


def assemble(libraries: list[Path], out: Path) -> None:
    """Write the archive.

    Raises:
        SystemExit: A library is none for Android, two are for one ABI, the classes do not compile, or the archive cannot be
            written. The message names the file and the reason. Nothing is written.
    """
    folders: dict[str, bytes] = {}
    for path in libraries:
        try:
            data = path.read_bytes()
        except OSError as error:
            sys.exit(f"{path}: {error.strerror}")
        abi = abi_of(path, data)
        if abi in folders:
            sys.exit(f"{path}: there is another library for {abi}")
        folders[abi] = data
    parts = {
        "AndroidManifest.xml": MANIFEST.encode(),
        "META-INF/com/android/build/gradle/aar-metadata.properties": METADATA.encode(),
        "META-INF/LICENSE": (ROOT / "LICENSE").read_bytes(),
        "R.txt": b"",
        "classes.jar": classes(),
        "proguard.txt": KEEP.encode(),
        **{f"jni/{abi}/{LIBRARY}": data for abi, data in sorted(folders.items())},
    }
    temporary = out.with_name(out.name + ".part")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(archive(parts))
        temporary.replace(out)
    except OSError as error:
        sys.exit(f"{error.filename}: {error.strerror}")


def abi_of(path: Path, data: bytes) -> str:
    """The ABI that a library is for.

    Raises:
        SystemExit: Android does not load it, or Java finds nothing in it.
    """
    if data[:7] != b"\x7fELF\x02\x01\x01" or len(data) < 64 or struct.unpack_from("<H", data, 16)[0] != 3:
        sys.exit(f"{path}: not a shared library for a 64-bit system")
    machine = struct.unpack_from("<H", data, 18)[0]
    if machine not in ABIS:
        sys.exit(f"{path}: for machine {machine}; expected {' or '.join(f'{k} ({v})' for k, v in ABIS.items())}")
    begin, size, count = *struct.unpack_from("<Q", data, 32), *struct.unpack_from("<HH", data, 54)
    if size != 56 or begin + size * count > len(data):
        sys.exit(f"{path}: not whole")
    for at in range(begin, begin + size * count, size):
        if struct.unpack_from("<I", data, at)[0] == 1 and (align := struct.unpack_from("<Q", data, at + 48)[0]) < PAGE:
            sys.exit(
                f"{path}: aligned to {align} bytes; phones have pages of {PAGE}: link with -z max-page-size={PAGE}"
            )
    if b"\0libc.so\0" not in data:  # glibc's and musl's libraries have other names
        sys.exit(f"{path}: does not use Android's libc.so")
    for name in ("JNI_OnLoad", "dev/blobstore/Native", *natives()):
        if f"{name}\0".encode() not in data:
            sys.exit(f"{path}: has no {name}, so it is not {LIBRARY} of version {VERSION}")
    return ABIS[machine]


def natives() -> list[str]:
    """The names that the library registers its functions under: each is a text in it."""
    source = (JAVA / "src" / "dev" / "blobstore" / "Native.java").read_text(encoding="utf-8")
    return re.findall(r"^  static native \S+ (\w+)\(", source, re.MULTILINE)


def sources() -> list[Path]:
    """The sources of the classes."""
    return sorted((JAVA / "src").rglob("*.java"))


def classes() -> bytes:
    """The compiled classes, as a jar."""
    javac = shutil.which("javac")
    if javac is None:
        sys.exit("the classes need javac, of a JDK of version 11 or later")
    with tempfile.TemporaryDirectory() as made:
        # CMakeLists.txt has the same options
        options = ["--release", "11", "-encoding", "UTF-8", "-Xlint:all,-serial", "-Werror", "-implicit:none"]
        command = [javac, *options, "-sourcepath", JAVA / "annotations", "-d", made, *sources()]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(done.stdout + done.stderr)
        manifest = b"Manifest-Version: 1.0\n" + (JAVA / "MANIFEST.MF").read_bytes() + b"\n"
        compiled = {path.relative_to(made).as_posix(): path.read_bytes() for path in Path(made).rglob("*.class")}
    return archive({"META-INF/MANIFEST.MF": manifest, **dict(sorted(compiled.items()))})


def archive(parts: dict[str, bytes]) -> bytes:
    """A zip file."""
    made = BytesIO()
    with zipfile.ZipFile(made, "w") as opened:
        for name, data in parts.items():
            about = zipfile.ZipInfo(name, WHEN)
            about.external_attr = 0o644 << 16
            opened.writestr(about, data, zipfile.ZIP_DEFLATED)
    return made.getvalue()


if __name__ == "__main__":
    main()
