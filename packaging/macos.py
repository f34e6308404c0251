"""Wheels for Macs with Apple silicon, linked on another system: what builds them, and what can be checked without a Mac."""

from __future__ import annotations

import sys
import tempfile
import zipfile
from pathlib import Path

import ziglang
from macholib import mach_o
from macholib.MachO import MachO
from macholib.SymbolTable import SymbolTable

TAG = "macosx_14_0_arm64"
_OF_SYSTEM = ("/usr/lib/", "/System/")
_ARM64 = 0x100000C
# Zig's linker makes no bundles, which Python loads as it does libraries, and reads no files of options: nanobind has one with
# the names that Python itself has.
_TRANSLATED = """for one do
  shift
  case "$one" in
    -bundle) set -- "$@" -dynamiclib ;;
    -Wl,@*) set -- "$@" -undefined dynamic_lookup ;;
    *) set -- "$@" "$one" ;;
  esac
done
"""
_ANY = 254  # the number of a library that is only known when the symbol is looked up


def environment(version: str, folder: Path) -> dict[str, str]:
    """What a build is told: zig's tools, as commands in a folder, and what Python says of itself on a Mac."""
    zig = Path(ziglang.__file__).with_name("zig")
    tools = folder / "zig"
    tools.mkdir(parents=True, exist_ok=True)
    for name in ("c++", "ar", "ranlib"):
        translated = _TRANSLATED if name == "c++" else ""
        (tools / name).write_text(f'#!/bin/sh\n{translated}exec "{zig}" {name} "$@"\n', encoding="utf-8")
        (tools / name).chmod(0o755)
    return {
        "BLOBSTORE_ZIG": str(tools),
        "_PYTHON_HOST_PLATFORM": "macosx-14.0-arm64",
        "SETUPTOOLS_EXT_SUFFIX": f".cpython-{version.replace('.', '')}-darwin.so",
    }


def check(wheel: Path) -> None:
    """Check that a wheel has the right name, and that a Mac's loader finds everything that its libraries ask for.

    Raises:
        SystemExit: It does not: a library is for another machine or a newer macOS, is not signed, looks for a path of the
            machine that built it, or takes a symbol that its library does not have.
    """
    if not wheel.name.endswith(f"-{TAG}.whl"):
        sys.exit(f"{wheel.name}: not named after {TAG}")
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as opened:
            opened.extractall(folder)
        paths = [path for path in Path(folder).rglob("*") if path.suffix in (".so", ".dylib")]
        libraries = {path.name: Library(path) for path in paths}
        for name, library in libraries.items():
            if problem := library.problem(libraries):
                sys.exit(f"{wheel.name}: {name} {problem}")


class Library:
    """What the load commands of a library say, and its symbols."""

    def __init__(self, path: Path) -> None:
        self.folder = path.parent
        header = MachO(str(path)).headers[0]
        self.machine = header.header.cputype
        self.asked: list[str] = []
        self.searched: list[str] = []
        self.signed = False
        self.oldest = 0
        for load, command, data in header.commands:
            text = data.rstrip(b"\0").decode() if isinstance(data, bytes) else ""
            if load.cmd in (mach_o.LC_LOAD_DYLIB, mach_o.LC_LOAD_WEAK_DYLIB):
                self.asked.append(text)
            elif load.cmd == mach_o.LC_RPATH:
                self.searched.append(text)
            elif load.cmd == mach_o.LC_BUILD_VERSION:
                self.oldest = command.minos
            self.signed = self.signed or load.cmd == mach_o.LC_CODE_SIGNATURE
        symbols = SymbolTable(MachO(str(path)))
        self.exported = {name.decode() for _, name in symbols.extdefsyms}
        # of a symbol that it takes, the high byte says from which library, by its number
        self.taken = [(name.decode(), entry.n_desc >> 8 & 255) for entry, name in symbols.undefsyms]

    def problem(self, libraries: dict[str, Library]) -> str:
        """Why a Mac would not load it; empty if it would.

        Args:
            libraries: those of the wheel, by their names.
        """
        ours = [path.removeprefix("@rpath/") for path in self.asked if path.startswith("@rpath/")]
        checks = (
            ("is not for arm64", self.machine != _ARM64),
            ("is not signed, as macOS asks of arm64", not self.signed),
            ("needs a newer macOS than 14", self.oldest > 14 << 16),
            ("looks for libraries in ", [path for path in self.searched if not path.startswith("@loader_path")]),
            ("asks for ", [path for path in self.asked if not path.startswith((*_OF_SYSTEM, "@rpath/"))]),
            ("asks for a library that it does not find: ", [name for name in ours if not self._finds(name)]),
            ("takes a symbol that its library does not have: ", self._lost(libraries)),
        )
        return next((text + (found[0] if isinstance(found, list) else "") for text, found in checks if found), "")

    def _finds(self, name: str) -> bool:
        return any(Path(path.replace("@loader_path", str(self.folder)), name).exists() for path in self.searched)

    def _lost(self, libraries: dict[str, Library]) -> list[str]:
        """The symbols that ExecuTorch's libraries lack, and those that any library may have and are not Python's."""
        lost = []
        for name, number in self.taken:
            source = libraries.get(Path(self.asked[number - 1]).name) if 0 < number <= len(self.asked) else None
            of_any = number == _ANY and not name.startswith(("_Py", "__Py"))
            if of_any or (source is not None and name not in source.exported):
                lost.append(name)
        return lost
