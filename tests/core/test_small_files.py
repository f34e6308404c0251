"""A file below 1 MB costs at most 2 seconds and 300 MB, or raises a clear error (B5)."""

from __future__ import annotations

import json
import os
import resource
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import flatbuffers
import numpy as np
import pytest

import blobstore

pytestmark = pytest.mark.long

SECONDS, MEMORY = 2, 300 << 20


class Flat:
    """Builds a program that refers to few objects many times; no serializer writes such files."""

    def __init__(self) -> None:
        self.builder = flatbuffers.Builder(1 << 20)
        self.builder.ForceDefaults(True)

    def table(self, slots: int, **fields: tuple[str, int]) -> int:
        """A table with fields by slot; each value is (type, number)."""
        b = self.builder
        b.StartObject(slots)
        for name, (kind, value) in fields.items():
            slot = int(name[1:])
            if kind == "ref":
                b.PrependUOffsetTRelativeSlot(slot, value, 0)
            else:
                getattr(b, f"Prepend{kind}Slot")(slot, value, 0)
        return int(b.EndObject())

    def vector(self, items: Sequence[int]) -> int:
        self.builder.StartVector(4, len(items), 4)
        for item in reversed(items):
            self.builder.PrependUOffsetTRelative(item)
        return int(self.builder.EndVector())

    def numbers(self, items: Any, dtype: str) -> int:
        return int(self.builder.CreateNumpyVector(np.array(items, dtype)))

    def text(self, text: str) -> int:
        return int(self.builder.CreateString(text))

    def program(self, path: Path, segment: bytes, **fields: tuple[str, int]) -> Path:
        """Write it, with one segment behind the extended header."""
        segments = self.vector([self.table(2, _0=("Uint64", 0), _1=("Uint64", len(segment)))])
        self.builder.Finish(self.table(8, _0=("Uint32", 0), _4=("ref", segments), **fields), b"ET12")
        flat = bytes(self.builder.Output())
        size = len(flat) + 32
        base = -(-size // 128) * 128
        header = struct.pack("<4sIQQQ", b"eh00", 32, size, base, len(segment))
        root = struct.pack("<I", struct.unpack_from("<I", flat)[0] + 32)
        path.write_bytes((root + flat[4:8] + header + flat[8:]).ljust(base, b"\0") + segment)
        return path

    def plan(self, name: str, **fields: tuple[str, int]) -> int:
        return self.table(10, _0=("ref", self.text(name)), **fields)


def keys_times_delegates(path: Path) -> Path:
    """Each of 3,000 keys may be in the payload of each of 3,000 delegates, which share one payload."""
    flat = Flat()
    reference = flat.table(2, _0=("Int8", 1), _1=("Uint32", 0))
    delegate = flat.table(3, _0=("ref", flat.text("X")), _1=("ref", reference))
    plan = flat.plan("forward", _7=("ref", flat.vector([delegate] * 3000)))
    named = [flat.table(2, _0=("ref", flat.text(f"key-{i}")), _1=("Uint32", 0)) for i in range(3000)]
    payload = b"\0".join(f"key-{i}".encode() for i in range(3000)).ljust(250_000, b"\0")
    return flat.program(path, payload, _1=("ref", flat.vector([plan])), _7=("ref", flat.vector(named)))


def keys_times_methods(path: Path) -> Path:
    """All of 4,000 methods have a delegate whose payload names all of 8,000 keys."""
    flat = Flat()
    reference = flat.table(2, _0=("Int8", 1), _1=("Uint32", 0))
    delegates = flat.vector([flat.table(3, _0=("ref", flat.text("X")), _1=("ref", reference))])
    plans = [flat.plan(f"m{i}", _7=("ref", delegates)) for i in range(4000)]
    named = [flat.table(2, _0=("ref", flat.text(f"k{i}")), _1=("Uint32", 0)) for i in range(8000)]
    payload = b"\0" + b"\0".join(f"k{i}".encode() for i in range(8000)) + b"\0"
    return flat.program(path, payload, _1=("ref", flat.vector(plans)), _7=("ref", flat.vector(named)))


def overlapping_constants(path: Path) -> Path:
    """5,000 constants of 400,000 bytes each, which start 4 bytes apart."""
    flat, number, count, nbytes = Flat(), 5000, 100_000, 400_000
    sizes, order = flat.numbers([count], "<i4"), flat.numbers([0], "u1")
    values = []
    for i in range(1, number + 1):
        tensor = flat.table(10, _0=("Int8", 6), _1=("Int32", 0), _2=("ref", sizes), _3=("ref", order), _5=("Uint32", i))
        values.append(flat.table(2, _0=("Uint8", 5), _1=("ref", tensor)))
    plan = flat.plan("forward", _2=("ref", flat.vector(values)))
    offsets = flat.table(2, _0=("Uint32", 0), _1=("ref", flat.numbers([0, *range(0, 4 * number, 4)], "<u8")))
    segment = np.random.default_rng(0).bytes(nbytes + 4 * number)
    return flat.program(path, segment, _1=("ref", flat.vector([plan])), _5=("ref", offsets))


def many_constants(path: Path) -> Path:
    """7,000 constants of four bytes each."""
    flat, number = Flat(), 7000
    sizes, order = flat.numbers([1], "<i4"), flat.numbers([0], "u1")
    values = []
    for i in range(1, number + 1):
        tensor = flat.table(10, _0=("Int8", 6), _1=("Int32", 0), _2=("ref", sizes), _3=("ref", order), _5=("Uint32", i))
        values.append(flat.table(2, _0=("Uint8", 5), _1=("ref", tensor)))
    plan = flat.plan("forward", _2=("ref", flat.vector(values)))
    offsets = flat.table(2, _0=("Uint32", 0), _1=("ref", flat.numbers([0, *range(0, 16 * number, 16)], "<u8")))
    segment = np.arange(4 * number, dtype="<u4").tobytes()
    return flat.program(path, segment, _1=("ref", flat.vector([plan])), _5=("ref", offsets))


def one_value_many_times(path: Path) -> Path:
    """As many references to one value as fit: 1,500 in each of 150 methods."""
    flat = Flat()
    sizes, order = flat.numbers([1] * 16, "<i4"), flat.numbers(range(16), "u1")
    tensor = flat.table(10, _0=("Int8", 6), _1=("Int32", 0), _2=("ref", sizes), _3=("ref", order), _5=("Uint32", 1))
    values = flat.vector([flat.table(2, _0=("Uint8", 5), _1=("ref", tensor))] * 1500)
    plans = [flat.plan(f"m{i}", _2=("ref", values)) for i in range(150)]
    offsets = flat.table(2, _0=("Uint32", 0), _1=("ref", flat.numbers([0, 0], "<u8")))
    return flat.program(path, bytes(700_000), _1=("ref", flat.vector(plans)), _5=("ref", offsets))


def keys_of_one_segment(path: Path) -> Path:
    """6,000 keys of one blob of half a megabyte."""
    weight = np.random.default_rng(0).integers(0, 255, 500_000, np.uint8)
    blobstore.save_file({f"k{i}": weight for i in range(6000)}, path)
    return path


def header_of_many_tensors(path: Path) -> Path:
    header = json.dumps({f"{i}": {"dtype": "U8", "shape": [1] * 20, "data_offsets": [0, 0]} for i in range(8000)})
    header = header.replace("[1, ", "[0, ")
    raw = header.encode().ljust(-(-len(header) // 8) * 8)
    path.write_bytes(len(raw).to_bytes(8, "little") + raw)
    return path


BOMBS: dict[str, Callable[[Path], Path]] = {
    made.__name__ + suffix: made
    for suffix, makers in (
        (
            ".pte",
            (keys_times_delegates, keys_times_methods, overlapping_constants, many_constants, one_value_many_times),
        ),
        (".ptd", (keys_of_one_segment,)),
        (".safetensors", (header_of_many_tensors,)),
    )
    for made in makers
}


@pytest.fixture(scope="module")
def bombs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bombs")
    for name, make in BOMBS.items():
        assert make(folder / name).stat().st_size < 1_000_000
    return folder


def cost(command: Sequence[Any], folder: Path) -> tuple[subprocess.CompletedProcess[str], float, int]:
    """The result of a command, its processor time in seconds, and its peak memory in bytes."""
    code = (
        "import resource, subprocess, sys\n"
        "done = subprocess.run([sys.executable, '-m', 'blobstore', *sys.argv[1:]], stdout=subprocess.PIPE)\n"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "print(used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, done.stdout.decode())\n"
        "sys.exit(done.returncode)"
    )
    arguments = [sys.executable, "-c", code, *map(str, command)]
    limit = lambda: resource.setrlimit(resource.RLIMIT_CPU, (60, 60))  # noqa: E731 - a defect ends, too
    done = subprocess.run(
        arguments,
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=os.environ,
        preexec_fn=limit,
    )
    seconds, peak, *_ = done.stdout.split()
    return done, float(seconds), int(peak)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["report", "inspect", "diff", "verify", "convert", "delta", "dedup", "fuse"])
@pytest.mark.parametrize("name", BOMBS)
def test_a_small_file_costs_little(name: str, command: str, bombs: Path, tmp_path: Path) -> None:
    path = bombs / name
    rest: dict[str, list[Any]] = {
        "report": ["--no-cache"],
        "diff": [path],
        "convert": [tmp_path / ("x.ptd" if name.endswith("safetensors") else "x.safetensors")],
        "delta": [shutil.copy(path, tmp_path / f"copy-{name}"), "-o", tmp_path / "out"] if command == "delta" else [],
        "dedup": ["-o", tmp_path / "out"],
        "fuse": ["-o", tmp_path / "out.pte"],
    }
    _, start, _ = cost(["--version"], tmp_path)
    done, seconds, peak = cost([command, path, *rest.get(command, [])], tmp_path)
    assert seconds - start <= SECONDS
    assert peak <= MEMORY
    assert done.returncode in (0, 1, 3)
    if done.returncode == 3:
        assert name in done.stderr + done.stdout
        assert "Traceback" not in done.stderr
    written = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    assert written <= MEMORY
