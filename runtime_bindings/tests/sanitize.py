"""Build the C++ tests with sanitizers and run them, and compare the definitions of all files: `make sanitize`."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import flatbuffers
import numpy as np
import xxhash

from blobstore.formats.payload import Constant, find_places, wrap
from blobstore.runtime import make_working_copy
from tests import models, native_build
from tests.logical import native_tensors

ROOT = native_build.ROOT
SKIPPED = 77  # the exit code of a test that cannot run, as for automake and CTest
SANITIZERS = {
    "address,undefined": {"ASAN_OPTIONS": "detect_leaks=1:abort_on_error=0", "UBSAN_OPTIONS": "print_stacktrace=1"},
    # a forked child renews mutexes that threads of its parent hold
    "thread": {"TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1:die_after_fork=0:report_destroy_locked=0"},
}


def main() -> None:
    if reason := native_build.missing():
        sys.exit(reason)
    check_definitions()
    for name, options in SANITIZERS.items():
        build = ROOT / "build" / f"sanitize-{name.replace(',', '-')}"
        make(build, "all", "-DCMAKE_BUILD_TYPE=RelWithDebInfo", f"-DBLOBSTORE_SANITIZE={name}")
        tests = build / "tests"
        with tempfile.TemporaryDirectory() as folder:
            tensors = {"a": np.zeros(60_000, np.float32), "b": np.ones(60_000, np.float32)}
            tensors["tied"] = tensors["a"].copy()
            tensors["opaque"] = np.arange(100, dtype=np.uint8)
            write(tensors, Path(folder))
            plain, copy = Path(folder, "plain.ptd"), Path(folder, "copy.ptd")
            run([tests / "memory_test", plain, copy], options)
            run([tests / "cache_test", plain, folder, *write_program(Path(folder))], options)
            run([tests / "files_test"], options)
            run([tests / "tensors_test", native_tensors.write(Path(folder, "tensors.ptd"))], options)
            run([tests / "fork_test", copy], options)
            run([tests / "fork_test", copy, "without-descriptors"], options)
        run([tests / "adapters_test", native_build.LIBRARY / "tests" / "data" / "adapters"], options)
        with tempfile.TemporaryDirectory() as folder:
            write_delegates(Path(folder))
            run([tests / "delegate_test", folder], options)
        sys.stdout.write(f"{name}: no findings\n")


def check_definitions() -> None:
    """Link all of the library with GCC's link-time optimization, which refuses two different definitions of one name."""
    make(ROOT / "build" / "one-definition", "cache_test", "-DCMAKE_BUILD_TYPE=Debug", "-DBLOBSTORE_ODR=ON")
    sys.stdout.write("definitions: no findings\n")


def make(build: Path, target: str, *options: str) -> None:
    """Build a target of the C++ tests with these options of CMake."""
    try:
        native_build.build(native_build.LIBRARY, build, "-DBLOBSTORE_TESTS=ON", *options, target=target)
    except AssertionError as error:
        sys.exit(str(error))


def run(command: list[object], options: dict[str, str]) -> None:
    """Run a test; a test that cannot run here says why, and ends with SKIPPED."""
    texts = [str(part) for part in command]
    done = subprocess.run(texts, check=False, env={**os.environ, **options})
    if done.returncode not in {0, SKIPPED}:
        sys.exit(f"{' '.join(texts)} ended with {done.returncode}")


def write(tensors: dict[str, np.ndarray], folder: Path) -> None:
    """The two files that the tests take; "opaque" is not a tensor in them."""
    from blobstore import BlobStore

    store = BlobStore()
    for key, array in tensors.items():
        store.add(key, array.tobytes() if key == "opaque" else array)
    store.write_ptd(folder / "plain.ptd")
    make_working_copy(folder / "plain.ptd", folder / "copy.ptd")


def write_program(folder: Path) -> tuple[Path, Path]:
    """A program that takes its weights from a data file, and the file."""
    program = models.mlp(external=True).write(folder)
    return program, folder / "_default_external_constant.ptd"


def write_delegates(folder: Path) -> None:
    """Weights, and payloads for an inner backend that reads a list of keys."""
    from blobstore import save_file

    mark = "@0123456789abcdef"
    ones = np.ones(3000, np.float32)
    save_file({f"packed{mark}": ones, f"kept{mark}": ones}, folder / "base.ptd")
    save_file({f"own{mark}": ones}, folder / "adapter.ptd")
    make_working_copy(folder / "base.ptd", folder / "copy.ptd")
    for name, own in (("base", False), ("both", True)):
        kinds = {f"packed{mark}": True, f"kept{mark}": False} | ({f"own{mark}": True} if own else {})
        inner = b"".join(
            struct.pack("<I", len(key)) + key.encode() + b"\0" + (b"p" if packed else b"k")
            for key, packed in kinds.items()
        )
        constants = [
            Constant(key, ones.nbytes, number, find_places(inner, key), packed)
            for number, (key, packed) in enumerate(kinds.items())
        ]
        (folder / f"{name}.payload").write_bytes(wrap(inner, "ToyBackend", constants))
    write_costly_payload(folder / "costly.payload")


def write_costly_payload(path: Path) -> None:
    """One description of a constant with 30,000 places, 60,000 times."""
    key = "k@0123456789abcdef"
    inner = key.encode()
    builder = flatbuffers.Builder(1 << 20)
    name, digest = builder.CreateString("ToyBackend"), builder.CreateByteVector(xxhash.xxh3_128_digest(inner))
    text = builder.CreateString(key)
    builder.StartVector(8, 30_000, 8)
    for _ in range(30_000):
        builder.PrependUint64(len(inner) - 16)
    places = builder.EndVector()
    builder.StartObject(5)
    builder.PrependUOffsetTRelativeSlot(0, text, 0)
    builder.PrependUOffsetTRelativeSlot(3, places, 0)
    constant = builder.EndObject()
    builder.StartVector(4, 60_000, 4)
    for _ in range(60_000):
        builder.PrependUOffsetTRelative(constant)
    constants = builder.EndVector()
    builder.StartObject(5)
    builder.PrependUint32Slot(0, 1, 0)
    builder.PrependUOffsetTRelativeSlot(1, name, 0)
    builder.PrependUint64Slot(2, len(inner), 0)
    builder.PrependUOffsetTRelativeSlot(3, constants, 0)
    builder.PrependUOffsetTRelativeSlot(4, digest, 0)
    builder.Finish(builder.EndObject(), file_identifier=b"BD01")
    description = bytes(builder.Output())
    path.write_bytes(inner + description + struct.pack("<Q", len(description)) + b"BSDELEG1")


if __name__ == "__main__":
    main()
