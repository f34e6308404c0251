"""Write the classes for Java, Android and Kotlin as a Maven repository, which Gradle and Maven take from a folder.

    python packaging/maven.py --out dist/maven build/arm64/libblobstore_jni.so

`blobstore` has the classes, `blobstore-android` the archive of `aar.py` if libraries are given, and `blobstore-kotlin`
functions with defaults and `suspend`, if Kotlin's compiler is here: on the PATH, or in build/kotlin, where `make dist`
puts that of npm. Each has a POM, its sources and its documentation. The same inputs give the same bytes, but for what
the compilers of other versions write. Needs a JDK.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from xml.etree import ElementTree

import aar

GROUP = "dev.blobstore"
HOME = "https://github.com/blobstore-project/blobstore"
KOTLIN = "2.2"  # the oldest version of Kotlin that reads what is compiled here
NULLNESS = ("org.jspecify", "jspecify", "1.0.0", "compile")
CLASSES = ("dev.blobstore", "blobstore", aar.VERSION, "provided")  # or blobstore-android: the application says which
COROUTINES = ("org.jetbrains.kotlinx", "kotlinx-coroutines-core", "1.10.2", "compile")
Dependency = tuple[str, str, str, str]


def main() -> None:
    parser = argparse.ArgumentParser(prog="packaging/maven.py", description=__doc__)
    parser.add_argument("libraries", nargs="*", type=Path, metavar=aar.LIBRARY, help="one for each ABI of Android")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the repository")
    options = parser.parse_args()
    write(options.out, options.libraries)


def write(out: Path, libraries: Sequence[Path] = ()) -> None:
    """Write the repository, and print what it has and what it lacks.

    Raises:
        SystemExit: There is no JDK, or as `aar.assemble`.
    """
    sources = {path.relative_to(aar.JAVA / "src").as_posix(): path for path in aar.sources()}
    documentation = javadoc()
    android = "The same for Android, with its native libraries"
    purpose = "A shared, writable cache of weights for programs of ExecuTorch"
    classes = aar.classes()
    publish(
        out, "blobstore", "jar", purpose, [NULLNESS], sources, documentation, lambda path: path.write_bytes(classes)
    )
    if libraries:
        publish(
            out,
            "blobstore-android",
            "aar",
            android,
            [NULLNESS],
            sources,
            documentation,
            lambda path: aar.assemble(list(libraries), path),
        )
    else:
        say("no blobstore-android: no libraries for Android were given")
    if (compiler := kotlinc()) is None:
        say("no blobstore-kotlin: there is no kotlinc")
        return
    publish(
        out,
        "blobstore-kotlin",
        "jar",
        "The same for Kotlin: defaults, and calls that suspend",
        [CLASSES, COROUTINES],
        {path.relative_to(aar.JAVA / "kotlin").as_posix(): path for path in kotlin_sources()},
        documentation,
        lambda path: compile_kotlin(compiler, path),
    )


def publish(
    out: Path,
    name: str,
    packaging: str,
    description: str,
    dependencies: Sequence[Dependency],
    sources: dict[str, Path],
    documentation: bytes,
    make: Callable[[Path], object],
) -> None:
    """Write one artifact where the layout of repositories has it."""
    folder = out.joinpath(*GROUP.split("."), name, aar.VERSION)
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{name}-{aar.VERSION}"
    make(folder / f"{stem}.{packaging}")
    (folder / f"{stem}.pom").write_bytes(pom(name, packaging, description, dependencies))
    parts = {name: path.read_bytes() for name, path in sorted(sources.items())}
    (folder / f"{stem}-sources.jar").write_bytes(aar.archive(parts))
    (folder / f"{stem}-javadoc.jar").write_bytes(documentation)
    say(f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")


def pom(name: str, packaging: str, description: str, dependencies: Sequence[Dependency]) -> bytes:
    """What repositories require of each artifact."""
    project = ElementTree.Element("project", xmlns="http://maven.apache.org/POM/4.0.0")

    def add(parent: ElementTree.Element, **texts: str) -> None:
        for tag, text in texts.items():
            ElementTree.SubElement(parent, tag).text = text

    add(project, modelVersion="4.0.0", groupId=GROUP, artifactId=name, version=aar.VERSION, packaging=packaging)
    add(project, name=name, description=description, url=HOME)
    licence = ElementTree.SubElement(ElementTree.SubElement(project, "licenses"), "license")
    add(licence, name="BSD-3-Clause", url=f"{HOME}/blob/main/LICENSE")
    developer = ElementTree.SubElement(ElementTree.SubElement(project, "developers"), "developer")
    add(developer, name="the blobstore authors", url=HOME)
    add(ElementTree.SubElement(project, "scm"), connection=f"scm:git:{HOME}.git", url=HOME)
    listed = ElementTree.SubElement(project, "dependencies")
    for group, artifact, version, scope in dependencies:
        one = ElementTree.SubElement(listed, "dependency")
        add(one, groupId=group, artifactId=artifact, version=version, scope=scope)
    ElementTree.indent(project)
    return ElementTree.tostring(project, "utf-8", xml_declaration=True) + b"\n"


def javadoc() -> bytes:
    """The documentation of the classes, as a jar."""
    command = shutil.which("javadoc")
    if command is None:
        sys.exit("the documentation of the classes needs javadoc, of a JDK of version 11 or later")
    with tempfile.TemporaryDirectory() as made:
        options = ("-quiet", "-notimestamp", "-Xdoclint:none", "--release", "11", "-encoding", "UTF-8", "-d", made)
        run(command, *options, "-sourcepath", aar.JAVA / "annotations", *aar.sources())
        pages = {
            path.relative_to(made).as_posix(): path.read_bytes() for path in Path(made).rglob("*") if path.is_file()
        }
    return aar.archive(dict(sorted(pages.items())))


def kotlinc() -> Path | None:
    """Kotlin's compiler, if it is here."""
    of_npm = aar.ROOT / "build" / "kotlin" / "node_modules" / "kotlin-compiler" / "bin" / "kotlinc"
    found = shutil.which("kotlinc") or shutil.which(of_npm)
    return None if found is None else Path(found).resolve()


def kotlin_sources() -> list[Path]:
    return sorted((aar.JAVA / "kotlin").rglob("*.kt"))


def compile_kotlin(compiler: Path, out: Path, *more: Path) -> None:
    """Compile the functions for Kotlin, and more files, on the classes for Java.

    Raises:
        SystemExit: They do not compile. The message is the compiler's.
    """
    coroutines = compiler.parents[1] / "lib" / "kotlinx-coroutines-core-jvm.jar"
    with tempfile.TemporaryDirectory() as folder:
        classes = Path(folder, "classes.jar")
        classes.write_bytes(aar.classes())
        versions = ("-language-version", KOTLIN, "-api-version", KOTLIN, "-jvm-target", "11")
        run(compiler, *versions, "-cp", f"{classes}:{coroutines}", "-d", out, *kotlin_sources(), *more)


def run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(done.stdout + done.stderr)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
