"""Why sharing was lost since a baseline: each cause by a change that has it, and sums that hold for all changes (B2)."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import blobstore
from blobstore.cli.app import app
from blobstore.errors import UnsupportedDataError
from blobstore.reporting import FileReport, Finding, FindingKind, Region, RegionKind, Report, load_report
from blobstore.reporting.find.baseline import Changes
from blobstore.reporting.find.causes import Cause
from blobstore.reporting.json_output import from_json, to_json
from blobstore.reporting.model import CauseKind, Claim
from tests.reporting.find.test_planted import values
from tests.reporting.planted import Payload, Tensor, write_ptd, write_safetensors

W, V, OWN = values(1, 60, 50), values(2, 60, 50), values(3, 60, 50)
SIZE = W.nbytes
Files = dict[str, Any]


def report_of(folder: Path, files: Files) -> Report:
    """A report of a folder that has these files and no others: tensors by their keys, or a program."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, contents in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(contents, Payload):
            contents.write(path)
        elif isinstance(contents, bytes):
            path.write_bytes(contents)
        else:
            tensors = [Tensor.of(key, array) for key, array in contents.items()]
            (write_ptd if name.endswith(".ptd") else write_safetensors)(path, tensors)
    return blobstore.report([folder])


def changes_of(tmp_path: Path, before: Files, after: Files) -> Changes:
    """What changed; the baseline goes through JSON, as on the command line."""
    old = from_json(json.loads(json.dumps(to_json(report_of(tmp_path / "models", before)))))
    changes = report_of(tmp_path / "models", after).since(old)
    assert lawful(changes)
    return changes


def lawful(changes: Changes) -> bool:
    saves = sum(cause.saves for cause in changes.lost) - sum(cause.saves for cause in changes.gained)
    return saves == changes.saves and all(cause.bytes > 0 for cause in (*changes.lost, *changes.gained))


def kinds(causes: tuple[Cause, ...]) -> dict[str, int]:
    """Bytes of each kind."""
    sums: dict[str, int] = {}
    for cause in causes:
        sums[cause.kind.value] = sums.get(cause.kind.value, 0) + cause.bytes
    return sums


def only(causes: tuple[Cause, ...]) -> Cause:
    [cause] = causes
    return cause


def sha(array: np.ndarray, name: str = "") -> str:
    return hashlib.sha256(array.tobytes()).hexdigest() + name


def program(*arrays: np.ndarray, suffix: str = "") -> Payload:
    """A program with named data under keys that are made of contents, as ExecuTorch makes them."""
    return Payload([], {sha(array, suffix): array.tobytes() for array in arrays})


SHARED: Files = {"shared.ptd": {"w": W}}
OTHERS: Files = {"a.pte": program(V), "b.pte": program(OWN)}
BESIDE: Files = {**SHARED, "b.ptd": {"own": V}}
HALF = W.astype("f2")
TIED: Files = {"m.pte": Payload([], {sha(W, "encoder"): W.tobytes(), sha(W, "decoder"): W.tobytes()})}


def beside(more: np.ndarray) -> Files:
    """What has a tensor under the name of the shared one, too."""
    return {**SHARED, "b.ptd": {"own": V, "w": more}}


CASES: dict[str, tuple[Any, ...]] = {  # files before and after, what is lost, and what is gained if anything is
    # ExecuTorch 1.1 and 1.2 put the name of a tensor into its key, so equal tensors were stored once for each name
    "key": ({"m.pte": Payload([], {sha(W): W.tobytes()})}, TIED, {"key": SIZE}),
    "key, in a data file": ({"a.ptd": {"embed": W}}, {"a.ptd": {"embed": W, "head": W}}, {"key": SIZE}),
    "data_file, into programs": (
        {**SHARED, **OTHERS},
        {**SHARED, **OTHERS, "a.pte": program(V, W)},
        {"data_file": SIZE},
    ),
    "data_file, which is gone": (
        {**SHARED, **OTHERS},
        {"a.pte": program(V, W), "b.pte": program(OWN, W)},
        {"data_file": SIZE},
    ),
    "data_file, one for each": (SHARED, {"a.ptd": {"w": W}, "b.ptd": {"w": W}}, {"data_file": SIZE}),
    "added_file, with the same": (
        {**SHARED, "a.pte": program(V)},
        {**SHARED, "a.pte": program(V), "b.pte": program(OWN, W)},
        {"added_file": SIZE},
    ),
    "added_file, with nothing in common": (
        {**SHARED, "a.pte": Payload([b"own"])},
        {**SHARED, "a.pte": Payload([b"own"]), "b.pte": program(V)},
        {},  # that it could have shared is a guess
        {},
    ),
    "dtype, exactly": (
        {"a.ptd": {"w": HALF}, "b.safetensors": {"w": HALF}},
        {"a.ptd": {"w": HALF}, "b.safetensors": {"w": HALF.astype("f4")}},
        {"dtype": SIZE},
        {"changed": SIZE // 2},
    ),
    "dtype, rounded": (BESIDE, beside(HALF), {"dtype": SIZE // 2}),
    "dtype, of one file": (
        {"a.ptd": {"w": W.astype("i1"), "v": V}},
        {"a.ptd": {"w": W, "v": V}},
        {"dtype": SIZE - W.size},
    ),
    "layout": (BESIDE, beside(W.T), {"layout": SIZE}),
    "values, a few": (BESIDE, beside(np.concatenate([W[:59], V[:1]])), {"values": SIZE - 50 * 8}),
    "values, all": (BESIDE, beside(OWN), {"values": SIZE}),
    "payload, beside a tensor": (
        {"a.ptd": {"w": W}, "m.pte": Payload([b"key of w"])},
        {"a.ptd": {"w": W}, "m.pte": Payload([b"0123" + W.tobytes()])},
        {"payload": SIZE},
    ),
    "payload, of two programs": (
        {"a.ptd": {"w": W}, "m.pte": Payload([b"key of w"]), "n.pte": Payload([b"it, too"])},
        {"m.pte": Payload([b"0123" + W.tobytes()]), "n.pte": Payload([b"other" + W.tobytes()])},
        {},  # without the tensor, that the payloads hold it is a guess
        {},
    ),
    "lowered_twice": (
        {"m.pte": Payload([W.tobytes(), V.tobytes()])},
        {"m.pte": Payload([W.tobytes(), V.tobytes(), W.tobytes()])},
        {"lowered_twice": SIZE},
    ),
    "constant": ({"a.ptd": {"w": W}}, {"a.ptd": {"w": 0 * abs(W)}}, {"constant": SIZE - 4}),
    "equal": (
        {"a.ptd": {"w": W}, "b.safetensors": {"w": V}},
        {"a.ptd": {"w": W}, "b.safetensors": {"w": W}},
        {"equal": SIZE},
    ),
    "added": ({"a.ptd": {"w": W}}, {"a.ptd": {"w": W, "x": V, "y": V}}, {"added": SIZE}),
    "shared": (
        {"a.pte": program(W), "b.pte": program(W)},
        {**SHARED, "a.pte": Payload([b"own"]), "b.pte": Payload([b"own, too"])},
        {},
        {"shared": SIZE, "removed": 64},  # a payload that named the key
    ),
    "changed": (
        {"a.ptd": {"w": W}, "b.safetensors": {"w": W}},
        {"a.ptd": {"w": W}, "b.safetensors": {"w": V}},
        {"values": SIZE},
        {"changed": SIZE},
    ),
    "removed": ({"a.ptd": {"w": W}, "b.ptd": {"w": W}}, {"a.ptd": {"w": W}}, {}, {"removed": SIZE}),
}


@pytest.mark.parametrize("name", CASES)
def test_each_cause_is_named_with_its_bytes(name: str, tmp_path: Path) -> None:
    before, after, lost, gained = (*CASES[name], {})[:4]
    changes = changes_of(tmp_path, before, after)
    assert (kinds(changes.lost), kinds(changes.gained)) == (lost, gained)


def test_every_cause_has_a_case() -> None:
    elsewhere = {"copies", "padding", "unreferenced"}
    assert {kind.value for kind in CauseKind} == elsewhere | {
        kind for case in CASES.values() for of in case[2:] for kind in of
    }


def test_tied_weights_that_are_stored_for_each_name(tmp_path: Path) -> None:
    """Once under both keys before, as blobstore writes it; then as a tool without aliases does."""
    (tmp_path / "models").mkdir()
    blobstore.save_file({"embed": W, "head": W}, tmp_path / "models" / "a.ptd")
    old = blobstore.report([tmp_path / "models"])
    changes = report_of(tmp_path / "models", {"a.ptd": {"embed": W, "head": W}}).since(old)
    assert lawful(changes) and only(changes.lost).kind is CauseKind.COPIES
    assert only(changes.lost).bytes == SIZE
    back = old.since(blobstore.report([tmp_path / "models"]))
    assert only(back.gained).kind is CauseKind.SHARED and not back.lost


def test_padding_and_what_nothing_refers_to(tmp_path: Path) -> None:
    tensors = [Tensor.of(f"w{i}", values(i, 30, 30)) for i in range(9)]
    write_ptd(tmp_path / "a.ptd", tensors, alignment=16)
    old = blobstore.report([tmp_path])
    write_ptd(tmp_path / "a.ptd", tensors, alignment=4096)
    changes = blobstore.report([tmp_path]).since(old)
    assert lawful(changes) and only(changes.lost).kind is CauseKind.PADDING
    assert only(changes.lost).detail == "blobs start at multiples of 4096, before of 16"
    (tmp_path / "a.ptd").write_bytes((tmp_path / "a.ptd").read_bytes() + b"appended" * 800)
    changes = blobstore.report([tmp_path]).since(old)
    assert lawful(changes) and set(kinds(changes.lost)) == {"padding", "unreferenced"}
    assert kinds(changes.lost)["unreferenced"] == 6400


@pytest.mark.long
def test_slim_programs_that_hold_their_weights_again(lowered: Any, tmp_path: Path) -> None:
    """Real programs before and after `blobstore dedup`, which has the opposite cause."""
    for name, model in {"a": lowered.mlp(), "b": lowered.mlp(delegated=True), "c": lowered.decoder()}.items():
        model.write(tmp_path / "fat", name)
    shutil.copy(tmp_path / "fat" / "a.pte", tmp_path / "fat" / "a2.pte")
    shutil.copy(tmp_path / "fat" / "c.pte", tmp_path / "fat" / "c2.pte")
    blobstore.dedup_programs([tmp_path / "fat"], tmp_path / "slim")
    fat, slim = blobstore.report([tmp_path / "fat"]), blobstore.report([tmp_path / "slim"])
    lost, gained = fat.since(slim), slim.since(fat)
    assert lawful(lost) and lawful(gained)
    weights = [c for c in lost.lost if c.kind is not CauseKind.LOWERED_TWICE]
    assert {c.kind for c in weights} == {CauseKind.DATA_FILE}
    assert {c.kind for c in gained.gained} == {CauseKind.SHARED}
    assert sum(c.saves for c in gained.gained) == sum(c.saves for c in weights)
    assert not lost.added and not gained.removed  # files are compared below the folder of each report


def test_the_methods_are_named() -> None:
    """A region that two methods use, and one for each now: what the baseline knows of the methods is said."""

    def region(start: int, *methods: str) -> Region:
        return Region(RegionKind.CONSTANT, start, start + SIZE, ("constant",), methods, digest="0a")

    shared = FileReport("m.pte", "pte", SIZE, (region(0, "encode", "decode"),))
    apart = FileReport("m.pte", "pte", 2 * SIZE, (region(0, "encode"), region(SIZE, "decode")))
    places, claims = ((0, 0), (0, 1)), (Claim(0, 1, 0, SIZE),)
    finding = Finding(FindingKind.DUPLICATE_METHODS, places, claims, SIZE, counted=SIZE)
    cause = only(Report((apart,), (finding,)).since(Report((shared,), ())).lost)
    assert (cause.kind, cause.bytes) == (CauseKind.COPIES, SIZE)
    assert cause.detail == "1 before, 2 now; used by encode, decode"


# ------------------------------------------------------------------------------------------------------ what holds


def test_other_values_everywhere_are_no_lost_sharing(tmp_path: Path) -> None:
    """A new version of the weights, in files that waste as much as before under the same keys, and under digests."""

    def version(one: np.ndarray, two: np.ndarray) -> Files:
        tensors = {"w": one, "tied": one, "v": two}
        return {"a.ptd": tensors, "b.ptd": tensors, "m.pte": program(one, two), "n.pte": program(one)}

    changes = changes_of(tmp_path, version(W, V), version(values(8, 60, 50), values(9, 60, 50)))
    assert (changes.lost, changes.gained, changes.saves) == ((), (), 0)


def test_files_of_another_folder_are_the_same_files(tmp_path: Path) -> None:
    """Also one file under another name; several files under other names are others."""
    tensors = {"w": W, "tied": W}
    one = report_of(tmp_path / "build-1", {"x/a.ptd": tensors, "x/b.ptd": {"w": V}})
    two = report_of(tmp_path / "build-2", {"x/a.ptd": tensors, "x/b.ptd": {"w": V}})
    changes = two.since(one)
    assert (changes.added, changes.removed, changes.new, changes.gone) == ((), (), {}, {})
    assert (changes.lost, changes.gained) == ((), ())
    single = report_of(tmp_path / "build-3", {"m-1.1.ptd": tensors})
    changes = single.since(report_of(tmp_path / "build-4", {"m-1.0.ptd": {"w": W}}))
    assert not changes.added and only(changes.lost).kind is CauseKind.KEY


@st.composite
def sets(draw: st.DrawFn) -> Files:
    """Files of tensors of a few contents, in a few types and layouts."""
    contents = [W, W.T, W.astype("f2"), W.astype("f2").astype("f4"), np.concatenate([W[:59], V[:1]]), V, 0 * abs(W)]
    chosen = st.lists(st.tuples(st.sampled_from("uvwxyz"), st.integers(0, len(contents) - 1)), unique_by=lambda x: x[0])
    files: Files = {}
    for name in ("a.ptd", "b.ptd", "c.safetensors", "m.pte", "n.pte"):
        tensors = [(key, contents[number]) for key, number in draw(chosen)]
        if draw(st.booleans()) or not tensors:
            continue
        if name.endswith(".pte"):
            raw = [array.tobytes() for _, array in tensors]
            cut = draw(st.integers(0, len(raw)))
            files[name] = Payload(
                raw[:cut], {key: data for (key, _), data in zip(tensors[cut:], raw[cut:], strict=True)}
            )
        else:
            files[name] = dict(tensors)
    return files


@pytest.mark.long
@settings(max_examples=80, suppress_health_check=list(HealthCheck))
@given(sets(), sets())
def test_causes_add_up_for_any_two_sets(tmp_path_factory: pytest.TempPathFactory, before: Files, after: Files) -> None:
    """The saves of what was lost minus those of what was gained are by how much the total grew, both ways."""
    folder = tmp_path_factory.mktemp("sets")
    one, two = (report_of(folder / "models", {**files, "z.ptd": {"own": OWN}}) for files in (before, after))
    for old, new in ((one, two), (two, one), (one, one)):
        changes = new.since(old)
        assert lawful(changes)
        assert (old is new) <= (changes.lost == changes.gained == ())
        assert all(cause.saves in {0, cause.bytes} for cause in (*changes.lost, *changes.gained))


# ------------------------------------------------------------------------------------------------- how they are shown


@pytest.fixture
def baseline(tmp_path: Path) -> Path:
    before, after, _ = CASES["key"]
    (tmp_path / "old.json").write_text(json.dumps(to_json(report_of(tmp_path / "models", before))))
    report_of(tmp_path / "models", {**after, "b.ptd": {"<b>w": V, "x": V}})
    return tmp_path


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["report", "--no-cache", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_causes_are_on_the_terminal_in_json_and_on_the_page(baseline: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    options = (baseline / "models", "--baseline", baseline / "old.json")
    text = run(*options)
    assert "Why sharing was lost" in text and "equal bytes under a new key" in text
    assert sha(W) in text and sha(W, "decoder") in text
    plain = json.loads(run(*options, "--json"))
    schema = json.loads((Path(blobstore.reporting.__file__).parent / "schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(plain)
    assert schema["properties"]["changes"]["properties"]["lost"]["items"]["properties"]["kind"]["enum"] == [
        kind.value for kind in CauseKind
    ]
    causes = {cause["kind"]: cause for cause in plain["changes"]["lost"]}
    assert set(causes) == {"key", "added_file"}
    path = str(baseline / "models" / "m.pte")
    assert causes["key"]["before"] == [{"path": path, "key": sha(W)}]
    assert causes["key"]["after"] == [{"path": path, "key": sha(W, name)} for name in ("encoder", "decoder")]
    run(*options, "--html", baseline / "page.html")
    page = (baseline / "page.html").read_text()
    assert "What changed</h2>" in page and "equal bytes under a new key" in page
    assert "&lt;b&gt;w" in page and "<b>w" not in page.split("<script")[0]
    run(baseline / "models", "--html", baseline / "page.html")
    assert "What changed</h2>" not in (baseline / "page.html").read_text()


def test_a_baseline_is_a_report(baseline: Path) -> None:
    """Not the path of one, nor its JSON."""
    report = blobstore.report(baseline / "models")
    assert report.since(load_report(baseline / "old.json")).lost
    wrong: Any
    for wrong in (baseline / "old.json", "old.json", {}):
        with pytest.raises(UnsupportedDataError, match="baseline: expected a report, found a"):
            report.to_html(baseline / "new.html", baseline=wrong)
    assert not (baseline / "new.html").exists()
