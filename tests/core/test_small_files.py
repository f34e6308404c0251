"""A file below 1 MB costs at most 2 seconds and 300 MB, or raises a clear error (B5)."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import blobstore
from tests.helpers.bombs import BYTES, Program, check_cost

pytestmark = pytest.mark.long


def keys_times_delegates(p: Program) -> bytes:
    """Each of 3,000 keys may be in the payload of each of 3,000 delegates, which share one payload."""
    reference = p.make("BackendDelegateDataReference", location=1, index=0)
    delegate = p.make("BackendDelegate", id=p.text("X"), processed=reference)
    plan = p.plan(delegates=p.references([delegate] * 3000))
    named = [p.make("NamedData", key=p.text(f"key-{i}"), segment_index=0) for i in range(3000)]
    payload = b"\0".join(f"key-{i}".encode() for i in range(3000)).ljust(250_000, b"\0")
    return p.whole([plan], payload, named_data=p.references(named))


def keys_times_methods(p: Program) -> bytes:
    """All of 4,000 methods have a delegate whose payload names all of 8,000 keys."""
    reference = p.make("BackendDelegateDataReference", location=1, index=0)
    delegates = p.references([p.make("BackendDelegate", id=p.text("X"), processed=reference)])
    plans = [p.plan(f"m{i}", delegates=delegates) for i in range(4000)]
    named = [p.make("NamedData", key=p.text(f"k{i}"), segment_index=0) for i in range(8000)]
    payload = b"\0" + b"\0".join(f"k{i}".encode() for i in range(8000)) + b"\0"
    return p.whole(plans, payload, named_data=p.references(named))


def constants(p: Program, number: int, size: int, step: int) -> bytes:
    """So many constants of so many floats, which begin so many bytes apart."""
    layout = p.layout([size])
    values = [p.tensor(**layout, data_buffer_idx=i) for i in range(1, number + 1)]
    segment = np.random.default_rng(0).bytes(4 * size + step * number)
    return p.whole([p.plan(values=p.references(values))], segment, [0, *range(0, step * number, step)])


def overlapping_constants(p: Program) -> bytes:
    """Of 400,000 bytes each."""
    return constants(p, 5000, 100_000, 4)


def many_constants(p: Program) -> bytes:
    """Of four bytes each."""
    return constants(p, 7000, 1, 16)


def one_value_many_times(p: Program) -> bytes:
    """As many references to one value as fit: 1,500 in each of 150 methods."""
    values = p.references([p.tensor(16, data_buffer_idx=1)] * 1500)
    return p.whole([p.plan(f"m{i}", values=values) for i in range(150)], bytes(700_000), [0, 0])


def keys_of_one_segment(path: Path) -> None:
    """6,000 keys of one blob of half a megabyte."""
    weight = np.random.default_rng(0).integers(0, 255, 500_000, np.uint8)
    blobstore.save_file({f"k{i}": weight for i in range(6000)}, path)


def header_of_many_tensors(path: Path) -> None:
    header = json.dumps({f"{i}": {"dtype": "U8", "shape": [1] * 20, "data_offsets": [0, 0]} for i in range(8000)})
    header = header.replace("[1, ", "[0, ")
    raw = header.encode().ljust(-(-len(header) // 8) * 8)
    path.write_bytes(len(raw).to_bytes(8, "little") + raw)


IMPORTS = (
    "import blobstore.reporting\nfrom blobstore.cli import files, programs, report\nfrom blobstore.cli.app import app"
)
PROGRAMS = (keys_times_delegates, keys_times_methods, overlapping_constants, many_constants, one_value_many_times)
FILES: dict[str, Callable[[Path], object]] = {
    **{f"{make.__name__}.pte": lambda path, make=make: path.write_bytes(make(Program())) for make in PROGRAMS},
    "keys_of_one_segment.ptd": keys_of_one_segment,
    "header_of_many_tensors.safetensors": header_of_many_tensors,
}


@pytest.fixture(scope="module")
def bombs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bombs")
    for name, make in FILES.items():
        make(folder / name)
        assert (folder / name).stat().st_size < 1_000_000
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("command", ["report", "inspect", "diff", "verify", "convert", "delta", "dedup", "fuse"])
@pytest.mark.parametrize("name", FILES)
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
    arguments = [str(one) for one in (command, path, *rest.get(command, []))]
    assert check_cost(path, IMPORTS, f"app({arguments})") in (0, 1, 3)
    assert sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()) <= BYTES
