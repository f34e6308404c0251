"""What the pages say of the sources is so: messages, errors, public names, files (U1, D2)."""

import ast
import functools
import importlib
import re
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from benchmarks.film import film
from blobstore import errors
from examples.demo.live import LiveResult
from examples.demo.starts import Start

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TROUBLESHOOTING = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
CPP_STRING = re.compile(r'"((?:[^"\\\n]|\\.)*)"')
PLACE = "\0"  # what a program puts in


@functools.cache
def messages() -> frozenset[str]:
    """Every string of the sources, in Python as one text with places for what is put in."""
    found = set()
    for path in (*(ROOT / "blobstore").rglob("*.py"), *(ROOT / "examples").rglob("*.py")):
        found |= {text(node) for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))}
    for path in (ROOT / "runtime_bindings").rglob("*.[ch]*"):
        if {"src", "python"} & set(path.parts) and path.suffix in {".cpp", ".h"}:
            found |= set(cpp_messages(path.read_text(encoding="utf-8")))
    return frozenset(found - {""})


def text(node: ast.AST) -> str:
    """A string, or the parts of an f-string or of a sum with places between them."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text(value) or PLACE for value in node.values)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "needed":
        return f"{text(node.args[0]) or PLACE}: {PLACE} ({PLACE})"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = text(node.left), text(node.right)
        return (left or PLACE) + (right or PLACE) if left or right else ""
    return ""


def cpp_messages(source: str) -> list[str]:
    """The strings of each statement, with places between them."""
    return [PLACE.join(["", *CPP_STRING.findall(part), ""]) for part in source.split(";\n") if '"' in part]


def headings() -> list[str]:
    return re.findall(r"^### `(.+)`$", TROUBLESHOOTING, re.MULTILINE)


def parts_of_messages() -> list[str]:
    """The first column of tables whose header says that it quotes a message."""
    tables = re.findall(r"^\| it says \|.*\n\|[-|]+\n((?:\|.*\n)+)", TROUBLESHOOTING, re.MULTILINE)
    return [re.findall(r"`(.+?)`", row)[0] for table in tables for row in table.splitlines()]


@pytest.mark.parametrize("heading", [*headings(), *parts_of_messages()])
def test_a_message_is_in_the_sources(heading: str) -> None:
    """What stands between the `…` of a heading is one message, in this order. In C++ the file is not part of it."""
    reason = heading.removeprefix("blobstore: ").removeprefix("…: ")
    parts = reason.split("…")
    pattern, longest = re.compile(".*".join(map(re.escape, parts)), re.DOTALL), max(parts, key=len)
    assert any(pattern.search(message) for message in messages() if longest in message), (
        f"no message of the sources is like: {heading}"
    )


def test_each_error_has_a_section_with_a_message() -> None:
    """The sections are the classes of blobstore.errors, none too few or too many."""
    sections = dict(re.findall(r"^## (\w+Error)\n(.*?)(?=^## |\Z)", TROUBLESHOOTING, re.MULTILINE | re.DOTALL))
    assert set(sections) == set(errors.__all__)
    assert [name for name, section in sections.items() if "\n### `" not in section] == []


PUBLIC = ("adapters", "errors", "lowering", "pool", "releases", "runtime", "testing", "training", "transformers")


@pytest.mark.parametrize("name", ["blobstore", *(f"blobstore.{name}" for name in PUBLIC)])
def test_the_reference_lists_what_is_public(name: str) -> None:
    """Everything in `__all__`, by that name or where it is defined."""
    assert (DOCS / "api" / f"{name.removeprefix('blobstore.')}.md").is_file()
    pages = (page.read_text(encoding="utf-8") for page in (DOCS / "api").glob("*.md"))
    listed = {item for page in pages for item in re.findall(r"^::: (\S+)$", page, re.MULTILINE)}
    module = importlib.import_module(name)
    public = {item for item in module.__all__ if not item.startswith("_")}
    if name != "blobstore.errors":
        public -= set(errors.__all__)  # they have a page of their own
    missing = {item for item in public if not listed & {f"{name}.{item}", f"{defined_in(module, item)}.{item}"}}
    assert missing == set(), f"docs/api lacks {sorted(missing)}"


def defined_in(module: ModuleType, name: str) -> str:
    """The module of a function or a class; the one that has it for everything else."""
    return str(getattr(getattr(module, name), "__module__", module.__name__))


def public_names() -> set[str]:
    """What `from blobstore… import` may name: `__all__` of the public modules, and what the reference lists."""
    modules = ["blobstore", *(f"blobstore.{name}" for name in (*PUBLIC, "llm", "numpy", "torch"))]
    names = {f"{module}.{name}" for module in modules for name in importlib.import_module(module).__all__}
    for page in (DOCS / "api").glob("*.md"):
        names |= set(re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE))
    return names


def test_pages_import_only_what_is_public() -> None:
    """A name that a reader is told to import is one that stays."""
    names = public_names()
    for path in (ROOT / "README.md", ROOT / "runtime_bindings" / "README.md", *DOCS.rglob("*.md")):
        for code in re.findall(
            r"^```python[^\n]*\n(.*?)^```$", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
        ):
            for node in ast.walk(ast.parse(code)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "blobstore":
                    for alias in node.names:
                        assert f"{node.module}.{alias.name}" in names, f"{path.name}: {node.module}.{alias.name}"


def test_the_film_shows_what_programs_computed() -> None:
    """In three phases, without scripts and other files, so that it moves inside an <img>; the committed one has what torch computes."""
    start = Start(0.1, 0, ())
    result = LiveResult((32, 64), [0.25, 0.26], [0.91, 0.92], [0.25, 0.26], 0.4, 0.2, {}, {}, None, (start, start))
    for picture in (film(result), (DOCS / "img" / "live.svg").read_text(encoding="utf-8")):
        root = ElementTree.fromstring(picture)  # noqa: S314 - it is ours
        assert not [node for node in root.iter() if node.tag.rpartition("}")[2] in {"script", "image", "use", "a"}]
        assert "url(" not in picture
        assert len(picture) < 60_000
        phases = {
            phase: [node.text for node in root.iter() if node.get("class") == f"number p{phase}"] for phase in range(3)
        }
        assert phases[0] == phases[2] != phases[1]
        assert all(f".p{phase} {{ animation-name: p{phase}; }}" in picture for phase in range(3))
    assert film(result).count(">0.9100<") == film(result).count(">0.9200<") == 1
    assert phases == {0: ["0.6639"] * 3, 1: ["1.0000"] * 3, 2: ["0.6639"] * 3}


def test_the_headers_are_listed() -> None:
    """The page on C++ links every installed header."""
    page = (DOCS / "api" / "cpp.md").read_text(encoding="utf-8")
    headers = {path.name for path in (ROOT / "runtime_bindings" / "include" / "blobstore").iterdir()}
    assert set(re.findall(r"include/blobstore/(\w+\.h)\)", page)) == headers


def test_tests_that_pages_name_exist() -> None:
    """A page that says how something is tested names files that are there."""
    for page in DOCS.rglob("*.md"):
        for name in re.findall(r"\btests/[\w/*.]+\w", page.read_text(encoding="utf-8")):
            assert list(ROOT.glob(name)), f"{page.name} names {name}, which is not there"


def test_one_page_says_what_runs_where() -> None:
    """The other pages link to it."""
    assert [page.name for page in DOCS.rglob("*.md") if "\n| part | system |" in page.read_text("utf-8")] == [
        "install.md"
    ]


def documents() -> list[Path]:
    """README.md and the like, and the pages of the site."""
    folders = (ROOT, ROOT / "runtime_bindings", ROOT / "schema")
    return [*(path for folder in folders for path in sorted(folder.glob("*.md"))), *sorted(DOCS.rglob("*.md"))]


def anchors(path: Path) -> set[str]:
    """Those of the headings, as the site and GitHub make them."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = [re.sub(r"`|\]\([^)]*\)", "", one).lower() for one in re.findall(r"^#+ (.+)$", text, re.MULTILINE)]
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip()) for heading in headings}


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path: Path) -> None:
    """To files of the repository, and to headings in them; `make site` sees only those inside docs/."""
    text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for name, anchor in re.findall(r"\]\((?![a-z]+:)([^)\s#]*)(?:#([^)\s]+))?\)", text):
        target = (path.parent / name).resolve() if name else path
        assert target.exists() and target.is_relative_to(ROOT), f"{path.name}: {name} is not there"
        assert not anchor or anchor in anchors(target), f"{path.name}: {name} has no heading #{anchor}"
