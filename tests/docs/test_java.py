"""The Java and Kotlin of the pages compiles (X2)."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers.native_build import JAVA, ROOT

PAGE = ROOT / "docs" / "java.md"

# What the page leaves to the reader
BEFORE = """
import dev.blobstore.*;
import java.nio.*;
import java.util.*;

abstract class Page {
  BlobCache cache, foundation;
  LogicalTensors tensors;
  Method forward;
  TextRunner runner;
  String folder, index, trustedDigest;
  abstract void download(String url, String range, String file);
"""


def excerpts(language: str) -> list[str]:
    """The blocks of a language that do not stand in an example, which is compiled, too."""
    text = re.sub(r"<!-- from \S+ -->\n+```.*?```", "", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled classes of the library, and of the example."""
    if shutil.which("javac") is None:
        pytest.skip("needs javac")
    folder = tmp_path_factory.mktemp("classes")
    sources = [*(JAVA / "src").rglob("*.java"), ROOT / "examples" / "java" / "Device.java"]
    compiled("javac", "-implicit:none", "-sourcepath", JAVA / "annotations", "-d", folder, *sources)
    return folder


def compiled(*command: object) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
def test_java_of_the_page_compiles(classes: Path, tmp_path: Path) -> None:
    """Each block as a method; later blocks use what earlier ones define."""
    blocks = excerpts("java")
    assert len(blocks) > 4
    code = "\n".join(blocks)
    (tmp_path / "Page.java").write_text(
        f"{BEFORE}\n  void page() throws Exception {{\n{code}\n  }}\n}}\n", encoding="utf-8"
    )
    compiled("javac", "-cp", classes, "-d", tmp_path, tmp_path / "Page.java")


@pytest.mark.long
def test_kotlin_of_the_page_compiles(classes: Path, tmp_path: Path) -> None:
    compiler = shutil.which("kotlinc") or shutil.which(ROOT / "build/kotlin/node_modules/kotlin-compiler/bin/kotlinc")
    if compiler is None:
        pytest.skip("needs kotlinc")
    [code] = [block for block in excerpts("kotlin") if "import" in block]
    (tmp_path / "Classifier.kt").write_text(code, encoding="utf-8")
    compiled(compiler, "-cp", classes, "-d", tmp_path / "kotlin.jar", tmp_path / "Classifier.kt")
