"""The Maven repository that `packaging/maven.py` writes, as builds for Java and Kotlin take it."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.helpers.native_build import JAVA, ROOT, missing
from tests.packaging.test_aar import x86_64  # noqa: F401 - a fixture

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("javadoc") is None, reason="needs a JDK"),
    pytest.mark.skipif(missing() is not None, reason="needs a C++ compiler"),
]

POM = {"m": "http://maven.apache.org/POM/4.0.0"}
KOTLIN = shutil.which("kotlinc") or shutil.which(ROOT / "build/kotlin/node_modules/kotlin-compiler/bin/kotlinc")

APPLICATION = """
package app

import dev.blobstore.BlobCache
import dev.blobstore.Program
import dev.blobstore.ReleaseOptions
import dev.blobstore.Tensor
import dev.blobstore.kotlin.*
import kotlinx.coroutines.runBlocking

fun scores(folder: String, fetch: suspend (String, String, String) -> Unit): FloatArray = runBlocking {
    awaitPull("https://models.example.com/a/latest/index.json", folder, download = fetch)
    openRelease(folder).use { live ->
        val program: Program = awaiting { Program.load(live.path() + "/serve.pte", live.cache()) }
        live.awaitFollow()
        program.loadMethod("forward").awaitExecute(Tensor.of(floatArrayOf(1f, 2f), 1, 2)).tensor(0).floats()
    }
}

fun cache(base: BlobCache?): BlobCache = openCache("adapter.ptd", base = base)
"""
WRONG = {
    "fun one(): BlobCache = openCache(null)": "openCache(null)",
    "fun two(out: dev.blobstore.Outputs): Any = out.get(0)": "out.get(0)",
    'fun three(cache: BlobCache?) = Program.load("a.pte", cache)': "cache)",
}
"""What a compiler that knows what may be null refuses, and where."""


@pytest.fixture(scope="module")
def repository(x86_64: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    out = tmp_path_factory.mktemp("maven")
    command = [sys.executable, ROOT / "packaging" / "maven.py", "--out", out, x86_64]
    subprocess.run([str(part) for part in command], check=True)
    return out


def artifact(repository: Path, name: str, ending: str) -> Path:
    [folder] = repository.glob(f"dev/blobstore/{name}/*")
    found = folder / f"{name}-{folder.name}{ending}"
    assert found.is_file()
    return found


def test_each_artifact_is_whole(repository: Path) -> None:
    """What repositories require, under the names that Maven and Gradle look for."""
    for name, ending in (("blobstore", ".jar"), ("blobstore-android", ".aar")):
        pom = ElementTree.parse(artifact(repository, name, ".pom")).getroot()  # noqa: S314 - written by this project
        found = {
            tag: pom.findtext(f"m:{tag}", namespaces=POM) for tag in ("groupId", "artifactId", "version", "packaging")
        }
        version = artifact(repository, name, ".pom").parent.name
        assert found == {"groupId": "dev.blobstore", "artifactId": name, "version": version, "packaging": ending[1:]}
        for required in ("name", "description", "url", "licenses/m:license", "developers/m:developer", "scm/m:url"):
            assert pom.find(f"m:{required}", POM) is not None
        assert [one.findtext("m:artifactId", namespaces=POM) for one in pom.iterfind("m:dependencies/*", POM)] == [
            "jspecify"
        ]
        with zipfile.ZipFile(artifact(repository, name, "-sources.jar")) as jar:
            source = JAVA / "src"
            assert set(jar.namelist()) == {path.relative_to(source).as_posix() for path in source.rglob("*.java")}
        with zipfile.ZipFile(artifact(repository, name, "-javadoc.jar")) as jar:
            assert {"index.html", "dev/blobstore/Release.html"} <= set(jar.namelist())
        assert artifact(repository, name, ending).stat().st_size > 0


def test_a_module_requires_the_classes_by_their_name(repository: Path, tmp_path: Path) -> None:
    jar = artifact(repository, "blobstore", ".jar")
    with zipfile.ZipFile(jar) as opened:
        assert [name for name in opened.namelist() if "jspecify" in name] == []
    (tmp_path / "module-info.java").write_text("module app { requires dev.blobstore; }", encoding="utf-8")
    (tmp_path / "App.java").write_text(
        "package app; class App { Object open() { return dev.blobstore.BlobCache.open(); } }", encoding="utf-8"
    )
    sources = [tmp_path / "module-info.java", tmp_path / "App.java"]
    command = ["javac", "--module-path", jar, "-d", tmp_path / "out", *sources]
    subprocess.run([str(part) for part in command], check=True)


@pytest.mark.skipif(KOTLIN is None, reason="needs kotlinc")
def test_kotlin_has_defaults_and_suspends_and_knows_what_may_be_null(repository: Path, tmp_path: Path) -> None:
    [coroutines] = Path(str(KOTLIN)).resolve().parents[1].glob("lib/kotlinx-coroutines-core-jvm.jar")
    jars = [artifact(repository, name, ".jar") for name in ("blobstore", "blobstore-kotlin")]
    for name, wrong in (("good.kt", ""), ("wrong.kt", "\n".join(WRONG))):
        source = tmp_path / name
        source.write_text(APPLICATION + wrong, encoding="utf-8")
        command = [KOTLIN, "-cp", ":".join(map(str, [*jars, coroutines])), "-d", tmp_path / f"{name}.jar", source]
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
        assert (done.returncode == 0) == (not wrong), done.stderr
    refused = re.findall(r"wrong\.kt:(\d+):\d+: error: .*\n(.*)", done.stderr)
    first = APPLICATION.count("\n") + 1
    assert [int(line) - first for line, _ in refused] == list(range(len(WRONG))), done.stderr
    assert all(part in text for part, (_, text) in zip(WRONG.values(), refused, strict=True))
