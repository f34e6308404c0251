"""One name for pip, everywhere: `blobstore` on PyPI is another package (E5)."""

import re
from importlib import metadata
from pathlib import Path

import pytest

from blobstore.core import distribution
from blobstore.core.distribution import DISTRIBUTION, RELEASED, install
from tests.packaging.test_packaging import ROOT, project

TEXTS = [
    path
    for pattern in (
        *("*.md", "docs/**/*.md", "runtime_bindings/*.md", "schema/*.md", "mkdocs.yml", ".github/**/*.*"),
        *("*.toml", "runtime_bindings/*.toml", "Makefile", ".ci/run", "*.py", "packaging/*.py", "campaigns/**/*.py"),
        *("blobstore/**/*.py", "blobstore/**/*.js", "blobstore/**/*.html", "examples/**/*.py", "benchmarks/*.py"),
        *("runtime_bindings/**/CMakeLists.txt", "runtime_bindings/cmake/*", "runtime_bindings/src/**/*.*"),
        *("runtime_bindings/include/**/*.h", "runtime_bindings/python/*.cpp", "examples/cpp/*"),
    )
    for path in sorted(ROOT.glob(pattern))
    if path.is_file()
]


def test_the_packages_have_the_name() -> None:
    assert project(ROOT)["project"]["name"] == DISTRIBUTION == "executorch-blobstore"
    assert project(ROOT / "runtime_bindings")["project"]["name"] == f"{DISTRIBUTION}-runtime"
    assert metadata.metadata(DISTRIBUTION)["Name"] == DISTRIBUTION


def test_the_command_line_and_the_import_keep_theirs() -> None:
    assert list(project(ROOT)["project"]["scripts"]) == ["blobstore"]


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_text_installs_another_package(path: Path) -> None:
    """Neither `blobstore[cli]` nor `pip install blobstore`, which would install a package of 2013."""
    text = path.read_text()
    assert re.findall(r"(?<![\w-])blobstore(?:-runtime)?\[\w+", text) == []
    assert (
        re.findall(
            r"pip install [^\n]*?(?<![\w./-])blobstore(?:-runtime)?(?![\w-]|://)", text.replace("blobstore @", "")
        )
        == []
    )


def test_the_extras_that_messages_name_exist() -> None:
    extras = project(ROOT)["project"]["optional-dependencies"]
    named = {
        name
        for path in TEXTS
        for name in re.findall(r"(?:install|needed)\((?:f?\".*\", )?[\"'](\w+)[\"']\)", path.read_text())
    }
    assert {"cli", "executorch", "pool", "releases", "runtime"} <= named <= set(extras)


def test_until_the_release_messages_install_from_the_clone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that nobody has registered would be an invitation to whoever does."""
    monkeypatch.setattr(distribution, "RELEASED", False)
    assert install("cli") == "pip install '.[cli]' in the clone"
    assert install("runtime", "--no-deps") == "pip install --no-deps ./runtime_bindings in the clone"
    monkeypatch.setattr(distribution, "RELEASED", True)
    assert install("cli") == "pip install 'executorch-blobstore[cli]'"


@pytest.mark.skipif(RELEASED, reason="the names are registered")
@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_until_the_release_no_text_asks_an_index_for_the_packages(path: Path) -> None:
    """Neither a page nor a message; the checklist of the release is for later, and `@ URL` asks no index."""
    if path.name != "releasing.md":
        command = r"(?:\bpipx?|\buv) [^\n`]*(?<![\w/.])executorch-blobstore(?!\[?[\w,]*\]? @ )[^\n]*"
        assert re.findall(command, path.read_text()) == []
