"""The page in a real browser: offline, by mouse and by keyboard, light and dark, on paper and on a phone (B2)."""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import blobstore
from blobstore.core.text import size
from blobstore.reporting import FindingKind, Report
from blobstore.reporting.show.html import to_html
from blobstore.reporting.show.words import COLORS
from tests.helpers.waiting import until
from tests.reporting.find.test_planted import values
from tests.reporting.planted import Payload, Tensor, write_ptd, write_safetensors
from tests.reporting.show.test_output import HOSTILE

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")

pytestmark = [pytest.mark.long, pytest.mark.skipif(not CHROMIUM and "CI" not in os.environ, reason="needs chromium")]

QUIET = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api")
    assert CHROMIUM, "CI has to install chromium"
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield started
        started.close()


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    weight = values(1, 60, 50)
    write_ptd(
        folder / "a.ptd",
        [
            Tensor.of("w", weight),
            Tensor.of("tied", weight),
            *(Tensor.of(f"own.{i}", values(9 + i, 9, 9)) for i in range(80)),
        ],
    )
    write_safetensors(folder / "b.safetensors", [Tensor.of(HOSTILE, weight), Tensor.of("t", weight.T)])
    write_ptd(folder / "<b>c.ptd", [Tensor.of("z", abs(weight) * 0)])
    Payload([weight.tobytes()]).write(folder / "d.pte")
    path = folder / "report.html"
    path.write_text(to_html(blobstore.report([folder])))
    return path


class Opened:
    """A page and all that went wrong in it."""

    def __init__(
        self, browser: Any, path: Path, scheme: str, width: int = 1200, view: str = "", **options: Any
    ) -> None:
        viewport = {"width": width, "height": 900}
        self.context = browser.new_context(color_scheme=scheme, offline=True, viewport=viewport, **options)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: self.complaints.append(f"dialog {dialog.message}"))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(f"{path.as_uri()}#{view}" if view else path.as_uri())
        self.page.wait_for_selector("html[data-ready=yes]")

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.context.close()
        if kind is None:
            assert self.complaints == []

    def view(self) -> str:
        """The address after the #; `page.url` follows it later."""
        return str(self.page.evaluate("location.hash.slice(1)"))

    def rows(self) -> list[str]:
        return list(self.page.locator("#rows tbody tr").all_inner_texts())

    def colors(self, selector: str) -> tuple[float, float]:
        """Relative luminance of text and of what is behind it."""
        shown = self.page.evaluate(
            """selector => {
                const own = getComputedStyle(document.querySelector(selector)).color;
                let node = document.querySelector(selector), back = "rgba(0, 0, 0, 0)";
                while (node && back === "rgba(0, 0, 0, 0)") {
                    back = getComputedStyle(node).backgroundColor;
                    node = node.parentElement;
                }
                return [own, back];
            }""",
            selector,
        )
        return luminance(shown[0]), luminance(shown[1])


def luminance(color: str) -> float:
    parts = [int(part) / 255 for part in color.removeprefix("rgb(").removesuffix(")").split(",")[:3]]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.fixture(params=["light", "dark"])
def opened(request: pytest.FixtureRequest, browser: Any, page_file: Path) -> Iterator[Opened]:
    with Opened(browser, page_file, request.param) as made:
        yield made
    assert made.requests == [page_file.as_uri()]


def test_the_page_draws_and_asks_for_nothing(opened: Opened) -> None:
    assert "can be saved" in opened.page.locator("h1").inner_text()
    # files, and blobs, of which the small ones are drawn too
    assert opened.page.locator("#map > .tile").count() == 4
    assert opened.page.locator("#map .tile .tile").count() > 20
    assert opened.page.locator(".matrix td.s3").count() >= 2
    legend = opened.page.locator("#legend li").all_inner_texts()
    for words in (
        *("equal bytes in several files", "same values, other layout", "one value repeated"),
        *("tensor inside a payload", "stays", "headers and tables"),
    ):
        assert any(text.startswith(words) for text in legend), words


def test_text_is_readable_on_what_is_behind_it(opened: Opened) -> None:
    for selector in ("h1", ".hint", "#rows td", "#rows td .detail", "pre code", "#legend li", "#show-findings"):
        text, back = opened.colors(selector)
        contrast = (max(text, back) + 0.05) / (min(text, back) + 0.05)
        assert contrast >= 4.5, (selector, contrast)
    text, back = opened.colors("h1")
    assert (text > back) == opened.page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")


@pytest.mark.way
def test_keys_are_text_and_never_markup(opened: Opened) -> None:
    page = opened.page
    shown = HOSTILE.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e")
    assert any(shown in row for row in opened.rows())
    assert page.locator("b", has_text="c.ptd").count() == 0
    page.locator("#filter").fill("alert(1)")
    page.locator("#show-blobs").click()
    assert page.locator("#rows tbody tr").count() == 1
    assert page.locator("#rows script").count() == 0
    labels = page.evaluate("Array.from(document.querySelectorAll('#map .words'), text => text.textContent)")
    assert any(label.startswith("<b>c.ptd") for label in labels), labels
    assert any(label.startswith("<script>") for label in labels)


def test_the_table_sorts_and_filters(opened: Opened) -> None:
    page = opened.page
    total = len(opened.rows())
    assert total == 5
    page.locator("#kind").select_option("constant")
    assert len(opened.rows()) == 1
    assert "all zeros" in opened.rows()[0]
    page.locator("#kind").select_option("all")
    page.locator("#filter").fill("d.pte payload")
    assert len(opened.rows()) == 1
    page.locator("#filter").fill("")
    header = page.locator("#rows th", has_text="Adds to total")
    assert header.get_attribute("aria-sort") == "descending"
    down = opened.rows()
    header.locator("button").click()
    assert header.get_attribute("aria-sort") == "ascending"
    assert opened.rows()[0] != down[0]
    page.locator("#show-blobs").click()
    first = len(opened.rows())
    assert first == 50
    page.locator("#more").click()
    assert len(opened.rows()) > first
    page.locator("#rows th button", has_text="Name").click()
    names = [row.split("\t")[0] for row in opened.rows()]
    assert names == sorted(names)
    assert "83" in page.locator("#count").inner_text() or "of" in page.locator("#count").inner_text()


def test_all_of_it_works_by_keyboard(opened: Opened) -> None:
    page = opened.page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "table"
    page.locator("#map [tabindex='0']").focus()
    said = []
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "Enter", "ArrowDown", "Backspace"):
        page.keyboard.press(key)
        said.append(page.locator("#map-chosen").inner_text())
    assert said[0] == said[2] != said[1]  # there and back
    assert said[3] == said[0]  # opened: the same file, now the level
    assert said[4].startswith(said[0].split(": ")[0])  # something in it
    assert page.evaluate("document.activeElement.parentElement.id") == "map"
    assert said[5] == said[0]
    page.locator("#show-blobs").focus()
    page.keyboard.press("Enter")
    assert page.locator("#show-blobs").get_attribute("aria-pressed") == "true"
    page.keyboard.press("Tab")
    page.keyboard.type("own.7")
    assert page.locator("#rows tbody tr").count() == 11
    for _ in range(3):
        page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.tagName") == "BUTTON"


def test_a_click_opens_a_file(opened: Opened) -> None:
    page = opened.page
    before = page.locator("#map-chosen").inner_text()
    page.locator("#map > .tile", has_text="a.ptd").first.click(position={"x": 60, "y": 8})
    assert page.locator("#map-chosen").inner_text() != before
    assert "a.ptd" in page.locator("#map-chosen").inner_text()
    page.locator("#map > .tile").first.click()
    assert page.locator("#map-chosen").inner_text().startswith("a.ptd: ")
    page.locator("#map-table").click()
    assert all("a.ptd" in row for row in opened.rows())
    assert page.locator("#show-blobs").get_attribute("aria-pressed") == "true"


def test_an_empty_report_has_a_page(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "empty.html"
    path.write_text(to_html(blobstore.report([])))
    with Opened(browser, path, "light") as opened:
        assert opened.page.locator("h1").inner_text() == "There are no files."
        assert opened.page.locator("#common").count() == opened.page.locator("#folders").count() == 0
        assert not opened.page.locator("#map-section, #table, .skip").first.is_visible()


def test_a_report_in_which_nothing_was_read_does_not_praise(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "<b>cut.ptd").write_bytes(b"cut")
    path = blobstore.report([tmp_path]).to_html(tmp_path / "bad.html")
    with Opened(browser, path, "light") as opened:
        assert opened.page.locator("h1").inner_text() == "No file could be read."
        assert "<b>cut.ptd" in opened.page.locator("header .notice").inner_text()


def test_a_file_without_findings_shows_its_bytes(browser: Any, tmp_path: Path) -> None:
    """One file fills the map down to its tensors, and the table lists them; what there is not is not offered."""
    tensors = [
        Tensor.of(f"layers.{i}.{part}.weight", values(9 + 2 * i + at, 60, 50))
        for i in range(7)
        for at, part in enumerate("qk")
    ]
    write_ptd(tmp_path / "a.ptd", tensors)
    with Opened(browser, blobstore.report([tmp_path]).to_html(tmp_path / "one.html"), "light") as opened:
        page = opened.page
        words = page.locator("#map .tile .words").all_inner_texts()
        assert sum(text.startswith("q.weight\n60 x 50 float") for text in words) == 7
        assert not page.locator("#map-colors, #map-when").first.is_visible()
        assert len(opened.rows()) > 14
        page.locator("#show-findings").click()
        assert page.locator("#none").inner_text() == "There are no findings."
        page.locator("#show-blobs").click()
        page.locator("#filter").fill("no such thing")
        assert page.locator("#none").inner_text() == "Nothing matches the filter."


# ---------------------------------------------------------------------------------------------- two hundred files


@pytest.fixture(scope="module")
def zoo_page(zoo_report: Report, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo_report.to_html(tmp_path_factory.mktemp("zoo-page") / "zoo.html")


@pytest.fixture
def zoo(browser: Any, zoo_page: Path) -> Iterator[Opened]:
    with Opened(browser, zoo_page, "light") as made:
        yield made
    assert made.requests == [zoo_page.as_uri()]


TILES = """() => Array.from(document.querySelectorAll("#map .tile"), (tile) => {
    const box = tile.getBoundingClientRect();
    const words = tile.querySelector(":scope > .words");
    const text = words && words.getBoundingClientRect();
    return {
        x: box.x, y: box.y, right: box.right, bottom: box.bottom, top: tile.parentElement.id === "map",
        text: words ? words.textContent : "", head: Boolean(words && words.classList.contains("head")),
        fits: !words || (words.scrollWidth <= box.width + 1 && text.bottom <= box.bottom + 1),
        nested: tile.querySelector(".tile") !== null,
    };
})"""


def test_the_map_of_a_zoo_shows_folders_with_names(zoo: Opened) -> None:
    """Folders fill the map; names fit into their tiles, and headers take little of the area."""
    tiles = zoo.page.evaluate(TILES)
    box = zoo.page.locator("#map").bounding_box()
    top = [tile for tile in tiles if tile["top"]]
    assert len(top) == 5
    covered = sum((tile["right"] - tile["x"]) * (tile["bottom"] - tile["y"]) for tile in top)
    assert covered == pytest.approx(box["width"] * box["height"], rel=0.01)
    assert {tile["text"].split("  ")[0] for tile in top} == {
        *("language", "speech", "vision", "experiments", "checkpoints")
    }
    assert all(tile["fits"] for tile in tiles)
    heads = sum(17 * (tile["right"] - tile["x"]) for tile in tiles if tile["head"])
    assert heads < 0.15 * covered
    large = [t for t in tiles if t["right"] - t["x"] > 90 and t["bottom"] - t["y"] > 40]
    assert len(large) > 12 and all(tile["text"] for tile in large)


def test_what_is_colored_is_what_can_go(zoo: Opened, zoo_report: Report) -> None:
    """The area of each color is the number of bytes of its kind, whether a tile shows a folder or a tensor."""
    zoo.page.locator("#color-kind").click()
    for _ in range(3):  # at the root, in a folder, and in one in it
        areas = zoo.page.evaluate("""() => {
            const sums = {};
            for (const tile of document.querySelectorAll("#map .tile")) {
                const background = tile.style.background;
                const box = tile.getBoundingClientRect();
                const stops = [...background.matchAll(/var\\(--c-(\\w+)\\) ([\\d.]+)% ([\\d.]+)%/g)];
                for (const [, kind, from, to] of stops) {
                    sums[kind] = (sums[kind] || 0) + box.width * box.height * (to - from) / 100;
                }
                const one = background.match(/^var\\(--c-(\\w+)\\)/);
                if (one) sums[one[1]] = (sums[one[1]] || 0) + box.width * box.height;
            }
            return sums;
        }""")
        said = zoo.page.locator("#map-path [aria-current]").inner_text().strip()
        files = [
            i
            for i, file in enumerate(zoo_report.files)
            if said == "all files" or f"/{said}/" in file.path.split("/models")[1]
        ]
        share = sum(zoo_report.saves_of[f] for f in files) / sum(zoo_report.files[f].size for f in files)
        colored = sum(area for kind, area in areas.items() if kind not in {"stays", "structure"})
        assert colored / sum(areas.values()) == pytest.approx(share, abs=0.03)
        zoo.page.locator("#map > .tile").first.click(position={"x": 60, "y": 8})


def test_the_map_opens_step_by_step_by_keyboard(zoo: Opened) -> None:
    page = zoo.page
    page.locator("#map [tabindex='0']").focus()
    seen = []
    for _ in range(4):
        seen.append(page.locator("#map-path button").all_inner_texts())
        page.keyboard.press("Home")
        page.keyboard.press("Enter")
    page.keyboard.press("End")
    assert [len(path) for path in seen] == [1, 2, 3, 4]
    assert seen[-1] == ["all files", "language", "small", "chat"]
    assert ".pte" in page.locator("#map-path [aria-current]").inner_text()
    assert re.match(r"language/small/chat/chat-\d+\.pte: ", page.locator("#map-chosen").inner_text())
    page.locator("#map-path button", has_text="language").focus()
    page.keyboard.press("Enter")
    assert page.locator("#map-path button").count() == 2
    assert page.evaluate("document.activeElement.getAttribute('aria-current')") == "true"  # still on the way
    page.locator("#map [tabindex='0']").focus()
    page.keyboard.press("Escape")
    assert page.locator("#map-path button").all_inner_texts() == ["all files"]


def test_tensors_of_a_large_file_are_grouped_by_module(zoo: Opened) -> None:
    """backbone.3.weight is in backbone, in 3; of a file in which keys are contents nothing is grouped."""
    page = zoo.page
    page.locator("#map > .tile", has_text="checkpoints").first.click(position={"x": 20, "y": 8})
    page.locator("#map > .tile", has_text="language-tiny").first.click(position={"x": 20, "y": 8})
    tiles = page.locator("#map > .tile")
    assert tiles.first.locator(".words").first.inner_text().split()[0] == "backbone"
    tiles.first.click(position={"x": 20, "y": 8})
    page.mouse.move(1, 1)
    assert page.locator("#map-chosen").inner_text().startswith("checkpoints/language-tiny.safetensors: backbone: ")
    page.keyboard.press("Home")
    page.keyboard.press("Enter")
    page.keyboard.press("Home")
    assert re.match(r".*: backbone\.\d\.weight: .*, float \d+ x \d+; ", page.locator("#map-chosen").inner_text())
    page.locator("#map-path button").nth(3).click()
    page.locator("#map-table").click()
    assert page.locator("#count").inner_text().startswith("20 of ")


def test_a_kind_has_one_color_everywhere(browser: Any, zoo: Opened, page_file: Path) -> None:
    """In the legend, in the map, in the table, in each report and on a dark page."""
    script = """kind => {
        const found = [];
        for (const node of document.querySelectorAll(`[style*="--c-${kind})"]`)) {
            const shown = getComputedStyle(node).background;
            found.push(...shown.match(/rgb\\([^)]*\\)/g).slice(0, shown.includes("gradient") ? 0 : 1));
        }
        return [...new Set(found)];
    }"""
    with Opened(browser, page_file, "dark") as dark:
        for kind in (FindingKind.DUPLICATE_FILES, FindingKind.OTHER_LAYOUT, FindingKind.CONSTANT):
            expected = [f"rgb({', '.join(str(int(COLORS[kind][at : at + 2], 16)) for at in (1, 3, 5))})"]
            assert zoo.page.evaluate(script, kind.value) == dark.page.evaluate(script, kind.value) == expected


def test_a_long_command_folds_and_copies(browser: Any, zoo_page: Path, zoo_report: Report) -> None:
    with Opened(browser, zoo_page, "light", permissions=["clipboard-read", "clipboard-write"]) as opened:
        page = opened.page
        box = page.locator("header .command").first
        command = max((f for f in zoo_report.findings if f.command), key=lambda f: f.counted).command
        folded = box.bounding_box()["height"]
        assert folded < 60
        box.locator(".fold").click()
        assert box.bounding_box()["height"] > 2 * folded
        assert box.locator(".fold").get_attribute("aria-expanded") == "true"
        box.locator(".fold").click()
        assert box.bounding_box()["height"] == folded
        box.locator(".copy").click()
        until(lambda: box.locator(".copy").inner_text() == "Copied")
        assert page.evaluate("navigator.clipboard.readText()") == command


def test_families_are_clustered(zoo: Opened) -> None:
    """Groups of files, not two hundred rows; what is left in common between groups has shades by its share."""
    groups = zoo.page.locator("#common .group:not(#lineage)")
    assert 6 <= groups.count() <= 20
    assert not groups.first.locator("table").is_visible()
    groups.first.locator("summary").click()
    rows = groups.first.locator("table tr").all_inner_texts()
    assert len(rows) == int(groups.first.locator(".name").inner_text().split(" and ")[1].split()[0]) + 1
    assert zoo.page.locator("#common .matrix tbody tr").count() <= 16


def test_folders_are_listed_with_their_sizes(zoo: Opened, zoo_report: Report) -> None:
    rows = zoo.page.locator("#folders tbody tr").all_inner_texts()
    vision = next(folder for folder in zoo_report.folders if folder.path.endswith("/vision"))
    assert any(
        row.split() == ["vision", "58", *size(vision.bytes).split(), *size(vision.saves).split()] for row in rows
    )


def test_types_shapes_and_names_are_in_the_table(zoo: Opened) -> None:
    page = zoo.page
    assert {"Type", "Shape"} <= set(page.locator("#rows th").all_inner_texts())
    page.locator("#show-blobs").click()
    page.locator("#filter").fill("vision/mobile/pose/pose-128.pte backbone.8.weight")
    assert len(zoo.rows()) == 1
    page.locator("#filter").fill("experiments/2026-01/run-000.ptd own.1.weight")
    assert zoo.rows()[0].split("\t")[2:4] == ["float", "60 x 60"]


def test_the_printed_page_is_whole(browser: Any, zoo_page: Path, zoo_report: Report, tmp_path: Path) -> None:
    """All rows, all files of groups, whole commands and the colors of the legend, on white; then all as before."""
    with Opened(browser, zoo_page, "dark") as opened:
        page = opened.page
        before = page.locator("#rows tbody tr").count()
        page.emulate_media(media="print", color_scheme="dark")
        page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
        assert page.locator("#rows tbody tr").count() == len(zoo_report.findings) > before
        assert all(page.locator("#common .group").nth(i).locator("table").is_visible() for i in range(3))
        text, back = opened.colors("h1")
        assert text < 0.1
        assert back > 0.9
        command = page.locator("header .command code").first
        assert command.evaluate("node => node.parentElement.clientHeight > 60")
        assert (
            page.locator("#legend .swatch").first.evaluate("node => getComputedStyle(node).printColorAdjust") == "exact"
        )
        for selector in ("#table .scroll", "#folders .scroll"):
            assert page.locator(selector).evaluate("node => node.scrollHeight <= node.clientHeight + 1"), selector
        for selector in (".copy", ".controls", "#more"):
            assert not page.locator(selector).first.is_visible()
        box = page.locator("#map").bounding_box()
        last = page.evaluate(
            "Math.max(...Array.from(document.querySelectorAll('#map > .tile'), t => t.getBoundingClientRect().right))"
        )
        assert last == pytest.approx(box["x"] + box["width"], abs=2)
        page.evaluate("window.dispatchEvent(new Event('afterprint'))")
        page.emulate_media(media="screen", color_scheme="dark")
        assert page.locator("#rows tbody tr").count() == before
        assert page.locator("#common .group[open]").count() == 0
        assert page.locator("#more").is_visible()
        page.emulate_media(media="null")
        pages = page.pdf(path=tmp_path / "zoo.pdf", format="A4").count(b"/Type /Page\n")
        assert pages > 10  # the browser itself calls for the whole table


@pytest.mark.parametrize("which", ["zoo_page", "page_file"])
def test_a_phone_shows_everything_without_scrolling_sideways(
    which: str, browser: Any, request: pytest.FixtureRequest
) -> None:
    with Opened(browser, request.getfixturevalue(which), "light", 390, is_mobile=True, has_touch=True) as opened:
        page = opened.page
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        wide = page.evaluate("""() => Array.from(document.querySelectorAll("body *:not(.matrix):not(.matrix *):not(.skip):not(.hidden)"), (node) => {
            const box = node.getBoundingClientRect();
            return box.width && box.right > 391 && !node.closest(".folded") ? node.className || node.tagName : "";
        }).filter(Boolean)""")
        assert wide == []
        assert page.locator("#map .words").count() > 4
        page.locator("#map > .tile").first.tap(position={"x": 40, "y": 8})
        assert page.locator("#map-path button").count() == 2
        page.locator("#show-blobs").tap()
        page.locator("#rows th button", has_text="Name").tap()
        assert page.locator("#rows th", has_text="Name").get_attribute("aria-sort") == "ascending"
        cell = page.locator("#rows tbody td").first
        assert cell.evaluate("node => getComputedStyle(node, '::before').content") == '"Name"'


# --------------------------------------------------------------------------------------------------------- views

LIT = "Array.from(document.querySelectorAll('#map .copy'), tile => map.describe(map.tree.nodes[tile.dataset.id]))"


def test_what_belongs_together_lights_up(opened: Opened) -> None:
    """Under the pointer, which also describes the tile, and with the keyboard: the copies in other files, and the payload that holds the tensor."""
    page = opened.page
    before = page.locator("#map-chosen").inner_text()
    page.locator("#map .tile .tile", has_text="tied").first.hover()
    assert (
        page.locator("#map-chosen")
        .inner_text()
        .startswith(
            "a.ptd: tied: 12.0 KB, tensors, float 60 x 50; tied weight, written twice 12.0 KB; also in w, b.safetensors: "
        )
    )
    lit = page.evaluate(LIT)
    assert sorted({text.split(":")[0] for text in lit}) == ["a.ptd", "b.safetensors", "d.pte"]
    assert not any("own." in text for text in lit)
    page.mouse.move(1, 1)
    assert page.locator("#map-chosen").inner_text() == before
    assert page.evaluate(LIT) == []
    page.locator("#map [tabindex='0']").focus()
    page.keyboard.press("Home")
    assert "a.ptd" in page.locator("#map-chosen").inner_text()
    assert {text.split(":")[0] for text in page.evaluate(LIT)} == {"b.safetensors", "d.pte"}


def test_the_map_is_searched(opened: Opened) -> None:
    page = opened.page
    page.keyboard.press("/")
    page.keyboard.type("own.1 a.ptd")
    assert page.locator("#map-count").inner_text() == f"11 found, {size(11 * 9 * 9 * 4)}"
    assert page.locator("#map > .dim").count() == 3
    page.keyboard.press("Enter")
    assert page.locator("#map-count").inner_text().startswith("1 of 11 found")
    first = page.locator("#map-chosen").inner_text()
    assert first.startswith("a.ptd: own.1")
    assert page.locator("#map .chosen-tile").count() == 1
    page.keyboard.press("Enter")
    assert page.locator("#map-chosen").inner_text() != first
    page.keyboard.press("Shift+Enter")
    assert page.locator("#map-chosen").inner_text() == first
    page.locator("#map-search").fill("own.1 a.ptd -own.10 -own.19")
    assert page.locator("#map-count").inner_text().startswith("9 found")
    page.keyboard.press("Escape")
    assert page.locator("#map-count").inner_text() == ""
    assert page.locator("#map .dim").count() == 0
    page.keyboard.type("no such thing")
    assert page.locator("#map-count").inner_text() == "0 found, 0 B"


SHOWN = """() => ["map", "map-path", "map-chosen", "map-when", "map-count", "rows", "count", "legend-copies"].map(
    (id) => document.getElementById(id)).map(
    (shown) => shown.hidden ? "" : shown.outerHTML.replace(/ title="[^"]*"/g, "")).join("\\n")"""


@pytest.mark.long
def test_every_view_has_an_address(zoo: Opened, zoo_page: Path, browser: Any) -> None:
    """A copy of the address shows the same in another window, and the way back leads through the views."""
    page = zoo.page
    steps = [
        lambda: page.locator("#map > .tile").first.click(position={"x": 60, "y": 8}),
        lambda: page.locator("#map > .tile").first.click(position={"x": 60, "y": 8}),
        lambda: page.locator("#color-kind").click(),
        lambda: page.locator("#map-search").fill("weight 288"),
        lambda: page.locator("#map-search").press("Enter"),
        lambda: page.locator("#show-blobs").click(),
        lambda: page.locator("#rows th button", has_text="Name").click(),
        lambda: page.locator("#filter").fill("backbone"),
        lambda: page.locator("#kind").select_option("duplicate_files"),
        lambda: page.locator("#map-when button").last.click(),
    ]
    views, seen = [""], [page.evaluate(SHOWN)]
    for step in steps:
        step()
        page.mouse.move(1, 1)  # nothing lights up under it
        assert zoo.view() != views[-1]
        views.append(zoo.view())
        seen.append(page.evaluate(SHOWN))
    for view, shown in zip(views, seen, strict=True):
        with Opened(browser, zoo_page, "light", view=view) as other:
            assert other.page.evaluate(SHOWN) == shown, view
    page.go_back()
    assert zoo.view() == views[-2]
    assert page.evaluate(SHOWN) == seen[-2]


@pytest.mark.parametrize("word", ["99", "constructor", "__proto__", "-1", "%00"])
def test_an_address_of_another_report_shows_what_there_is(word: str, browser: Any, zoo_page: Path) -> None:
    view = f"at=language/{word}/%00<b>&find=%3Cscript%3E&tile=~~%"
    view += "".join(f"&{name}={word}" for name in ("after", "color", "table", "kind", "sort", "match"))
    with Opened(browser, zoo_page, "light", view=view) as opened:
        assert opened.page.locator("#map-path button").all_inner_texts() == ["all files", "language"]
        assert opened.page.locator("#rows tbody tr").count() == 50


def test_copies_have_one_color(opened: Opened) -> None:
    """Tensors that a finding relates share a color, pale where they stay; others have none of these colors."""
    page = opened.page
    page.locator("#color-copies").click()
    hues = page.evaluate("""Object.fromEntries(Array.from(document.querySelectorAll("#map .tile"), (tile) => {
        const node = map.tree.nodes[tile.dataset.id];
        return [map.describe(node).split(": ").slice(0, 2).join(": "), tile.style.background];
    }).filter(([, background]) => background && !background.includes("gradient")))""")
    hue = {name: re.findall(r"var\(--([a-z]+)(\d\) \d+)", color) for name, color in hues.items()}
    [(kept, first)] = hue["a.ptd: w"]
    [(gone, second)] = hue["a.ptd: tied"]
    assert (kept, gone, first) == ("pale", "full", second)
    [(state, third)] = hue["b.safetensors: t"]
    assert (state, third) == ("full", first)  # transposed
    assert all(not found for name, found in hue.items() if "own." in name)
    assert page.locator("#legend-copies li").count() >= 3
    assert not page.locator("#legend").is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_neighbors_differ_in_color(browser: Any, tmp_path: Path, scheme: str) -> None:
    """Thirty groups of one model: those next to each other in size, all of the palette, and what is not in it."""
    tensors = [Tensor.of(f"layer.{i}", values(i, 40 + i, 50)) for i in range(30)]
    for name in "ab":
        write_ptd(tmp_path / f"{name}.ptd", tensors)
    page = tmp_path / "report.html"
    page.write_text(to_html(blobstore.report(tmp_path)))
    with Opened(browser, page, scheme) as opened:
        shown: dict[str, list[list[float]]] = opened.page.evaluate("""() => {
            const seen = (color) => {  // as OKLab
                const probe = document.body.appendChild(document.createElement("i"));
                probe.style.color = `color-mix(in oklab, ${color} 100%, ${color})`;
                const lab = getComputedStyle(probe).color.match(/-?[0-9.]+(?:e-?[0-9]+)?/g).map(Number);
                probe.remove();
                return lab.slice(0, 3);
            };
            const full = (stays) => copies.groups.map((group) => seen(copies.color(group, stays)));
            const names = ["many", "stays", "structure"];
            return { full: full(false), pale: full(true), plain: names.map((name) => seen(`var(--c-${name})`)) };
        }""")
    for state, least in (("full", 0.07), ("pale", 0.025)):
        colors = shown[state]
        assert len(colors) == 30
        for at, color in enumerate(colors):
            assert all(math.dist(color, other) > least for other in colors[max(at - 15, 0) : at])
    many, *others = shown["plain"]
    assert math.hypot(*many[1:]) < 0.01  # grey
    assert all(math.dist(many, other) > 0.07 for other in [*others, *shown["full"]])


def test_the_map_begins_on_the_first_screen(browser: Any, tmp_path: Path) -> None:
    """Under a pool and six commands of long paths, of which two are shown."""
    for family in range(7):
        base = {f"layers.{i}.weight": values(10 * family + i, 64, 64) for i in range(9)}
        for team in ("search-and-recommendation", "support-and-documentation", "vision-and-robotics"):
            path = tmp_path / f"family-{family}" / team / f"{team}.safetensors"
            path.parent.mkdir(parents=True)
            tuned = {**base, "layers.8.weight": values(hash(path.name) % 1000, 64, 64)}
            write_safetensors(path, [Tensor.of(key, value) for key, value in tuned.items()])
    page = tmp_path / "report.html"
    page.write_text(to_html(blobstore.report(tmp_path)))
    with Opened(browser, page, "light", width=1280) as opened:
        assert opened.page.locator("#map").bounding_box()["y"] <= 520  # of 900
        commands = opened.page.locator("header .command")
        assert sum(commands.nth(i).is_visible() for i in range(commands.count())) <= 3
        opened.page.locator("header summary").click()
        assert all(commands.nth(i).is_visible() for i in range(commands.count()))


def test_colors_say_what_belongs_together_where_all_is_waste(opened: Opened, zoo: Opened) -> None:
    assert zoo.page.locator("#color-copies").get_attribute("aria-pressed") == "true"
    assert opened.page.locator("#color-kind").get_attribute("aria-pressed") == "true"  # of many kinds


def test_the_map_shows_the_files_after_a_command(zoo: Opened, zoo_report: Report) -> None:
    """To the scale of now: what is saved stays empty."""
    page = zoo.page
    command = max((f for f in zoo_report.findings if f.command), key=lambda f: f.counted).command
    saves = sum(finding.counted for finding in zoo_report.findings if finding.command == command)
    page.locator("#map-when button", has_text="After 1").click()
    names = page.evaluate("map.tree.files.map((file) => file.name)")
    assert sum("slim-1/" in name for name in names) == 19
    assert not any("speech/en/" in name and name.endswith(".pte") for name in names)
    empty = page.locator("#map .saved").bounding_box()
    box = page.locator("#map").bounding_box()
    assert empty["width"] / box["width"] == pytest.approx(saves / zoo_report.total_bytes, abs=0.01)
    assert not page.locator("#map-table").is_visible()
    page.locator("#map-when button", has_text="Now").click()
    assert page.locator("#map .saved").count() == 0


def test_a_search_colors_the_bytes_that_it_finds(zoo: Opened, zoo_report: Report) -> None:
    """Also in a tile that holds other bytes; a match is shown in its file, however deep it is."""
    page = zoo.page
    page.locator("#color-kind").click()
    page.locator("#map-search").fill("backbone.2 float")
    found = [
        region.nbytes
        for file in zoo_report.files
        for region in file.regions
        if "backbone.2." in region.name and region.element_type == "float"
    ]
    areas = page.evaluate("""Array.from(document.querySelectorAll("#map .tile"), (tile) => {
        const {width, height} = tile.getBoundingClientRect();
        const parts = [...tile.style.background.matchAll(/var\\(--c-(\\w+)\\)(?: ([\\d.]+)% ([\\d.]+)%)?/g)];
        return parts.map(([, kind, from, to]) => [kind, width * height * (to ? to - from : 100)]);
    }).flat()""")
    bright = sum(area for kind, area in areas if kind != "rest")
    share = sum(found) / zoo_report.total_bytes
    assert bright / sum(area for _, area in areas) == pytest.approx(share, rel=0.15)
    page.locator("#map-search").press("Enter")
    assert page.locator("#map-path [aria-current]").inner_text().strip().endswith(".pte")
    assert "backbone.2.weight" in page.evaluate("map.describe(map.match)")
    assert page.locator("#map > .tile").count() > 1
    assert page.evaluate("document.querySelector('#map .chosen-tile').dataset.id == map.match.id")


def test_a_command_breaks_between_paths(browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at the hyphens of one; what is copied is the command."""
    for name in ("minilm-128", "minilm-256"):
        write_ptd(tmp_path / f"{name}.ptd", [Tensor.of("w", values(1, 60, 50))])
    monkeypatch.chdir(tmp_path)
    report = blobstore.report(["."])
    with Opened(browser, report.to_html(tmp_path / "report.html"), "light", 390) as opened:
        code = opened.page.locator("header .command code")
        assert code.evaluate("node => node.textContent") == report.findings[0].command
        heights = code.evaluate("node => [...node.children].map((word) => word.getClientRects().length)")
        assert set(heights) == {1}


@pytest.mark.long
def test_any_name_has_an_address(browser: Any, tmp_path: Path) -> None:
    """Names with the signs of addresses and paths, of nothing but dots, and of parts of JavaScript."""
    names = [
        *("a/b/c", "~1", "%2f", "x\ny", "..", ".", " ", "a..b", "__proto__"),
        *("constructor", "toString.valueOf", "&x=1#"),
    ]
    tensors = [Tensor.of(name, values(i, 30, 30)) for i, name in enumerate([*names, "layers.0.q", "layers.0.k"])]
    write_ptd(tmp_path / "__proto__.ptd", tensors)
    path = blobstore.report([tmp_path]).to_html(tmp_path / "report.html")
    with Opened(browser, path, "light", view="at=__proto__.ptd") as opened:
        opened.page.locator("#map [tabindex='0']").focus()
        said = set()
        for _ in names:
            opened.page.keyboard.press("ArrowRight")
            chosen = opened.page.locator("#map-chosen").inner_text()
            said.add(chosen)
            with Opened(browser, path, "light", view=opened.view()) as other:
                assert other.page.locator("#map-chosen").inner_text() == chosen, opened.view()
        assert len(said) == len(names)


def test_a_browser_that_takes_no_more_addresses_still_shows_views(opened: Opened) -> None:
    page = opened.page
    page.evaluate("""() => {
        history.pushState = history.replaceState = () => { throw new DOMException("", "SecurityError"); };
    }""")
    page.locator("#map > .tile", has_text="a.ptd").first.click(position={"x": 60, "y": 8})
    assert page.locator("#map-path button").count() == 2
    page.locator("#map-search").fill("own.1")
    assert "found" in page.locator("#map-count").inner_text()
