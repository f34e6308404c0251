"""Reads files of packed weights without the library, and runs programs with and without a packed store.

As a program, `python -m tests.runtime.packed_files OPTIONS`, it is a process of its own that loads a program once.
"""

from __future__ import annotations

import json
import os
import resource
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from blobstore.runtime import BlobCache, PackedStore, Program
from tests.helpers.native_build import ROOT
from tests.helpers.process_memory import mapped_memory, memory

FOOTER, TRAILER = struct.Struct("<QIII"), struct.Struct("<QQ16s8s")


@dataclass(frozen=True)
class Entry:
    name: str
    offset: int
    size: int
    seed: int
    digest: bytes
    map: int  # the number of its map, from 1; 0 for none


@dataclass(frozen=True)
class Packed:
    """What a file says, with its bytes."""

    data: bytes
    entries: tuple[Entry, ...]
    covers: tuple[bytes, ...]
    digests: int  # where they start
    maps: tuple[bytes, ...]
    table: bytes  # digests and maps

    def content(self, entry: Entry) -> bytes:
        return self.data[entry.offset : entry.offset + entry.size]

    @property
    def names(self) -> set[str]:
        return {entry.name for entry in self.entries}


def read(path: Path, *, changes: bool = False) -> Packed:
    """Read a file and check everything that docs/packed.md says of it. `changes` for that of a working copy."""
    data = path.read_bytes()
    index, count, magic, version = FOOTER.unpack(data[-FOOTER.size :])
    assert (magic, version) == (0x58505743, 2)
    digests, length, of_table, trailer_magic = TRAILER.unpack(data[-FOOTER.size - TRAILER.size : -FOOTER.size])
    assert trailer_magic == b"BSPACK01" and digests + length == index
    end = len(data) - FOOTER.size - TRAILER.size
    assert xxhash.xxh3_128_digest(data[digests:end]) == of_table
    rows, at = [], index
    for _ in range(count):
        (size,) = struct.unpack_from("<I", data, at)
        name = data[at + 4 : at + 4 + size].decode()
        at += 4 + size
        rows.append((name, *struct.unpack_from("<QQI", data, at)))
        at += 20
    assert at == end
    found = [struct.unpack_from("<16sI", data, digests + 20 * i) for i in range(count)]
    at = digests + 20 * count
    (covered,) = struct.unpack_from("<Q", data, at)
    covers = tuple(data[at + 8 + 16 * i :][:16] for i in range(covered))
    at += 8 + 16 * covered
    (maps,) = struct.unpack_from("<Q", data, at)
    at += 8
    encoded = []
    for _ in range(maps):
        (size,) = struct.unpack_from("<Q", data, at)
        encoded.append(data[at + 8 : at + 8 + size])
        at += 8 + size
    assert at == index
    assert all(number <= maps for _, number in found)
    entries = tuple(Entry(*row, *about) for row, about in zip(rows, found, strict=True))
    last = 0
    for entry in sorted(entries, key=lambda one: one.offset):
        assert entry.offset % 4096 == 0 and entry.offset >= last and entry.offset + entry.size <= digests
        assert not any(data[last : entry.offset])
        last = entry.offset + entry.size
        if not changes or entry.name == "blobstore:keys":
            assert xxhash.xxh3_128_digest(data[entry.offset : last]) == entry.digest
    return Packed(data, entries, covers, digests, tuple(encoded), data[digests:index])


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.packed"))


def only(folder: Path) -> Path:
    [path] = files(folder)
    return path


def spoil(path: Path, content: bytes, *, times: bool = True) -> None:
    """Write other bytes over a file of packed weights. Its time becomes what the system says, or stays."""
    status = path.stat()
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.truncate(len(content))
        file.write(content)
    path.chmod(0o444)
    if not times:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@dataclass
class Running:
    """A program on a cache of its own."""

    cache: BlobCache
    program: Program
    method: Any
    inputs: tuple[Any, ...]

    @classmethod
    def open(
        cls,
        folder: Path,
        inputs: tuple[Any, ...],
        packed: PackedStore | Path | None = None,
        *,
        name: str = "model",
        data: str = "model.ptd",
        method: str = "forward",
        **options: Any,
    ) -> Running:
        cache = BlobCache(folder / data, packed=packed, **options)
        program = Program(folder / f"{name}.pte", cache)
        return cls(cache, program, program.method(method), inputs)

    def __call__(self) -> list[bytes]:
        """The bytes of the outputs."""
        return [np.asarray(value).tobytes() for value in self.method.execute(*self.inputs)]


def ones(*sizes: int) -> tuple[Any, ...]:
    return (np.ones(sizes, np.float32),)


MLP_SHAPES = {"layers.0.weight": (24, 16), "layers.0.bias": (24,), "layers.2.weight": (8, 24), "layers.2.bias": (8,)}


def mlp_weights(seed: int) -> dict[str, np.ndarray]:
    """New weights for two of the layers of `nets.MLP`."""
    generator = np.random.default_rng(seed)
    return {name: generator.standard_normal(shape, np.float32) for name, shape in MLP_SHAPES.items()}


def child(**options: Any) -> subprocess.Popen[str]:
    """Start a process that loads a program; see `main` for the options. It ends at the end of its input."""
    text = json.dumps(options, default=str)
    command = [sys.executable, "-W", "ignore", "-m", "tests.runtime.packed_files", text]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def report(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What a child says when it has run."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"the child ended with {process.wait()}"
    return dict(json.loads(line))


def tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def end(process: subprocess.Popen[str]) -> None:
    process.communicate("")
    assert process.returncode == 0


def run_child(**options: Any) -> dict[str, Any]:
    process = child(**options)
    found = report(process)
    end(process)
    return found


def anonymous() -> int:
    """Bytes of memory of this process that are in no file."""
    return 1024 * memory()["Anonymous"]


def _say(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value, default=str) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Load a program, run it, and print what happened.

    Options: `folder` of the program, `sizes` of its input, `packed` (a folder), `store` (options of the store), `barrier`
    (whether it waits for a line first), `user` (the number of the user who does all this), `most` (bytes of a file).
    """
    options = json.loads(sys.argv[1])
    if "most" in options:
        resource.setrlimit(resource.RLIMIT_FSIZE, (options["most"], options["most"]))
    if options.get("barrier"):
        _say({})
        sys.stdin.readline()
    packed = options.get("packed")
    store = PackedStore(packed, **options.get("store", {})) if packed else None
    before = anonymous()
    if "user" in options:
        Running.open(Path(options["folder"]), ones(*options["sizes"]))()  # another user may not be able to import
        os.seteuid(options["user"])
    running = Running.open(Path(options["folder"]), ones(*options["sizes"]), store)
    outputs = running()
    if "user" in options:
        os.seteuid(0)
    said: dict[str, Any] = {"anonymous": anonymous() - before, "outputs": [one.hex() for one in outputs]}
    if store is not None:
        said |= {"stats": vars(store.stats), "files": [path.name for path in files(store.folder)]}
    _say(said)
    for line in sys.stdin:  # "pss": say how much of the file this process has
        if line == "pss\n":
            _say({"pss": sum(mapped_memory(file, "Pss") for file in files(Path(packed)))})


if __name__ == "__main__":
    main()
