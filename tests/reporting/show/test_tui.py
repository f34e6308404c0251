"""The report's browser: keys are pressed and the screen is read, at several sizes (B2)."""

import re
import shlex
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from safetensors.numpy import load_file
from textual.geometry import Size
from typer.testing import CliRunner

import blobstore
from blobstore.cli.app import app
from blobstore.cli.report import _browse
from blobstore.core.text import printable, size
from blobstore.reporting import FileReport, Finding, FindingKind, Region, RegionKind, Report
from blobstore.reporting.json_output import to_json
from blobstore.reporting.model import Claim
from blobstore.reporting.show.tree import Node, Tree
from blobstore.reporting.show.tui.app import Browser
from blobstore.reporting.show.tui.cells import fit, folded
from blobstore.reporting.show.tui.files import Files
from blobstore.reporting.show.words import FINDINGS
from tests.helpers.terminal import Terminal
from tests.reporting.browsing import Drawing, after_keys, browsing, picture
from tests.reporting.find.test_planted import values
from tests.reporting.planted import Payload, Tensor, write_ptd, write_safetensors
from tests.reporting.show.test_output import HOSTILE

ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Copies in two data files and a checkpoint, names that are hostile, and a file that cannot be read."""
    made = tmp_path / "models"
    (made / "[red]x[").mkdir(parents=True)
    weight = values(1, 60, 50)
    write_ptd(made / "a.ptd", [Tensor.of("w", weight), Tensor.of(HOSTILE, weight), Tensor.of("z", abs(weight) * 0)])
    write_ptd(
        made / "[red]x[" / "b\x1b]0;t\x07.ptd", [Tensor.of("w", weight), Tensor.of("[@click=app.quit]q", values(2, 9))]
    )
    long = [Tensor.of("long.\u05d0\u6f22\U0001f600" * 400, values(3, 70, 9)), Tensor.of("t", weight.T)]
    write_safetensors(made / "c.safetensors", long)
    Payload([weight.tobytes()]).write(made / "d.pte")
    (made / "bad\x1b[31m.ptd").write_bytes(b"nothing")
    return made


@pytest.fixture
def report(folder: Path) -> Report:
    return blobstore.report([folder])


# ------------------------------------------------------------------------------------------------------- the tree


def nodes(tree: Tree) -> Iterator[tuple[str, Node]]:
    """All nodes below the root, with the way to each."""
    left = [("", tree.root)]
    while left:
        way, node = left.pop()
        for child in tree.children(node):
            left.append((f"{way}/{child.label}".removeprefix("/"), child))
            yield left[-1]


def test_a_file_has_its_tensors_in_modules(zoo_report: Report, zoo_folder: Path) -> None:
    """Against the package safetensors; what has no name is together."""
    name = "checkpoints/language-small.safetensors"
    found = {
        way.removeprefix(f"{name}/"): node for way, node in nodes(Tree.of(zoo_report)) if way.startswith(f"{name}/")
    }
    arrays = load_file(zoo_folder / name)
    leaves = {way.replace("/", "."): node.nbytes for way, node in found.items() if node.place}
    assert {way: nbytes for way, nbytes in leaves.items() if way in arrays} == {k: a.nbytes for k, a in arrays.items()}
    inside = sum(array.nbytes for key, array in arrays.items() if key.startswith("backbone.3."))
    assert (found["backbone/3"].nbytes, found["backbone/3"].items) == (inside, 2)
    assert "head.tied" in found  # alone in its module


def test_regions_without_names_are_together(tmp_path: Path) -> None:
    own = [Tensor.of(f"own.{i}", values(i, 17)) for i in range(20)]
    report = blobstore.report(write_ptd(tmp_path / "a.ptd", own))
    [padding] = [node for way, node in nodes(Tree.of(report)) if way == "a.ptd/padding"]
    assert padding.nbytes == report.files[0].by_kind[RegionKind.PADDING]
    assert padding.items == sum(region.kind is RegionKind.PADDING for region in report.files[0].regions) > 10


def test_names_of_many_parts_and_folders_beyond_number(tmp_path: Path) -> None:
    """A name has eight modules at most; folders may be nested deeper than calls of Python."""
    keys = [f"{'m.' * 1100}{i}" for i in range(20)]
    made = blobstore.report(write_ptd(tmp_path / "a.ptd", [Tensor.of(key, values(i, 9)) for i, key in enumerate(keys)]))
    ways = [way for way, node in nodes(Tree.of(made)) if node.place and "m." in way]
    assert sorted(ways) == sorted(f"a.ptd/m.m.m.m.m.m.m.m/{key}" for key in keys)
    deep = f"s3://zoo/{'x/' * 1100}a.ptd"
    files = [FileReport(path, "ptd", 9, (Region(RegionKind.STRUCTURE, 0, 9),)) for path in (deep, "s3://zoo/b.ptd")]
    tree = Tree.of(Report(tuple(files), ()))
    assert {way for way, node in nodes(tree) if node.is_file} == {"s3://zoo/" + "x/" * 1100 + "a.ptd", "s3://zoo/b.ptd"}
    assert tree.root.nbytes == 18


# ------------------------------------------------------------------------------------------------------- files


def sums(folder: Path, report: Report) -> dict[str, tuple[int, int]]:
    """Of each file or folder in a folder the bytes that the file system gives, and those that JSON says can go."""
    saves = {file["path"]: file["saves"] for file in to_json(report)["files"]}
    made = {}
    for entry in folder.iterdir():
        files = [path for path in entry.rglob("*") if path.is_file()] if entry.is_dir() else [entry]
        made[entry.name] = sum(path.stat().st_size for path in files), sum(saves[str(path)] for path in files)
    return made


def cells(rows: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Size, and what can go, of each name in a list."""
    found = {}
    for row in rows:
        if not row.endswith("/.."):
            first, second, name = re.fullmatch(
                r" *([\d.]+ .?B) +([\d.]+ .?B)? *(?:\[.*?\] )?[/ ](.+?)(?:  .*)?", row
            ).groups()
            found[name] = first, second or ""
    return found


@pytest.mark.parametrize("extent", [(80, 24), (140, 40), (60, 20)])
async def test_a_level_has_the_sizes_of_the_file_system(
    zoo_report: Report, zoo_folder: Path, extent: tuple[int, int]
) -> None:
    async with browsing(zoo_report, extent) as screen:
        folder = zoo_folder
        for name in ("", "speech", "en", "dictation"):
            if name:
                names = list(cells(screen.see().rows))
                await screen.press("home", *["down"] * (names.index(name) + (folder != zoo_folder)), "enter")
                folder /= name
            drawing = screen.see()
            assert drawing.heading == " / ".join(folder.relative_to(zoo_folder).parts or ["all files"])
            expected = sums(folder, zoo_report)
            shown = {name: (size(n), size(saves) if saves else "") for name, (n, saves) in expected.items()}
            assert cells(drawing.rows) == shown
            largest = sorted((nbytes for nbytes, _ in expected.values()), reverse=True)
            assert [first for first, _ in cells(drawing.rows).values()] == [size(nbytes) for nbytes in largest]


def order(drawing: Drawing) -> list[str]:
    return list(cells(drawing.rows))


async def test_rows_are_sorted_as_in_ncdu(zoo_report: Report, zoo_folder: Path) -> None:
    """By name, size, items and what can go; the same key again turns the order round."""
    there = sums(zoo_folder, zoo_report)
    items = Counter[str]()
    for file in zoo_report.files:
        items[Path(file.path).relative_to(zoo_folder).parts[0]] += len(file.regions)
    async with browsing(zoo_report) as screen:
        for key, by in {
            "n": sorted(there),
            "C": sorted(there, key=lambda name: -items[name]),
            "w": sorted(there, key=lambda name: -there[name][1]),
            "s": sorted(there, key=lambda name: -there[name][0]),
        }.items():
            assert order(await screen.press(key)) == by, key
            assert order(await screen.press(key)) == by[::-1], key


async def test_folders_first(zoo_report: Report) -> None:
    async with browsing(zoo_report) as screen:
        await screen.press("down", "enter", "enter", "end", "up", "enter")
        assert screen.see().heading == "speech / en / commands"
        assert order(screen.see())[-1] == "adapters"
        assert order(await screen.press("t"))[0] == "adapters"
        assert order(await screen.press("n", "n"))[0] == "adapters"
        assert order(await screen.press("t"))[-1] == "adapters"


async def test_bars_shares_and_counts(zoo_report: Report, zoo_folder: Path) -> None:
    there = {name: nbytes for name, (nbytes, _) in sums(zoo_folder, zoo_report).items()}

    def filled(row: str) -> int:
        return sum(row.count(c) for c in "█░")

    async with browsing(zoo_report) as screen:
        before = rows = screen.see().rows
        assert filled(rows[0]) == 12  # the largest
        for name, row in zip(order(screen.see()), rows, strict=True):
            assert filled(row) == max(round(12 * there[name] / max(there.values())), 1)
        rows = (await screen.press("g")).rows
        assert "[" not in "".join(rows)
        for row in rows:
            name = row.split("/")[1].split()[0]
            assert f" {there[name] / sum(there.values()):.1%} /{name}" in row
        rows = (await screen.press("g")).rows
        assert all("[" in row and "%" in row for row in rows)
        rows = (await screen.press("g", "c")).rows
        assert not any("[" in row or "%" in row for row in rows)
        number = sum(len(file.regions) for file in zoo_report.files if "/checkpoints/" in file.path)
        assert re.search(rf" {number} /checkpoints ", "\n".join(rows))
        assert (await screen.press("c", "g")).rows == before


async def test_the_keys_that_move(zoo_report: Report) -> None:
    """Back in a folder, the one that was left is chosen."""
    async with browsing(zoo_report) as screen:
        for down, into, back, up in (
            ("j", "l", "h", "k"),
            ("down", "right", "left", "up"),
            ("j", "enter", "less_than_sign", "k"),
            ("down", "l", "backspace", "up"),
        ):
            assert (await screen.press("home")).about.startswith("language: ")
            assert (await screen.press(down)).about.startswith("speech: ")
            assert (await screen.press(into)).heading == "speech"
            assert screen.see().about.startswith("en: ")  # not the row that leads up
            assert (await screen.press(back)).heading == "all files"
            assert screen.see().about.startswith("speech: ")
            assert (await screen.press(back)).heading == "all files"  # there is nothing above it
            assert (await screen.press(up, up)).about.startswith("language: ")
            assert (await screen.press("end")).about.startswith("checkpoints: ")
            assert (await screen.press(into, "home", into)).heading == "all files"  # by the row that leads up
            await screen.press("pageup")
            assert (await screen.press("pagedown")).about.startswith("checkpoints: ")


async def test_tensors_have_types_and_shapes(tmp_path: Path) -> None:
    arrays = {"a": values(1, 60, 50), "b": values(2, 7, 3, 5).astype(np.float16), "c": np.zeros(1, np.int64)}
    write_safetensors(tmp_path / "m.safetensors", [Tensor.of(key, array) for key, array in arrays.items()])
    drawing = await after_keys(blobstore.report([tmp_path]), ["enter"])
    for key, words in {"a": "float 60 x 50", "b": "half 7 x 3 x 5", "c": "long 1"}.items():
        assert re.search(rf"^ +{size(arrays[key].nbytes)} .* {key} +{words}$", drawing.text, re.MULTILINE)
    assert "a: 12.0 KB, tensors, float 60 x 50; all of it stays" in drawing.about


@pytest.mark.long
async def test_files_and_blobs_are_found_by_words(zoo_report: Report, zoo_folder: Path) -> None:
    """A file by its name, the blobs of others by what they are; in the level that is open."""
    there = [path.relative_to(zoo_folder).as_posix() for path in zoo_folder.rglob("*") if "dictation-2" in path.name]
    async with browsing(zoo_report) as screen:
        await screen.press("slash")
        drawing = await screen.type("DICT -2")
        await screen.press("enter")
        drawing = screen.see()
        assert drawing.heading == f"{len(there)} found in all files"
        assert sorted(cells(drawing.rows)) == sorted(there)
        drawing = await screen.press("end", "enter")  # where it is
        assert drawing.heading == "speech / en / dictation"
        assert drawing.about.startswith("dictation-256.pte: ")
        await screen.press("left", "slash")
        await screen.type("half.ptd 2.w")
        drawing = await screen.press("enter")
        assert drawing.heading == "1 found in speech / en"
        assert (await screen.press("end", "enter")).heading == "speech / en / shared / half.ptd / backbone / 2"
        await screen.press("slash")
        await screen.type("nothing like it")
        drawing = await screen.press("enter")
        assert drawing.heading.startswith("0 found in")
        assert (await screen.press("escape")).heading == "speech / en / shared / half.ptd / backbone / 2"


# ---------------------------------------------------------------------------------------------------- findings


def plain(report: Report) -> list[dict[str, Any]]:
    """The findings as JSON has them, the one that adds most first."""
    return sorted(to_json(report)["findings"], key=lambda finding: -finding["counted"])


async def test_findings_are_sorted_by_what_they_add(zoo_report: Report) -> None:
    every = len(plain(zoo_report))
    async with browsing(zoo_report) as screen:
        drawing = await screen.press("2")
        assert drawing.heading.startswith(f"{every} of {every} findings, {size(zoo_report.total_saves)} ─ all kinds")
        for row, finding in zip(drawing.rows, plain(zoo_report), strict=False):
            assert re.match(rf" +{size(finding['counted'])} +■ {FINDINGS[FindingKind(finding['kind'])]} ", row)
        alone = sorted((finding["saves"] for finding in plain(zoo_report)), reverse=True)
        await screen.press("w")
        assert f"; {size(alone[0])} if nothing else is done; " in screen.see().about
        await screen.press("w")
        assert f"; {size(alone[-1])} if nothing else is done; " in screen.see().about


async def test_findings_of_one_kind(zoo_report: Report) -> None:
    """In turn; after the last kind all again, and back."""
    kinds = Counter(finding["kind"] for finding in plain(zoo_report))
    every = len(plain(zoo_report))
    async with browsing(zoo_report) as screen:
        await screen.press("2")
        for kind in FindingKind:
            if kinds[kind.value]:
                drawing = await screen.press("f")
                assert drawing.heading.startswith(f"{kinds[kind.value]} of {every} findings, ")
                assert drawing.heading.endswith(f"■ {FINDINGS[kind]}")
                assert all(FINDINGS[kind] in row for row in drawing.rows)
        assert (await screen.press("f")).heading.endswith("all kinds")
        assert (await screen.press("F")).heading.endswith(FINDINGS[FindingKind.PADDING])


@pytest.mark.long
async def test_findings_are_found_by_all_their_places(zoo_report: Report) -> None:
    """Not only by those that a row names."""
    words = ("wake-word-512", "differ")
    files = zoo_report.files
    expected = [
        finding
        for finding in zoo_report.findings
        if finding.kind is FindingKind.NEAR_DUPLICATE
        and any("wake-word-512" in files[f].path for f, _ in finding.places)
    ]
    every = len(plain(zoo_report))
    async with browsing(zoo_report) as screen:
        await screen.press("2", "slash")
        await screen.type(" ".join(words))
        drawing = await screen.press("enter")
        assert drawing.heading.startswith(
            f"{len(expected)} of {every} findings, {size(sum(f.counted for f in expected))} "
        )
        assert len(drawing.rows) == len(expected) > 0
        assert "wake-word-512 differ" in drawing.text  # what was searched for stays there
        assert (await screen.press("1")).heading == "all files"
        assert (await screen.press("2")).heading.startswith(f"{len(expected)} of")
        assert (await screen.press("escape")).heading.startswith(f"{every} of {every}")


async def test_typing_searches_without_enter_and_no_key_does_anything_else(zoo_report: Report) -> None:
    every = len(plain(zoo_report))
    after_two = (await after_keys(zoo_report, ["2", "down"])).about
    async with browsing(zoo_report) as screen:
        await screen.press("2", "slash")
        await screen.type("q13")
        await screen.until(f"0 of {every}")
        await screen.press("backspace", "backspace", "backspace", "down")  # into the list
        await screen.until(f"{every} of {every}")
        assert (await screen.press("down")).about == after_two


# ------------------------------------------------------------------------------------------- commands, and after


def saved(report: Report) -> dict[str, int]:
    """What each command saves, the largest first."""
    found = Counter[str]()
    for finding in plain(report):
        if finding["command"]:
            found[finding["command"]] += finding["counted"]
    return dict(found.most_common())


async def test_commands_are_copied_as_they_are(zoo_report: Report) -> None:
    """To the clipboard, and for the end."""
    commands = saved(zoo_report)
    async with browsing(zoo_report, (80, 60)) as screen:
        drawing = await screen.press("3")
        assert len(drawing.rows) == len(commands) + 1
        for row, (command, nbytes) in zip(drawing.rows, commands.items(), strict=False):
            assert row.split("  ")[1].strip() == size(nbytes)
            number = 1 if " convert " in command else len(shlex.split(command)) - 4
            assert f"{number} file" in row and command[:18] in row and command[-9:] in row
        for command in list(commands)[:2]:
            assert (await screen.press("y")).lines[-1].startswith(" Copied: blobstore dedup ")
            assert screen.app.clipboard == command
            drawing = await screen.press("down")
        await screen.press("end", "c")
        assert screen.app.clipboard == " && ".join(commands)
        assert screen.app.copied == [*list(commands)[:2], " && ".join(commands)]


async def test_the_whole_command_is_shown(zoo_report: Report) -> None:
    command = next(iter(saved(zoo_report)))
    wide = await after_keys(zoo_report, ["3"], (250, 60))
    assert command in "".join(
        line[1:] for line in wide.lines[wide.lines.index(next(x for x in wide.lines if x.startswith(" ──"))) + 1 : -1]
    )
    assert "18 files replaced by 19 files" in (await after_keys(zoo_report, ["3", "i"])).text


async def test_a_finding_copies_its_command(zoo_report: Report) -> None:
    async with browsing(zoo_report) as screen:
        await screen.press("2", "y")
        assert screen.app.clipboard == plain(zoo_report)[0]["command"]
        assert "Copied." in (await screen.press("down", "enter", "y")).text
        await screen.press("escape")
        assert screen.app.clipboard == plain(zoo_report)[1]["command"]


async def test_the_files_after_a_command_are_those_that_it_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command is run."""
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    shared, other = values(1, 60, 50), values(2, 70, 50)
    write_ptd(Path("models/a.ptd"), [Tensor.of("w", shared), Tensor.of("own", other)])
    write_ptd(Path("models/b.ptd"), [Tensor.of("w", shared)])
    write_ptd(Path("models/c.ptd"), [Tensor.of("alone", values(3, 80, 50))])
    report = blobstore.report(["models"])
    [command] = saved(report)
    async with browsing(report) as screen:
        drawing = await screen.press("3", "enter")
        assert drawing.heading.startswith("after command 1: ")
        assert sorted(cells(drawing.rows)) == ["c.ptd", "slim"]
        await screen.press("n", "end", "enter")
        assert list(cells(screen.see().rows)) == ["shared.ptd"]
        drawing = await screen.press("enter")
        there = {name: first for name, (first, _) in cells(drawing.rows).items()}
        assert {"w": size(shared.nbytes), "own": size(other.nbytes)} == there
        await screen.press("i", "escape")
        assert (await screen.press("escape")).heading == "all files"
        assert sorted(cells(screen.see().rows)) == ["a.ptd", "b.ptd", "c.ptd"]
        assert (await screen.press("a")).heading.startswith("after command 1: ")
        assert (await screen.press("a")).heading == "all files"

    assert CliRunner().invoke(app, shlex.split(command)[1:]).exit_code == 0
    assert [path.name for path in Path("slim").iterdir()] == ["shared.ptd"]
    made = blobstore.open_ptd("slim/shared.ptd")
    assert {key: len(made.bytes(key)) for key in made} == {"w": shared.nbytes, "own": other.nbytes}


async def test_nothing_to_save_has_no_command(tmp_path: Path) -> None:
    report = blobstore.report(write_ptd(tmp_path / "a.ptd", [Tensor.of("w", values(1, 60, 50))]))
    assert (await after_keys(report, ["2", "y", "enter", "f", "s"])).about == "Nothing is wasted."
    assert "No command saves anything here." in (await after_keys(report, ["3", "y", "enter", "i", "a"])).about
    assert (await after_keys(report, ["3", "1", "a"])).heading == "all files"


# ------------------------------------------------------------------------------------------------------- copies


@pytest.mark.long
async def test_a_copy_is_gone_to_and_back(tmp_path: Path) -> None:
    weight = values(1, 60, 50)
    for name in "abc":
        write_ptd(
            tmp_path / f"{name}.ptd", [Tensor.of("w", weight), Tensor.of(f"own.{name}", values(ord(name), 80, 50))]
        )
    async with browsing(blobstore.report([tmp_path])) as screen:
        await screen.press("n", "enter", "end")  # w in a.ptd
        assert "w: 12.0 KB, tensors, float 60 x 50; all of it stays; goes with b.ptd, c.ptd" in screen.see().about
        drawing = await screen.press("enter")
        places = [line.strip(" │▁▂▃▄▅▆▇█") for line in drawing.lines if re.search(r"12.0 KB  [abc]\.ptd: w", line)]
        assert places == ["12.0 KB  b.ptd: w", "12.0 KB  c.ptd: w"]
        drawing = await screen.press("down", "enter")
        assert (drawing.heading, drawing.lines[-1].strip()) == ("c.ptd", "Here it is. b goes back.")
        assert drawing.about.startswith(
            "w: 12.0 KB, tensors, float 60 x 50; ■ equal bytes in several files 12.0 KB; goes"
        )
        await screen.press("i", "enter")  # the first of its copies
        assert screen.see().heading == "a.ptd"
        await screen.press("b", "escape")
        assert screen.see().heading == "c.ptd"
        await screen.press("b")
        assert "Enter go to it" in screen.see().text  # to choose another one
        assert (await screen.press("up", "enter")).heading == "b.ptd"
        await screen.press("2", "enter", "end", "enter")  # from a finding, too
        assert screen.see().heading == "c.ptd"
        drawing = await screen.press("b", "escape")
        assert drawing.heading.startswith("1 of 1 findings")
        assert (await screen.press("1", "b", "escape", "b")).heading == "a.ptd"


async def test_everything_about_a_blob(tmp_path: Path) -> None:
    weight = values(1, 60, 50)
    [a, _] = [write_ptd(tmp_path / f"{name}.ptd", [Tensor.of("w", weight)]) for name in "ab"]
    start = a.read_bytes().index(weight.tobytes())
    report = blobstore.report([tmp_path])
    text = (await after_keys(report, ["n", "enter", "end", "i"], (120, 40))).text
    for words in (
        f"{tmp_path}/a.ptd (ptd)",
        "tensors float 60 x 50",
        f"12.0 KB (12,000 bytes), from byte {start:,} on",
        "xxh3-128 " + report.region(report.findings[0].places[0]).digest,
        "run command 1: blobstore dedup",
    ):
        assert words in re.sub(r" *│\n *│| {2,}", " ", text).replace("  ", " "), words


# --------------------------------------------------------------------------------------- whatever names there are


INTO = ("enter", "end", "i", "escape", "enter", "escape", "left", "left", "down")
EVERYWHERE = [
    *("n", *INTO * 6, "slash", "a", "enter", "end", "escape"),
    *("2", "end", "enter", "end", "escape", "up", "i", "escape", "f"),
    *("3", "y", "end", "i", "escape", "enter", "enter", "enter", "end", "i", "escape", "escape"),
    *("4", "i", "escape", "question_mark", "pagedown", "escape"),
]
"""Keys that lead to every view, and into each of six files and folders."""


@pytest.mark.slow_for("extent1", "extent2", "extent3")
@pytest.mark.long
@pytest.mark.parametrize("extent", [(80, 24), (200, 50), (30, 10), (1, 1)])
async def test_no_name_acts_on_the_terminal_or_is_markup(report: Report, extent: tuple[int, int]) -> None:
    """Control characters, marks of direction and markup are text, wide characters take two cells, long names are cut."""
    seen = []
    async with browsing(report, extent) as screen:
        for key in EVERYWHERE:
            drawing = await screen.press(key)
            assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", drawing.text)
            assert len(drawing.lines) <= extent[1]
            assert "\x1b" not in screen.app.clipboard
            seen.append(drawing.text)

    if extent[0] == 200:
        text = "\n".join(seen)
        for name in (printable(HOSTILE), "[red]x[", "b\\x1b]0;t\\x07.ptd", "[@click=app.quit]q", "bad\\x1b[31m.ptd"):
            assert name in text, name
        assert re.search("long.\u05d0\u6f22\U0001f600.*….*\u05d0\u6f22\U0001f600", text)


async def test_what_was_not_read_is_listed(report: Report) -> None:
    """Only if there is such a thing."""
    drawing = await after_keys(report, ["4"])
    assert drawing.heading == "not read, and not in the numbers"
    [row] = drawing.rows
    assert "bad\\x1b[31m.ptd" in row and report.problems[0].reason[-20:] in drawing.about
    whole = Report(report.files, report.findings)
    assert "Not read" not in (await after_keys(whole, ["4"])).text
    assert (
        "cannot be written"
        in (await after_keys(Report(report.files, (), (), ("the cache cannot be written",)), ["4"])).text
    )


async def test_colors_can_be_turned_off(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then what can go is filled, and what stays is hatched, all the same."""
    for keys in ([], ["2"]):  # in bars, and beside findings
        assert {"#d55e00", "#009e73"} <= set(re.findall("#[0-9a-f]{6}", (await after_keys(report, keys)).svg))
    monkeypatch.setenv("NO_COLOR", "1")
    drawing = await after_keys(report)
    assert not {"#d55e00", "#009e73"} & set(re.findall("#[0-9a-f]{6}", drawing.svg))
    assert re.search(r"\[█+░*", drawing.text)


async def test_the_size_of_the_terminal_may_change(zoo_report: Report) -> None:
    async with browsing(zoo_report) as screen:
        await screen.press("end", "enter", "end")
        about = screen.see().about
        for extent in ((40, 9), (10, 3), (150, 50), (80, 24)):
            await screen.pilot.resize_terminal(*extent)
            await screen.pilot.pause()
            assert max(len(line) for line in screen.see().lines) <= extent[0]
        assert screen.see().about == about
        await screen.press("i")
        await screen.pilot.resize_terminal(60, 12)
        await screen.pilot.pause()
        await screen.press("escape", "question_mark")
        await screen.pilot.resize_terminal(80, 24)
        assert (await screen.press("q")).about == about


async def test_the_mouse(zoo_report: Report) -> None:
    """A click chooses, a click on what is chosen opens; names of views are buttons."""
    async with browsing(zoo_report) as screen:

        async def click(x: int, y: int) -> Drawing:
            await screen.pilot.click(offset=(x, y))
            await screen.pilot.pause()
            return screen.see()

        assert (await click(40, 5)).about.startswith("speech: ")
        assert (await click(40, 5)).heading == "speech"
        assert (await click(40, 4)).heading == "speech"  # what leads up is chosen
        assert (await click(40, 4)).heading == "all files"
        assert (await click(40, 15)).heading == "all files"  # nothing is there
        assert "findings" in (await click(15, 1)).heading
        await click(40, 6)
        await click(40, 6)
        assert "Where it is; the first one stays" in screen.see().text
        lines = screen.see().lines
        at = next(number for number, line in enumerate(lines) if "commands-224.pte" in line and "KB" in line)
        await click(40, at)
        assert (await click(40, at)).heading.startswith("speech / en / commands / commands-224.pte")


async def test_keys_that_come_at_once_act_one_after_the_other(zoo_report: Report) -> None:
    """As when they are pasted: each acts on what the one before it chose."""
    async with browsing(zoo_report) as screen:
        await screen.pilot.press("down", "enter", "enter", "down", "enter", "end", "enter")
        assert (await screen.press()).heading == "speech / en / wake-word / adapters"


# ----------------------------------------------------------------------------------------------------- large sets


def large(files: int, blobs: int) -> Report:
    made, findings = [], []
    for f in range(files):
        regions = [
            Region(
                RegionKind.NAMED_DATA, 4096 * b, 4096 * (b + 1), (f"layers.{b}.weight",), digest=f"{f * (b % 2)}-{b}"
            )
            for b in range(blobs)
        ]
        made.append(FileReport(f"zoo/team-{f % 9}/model-{f}.ptd", "ptd", 4096 * blobs, tuple(regions)))
        findings += [
            Finding(FindingKind.CONSTANT, ((f, r),), (Claim(f, r, 8, 4096),), 4088, counted=4088)
            for r in range(1, blobs, 2)
        ]
    for b in range(0, blobs, 2):
        places = tuple((f, b) for f in range(files))
        claims = tuple(Claim(f, b, 0, 4096) for f in range(1, files))
        findings.append(
            Finding(FindingKind.DUPLICATE_FILES, places, claims, 4096 * (files - 1), counted=4096 * (files - 1))
        )
    return Report(tuple(made), tuple(findings))


@pytest.mark.parametrize(("files", "blobs"), [(200, 20), pytest.param(10_000, 20, marks=pytest.mark.long)])
async def test_only_what_is_seen_is_made(files: int, blobs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of rows on the screen, nodes of files that are open; however many there are."""
    lines, places = [], []
    line, blob = Files.line, Tree._open
    monkeypatch.setattr(Files, "line", lambda self, row, width: lines.append(row) or line(self, row, width))
    monkeypatch.setattr(Tree, "_open", lambda self, node, number: places.append(number) or blob(self, node, number))
    async with browsing(large(files, blobs), (100, 40)) as screen:
        await screen.press("enter")
        assert not places
        lines.clear()
        for key in ("end", "home", "pagedown", "down", "up"):
            await screen.press(key)
        assert len(lines) <= 5 * 3 * 40
        await screen.press("enter")
        assert len(places) == 1
        await screen.press("2", "end", "enter", "escape", "home", "enter", "end", "enter")
        assert screen.see().heading.startswith("team-")
        assert len(places) <= 3
        assert screen.app.focused is not None and screen.app.focused.virtual_size < Size(1000, 1000)


# ------------------------------------------------------------------------------------------------ text in cells


@pytest.mark.parametrize(
    "text", ["", "short", "a.very.long.name" * 20, "\u6f22" * 50, "e\u0301" * 60, "\x1b[31m" * 9, "[red]x[/]" * 9]
)
def test_a_name_is_cut_to_its_cells(text: str) -> None:
    from rich.cells import cell_len

    for width in range(70):
        cut = fit(text, width)
        assert cell_len(cut) <= width
        assert cut == printable(text) or "…" in cut or not width
        if cell_len(printable(text)) <= width:
            assert cut == printable(text)
        elif width > 8:
            assert cell_len(cut) >= width - 2 and printable(text).startswith(cut.split("…")[0].rstrip("\u0301"))
    for lines in range(1, 5):
        rows = folded(text, 20, lines).plain.split("\n")
        assert len(rows) <= lines and all(cell_len(row) <= 20 for row in rows)


# ------------------------------------------------------------------------------------------------- the command line


def test_it_needs_a_terminal_and_is_not_json(folder: Path) -> None:
    """A pipe gets one line that says what to do, before all the work."""
    done = CliRunner().invoke(app, ["report", str(folder), "--tui"])
    assert (done.exit_code, len(done.output.splitlines())) == (3, 1)
    assert all(text in done.output for text in ("--tui needs a terminal", " is none", "--html FILE", "--json"))
    done = CliRunner().invoke(app, ["report", str(folder), "--tui", "--json"])
    assert done.exit_code == 2 and "--json" in done.output and "Usage" in done.output


@pytest.mark.long
def test_it_ends_with_the_exit_codes_of_the_command(tmp_path: Path) -> None:
    """Of a file that cannot be read, of a limit, and 130 after Ctrl-C or its signal; the terminal is as it was."""
    weight = values(1, 60, 50)
    for name in "ab":
        write_ptd(tmp_path / f"{name}.ptd", [Tensor.of("w", weight)])
    (tmp_path / "bad.pte").write_bytes(b"nothing")
    good = ("a.ptd", "b.ptd")
    for arguments, keys, code in (
        (good, b"q", 0),
        (good, b"\x11", 0),  # Ctrl-Q
        ((*good, "--fail-over", "5%"), b"q", 1),
        ((*good, "--fail-over", "90%"), b"q", 0),
        ((*good, "bad.pte"), b"q", 3),
        (good, b"\x03", 130),
        (good, b"/a\x03", 130),
        (good, b"?\x03", 130),
        (good, signal.SIGINT, 130),
    ):
        terminal = Terminal("report", *arguments, "--tui", folder=tmp_path)
        terminal.until(b"Commands")
        terminal.until(b"quit")
        if isinstance(keys, bytes):
            terminal.press(keys)
        else:
            terminal.process.send_signal(keys)
        assert terminal.end() == code, (arguments, keys, terminal.output[-500:])
        assert b"\x1b[?1049h" in terminal.output
        left = terminal.output.split(b"\x1b[?1049l")[1]  # the screen that was there before
        assert b"Traceback" not in terminal.output
        assert (b"over the limit of 5%" in left) == (code == 1)
        assert (b"bad.pte: " in left) == (code == 3)


def test_a_defect_of_the_browser_is_an_error(report: Report) -> None:
    """Its traceback is printed by then; 1 would be the code of a limit that is exceeded."""

    class Broken(Browser):
        def run(self, *_: Any, **__: Any) -> None:
            self.exit(return_code=1)

    with pytest.raises(typer.Exit) as left:
        _browse(Broken, report)
    assert left.value.exit_code == 3


@pytest.mark.long
def test_what_was_copied_is_in_the_clipboard_and_on_the_terminal(tmp_path: Path) -> None:
    import base64

    for name in "ab":
        write_ptd(tmp_path / f"{name}.ptd", [Tensor.of("w", values(1, 60, 50))])
    terminal = Terminal("report", "a.ptd", "b.ptd", "--tui", folder=tmp_path)
    terminal.until(b"quit")
    terminal.press(b"3y")
    terminal.until(b"Copied: ")
    terminal.press(b"q")
    assert terminal.end() == 0
    command = b"blobstore dedup a.ptd b.ptd -o slim"
    assert b"\x1b]52;c;" + base64.b64encode(command) + b"\x07" in terminal.output
    assert terminal.output.split(b"\x1b[?1049l")[1].splitlines()[-1].strip().endswith(command)


@pytest.mark.long
@pytest.mark.parametrize(
    ("where", "term", "reason"),
    [("models", "dumb", b"--tui needs a terminal"), ("empty", "xterm-256color", b"no file to report on")],
)
def test_without_a_file_or_a_cursor_that_moves_nothing_opens(
    where: str, term: str, reason: bytes, tmp_path: Path
) -> None:
    for name in ("models", "empty"):
        (tmp_path / name).mkdir()
    write_ptd(tmp_path / "models" / "a.ptd", [Tensor.of("w", values(1, 60, 50))])
    terminal = Terminal("report", where, "--tui", folder=tmp_path, term=term)
    assert terminal.end() == 3
    assert reason in terminal.output and b"\x1b[?1049h" not in terminal.output


def test_the_picture_of_the_documentation_is_what_is_shown(zoo_report: Report) -> None:
    """`python -m tests.reporting.browsing docs/img/report-tui.svg` draws it; it asks nothing of another host."""
    drawn = (ROOT / "docs" / "img" / "report-tui.svg").read_text(encoding="utf-8")
    assert Drawing(drawn).lines == Drawing(picture(zoo_report)).lines
    assert set(re.findall(r"https?:[^\"')\s]+", drawn)) == {"http://www.w3.org/2000/svg"}
    assert "font-face" not in drawn and len(drawn) < 150_000
