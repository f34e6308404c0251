"""What both packages say of themselves, before anything is built; `make dist` builds and tries them."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import blobstore
from tests.helpers import machines

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[2]
PROJECTS = [ROOT, ROOT / "runtime_bindings"]
OF_CONTRIBUTORS = {"test", "bench", "build", "fuzz", "lint", "platforms", "pictures", "docs", "dist", "architectures"}
"""Extras for work on blobstore itself."""


def project(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))


def pythons(folder: Path = ROOT) -> list[str]:
    """The Pythons that a package supports: its classifiers are the one place that lists them."""
    classifiers = project(folder)["project"]["classifiers"]
    return [
        version for one in classifiers for version in re.findall(r"^Programming Language :: Python :: (3\.\d+)$", one)
    ]


def test_the_pythons_are_the_same_everywhere() -> None:
    """In both packages, in what CI tests, on the page, and where a build names the oldest."""
    supported = pythons()
    assert supported == [f"3.{minor}" for minor in range(10, 15)]
    assert pythons(ROOT / "runtime_bindings") == supported
    assert project(ROOT)["tool"]["ruff"]["target-version"] == "py" + supported[0].replace(".", "")
    assert (
        f"find_package(Python {supported[0]} " in (ROOT / "runtime_bindings" / "python" / "CMakeLists.txt").read_text()
    )
    assert set(machines.DEBIAN) <= set(supported)
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    for part in ("`blobstore`: files, command line, report", "`executorch-blobstore-runtime`, Python"):
        cells = re.findall(rf"^\| {re.escape(part)} \| Linux x86-64 \| ([^|]+) \|", page, re.MULTILINE)
        assert sorted(",".join(cells).replace(" ", "").split(","), key=lambda one: int(one[2:])) == supported
    (line,) = re.findall(
        r"^\| Python \| ([\d.]+) to ([\d.]+) \|", (ROOT / "docs" / "stability.md").read_text(), re.MULTILINE
    )
    assert list(line) == [supported[0], supported[-1]]


def test_both_packages_have_one_version() -> None:
    """Each has it in one place, the C++ headers too, and they are released together."""
    (native,) = re.findall(
        r"^project\(blobstore_runtime VERSION ([0-9.]+) ",
        (ROOT / "runtime_bindings" / "CMakeLists.txt").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert native == blobstore.__version__
    header = (ROOT / "runtime_bindings" / "include" / "blobstore" / "version.h").read_text(encoding="utf-8")
    numbers = re.findall(r"^#define BLOBSTORE_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)$", header, re.MULTILINE)
    assert ".".join(numbers) == blobstore.__version__  # `blobstore::version()` is made of them, see facade_test.cpp
    for folder in PROJECTS:
        assert "version" in project(folder)["project"]["dynamic"]


@pytest.mark.parametrize("folder", PROJECTS, ids=lambda folder: folder.name)
def test_what_pypi_shows(folder: Path) -> None:
    about = project(folder)["project"]
    assert {"Homepage", "Documentation", "Changelog", "Issues", "Source"} <= set(about["urls"])
    assert about["authors"] and about["keywords"] and about["description"]
    assert pythons(folder)[0] == about["requires-python"].removeprefix(">=")
    for name in about["license-files"]:
        assert any(path.is_file() for path in folder.glob(name)), name


def test_the_extras_are_listed() -> None:
    """The page on installing has every extra that is not for work on blobstore itself, and what it says of them is so."""
    extras = project(ROOT)["project"]["optional-dependencies"]
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    table = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", page, re.MULTILINE))
    assert table.keys() == extras.keys() - OF_CONTRIBUTORS
    for name, text in table.items():
        for included in re.findall(r"includes `(\w+)`", text):
            assert f"executorch-blobstore[{included}]" in extras[name], name


def test_the_runtime_needs_neither_executorch_nor_torch() -> None:
    """They take most of a gigabyte, and it has what it needs of them."""
    assert project(ROOT / "runtime_bindings")["project"]["dependencies"] == ["numpy>=1.26"]


def test_both_packages_have_types_and_the_same_licence() -> None:
    assert (ROOT / "blobstore" / "py.typed").exists()
    assert (ROOT / "runtime_bindings" / "python" / "blobstore_runtime" / "py.typed").exists()
    assert (ROOT / "LICENSE").read_text("utf-8") == (ROOT / "runtime_bindings" / "LICENSE").read_text("utf-8")


def test_links_of_the_readme_lead_somewhere_and_are_absolute_on_pypi() -> None:
    """The long description has no file beside it, so the build's substitutions must reach every relative link."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rules = project(ROOT)["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]
    for path in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
        assert (ROOT / path).exists(), path
    for rule in rules:
        text = re.sub(rule["pattern"], rule["replacement"], text)
    native = (ROOT / "runtime_bindings" / "README.md").read_text(encoding="utf-8")
    for links in (re.findall(r"\]\(([^)]+)\)", one) for one in (text, native)):
        assert links
        assert [link for link in links if not link.startswith(("https://", "#"))] == []


def test_the_demo_installs_what_it_needs_and_says_so(tmp_path: Path) -> None:
    """On a fresh clone: neither tests nor linters, which are half of what `make install` brings."""
    done = subprocess.run(
        [shutil.which("make") or "make", "-n", "demo", f"VENV={tmp_path / 'venv'}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    installed = [line for line in done.stdout.splitlines() if '".[' in line]
    assert [re.findall(r'"\.\[(.*)\]"', line) for line in installed] == [["demo,build"]]
    assert "--quiet" not in installed[0]
