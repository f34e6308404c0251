"""Files of every kind: all their bytes accounted for; broken ones are reported and passed over."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import blobstore
from blobstore.core.formats.ptd.reader import PtdDataMap
from blobstore.reporting import FindingKind, RegionKind, Report
from blobstore.reporting.json_output import to_json
from blobstore.reporting.show.html import to_html
from tests.core.formats.ptd.test_format import DATA
from tests.reporting.find.test_planted import accounted, values
from tests.reporting.planted import Payload, Tensor, keys, write_ptd, write_safetensors


def report_of(*paths: Path | str, **options: Any) -> Report:
    report = blobstore.report(paths, **options)
    accounted(report)
    return report


@pytest.mark.long
def test_every_byte_of_lowered_programs(lowered: Any, tmp_path: Path) -> None:
    made = {
        "mlp": lowered.mlp(),
        "mlp-xnnpack": lowered.mlp(delegated=True),
        "mlp-external": lowered.mlp(external=True),
        "conv": lowered.conv(),
        "channels-last": lowered.channels_last(),
        "counter": lowered.counter(),
        "decoder": lowered.decoder(),
        "adapters": lowered.adapters(delegated=True),
    }
    for name, model in made.items():
        model.write(tmp_path / name, name)
    report = report_of(tmp_path)
    assert not report.problems
    assert not [f for f in report.findings if f.kind is FindingKind.UNREFERENCED]
    kinds = {kind for file in report.files for kind in file.by_kind}
    assert kinds == set(RegionKind) - {RegionKind.UNREFERENCED, RegionKind.METADATA}


def test_initial_state_is_its_own_kind(lowered: Any, tmp_path: Path) -> None:
    [file] = report_of(lowered.counter().write(tmp_path)).files
    assert file.by_kind[RegionKind.STATE] == 64 * 4


def test_methods_of_named_data_are_told(lowered: Any, tmp_path: Path) -> None:
    [file] = report_of(lowered.decoder().write(tmp_path)).files
    named = [region for region in file.regions if region.kind is RegionKind.NAMED_DATA]
    assert named
    assert {region.methods for region in named} == {("decode", "prefill")}


def test_a_program_and_its_checkpoint(lowered: Any, tmp_path: Path) -> None:
    module, _ = lowered.mlp().methods["forward"]
    tensors = [Tensor.of(name, value.numpy()) for name, value in module.state_dict().items()]
    checkpoint = write_safetensors(tmp_path / "mlp.safetensors", tensors)
    report = report_of(lowered.mlp().write(tmp_path), checkpoint)
    found = [keys(report, f) for f in report.findings if f.kind is FindingKind.DUPLICATE_FILES]
    assert any("mlp.safetensors:first.weight" in places for places in found)
    assert all(finding.command is None for finding in report.findings)  # a checkpoint is not deployed


def test_xnnpack_stores_convolutions_channels_last(lowered: Any, tmp_path: Path) -> None:
    module, _ = lowered.conv().methods["forward"]
    weight = module.depthwise.weight.detach().numpy()
    checkpoint = write_safetensors(tmp_path / "conv.safetensors", [Tensor.of("depthwise.weight", weight)])
    report = report_of(lowered.conv().write(tmp_path), checkpoint)
    [finding] = [f for f in report.findings if f.kind is FindingKind.OTHER_LAYOUT]
    assert "conv.safetensors:depthwise.weight" in keys(report, finding)
    assert finding.saves == weight.nbytes


def test_tied_weights_that_are_stored_once_are_no_waste(tmp_path: Path) -> None:
    weight = values(1, 40, 30)
    blobstore.save_file({"embed": weight, "head": weight.copy()}, tmp_path / "tied.ptd")
    report = report_of(tmp_path)
    assert not report.findings
    assert report.files[0].already_shared == weight.nbytes


@pytest.mark.parametrize("count", [2, 50])
def test_each_segment_is_looked_up_by_itself(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of all segments is made once, however many keys a file has: a report takes time in proportion."""
    lists: list[list[tuple[int, int]]] = []
    all_of = PtdDataMap.extents.fget
    assert all_of is not None
    monkeypatch.setattr(PtdDataMap, "extents", property(lambda self: lists.append(all_of(self)) or lists[-1]))
    blobstore.save_file({f"k{i}": values(i, 3) for i in range(count)}, tmp_path / "model.ptd")
    assert len(report_of(tmp_path).files[0].regions) >= count
    assert [len(one) for one in lists] == [count]


def write_gguf(path: Path, *tensors: tuple[str, np.ndarray, Any], **options: Any) -> None:
    """By the package of that name, which tests here need."""
    writer = pytest.importorskip("gguf").GGUFWriter(path, "llama", **options)
    writer.add_name("a model")
    for name, array, dtype in tensors:
        writer.add_tensor(name, array, raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    weight, half = values(2, 32, 64), values(3, 16, 64).astype(np.float16)
    packed = np.random.default_rng(4).integers(0, 255, (4, 34), dtype=np.uint8)
    write_gguf(
        tmp_path / "model.gguf",
        ("blk.0.weight", weight, None),
        ("blk.1.weight", half, None),
        ("blk.2.weight", packed, gguf.GGMLQuantizationType.Q8_0),
    )
    write_ptd(tmp_path / "a.ptd", [Tensor.of("w", weight)])
    report = report_of(tmp_path)
    assert not report.problems
    [file] = [file for file in report.files if file.format == "gguf"]
    tensors = {region.name: region for region in file.regions if region.kind is RegionKind.TENSOR}
    assert str(tensors["blk.0.weight"].layout) == "float[32, 64]"
    assert tensors["blk.2.weight"].dtype == "Q8_0"
    assert [keys(report, finding) for finding in report.findings] == [{"model.gguf:blk.0.weight", "a.ptd:w"}]


def test_gguf_in_the_other_byte_order(tmp_path: Path) -> None:
    """Its tensors are opaque, because no layout says in which order the bytes of a number are."""
    gguf = pytest.importorskip("gguf")
    weight = values(2, 32, 64)
    write_gguf(tmp_path / "big.gguf", ("blk.0.weight", weight, None), endianess=gguf.GGUFEndian.BIG)
    [file] = report_of(tmp_path).files
    [region] = [region for region in file.regions if region.kind is RegionKind.TENSOR]
    assert (region.layout, region.dtype, region.nbytes) == (None, "F32 (big-endian)", weight.nbytes)


def test_a_manifest_is_the_structure_of_its_file() -> None:
    path = DATA / "golden.ptd"
    [file] = report_of(path).files
    assert not file.by_kind.get(RegionKind.UNREFERENCED)
    data, last = path.read_bytes(), file.regions[-1]
    assert (last.kind, last.stop) == (RegionKind.STRUCTURE, len(data))
    assert last.start == data.index(b"BM01") - 4


def test_links_are_one_file(tmp_path: Path) -> None:
    path = write_ptd(tmp_path / "a.ptd", [Tensor.of("w", values(5, 30, 30))])
    os.link(path, tmp_path / "hard.ptd")
    (tmp_path / "soft.ptd").symlink_to(path)
    report = report_of(tmp_path)
    assert [Path(file.path).name for file in report.files] == ["a.ptd"]
    assert [Path(alias).name for alias in report.files[0].aliases] == ["hard.ptd", "soft.ptd"]
    assert not report.findings


def test_files_in_which_a_key_has_two_contents_get_no_common_data_file(tmp_path: Path) -> None:
    """Data files alone can be deltas of one; beside programs, which find a key once, no command takes them together."""
    shared = values(6, 60, 60)
    for i in range(2):
        write_ptd(tmp_path / f"{i}.ptd", [Tensor.of("same", shared), Tensor.of("key", values(7 + i, 50, 50))])
    [finding] = report_of(tmp_path).findings
    assert (finding.command or "").startswith("blobstore delta ")
    Payload([b"a program"]).write(tmp_path / "m.pte")
    [finding] = report_of(tmp_path).findings
    assert finding.command is None
    assert "different bytes" in finding.advice


BROKEN: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "empty": ("the file is empty", lambda data: b""),
    "truncated": ("truncated", lambda data: data[:-50]),
    "header.pte": ("extended header|truncated", lambda data: b"\x10\0\0\0ET12eh00" + b"\xff" * 60),
    "named.pte": ("does not begin like a .pte", lambda data: b"something else altogether"),
    "text.txt": ("neither .pte, .ptd", lambda data: b"something else altogether"),
    "x.safetensors": ("bytes", lambda data: b"\xff" * 16),
    "x.gguf": ("well-formed", lambda data: b"GGUF\x03\0\0\0" + b"\xff" * 40),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_told_and_passed_over(name: str, tmp_path: Path) -> None:
    good = write_ptd(tmp_path / "good.ptd", [Tensor.of("w", values(9, 30, 30))])
    reason, change = BROKEN[name]
    bad = tmp_path / name
    bad.write_bytes(change(good.read_bytes()))
    report = report_of(good, bad)
    assert [file.path for file in report.files] == [str(good)]
    [problem] = report.problems
    assert problem.path == str(bad)
    assert pytest.importorskip("re").search(reason, problem.reason), problem.reason


def test_what_is_no_file_is_told(tmp_path: Path) -> None:
    good = write_ptd(tmp_path / "good.ptd", [Tensor.of("w", values(9, 30, 30))])
    os.mkfifo(tmp_path / "pipe.ptd")
    report = report_of(good, tmp_path / "missing.ptd", tmp_path / "pipe.ptd", "no-such-protocol://x.ptd")
    assert len(report.files) == 1
    assert sorted(Path(p.path).name for p in report.problems) == ["missing.ptd", "pipe.ptd", "x.ptd"]


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("exact_only", [False, True])
def test_a_damaged_file_is_reported_and_compared_with_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: bool, exact_only: bool
) -> None:
    """Its bytes are no reason to drop those of another file: the good one would go, and the damaged one stay (S1, B5)."""
    damaged, good, third = (tmp_path / name for name in ("a.ptd", "b.ptd", "c.ptd"))
    tensors = {"w": values(1, 1000), "same": values(2, 1000)}
    for path in (damaged, good, third):
        blobstore.save_file(tensors, path)
    with blobstore.open_ptd(damaged) as data_map:
        at = data_map.byte_range("w")[0]
    data = bytearray(damaged.read_bytes())
    data[at + 5] ^= 1
    damaged.write_bytes(data)
    options = {"exact_only": exact_only, "cache": tmp_path / "cache" if cached else None}
    monkeypatch.setattr("blobstore.reporting.read.cache._SETTLED_NS", 0)
    for _ in range(2 if cached else 1):
        report = report_of(damaged, good, third, **options)
        assert [file.path for file in report.files] == [str(good), str(third)]
        (problem,) = report.problems
        assert problem.path == str(damaged)
        assert "the bytes of 'w' are damaged: expected xxh3-128 " in problem.reason
        for finding in report.findings:
            assert str(damaged) not in (finding.command or "")
        for shown in (to_html(report), json.dumps(to_json(report))):
            assert "the bytes of" in shown and "are damaged: expected xxh3-128" in shown
