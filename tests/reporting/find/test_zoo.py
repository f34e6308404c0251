"""A report of two hundred files: folders, families, names from a checkpoint, and what a notebook shows (B2)."""

import hashlib
import html
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import blobstore
from blobstore import BlobStore
from blobstore.core.formats.opening import open_any
from blobstore.core.text import size
from blobstore.errors import OutputPathError
from blobstore.logical.records import records_key
from blobstore.reporting import FindingKind, RegionKind, Report
from blobstore.reporting.find.baseline import Changes, compare_reports
from blobstore.reporting.json_output import SCHEMA, from_json, to_json
from blobstore.reporting.report_data import _ancestors
from blobstore.reporting.show.groups import common_bytes, find_groups
from blobstore.reporting.show.html import to_html
from blobstore.reporting.show.terminal import print_changes, print_report
from blobstore.reporting.show.words import COLORS, FINDINGS, branches
from tests.reporting.find.test_planted import accounted, values
from tests.reporting.planted import Payload, Tensor, write_ptd, write_safetensors
from tests.reporting.show.test_output import HOSTILE, run


def printed(report: Report, width: int = 100) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    print_report(report, console)
    return console.export_text()


# ------------------------------------------------------------------------------------------------------ folders


@pytest.mark.long
def test_folders_add_up_as_their_files_do(zoo_report: Report, zoo_folder: Path) -> None:
    """Against the sizes that the file system gives."""
    accounted(zoo_report)
    assert len(zoo_report.files) == 200
    folders = {folder.path: folder for folder in zoo_report.folders}
    assert next(iter(folders)) == str(zoo_folder)
    there = {path for path in zoo_folder.rglob("*") if path.is_dir()} | {zoo_folder}
    assert set(folders) == {str(path) for path in there}
    for path in there:
        inside = [file for file in path.rglob("*") if file.is_file()]
        folder = folders[str(path)]
        assert (folder.files, folder.bytes) == (len(inside), sum(file.stat().st_size for file in inside))
    assert folders[str(zoo_folder)].saves == zoo_report.total_saves == sum(zoo_report.saves_of)


@pytest.mark.long
def test_folders_are_in_json_and_in_the_terminal(zoo_report: Report) -> None:
    plain = json.loads(json.dumps(to_json(zoo_report)))
    pytest.importorskip("jsonschema").validate(plain, json.loads(SCHEMA.read_text()))
    schema = json.loads(SCHEMA.read_text())["properties"]
    assert set(plain["folders"][0]) == set(schema["folders"]["items"]["properties"])
    assert sum(file["saves"] for file in plain["files"]) == plain["total_saves"] == plain["folders"][0]["saves"]
    assert from_json(plain) == zoo_report
    text = printed(zoo_report)
    assert "largest of" in text
    vision = next(folder for folder in branches(zoo_report.folders) if folder.path == "vision")
    assert re.search(rf"\bvision +{vision.files} +{size(vision.bytes)} +{size(vision.saves)}", text)
    assert re.search(r"\n   edge +\d+", text)  # below vision


def test_one_folder_is_not_divided(tmp_path: Path) -> None:
    for name in "ab":
        write_ptd(tmp_path / f"{name}.ptd", [Tensor.of("w", values(1, 60, 50))])
    report = blobstore.report([tmp_path])
    assert [(folder.files, folder.bytes) for folder in report.folders] == [(2, report.total_bytes)]
    assert branches(report.folders) == []
    assert "Folders" not in printed(report)
    assert blobstore.report([]).folders == ()


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("a.pte", [""]),
        ("x/y/a.pte", ["", "x", "x/y"]),
        ("/x/y/a.pte", ["/", "/x", "/x/y"]),
        ("/a.pte", ["/"]),
        ("../x/a.pte", ["", "..", "../x"]),
        ("s3://zoo/x/a.pte", ["s3://zoo", "s3://zoo/x"]),
        ("memory://a.pte", ["memory://"]),
    ],
)
def test_the_folders_of_a_path(path: str, expected: list[str]) -> None:
    assert _ancestors(path) == expected


# -------------------------------------------------------------------------------------------- names of tensors


@pytest.mark.long
def test_contents_are_shown_under_their_names_in_a_checkpoint(zoo_report: Report, zoo_folder: Path) -> None:
    """In the one that the caller names, or in a file of the report; keys stay what the file has."""
    names: dict[str, set[str]] = {}
    for path in (*zoo_folder.rglob("*.safetensors"), *zoo_folder.rglob("*.ptd")):
        opened = open_any(path)
        for key in opened:
            names.setdefault(hashlib.sha256(opened.get_data(key)).hexdigest(), set()).add(key)
    seen: dict[str, set[str]] = {}
    for file in zoo_report.files:
        for region in file.regions:
            if file.path.endswith(".pte") and region.kind is RegionKind.NAMED_DATA:
                given = names.get(region.keys[0], set())
                assert region.tensor in given or not (region.tensor or len(given) == 1)
                assert region.name == (region.tensor or region.keys[0])
                seen.setdefault(file.path.split("/models/")[1].rsplit("/", 2)[0], set()).add(region.tensor)
    assert len(seen["vision/mobile"]) > 5 and "" in seen["vision/mobile"]  # its heads are in no checkpoint


def test_a_checkpoint_beside_a_program_gives_names(tmp_path: Path) -> None:
    """It is not reported on, and what is damaged, or beside nothing, gives no names and no error."""
    weight, other = values(1, 60, 50), values(2, 60, 50)
    keys = [hashlib.sha256(array.tobytes()).hexdigest() for array in (weight, other)]
    blobs = [Tensor.opaque(key, array.tobytes()) for key, array in zip(keys, (weight, other), strict=True)]
    (tmp_path / "team" / "models").mkdir(parents=True)
    program = write_ptd(tmp_path / "team" / "models" / "m.ptd", blobs)
    write_safetensors(tmp_path / "team" / "models" / "m.safetensors", [Tensor.of("encoder.weight", weight)])
    (tmp_path / "team" / "models" / "cut.safetensors").write_bytes(b"\xff" * 20)
    write_safetensors(tmp_path / "other.safetensors", [Tensor.of("decoder.weight", other)])
    report = blobstore.report(program)
    assert [file.path for file in report.files] == [str(program)]
    assert (report.problems, report.notes) == ((), ())
    named = {region.keys[0]: region for region in report.files[0].regions if region.kind is RegionKind.NAMED_DATA}
    assert (named[keys[0]].name, named[keys[0]].shape) == ("encoder.weight", "60 x 50")
    assert (named[keys[1]].name, named[keys[1]].shape) == (keys[1], "")


def nameless(*arrays: np.ndarray) -> list[Tensor]:
    """Opaque bytes under the keys that delegates give them."""
    return [Tensor.opaque(hashlib.sha256(array.tobytes()).hexdigest(), array.tobytes()) for array in arrays]


@pytest.mark.parametrize("where", ["models/model.ptd", "model.safetensors", "models/pytorch.safetensors"])
def test_a_checkpoint_beside_names_values_in_another_type_or_layout(where: str, tmp_path: Path) -> None:
    """A delegate's float32 of the half floats in the checkpoint, and a convolution with its channels last."""
    linear, conv = values(1, 60, 50).astype(np.float16), values(2, 24, 16, 3, 3)
    tensors = [Tensor.of("head.weight", linear), Tensor.of("stem.weight", conv)]
    (tmp_path / "models").mkdir()
    (write_ptd if where.endswith(".ptd") else write_safetensors)(tmp_path / where, tensors)
    channels_last = np.ascontiguousarray(conv.transpose(0, 2, 3, 1))
    Payload([], {t.key: t.raw for t in nameless(linear.astype(np.float32), channels_last, values(3, 9, 9))}).write(
        tmp_path / "models" / "m.pte"
    )
    report = blobstore.report(tmp_path / "models" / "m.pte")
    names = sorted(r.tensor for r in report.files[0].regions if r.kind is RegionKind.NAMED_DATA)
    assert names == ["", "head.weight", "stem.weight"]
    assert report == blobstore.report(tmp_path / "models" / "m.pte", cache=tmp_path / "cache")
    exact = blobstore.report(tmp_path / "models" / "m.pte", exact_only=True)
    assert not any(region.tensor for region in exact.files[0].regions)


def test_a_checkpoint_that_cannot_have_the_names_is_not_read(tmp_path: Path) -> None:
    """Of another model, in the folder above: a few small tensors have the sizes of some here, and that is all."""
    (tmp_path / "models").mkdir()
    weight, bias = values(1, 60, 50), values(2, 50)
    Payload([], {t.key: t.raw for t in nameless(weight, bias)}).write(tmp_path / "models" / "m.pte")
    other = [Tensor.of("big", values(4, 90, 80)), Tensor.of("bias", bias)]
    read: list[int] = []

    def names() -> list[str]:
        read.clear()
        report = blobstore.report(tmp_path / "models" / "m.pte", progress=lambda what, done, total: read.append(total))
        return sorted(region.tensor for region in report.files[0].regions if region.kind is RegionKind.NAMED_DATA)

    alone = max((names(), read)[1])
    write_safetensors(tmp_path / "other.safetensors", other)
    assert (names(), max(read)) == (["", ""], alone)
    write_safetensors(tmp_path / "own.safetensors", [*other, Tensor.of("weight", weight)])
    assert (names(), max(read) > alone) == (["bias", "weight"], True)


def test_what_has_the_values_of_a_named_tensor_has_its_name(tmp_path: Path) -> None:
    weight = values(1, 60, 50)
    key = f"tensor.{'0' * 32}.float.3000"
    write_ptd(tmp_path / "a.ptd", [Tensor.of(key, weight.T)])
    write_safetensors(tmp_path / "b.safetensors", [Tensor.of("encoder.weight", weight)])
    report = blobstore.report([tmp_path])
    (region,) = [region for region in report.files[0].regions if region.kind.is_blob]
    assert (region.keys, region.name) == ((key,), "encoder.weight")


def test_a_key_that_is_a_name_keeps_it_and_equal_tensors_name_nothing(tmp_path: Path) -> None:
    weight, twice = values(1, 60, 50), values(2, 60, 50)
    key = hashlib.sha256(twice.tobytes()).hexdigest()
    write_ptd(tmp_path / "a.ptd", [Tensor.of("own.name", weight), Tensor.opaque(key, twice.tobytes())])
    names = [Tensor.of("weight", weight), Tensor.of("one", twice), Tensor.of("two", twice)]
    write_safetensors(tmp_path / "names.safetensors", names)
    report = blobstore.report([tmp_path / "a.ptd"], names=open_any(tmp_path / "names.safetensors"))
    assert {region.tensor for region in report.files[0].regions} == {""}
    # of several with the same bytes, one alone has the shape
    write_ptd(tmp_path / "b.ptd", [Tensor.of(f"tensor.{'0' * 32}.float.3000", twice.reshape(-1))])
    write_safetensors(tmp_path / "names.safetensors", [*names, Tensor.of("flat", twice.reshape(-1))])
    report = blobstore.report([tmp_path / "b.ptd"], names=open_any(tmp_path / "names.safetensors"))
    assert [region.name for region in report.files[0].regions if region.kind.is_blob] == ["flat"]


@pytest.mark.long
def test_names_on_the_command_line(zoo_folder: Path, tmp_path: Path) -> None:
    programs = sorted((zoo_folder / "language" / "small" / "chat").glob("*.pte"))
    checkpoint = zoo_folder / "checkpoints" / "language-small.safetensors"
    assert "backbone." not in run(*programs, "--no-cache").stdout
    assert "backbone." in run(*programs, "--no-cache", "--names", checkpoint).stdout
    plain = json.loads(run(*programs, "--no-cache", "--names", checkpoint, "--json").stdout)
    assert "backbone.8.weight" in {region["tensor"] for file in plain["files"] for region in file["regions"]}
    assert "missing.safetensors" in run(*programs, "--names", tmp_path / "missing.safetensors", code=3).stderr


@pytest.mark.long
def test_names_do_not_make_another_report_of_it(zoo_folder: Path) -> None:
    """What was found without names is the same finding with them, in a baseline."""
    family, checkpoint = zoo_folder / "vision" / "mobile", zoo_folder / "checkpoints" / "vision-mobile.safetensors"
    changes = compare_reports(blobstore.report([family]), blobstore.report([family], names=open_any(checkpoint)))
    assert (changes.new, changes.gone) == ({}, {})


# ------------------------------------------------------------------------------------ what blobstore adds itself


def test_own_records_and_padding_are_no_findings(tmp_path: Path) -> None:
    """Equal records in two files, and small tensors that the format keeps apart."""
    record = bytes(4) + b"BR01" + b"how a delegate's weights are made of the model's" * 40
    for number, name in enumerate("ab"):
        store = BlobStore()
        for i in range(300):
            store.add(f"{name}.{i}", values(1000 * number + i, 17))
        store.add(records_key(record), record)
        store.write(tmp_path)
        (tmp_path / "blobs.ptd").rename(tmp_path / f"{name}.ptd")
        Payload([f"{name} {records_key(record)}".encode()], {records_key(record): record}).write(
            tmp_path / f"{name}.pte"
        )
    report = blobstore.report([tmp_path])
    accounted(report)
    assert report.files[0].by_kind[RegionKind.PADDING] > 4096
    assert report.findings == ()
    # of another writer, the same padding is one
    write_ptd(tmp_path / "c.ptd", [Tensor.of(f"c.{i}", values(5000 + i, 17)) for i in range(300)], alignment=128)
    assert {finding.kind for finding in blobstore.report([tmp_path]).findings} == {FindingKind.PADDING}


def test_what_dedup_writes_has_no_padding_to_complain_of(lowered: Any, tmp_path: Path) -> None:
    (tmp_path / "a.pte").write_bytes(lowered.decoder().pte)
    blobstore.dedup_programs([tmp_path / "a.pte"], tmp_path / "out")
    report = blobstore.report([tmp_path / "out"])
    assert not {FindingKind.PADDING, FindingKind.UNREFERENCED} & set(report.by_kind)
    assert {file.format: file.alignment for file in report.files} == {"pte": 4096, "ptd": 128}


# --------------------------------------------------------------------------------------------- files in common


def test_families_are_groups_and_strangers_are_alone(zoo_report: Report) -> None:
    groups = find_groups(zoo_report)
    assert sorted(f for group in groups for f in group.files) == list(range(200))
    of = [zoo_report.files[f].path for f in groups[0].files]
    assert len(of) > 15
    assert len({path.split("/models/")[1].split("-")[0].replace("checkpoints/", "") for path in of}) < len(of)
    for group in groups:
        assert group.once <= group.bytes
        if len(group.files) > 1:
            common = common_bytes(zoo_report, [(f,) for f in group.files])
            assert all(2 * common[0][i] >= common[i][i] for i in range(len(group.files)))
    alone = [group for group in groups if len(group.files) == 1]
    assert sum("experiments" in zoo_report.files[group.files[0]].path for group in alone) == 55


def test_tensors_of_one_value_make_no_family(tmp_path: Path) -> None:
    for number, name in enumerate("ab"):
        zeros = np.zeros((64, 64), np.float32)
        write_ptd(tmp_path / f"{name}.ptd", [Tensor.of("zeros", zeros), Tensor.of(name, values(number, 30, 30))])
    assert [len(group.files) for group in find_groups(blobstore.report([tmp_path]))] == [1, 1]


# ------------------------------------------------------------------------------------- reprs, notebooks, pages


def test_a_report_of_nothing_says_so_in_a_console() -> None:
    assert repr(blobstore.report(["/missing.pte"])) == (
        "<Report: No file could be read, 0 findings, 1 could not be read>"
    )


def test_a_notebook_shows_a_summary(zoo_report: Report, tmp_path: Path) -> None:
    text = zoo_report._repr_html_()
    assert len(text) < 10_000
    assert "<script" not in text and "http" not in text and "<style" not in text
    for kind in zoo_report.by_kind:
        assert FINDINGS[kind] in text and COLORS[kind] in text
    assert "vision" in text
    write_ptd(tmp_path / "<b>bold.ptd", [Tensor.of(HOSTILE, values(1, 60, 50)), Tensor.of("t", values(1, 60, 50))])
    text = blobstore.report([tmp_path])._repr_html_()
    assert html.escape("<b>bold.ptd") in text and "<b>" not in text


@pytest.mark.long
def test_to_html_writes_the_page_and_replaces_pages_only(zoo_report: Report, tmp_path: Path) -> None:
    path = tmp_path / "zoo.html"
    assert zoo_report.to_html(path) == path
    assert zoo_report.to_html(str(path)) == path
    assert path.read_text() == to_html(zoo_report)
    assert len(path.read_bytes()) < 500_000
    other = write_ptd(tmp_path / "weights.ptd", [Tensor.of("w", values(1, 9))])
    with pytest.raises(OutputPathError):
        zoo_report.to_html(other)
    zoo_report.to_html(other, force=True)
    assert other.read_text() == path.read_text()


def test_a_page_of_nameless_tensors_says_how_they_get_names(tmp_path: Path) -> None:
    weight = values(1, 60, 50)
    (tmp_path / "models").mkdir()
    Payload([], {t.key: t.raw for t in nameless(weight)}).write(tmp_path / "models" / "m.pte")
    assert "12.0 KB have no names" in to_html(blobstore.report(tmp_path / "models"))
    write_safetensors(tmp_path / "model.safetensors", [Tensor.of("weight", weight)])
    assert "have no names" not in to_html(blobstore.report(tmp_path / "models"))


def test_names_that_look_like_parts_of_the_template_are_names(tmp_path: Path) -> None:
    """Files and folders called {{js}} or <b>: in commands, folders and groups they are text, and all parts are there."""
    for folder in ("{{data}}", "<b>bold"):
        (tmp_path / folder).mkdir()
        for name in ("{{js}}", "</code><i>"):
            path = tmp_path / folder / f"{name.replace('/', '|')}.ptd"
            write_ptd(path, [Tensor.of("w", values(1, 60, 50)), Tensor.of(name, values(len(name), 30, 30))])
    page = to_html(blobstore.report([tmp_path]))
    assert page.count("<script") == page.count("</script>") == 2
    assert page.count('"use strict"') == 1
    assert "{{data}}" in page and "{{js}}" in page
    assert "<b>bold" not in page and "<i>" not in page


# ---------------------------------------------------------------------------------------------------- the rest


@pytest.mark.parametrize(
    ("grown", "more", "expected"),
    [
        (5_000, -2_000, "the files grew by 5.00 KB; 2.00 KB less can be saved"),
        (-5_000, 2_000, "the files shrank by 5.00 KB; 2.00 KB more can be saved"),
        (0, 0, "the files have as many bytes as before; as much can be saved as before"),
    ],
)
def test_what_grew_is_told_as_growth(grown: int, more: int, expected: str) -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    print_changes(Changes(grown, more, (), (), (("a.pte", grown),) if grown else (), {}, {}), console)
    text = console.export_text()
    assert f"Since the baseline: {expected}." in text
    assert "-" not in text
    if grown:
        assert f"{'grew' if grown > 0 else 'shrank'} by 5.00 KB: a.pte" in text


def test_the_terminal_names_types_and_shapes(zoo_report: Report) -> None:
    text = printed(zoo_report)
    assert max(map(len, (line for line in text.splitlines() if "blobstore dedup" not in line))) <= 100
    console = Console(width=100, record=True, file=io.StringIO())
    print_report(zoo_report, console, top=1000)
    assert "float 128 x 256" in console.export_text()
