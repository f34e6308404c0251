"""The code of the documentation runs as it is printed, and prints what the pages say (U1, U2, W1, T1, F5).

A page's ```python blocks run in order in one namespace; one with a title is written to the file of that name. In a
```console block each line after `$ ` is a command, and what follows is its output. A block without a language that
follows ```python is what that code prints. `…` in an output stands for anything. Sizes, and numbers of four digits or more, may
differ by a tenth, since compressors and headers do; all others are exact. ```bash blocks are one script each.
Everything runs in one temporary folder a page, which `pages.py` fills. A block after a comment `<!-- needs PACKAGE -->` is
run if the package is installed. One after `<!-- not run: why -->` is not run; these comments are counted here.
"""

import contextlib
import importlib.util
import io
import os
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from blobstore.lowering.export import quiet
from tests.docs.pages import PAGES

ROOT = Path(__file__).parents[2]

BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]+) -->\n+|<!-- needs (?P<package>\w+) -->\n+)?"
    r"^```(?P<language>python|console|bash|sh|cpp)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<code>.*?)^```$"
    r"(?:\n+^```\n(?P<output>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)

FIGURE = re.compile(r"(?<![\w.,@/-])\d[\d,]*(?:\.\d+)? (?:B|KB|MB|GB)\b|(?<![\w.,@/-])\d[\d,]{3,}(?![\w.,/-])")
"""A size with its unit, or a number of four digits or more."""

# How many blocks of a page are marked as not run
NOT_RUN = {
    "docs/howto/fuse.md": 1,
    "docs/howto/peft.md": 2,
    "docs/language-models.md": 3,
    "docs/index.md": 1,
    "docs/install.md": 5,
    "docs/tutorial.md": 1,
    "docs/cpp.md": 2,
    "docs/java.md": 1,
    "docs/platforms.md": 5,
    "docs/pool.md": 5,
    "docs/report.md": 1,
}


@dataclass(frozen=True)
class Block:
    """A block of a page, with the line that it begins in."""

    line: int
    language: str
    title: str | None
    code: str
    output: str | None
    reason: str | None
    package: str | None


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(text.count("\n", 0, m.start("code")) + 1, **{key: m[key] for key in BLOCK.groupindex})
        for m in BLOCK.finditer(text)
    ]


def pages() -> list[str]:
    """README.md and all pages of the site that have code."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page.relative_to(ROOT).as_posix() for page in found if blocks(page)]


def check_output(found: str, expected: str, where: str) -> None:
    """Compare line by line, without blanks at the end; `…` stands for anything, also for several lines."""
    wanted = "\n".join(line.rstrip() for line in expected.strip().splitlines())
    got = "\n".join(line.rstrip() for line in found.strip().splitlines())
    texts = ("".join(".*?" if c == "…" else re.escape(c) for c in text) for text in FIGURE.split(wanted))
    match = re.fullmatch(f"({FIGURE.pattern})".join(texts), got, re.DOTALL)
    figures = list(zip(FIGURE.findall(wanted), match.groups(), strict=True)) if match else []
    far = [pair for pair in figures if abs(amount(pair[0]) - amount(pair[1])) > 0.1 * amount(pair[0])]
    assert match, f"{where}: expected\n{wanted}\nfound\n{got}"
    assert not far, f"{where}: expected and found {far}"


def amount(figure: str) -> float:
    """A size in bytes, or a number."""
    number, _, unit = figure.replace(",", "").partition(" ")
    return float(number) * {"": 1, "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9}[unit]


def environment(folder: Path) -> dict[str, str]:
    """That of a user whose terminal has 100 columns, and who has nothing but this in their home."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "COLUMNS": "100", "HOME": str(folder), "XDG_CACHE_HOME": str(folder / ".cache")}


def run_shell(code: str, folder: Path, where: str) -> str:
    """What a script prints, errors included, as on a terminal."""
    done = subprocess.run(
        ["/bin/bash", "-ec", code],
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{where}: exit code {done.returncode} of\n{code}\n{done.stdout}"
    return done.stdout


def run_console(code: str, folder: Path, where: str) -> None:
    assert code.startswith("$ "), f"{where}: a console block begins with a command"
    for part in re.split(r"^\$ ", code, flags=re.MULTILINE)[1:]:
        command, _, expected = part.partition("\n")
        found = run_shell(command, folder, where)
        if expected.strip():
            check_output(found, expected, f"{where}: {command}")


def run_python(block: Block, names: dict[str, Any], where: str) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), quiet():  # the libraries' own deprecations are not for the page to tell
        exec(compile(block.code, where, "exec", dont_inherit=True), names)  # noqa: S102
    if block.output is not None:
        check_output(printed.getvalue(), block.output, where)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, from which Python imports, as at its prompt."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if Path(getattr(module, "__file__", None) or "/").is_relative_to(tmp_path):
            del sys.modules[name]


@pytest.mark.slow_for("docs/language-models.md", "docs/pool.md", "docs/case-study.md")
@pytest.mark.long_for(
    "docs/tutorial.md",
    "docs/training.md",
    "docs/transformers.md",
    "docs/backends.md",
    *(
        f"docs/howto/{name}.md"
        for name in ("ci", "dedup", "foundation-release", "live-weights", "lora", "lowering", "peft")
    ),
)
@pytest.mark.long
@pytest.mark.parametrize("page", pages())
def test_page(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block runs, in order, and what the page prints is what comes out."""
    module = types.ModuleType(re.sub(r"\W", "_", page))  # torch's compiler remembers modules by name
    monkeypatch.setitem(sys.modules, module.__name__, module)  # torch.export looks there
    with quiet():
        from blobstore.lowering import plugin
    monkeypatch.setattr(plugin, "_inners", dict(plugin._inners))  # a page registers one
    PAGES.get(page, lambda folder, names: None)(folder, vars(module))
    for block in blocks(ROOT / page):
        where = f"{page}:{block.line}"
        if block.reason is not None or (block.package and importlib.util.find_spec(block.package) is None):
            continue
        if block.title is not None:
            (folder / block.title).write_text(block.code)
        elif block.language == "cpp":
            continue  # test_cpp.py compiles it
        elif block.language == "python":
            run_python(block, vars(module), where)
        elif block.language == "console":
            run_console(block.code, folder, where)
        else:
            run_shell(block.code, folder, where)


@pytest.mark.parametrize(
    ("expected", "found", "same"),
    [
        ("stored in 13.5 KB.", "stored in 13.1 KB.", True),
        ("stored in 13.5 KB.", "stored in 10.5 KB.", False),
        ("stored in 990 B, … wait", "stored in 1.02 KB, 3 wait", True),
        ("chat@1\t1\t15864\t1795789974", "chat@1\t1\t15900\t1760000000", True),
        ("chat@1\t1\t15864\t1795789974", "chat@1\t2\t15864\t1795789974", False),
        ("5 new contents", "6 new contents", False),
        ("in 2026 files", "in 900 files", False),
    ],
)
def test_figures_may_differ_a_little(expected: str, found: str, same: bool) -> None:
    with contextlib.nullcontext() if same else pytest.raises(AssertionError):
        check_output(found, expected, "here")


def test_what_is_not_run_is_counted() -> None:
    """A block that does not run says why, and adding one changes this test."""
    marked = {page: sum(block.reason is not None for block in blocks(ROOT / page)) for page in pages()}
    assert {page: count for page, count in marked.items() if count} == NOT_RUN


def test_each_marker_belongs_to_a_block() -> None:
    """A marker that stands before something else would hide nothing, or what it should not."""
    for page in pages():
        text = (ROOT / page).read_text(encoding="utf-8")
        assert text.count("<!-- not run") == sum(block.reason is not None for block in blocks(ROOT / page)), page
