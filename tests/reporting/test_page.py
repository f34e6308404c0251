"""The page in a real browser: offline, by mouse and by keyboard, light and dark."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import blobstore
from blobstore.reporting.html import to_html
from tests.reporting.planted import Payload, Tensor, write_ptd, write_safetensors
from tests.reporting.test_output import HOSTILE
from tests.reporting.test_planted import values
from tests.waiting import until

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")

pytestmark = pytest.mark.skipif(not CHROMIUM and "CI" not in os.environ, reason="needs chromium")

QUIET = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
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

    def __init__(self, browser: Any, path: Path, scheme: str) -> None:
        self.context = browser.new_context(color_scheme=scheme, offline=True, viewport={"width": 1200, "height": 900})
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: self.complaints.append(f"dialog {dialog.message}"))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html[data-ready=yes]")

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
    made = Opened(browser, page_file, request.param)
    yield made
    made.context.close()
    assert made.complaints == []
    assert made.requests == [page_file.as_uri()]


def test_the_page_draws_and_asks_for_nothing(opened: Opened) -> None:
    assert "can be saved" in opened.page.locator("h1").inner_text()
    # root, files, and blobs, of which the small ones are drawn too
    assert opened.page.locator("#map .slice").count() > 20
    assert opened.page.locator("#matrix .heatmaplayer image, #matrix .hm").count() >= 1
    assert {
        "equal bytes in several files",
        "same values, other layout",
        "one value repeated",
        "tensor inside a payload",
    } <= set(opened.page.locator("#legend li").all_inner_texts())


def test_text_is_readable_on_what_is_behind_it(opened: Opened) -> None:
    for selector in ("h1", ".hint", "#rows td", "#rows td .detail", "pre code", "#legend li", "#show-findings"):
        text, back = opened.colors(selector)
        contrast = (max(text, back) + 0.05) / (min(text, back) + 0.05)
        assert contrast >= 4.5, (selector, contrast)


def test_keys_are_text_and_never_markup(opened: Opened) -> None:
    page = opened.page
    shown = HOSTILE.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e")
    assert any(shown in row for row in opened.rows())
    assert page.locator("b", has_text="c.ptd").count() == 0
    page.locator("#filter").fill("alert(1)")
    page.locator("#show-blobs").click()
    assert page.locator("#rows tbody tr").count() == 1
    assert page.locator("#rows script").count() == 0
    labels = page.evaluate("Array.from(document.querySelectorAll('#map .slicetext'), text => text.textContent)")
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
    page.locator("#map").focus()
    said = []
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "Enter", "ArrowDown", "Backspace"):
        page.keyboard.press(key)
        said.append(page.locator("#map-chosen").inner_text())
    assert said[0] == said[2] != said[1]  # there and back
    assert said[3] == said[0]  # opened: the same file, now the level
    assert said[4].startswith(said[0].split(": ")[0])  # something in it
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
    page.locator("#map .slice", has_text="a.ptd").first.click(position={"x": 60, "y": 10})
    page.wait_for_function(f"document.getElementById('map-chosen').textContent !== {before!r}")
    assert "a.ptd" in page.locator("#map-chosen").inner_text()


def test_the_page_follows_the_system_when_it_turns_dark(browser: Any, page_file: Path) -> None:
    opened = Opened(browser, page_file, "light")
    light = opened.colors("h1")
    opened.page.emulate_media(color_scheme="dark")
    assert light[0] < light[1]

    def dark() -> bool:
        text, behind = opened.colors("h1")
        return text > behind

    until(dark)
    opened.context.close()


def test_an_empty_report_has_a_page(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "empty.html"
    path.write_text(to_html(blobstore.report([])))
    opened = Opened(browser, path, "light")
    assert "nothing is wasted" in opened.page.locator("h1").inner_text()
    assert not opened.page.locator("#matrix-section").is_visible()
    opened.context.close()
    assert opened.complaints == []
