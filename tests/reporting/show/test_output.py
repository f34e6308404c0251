"""What the report prints and writes: terminal, JSON, changes, limits, exit codes."""

import copy
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

import blobstore
from blobstore.cli.app import app
from blobstore.core.regions.region import RegionKind
from blobstore.core.text import size
from blobstore.errors import InvalidFileError
from blobstore.reporting.find.baseline import compare_reports
from blobstore.reporting.json_output import SCHEMA, from_json, load_report, to_json
from blobstore.reporting.limits import Limit
from blobstore.reporting.model import FindingKind
from blobstore.reporting.show.terminal import print_report
from blobstore.reporting.show.words import COLORS, FINDINGS, REGIONS
from tests.reporting.find.test_planted import values
from tests.reporting.planted import Payload, Tensor, write_ptd, write_safetensors

HOSTILE = "<script>alert(1)</script>[bold red]x[/] \x1b[31m\u202e</script><!--.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Waste of many classes, a hostile key, and a file that cannot be read."""
    made = tmp_path / "models"
    made.mkdir()
    weight = values(1, 60, 50)
    tuned = weight.copy()
    tuned[3, :7] += 1
    write_ptd(made / "a.ptd", [Tensor.of("w", weight), Tensor.of(HOSTILE, weight), Tensor.of("z", abs(weight) * 0)])
    write_safetensors(made / "b.safetensors", [Tensor.of("w", weight), Tensor.of("t", weight.T)])
    write_ptd(
        made / "[red]c.ptd",
        [Tensor.of("tuned", tuned), Tensor.of("long." * 30, values(2, 9, 9)), Tensor.of("x", values(3, 9, 9))],
        alignment=4096,
    )
    Payload([weight.tobytes()]).write(made / "d.pte")
    (made / "bad\x1b[31m.ptd").write_bytes(b"nothing")
    return made


def run(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["report", *map(str, arguments)], env={"COLUMNS": "100"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == code, result.output
    return result


def test_every_kind_has_words_and_a_color() -> None:
    assert set(FINDINGS) == set(COLORS) == set(FindingKind)
    assert set(REGIONS) == set(RegionKind)


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_the_terminal_view_leads_with_the_answer_and_fits(folder: Path, width: int) -> None:
    report = blobstore.report([folder])
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    print_report(report, console)
    console.file.close()
    lines = console.export_text().splitlines()
    assert lines[0].startswith(f"{size(report.total_saves)} of {size(report.total_bytes)}")
    prose = [line for line in lines if "blobstore dedup" not in line and "blobstore convert" not in line]
    assert max(map(len, prose)) <= min(width, 100)


def test_nothing_in_a_key_or_a_path_acts_on_a_terminal(folder: Path) -> None:
    output = run(folder, code=3).output
    assert "\x1b" not in output
    assert "\u202e" not in output
    assert "[red]c.ptd" in output
    assert "not read: " in output
    assert "bad\\x1b[31m.ptd: " in output.replace("\n", "")


def test_json_is_as_the_schema_says(folder: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    plain = json.loads(run(folder, "--json", code=3).stdout)
    validator = jsonschema.Draft202012Validator(schema)
    validator.validate(plain)
    # nothing is left out of the schema, and the kinds are all there are
    assert set(plain) <= set(schema["properties"])
    assert set(plain["files"][0]) == set(schema["properties"]["files"]["items"]["properties"])
    finding = schema["properties"]["findings"]["items"]["properties"]
    assert set(plain["findings"][0]) == set(finding)
    assert finding["kind"]["enum"] == [kind.value for kind in FindingKind]
    region = schema["properties"]["files"]["items"]["properties"]["regions"]["items"]["properties"]
    assert set(plain["files"][0]["regions"][0]) == set(region)
    assert region["kind"]["enum"] == [kind.value for kind in RegionKind]
    assert {finding["kind"] for finding in plain["findings"]} >= {"contained", "near_duplicate", "padding"}
    broken = {**plain, "version": 2}
    assert not validator.is_valid(broken)


def test_json_there_and_back(folder: Path) -> None:
    report = blobstore.report([folder])
    assert from_json(json.loads(json.dumps(to_json(report)))) == report


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", r"not JSON \(Expecting value.*"),
        (b"{", r"not JSON \(.*line 1.*"),
        (b"[" * 10**5, r"not JSON \(.*recursion.*"),
        (b"\x1c\0\0\0ET12\xff", "not JSON"),
        (b"[]", "expected an object with 'schema', found a list"),
        (b"null", "expected an object with 'schema', found None"),
        (b"{}", "it lacks 'schema'"),
        (b'{"schema": "blobstore-report", "version": 99}', "expected a blobstore-report of version 1"),
    ],
)
def test_something_else_is_not_taken_for_a_report(content: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    path.write_bytes(content)
    with pytest.raises(InvalidFileError, match=f"old.json: not a report of blobstore: {reason}$"):
        load_report(path)
    assert "old.json" in run(tmp_path, "--baseline", path, code=3).stderr


def test_what_changed_since_the_baseline(tmp_path: Path) -> None:
    folder, old = tmp_path / "models", tmp_path / "old.json"
    folder.mkdir()
    weight, other = values(1, 60, 50), values(2, 60, 50)
    write_ptd(folder / "a.ptd", [Tensor.of("w", weight)])
    write_ptd(folder / "b.ptd", [Tensor.of("w", weight)])
    write_ptd(folder / "gone.ptd", [Tensor.of("x", values(3, 9, 9))])
    old.write_text(run(folder, "--json").stdout)
    same = json.loads(run(folder, "--json", "--baseline", old).stdout)["changes"]
    assert not any(same.values()) and {"lost", "gained", "new", "gone"} < set(same)

    (folder / "gone.ptd").unlink()
    write_ptd(folder / "b.ptd", [Tensor.of("v", other)])
    write_ptd(folder / "c.ptd", [Tensor.of("v", other), Tensor.of("t", other.T)])
    plain = json.loads(run(folder, "--json", "--baseline", old).stdout)
    pytest.importorskip("jsonschema").validate(plain, json.loads(SCHEMA.read_text()))
    changes = plain["changes"]
    assert [Path(path).name for path in changes["added"]] == ["c.ptd"]
    assert [Path(path).name for path in changes["removed"]] == ["gone.ptd"]
    assert changes["saves"] == other.nbytes
    assert changes["gone"] == [{"kind": "duplicate_files", "findings": 1, "bytes": weight.nbytes}]
    assert changes["new"] == [
        {"kind": "duplicate_files", "findings": 1, "bytes": other.nbytes},
        {"kind": "other_layout", "findings": 1, "bytes": other.nbytes},
    ]
    text = run(folder, "--baseline", old).stdout
    assert "Since the baseline: " in text
    assert "no longer there: " in text

    # a limit bounds what was added to the baseline, not the earlier findings
    assert run(folder, "--baseline", old, "--fail-over", other.nbytes).exit_code == 0
    line = run(folder, "--baseline", old, "--fail-over", other.nbytes - 1, code=1).stderr
    end = f"since the baseline; the limit is {other.nbytes - 1}\n"
    assert line == f"blobstore: waste grew by {size(other.nbytes)} ({other.nbytes:,} bytes) {end}"
    line = run(folder, "--baseline", old, "--fail-over", "1%", code=1).stderr
    assert line.endswith(f"the limit is 1% of {plain['total_bytes']:,} bytes\n")


@pytest.mark.parametrize(("limit", "code"), [("0", 1), ("11999", 1), ("12000", 0), ("1%", 1), ("60%", 0), ("1MB", 0)])
def test_a_limit_on_waste(tmp_path: Path, limit: str, code: int) -> None:
    for name in "ab":
        write_ptd(tmp_path / f"{name}.ptd", [Tensor.of("w", values(1, 60, 50))])
    result = run(tmp_path, "--fail-over", limit, code=code)
    lines = result.stderr.splitlines()
    assert len(lines) == code  # one line that says why, or none
    if code:
        assert re.fullmatch(
            rf"blobstore: duplicates waste 12\.0 KB \(12,000 bytes.*over the limit of {limit}", lines[0]
        )


def test_a_file_that_cannot_be_read_comes_before_a_limit(folder: Path) -> None:
    """What was not read may waste more, so both are reported (B2)."""
    assert "over the limit" in run(folder, "--fail-over", "1", code=3).stderr
    run(folder, "--fail-over", "99%", code=3)


@pytest.mark.parametrize("options", [[], ["--fail-over", "5%"], ["--json"]])
def test_a_report_on_nothing_is_not_a_success(options: list[str], tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no model")
    assert "no file to report on" in run(tmp_path, *options, code=3).stderr


@pytest.mark.parametrize(
    ("text", "number"), [("5", 5), ("1.5 KB", 1500), ("1KiB", 1024), ("2gb", 2 * 10**9), ("0.5MiB", 2**19), ("7B", 7)]
)
def test_sizes(text: str, number: float) -> None:
    assert Limit.parse(text) == (number, False, text)


@pytest.mark.parametrize("text", ["", "-1", "five", "5 apples", "%", "1e3", "nan", "5%%"])
def test_what_is_not_a_limit(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither"):
        Limit.parse(text)
    run(tmp_path, f"--fail-over={text}", code=2)


def test_the_cache_is_used_unless_it_is_refused(folder: Path, cache_folder: Path, tmp_path: Path) -> None:
    default = cache_folder / "blobstore" / "fingerprints.sqlite"
    run(folder, "--no-cache", code=3)
    assert not default.exists()
    run(folder, code=3)
    assert default.exists()
    run(folder, "--cache", tmp_path / "mine.sqlite", code=3)
    assert (tmp_path / "mine.sqlite").exists()


def test_without_a_home_the_report_goes_on_without_a_cache(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    run(folder, code=3)


def test_html_is_written_whole_or_not_at_all(folder: Path, tmp_path: Path) -> None:
    run(folder, "--html", tmp_path / "missing" / "x.html", code=3)
    run(folder, "--html", tmp_path / "x.html", code=3)
    page = (tmp_path / "x.html").read_text()
    assert page.count("<script") == 2
    assert "src=" not in page and 'href="http' not in page and "@import" not in page  # it needs no library
    assert "alert(1)" not in page  # keys are in the packed data only
    assert "bad\\x1b[31m.ptd" in page
    assert "{{" not in page.split("<script>")[0]


def test_a_name_that_cannot_be_decoded(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"bytes-\xff.ptd")
    write_ptd(path, [Tensor.of("w", values(1, 60, 50)), Tensor.of("v", values(1, 60, 50))])
    os.utime(path, (1, 1))
    for _ in range(2):  # the second time from the cache
        assert "bytes-\\udcff.ptd" in run(tmp_path, "--html", tmp_path / "x.html").output
    json.loads(run(tmp_path, "--json").stdout)


def baseline_of(folder: Path, tmp_path: Path) -> tuple[Path, Any]:
    path = tmp_path / "old.json"
    path.write_text(run(folder, "--json", "--no-cache", code=3).stdout)
    return path, json.loads(path.read_text())


def places_of(plain: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value of a JSON document; of the elements of a list only the first."""
    if path:
        yield path
    for name, value in (
        plain.items() if isinstance(plain, dict) else enumerate(plain[:1]) if isinstance(plain, list) else ()
    ):
        yield from places_of(value, (*path, name))


@pytest.mark.long
def test_a_baseline_that_was_changed_anywhere_is_refused_or_harmless(folder: Path, tmp_path: Path) -> None:
    """Every value of a baseline replaced by every kind of value, and left out: an error of ours, or a report."""
    _, plain = baseline_of(folder, tmp_path)
    path = tmp_path / "changed.json"
    refused = 0
    for place in places_of(plain):
        for value in (None, True, -1, 2**63, 1.5, float("nan"), "x", "\ud800", [], [[]], {}, ..., 10**400):
            changed = copy.deepcopy(plain)
            inner = changed
            for name in place[:-1]:
                inner = inner[name]
            if value is ...:
                del inner[place[-1]]
            else:
                inner[place[-1]] = value
            path.write_text(json.dumps(changed))
            try:
                old = load_report(path)
            except InvalidFileError as error:
                refused += 1
                assert "changed.json: not a report of blobstore" in str(error)
            else:
                compare_reports(old, old)
    assert refused > 200
