"""The pictures in docs/report.md: the report's page, and what people know, on the same files.

`make pictures` runs the demo if it did not run yet, and writes `docs/img/report*.png` and
`docs/img/compared-*.png`. It needs chromium, and for the comparison ncdu and npm, whose package webpack-bundle-analyzer is
fetched into `build/pictures`. What is missing is left out, and said. `--zoo` also compares on the two hundred files of the
tests; those pictures stay in `build/pictures`.
"""

from __future__ import annotations

import argparse
import html
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pexpect
import pyte
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

import blobstore
from blobstore.reporting import Report
from examples.demo.models import encoder_directory
from tests.helpers.waiting import until
from tests.reporting.zoo import write_zoo

IMAGES = Path(__file__).parents[1] / "docs" / "img"
WORK = Path(__file__).parents[1] / "build" / "pictures"
ZOO = WORK / "zoo" / "models"
WIDTH = 1100  # of the page, in pixels
WINDOW = {"width": 960, "height": 600}  # of the others
ROWS, COLUMNS = 24, 104  # of a terminal
PORT = 8123
MOST = 150_000  # bytes of a picture
ANALYZER = "webpack-bundle-analyzer@5"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--demo", type=Path, default=Path("demo-output"), help="where `make demo` wrote its programs")
    parser.add_argument("--zoo", action="store_true", help="also compare on the two hundred files of the tests")
    parser.add_argument("--only", default="", help="a part of the names of the pictures to make")
    arguments = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(ZOO, ignore_errors=True)
    write_zoo(ZOO)
    programs = arguments.demo / "before"
    with _browser() as browser:
        jobs = dict(_pages(browser, programs))
        compared = _compared(browser, programs, encoder_directory() / "model.safetensors", WORK / "demo")
        jobs |= {f"compared-{name}.png": job for name, job in compared}
        for name, job in jobs.items():
            if arguments.only in name:
                _make(IMAGES / name, job)
        for name, job in _compared(browser, ZOO, None, WORK / "other") if arguments.zoo else ():
            _make(WORK / f"zoo-{name}.png", job)


Job = Callable[[], bytes]
"""Makes a picture, as PNG."""


class MissingError(Exception):
    """A program that a picture needs is not installed."""


def _make(path: Path, job: Job) -> None:
    try:
        picture = Image.open(io.BytesIO(job())).convert("RGB")
    except MissingError as missing:
        print(f"{path.name}: left out, since {missing} is not installed")
        return
    picture.save(path, optimize=True)
    if path.stat().st_size > MOST:  # gradients; few colors would change those of a legend
        picture.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path.name}: {path.stat().st_size:,} bytes")


def _program(name: str) -> str:
    """A program beside this Python, or on the path."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        raise MissingError(name)
    return found


# ------------------------------------------------------------------------------------------------- the report's page


def _pages(browser: Browser, programs: Path) -> Iterator[tuple[str, Job]]:
    demo = partial(_report, programs, encoder_directory() / "model.safetensors")
    zoo = partial(_report, ZOO, None)
    yield "report.png", partial(_page, browser, demo)
    yield "report-after.png", partial(_page, browser, demo, "after=all", only_map=True)
    yield "report-found.png", partial(_page, browser, zoo, "find=backbone.2+float&color=kind", only_map=True)
    yield "report-zoo.png", partial(_page, browser, zoo, scheme="dark")


def _report(folder: Path, names: Path | None) -> Report:
    """Of a folder as somebody would name it who stands two above it."""
    here, folder = Path.cwd(), folder.resolve()
    os.chdir(folder.parents[1])
    try:
        return blobstore.report(folder.relative_to(Path.cwd()), names=names)
    finally:
        os.chdir(here)


def _page(
    browser: Browser, report: Callable[[], Report], view: str = "", *, scheme: Any = "light", only_map: bool = False
) -> bytes:
    path = report().to_html(WORK / "page.html")
    page = browser.new_page(viewport={"width": WIDTH, "height": 860}, color_scheme=scheme, offline=True)
    page.goto(f"{path.resolve().as_uri()}#{view}")
    page.wait_for_selector("html[data-ready=yes]")
    section = page.locator("#map-section")
    if only_map:
        return section.screenshot()
    box = section.bounding_box()
    assert box is not None
    clip = {"x": 0, "y": 0, "width": WIDTH, "height": box["y"] + box["height"] + 12}
    return page.screenshot(full_page=True, clip=clip)


# ----------------------------------------------------------------------------------------------- what people know


def _compared(browser: Browser, folder: Path, names: Path | None, work: Path) -> Iterator[tuple[str, Job]]:
    """Pictures of the same files in other programs."""
    work.mkdir(parents=True, exist_ok=True)
    yield "netron", partial(_netron, browser, folder)
    yield "webpack-bundle-analyzer", partial(_analyzer, browser, folder, names, work)
    yield "ncdu", partial(_ncdu, browser, folder, work)
    yield "dive", partial(_dive, browser, folder, work)


def _netron(browser: Browser, folder: Path) -> bytes:
    """The largest program, with a node of its graph chosen."""
    program = max(folder.rglob("*.pte"), key=lambda path: path.stat().st_size)
    command = [_program("netron"), "--port", str(PORT), os.fspath(program)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            page = browser.new_page(viewport=WINDOW)
            # it reports who uses it
            page.route(lambda url: "//localhost" not in url, lambda route: route.abort())
            until(lambda: _opens(page, f"http://localhost:{PORT}"), lambda: page.wait_for_timeout(200))
            page.get_by_role("button", name="Accept").click()
            page.wait_for_selector("body.default")
            node = page.locator("#canvas .node", has_text="embedding")
            if node.count():
                node.first.click()
                page.wait_for_selector("#sidebar")
            page.wait_for_timeout(1000)  # it slides in
            return page.screenshot()
        finally:
            server.terminate()


def _opens(page: Page, url: str) -> bool:
    try:
        page.goto(url)
    except Exception:
        return False
    return True


def _analyzer(browser: Browser, folder: Path, names: Path | None, work: Path) -> bytes:
    """A bundle for each file, and a module for each blob."""
    stats, target = work / "stats.json", work / "analyzer.html"
    stats.write_text(json.dumps(_stats(_report(folder, names))))
    command = [_program("npm"), "exec", "--yes", "--prefix", os.fspath(WORK), "--", ANALYZER, "--mode", "static"]
    command += ["--no-open", "--report", os.fspath(target), os.fspath(stats)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    page = browser.new_page(viewport=WINDOW)
    page.goto(target.resolve().as_uri())
    page.wait_for_selector("canvas")
    page.mouse.move(700, 300)  # its sidebar gives way
    page.wait_for_timeout(4000)  # it draws step by step
    page.mouse.move(600, 200)
    page.wait_for_timeout(500)
    return page.screenshot()


def _stats(report: Report) -> dict[str, Any]:
    """The files as webpack would describe bundles."""
    assets, modules = [], []
    for number, file in enumerate(report.files):
        name = f"{file.path}.js"
        assets.append({"name": name, "size": file.size, "chunks": [number], "emitted": True, "type": "asset"})
        for region in file.regions:
            if region.kind.is_blob:
                path = f"./{region.name.replace('.', '/')}"
                module = {"id": len(modules), "name": path, "identifier": f"{number} {path}", "size": region.nbytes}
                modules.append({**module, "chunks": [number]})
    chunks = [{"id": number, "names": [], "files": [asset["name"]]} for number, asset in enumerate(assets)]
    return {"assets": assets, "chunks": chunks, "modules": modules, "entrypoints": {}, "errors": [], "warnings": []}


def _ncdu(browser: Browser, folder: Path, work: Path) -> bytes:
    """From its own export, in which the folder has no path of this machine."""
    command = [_program("ncdu"), "-0", "-o", "-", os.fspath(folder)]
    tree = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    tree[3][0]["name"] = f"/{folder.parent.name}/{folder.name}"
    (work / "ncdu.json").write_text(json.dumps(tree))
    return _terminal(browser, [command[0], "--si", "--color", "off", "-f", "ncdu.json"], work)


def _dive(browser: Browser, folder: Path, work: Path) -> bytes:
    """An image in which each file came with a layer of its own; the last one is chosen."""
    _write_image(work / "models.tar", folder)
    command = [_program("dive"), "--source", "docker-archive", "models.tar"]
    return _terminal(browser, command, work, [_DOWN] * min(len(list(folder.rglob("*.pt*"))), 20))


def _write_image(path: Path, folder: Path) -> None:
    """As `docker save` writes it: a tar of tars, and what is in them as JSON."""
    files = sorted(file for file in folder.rglob("*") if file.suffix in {".pte", ".ptd", ".safetensors"})
    with tarfile.open(path, "w") as tar:

        def add(name: str, data: bytes) -> None:
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))

        layers = []
        for number, file in enumerate(files):
            packed = io.BytesIO()
            with tarfile.open(fileobj=packed, mode="w") as layer:
                layer.add(file, f"models/{file.relative_to(folder)}")
            layers.append(f"{number:064x}/layer.tar")
            add(layers[-1], packed.getvalue())
        history = [{"created_by": f"COPY {file.relative_to(folder)} /models/"} for file in files]
        rootfs = {"type": "layers", "diff_ids": [f"sha256:{number:064x}" for number in range(len(files))]}
        add(
            "config.json",
            json.dumps({"architecture": "amd64", "os": "linux", "history": history, "rootfs": rootfs}).encode(),
        )
        add(
            "manifest.json",
            json.dumps([{"Config": "config.json", "RepoTags": ["models:1"], "Layers": layers}]).encode(),
        )


# ------------------------------------------------------------------------------------------------------- terminals


_DOWN = "\x1b[B"


def _terminal(browser: Browser, command: Sequence[str], folder: Path, keys: Sequence[str] = ()) -> bytes:
    """What a program draws on a terminal, after some keys."""
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "", "LANG": "C.UTF-8"}
    child = pexpect.spawn(command[0], [*command[1:]], dimensions=(ROWS, COLUMNS), cwd=folder, env=environment)
    try:
        _drain(child, stream)
        for key in keys:
            child.send(key)
            _drain(child, stream, 0.3)
    finally:
        child.close(force=True)
    page = browser.new_page(viewport=WINDOW)
    page.set_content(_as_html(screen))
    return page.locator("pre").screenshot()


def _drain(child: Any, stream: Any, seconds: float = 3) -> None:
    """Read until nothing comes for some seconds."""
    while True:
        try:
            stream.feed(child.read_nonblocking(65536, timeout=seconds))
        except (pexpect.TIMEOUT, pexpect.EOF):
            return


def _as_html(screen: Any) -> str:
    lines = []
    for row in range(screen.lines):
        cells = (screen.buffer[row][column] for column in range(screen.columns))
        lines.append("".join(f"<span style='{_style(cell)}'>{html.escape(cell.data)}</span>" for cell in cells))
    style = "display:inline-block;margin:0;padding:12px;background:#14181d;color:#e8edf2;font:15px/1.25 monospace"
    return f"<body style='margin:0'><pre style='{style}'>{'<br>'.join(lines)}</pre>"


_ANSI = {
    "black": "#14181d",
    "red": "#e06c75",
    "green": "#7fc27f",
    "brown": "#d7ba6a",
    "blue": "#6aa5e8",
    "magenta": "#c58ae0",
    "cyan": "#5bc0c9",
    "white": "#e8edf2",
}


def _style(cell: Any) -> str:
    front, back = (_color(name, default) for name, default in ((cell.fg, "#e8edf2"), (cell.bg, "#14181d")))
    if cell.reverse:
        front, back = back, front
    return f"color:{front};background:{back};font-weight:{'bold' if cell.bold else 'normal'}"


def _color(name: str, default: str) -> str:
    if name == "default":
        return default
    return _ANSI.get(name.removeprefix("bright"), f"#{name}" if len(name) == 6 else default)


@contextmanager
def _browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        found = shutil.which("chromium") or shutil.which("chromium-browser")
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


if __name__ == "__main__":
    main()
