"""`blobstore diff` finds every difference between two files; only equal files have none (B5)."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save
from safetensors.numpy import save_file as save_safetensors

from blobstore import BlobStore, save_file
from blobstore.core.tools.compare import Comparison, compare_files
from blobstore.core.tools.convert import convert
from blobstore.errors import BlobStoreError
from tests.core.formats.pte.oracle import from_json, join, split, to_json
from tests.core.formats.test_ptn import package

Json = dict[str, Any]


@pytest.fixture(scope="module")
def program(lowered: Any) -> bytes:
    """Two methods on shared weights, with delegates and named data."""
    return bytes(lowered.decoder().pte)


def edited(program: bytes, edit: Callable[[Json], None]) -> bytes:
    """The program with one thing changed, through flatc."""
    flatbuffer, segments = split(program)
    plain = to_json(flatbuffer)
    edit(plain)
    return join(from_json(plain), segments)


def plan(program: Json) -> Json:
    return program["execution_plan"][0]


def kernel_call(program: Json) -> Json:
    instructions = plan(program)["chains"][0]["instructions"]
    return next(one["instr_args"] for one in instructions if one["instr_args_type"] == "KernelCall")


def value(program: Json, kind: str) -> Json:
    return next(one["val"] for one in plan(program)["values"] if one["val_type"] == kind)


def swap(items: list[Any]) -> None:
    items[0], items[1] = items[1], items[0]


EDITS: dict[str, tuple[str, Callable[[Json], None]]] = {
    "version": ("version", lambda p: p.update(version=7)),
    "a method's name": ("methods", lambda p: plan(p).update(name="other")),
    "order of methods": ("methods", lambda p: swap(p["execution_plan"])),
    "a method less": ("methods", lambda p: p["execution_plan"].pop()),
    "an operator": ("operators", lambda p: plan(p)["operators"][0].update(name="aten::other")),
    "an overload": ("operators", lambda p: plan(p)["operators"][0].update(overload="x")),
    "an argument of an instruction": ("instructions", lambda p: swap(kernel_call(p)["args"])),
    "an instruction less": ("instructions", lambda p: plan(p)["chains"][0]["instructions"].pop()),
    "inputs": ("inputs", lambda p: plan(p)["inputs"].append(0)),
    "outputs": ("outputs", lambda p: plan(p)["outputs"].append(0)),
    "planned memory": ("planned memory", lambda p: plan(p)["non_const_buffer_sizes"].append(64)),
    "a number": ("values", lambda p: value(p, "Int").update(int_val=12345)),
    "sizes of an activation": ("values", lambda p: value(p, "Tensor").update(shape_dynamism="DYNAMIC_BOUND")),
    "a value more": ("values", lambda p: plan(p)["values"].append(copy.deepcopy(plan(p)["values"][-1]))),
    "a delegate's backend": ("delegates", lambda p: plan(p)["delegates"][0].update(id="Other")),
    "a delegate's compile specs": (
        "delegates",
        lambda p: plan(p)["delegates"][0].update(compile_specs=[{"key": "k", "value": [1]}]),
    ),
    "container": (
        "container",
        lambda p: plan(p).update(container_meta_type={"encoded_inp_str": "a", "encoded_out_str": "b"}),
    ),
    "order of named data": ("order of the keys", lambda p: swap(p["named_data"])),
}


@pytest.mark.parametrize("name", EDITS)
def test_every_part_of_a_program_is_compared(name: str, program: bytes, tmp_path: Path) -> None:
    """Every change of a program is found, and the changed part is named (B5)."""
    what, edit = EDITS[name]
    (tmp_path / "same.pte").write_bytes(edited(program, lambda plain: None))
    (tmp_path / "edited.pte").write_bytes(edited(program, edit))
    result = compare_files(tmp_path / "same.pte", tmp_path / "edited.pte")
    assert any(what in difference.what for difference in result.differences), result.differences
    assert compare_files(tmp_path / "same.pte", tmp_path / "same.pte").equal


def test_values_are_shown_without_what_holds_them(program: bytes, tmp_path: Path) -> None:
    (tmp_path / "same.pte").write_bytes(edited(program, lambda plain: None))
    (tmp_path / "edited.pte").write_bytes(edited(program, EDITS["a number"][1]))
    [difference] = compare_files(tmp_path / "same.pte", tmp_path / "edited.pte").differences
    assert difference.right.endswith("Int(int_val=12345)")


def test_a_delegates_payload_is_compared(program: bytes, tmp_path: Path) -> None:
    flatbuffer, segments = split(program)
    plain = to_json(flatbuffer)
    index = plan(plain)["delegates"][0]["processed"]["index"]
    at = plain["segments"][index].get("offset", 0)
    changed = bytearray(segments)
    changed[at + 40] ^= 1
    (tmp_path / "a.pte").write_bytes(join(flatbuffer, segments))
    (tmp_path / "b.pte").write_bytes(join(flatbuffer, bytes(changed)))
    result = compare_files(tmp_path / "a.pte", tmp_path / "b.pte")
    assert not result.changes
    assert {difference.what.split(": ")[1] for difference in result.differences} == {"delegates"}


def test_a_program_with_another_layout_of_its_flatbuffer_is_not_equal(program: bytes, tmp_path: Path) -> None:
    """No part differs, so the difference is reported as bytes."""
    flatbuffer, segments = split(program)
    (tmp_path / "a.pte").write_bytes(join(flatbuffer, segments))
    (tmp_path / "b.pte").write_bytes(join(from_json(to_json(flatbuffer)), segments))
    result = compare_files(tmp_path / "a.pte", tmp_path / "b.pte")
    assert [difference.what for difference in result.differences] == [
        "other bytes, such as the order of parts or padding"
    ]


def ptd(path: Path, *, order: str = "ab", alignment: int = 16, metadata: Any = None, tied: bool = True) -> Path:
    store = BlobStore()
    for key in order:
        store.add(key, np.zeros(4, np.float32) + (not tied and key == "b"), alignment=alignment)
    store.write_ptd(path, metadata=metadata)
    return path


def whats(result: Comparison) -> set[str]:
    return {difference.what for difference in result.differences} | {change.kind for change in result.changes}


def test_differences_of_data_files_outside_their_blobs(tmp_path: Path) -> None:
    first = ptd(tmp_path / "a.ptd")
    assert compare_files(first, first).equal
    assert whats(compare_files(first, ptd(tmp_path / "b.ptd", alignment=32))) == {"alignments"}
    assert whats(compare_files(first, ptd(tmp_path / "b.ptd", metadata={"step": "1"}))) == {"metadata"}
    assert whats(compare_files(first, ptd(tmp_path / "b.ptd", tied=False))) == {"bytes", "keys that share their bytes"}


def test_a_checkpoint_and_its_data_file_hold_the_same_keys_but_are_not_equal(tmp_path: Path) -> None:
    """What only one format can say, such as the name of a dtype, is no difference of its own."""
    save_safetensors({"w": np.ones((2, 3), np.float32)}, tmp_path / "a.safetensors")
    convert(tmp_path / "a.safetensors", tmp_path / "a.ptd")
    result = compare_files(tmp_path / "a.safetensors", tmp_path / "a.ptd")
    assert (result.changes, result.same, result.same_bytes) == ([], 1, 24)
    assert whats(result) == {"format"}


def test_packages_of_native_programs_are_compared(tmp_path: Path) -> None:
    for name, value in (("a", 1), ("b", 2)):
        (tmp_path / f"{name}.ptn").write_bytes(package({"m.safetensors": save({"w": np.full(3, value, np.float32)})}))
    result = compare_files(tmp_path / "a.ptn", tmp_path / "b.ptn")
    assert [(change.key, change.kind) for change in result.changes] == [("w", "bytes")]
    save_safetensors({"w": np.ones(3, np.float32)}, tmp_path / "a.safetensors")
    assert compare_files(tmp_path / "a.ptn", tmp_path / "a.safetensors").same == 1


def test_shapes_that_a_data_file_cannot_name_are_compared(tmp_path: Path) -> None:
    for name, shape in (("a", (2, 3)), ("b", (3, 2))):
        header = json.dumps({"c": {"dtype": "F8_E8M0", "shape": shape, "data_offsets": [0, 6]}}).encode()
        header += b" " * (-len(header) % 8)
        data = len(header).to_bytes(8, "little") + header + bytes(6)
        (tmp_path / f"{name}.safetensors").write_bytes(data)
    assert whats(compare_files(tmp_path / "a.safetensors", tmp_path / "b.safetensors")) == {"dtypes"}


@pytest.mark.long
@pytest.mark.parametrize("kind", ["ptd", "pte"])
def test_no_changed_byte_goes_unnoticed(kind: str, lowered: Any, tmp_path: Path) -> None:
    """If any byte changes, the file is unreadable or different (B5)."""
    path = tmp_path / f"a.{kind}"
    if kind == "ptd":
        save_file({"w": np.arange(6.0), "b": b"opaque"}, path, metadata={"made": "here"})
    else:
        path.write_bytes(lowered.counter().pte)
    data = path.read_bytes()
    other = tmp_path / f"b.{kind}"
    for at in range(0, len(data), 3):
        other.write_bytes(data[:at] + bytes([data[at] ^ 0x11]) + data[at + 1 :])
        try:
            result = compare_files(path, other)
        except BlobStoreError:
            continue
        assert not result.equal, f"byte {at}"


def test_sides_are_in_words(tmp_path: Path) -> None:
    """An empty list, one entry, several, and a list that the other one continues."""
    files = [ptd(tmp_path / f"{n}.ptd", metadata={f"k{i}": "v" for i in range(n)}) for n in range(4)]

    def sides(left: int, right: int) -> list[tuple[str, str]]:
        return [(one.left, one.right) for one in compare_files(files[left], files[right]).differences]

    assert sides(0, 1) == [("none", "k0: v")]
    assert sides(1, 2) == [("k0: v", "2 entries, first difference: k1: v")]
    assert sides(3, 2) == [("3 entries, first difference: k2: v", "2 entries")]
