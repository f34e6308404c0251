"""Build both packages and try them as a user would: `make dist`.

Each of the Pythons that this machine has gets an empty environment, the wheels from `dist/`, and `smoke.py`, which runs
outside of the source tree. Wheels are built from the source distributions, which must contain the tests.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
PROJECTS = {"blobstore": ROOT, "blobstore_runtime": ROOT / "runtime_bindings"}


def main() -> None:
    parser = argparse.ArgumentParser(prog="make dist", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--pure", action="store_true", help="only the package without native code")
    parser.add_argument("--python", action="append", help="a version such as 3.12; all that there are if not given")
    options = parser.parse_args()
    out: Path = options.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    pythons = [version for version in options.python or PYTHONS if interpreter(version)]
    if not pythons:
        sys.exit(f"none of Python {', '.join(options.python or PYTHONS)} is installed")
    projects = {"blobstore": ROOT} if options.pure else PROJECTS
    for name, folder in projects.items():
        run(sys.executable, "-m", "build", "--outdir", out, "--sdist", folder)
        (archive,) = out.glob(f"{name}-*.tar.gz")
        check_archive(archive)
        native = name == "blobstore_runtime"
        for version in pythons if native else pythons[:1]:
            wheel(str(interpreter(version)), archive, out)
    run(sys.executable, "-m", "twine", "check", "--strict", *sorted(out.iterdir()))
    for path in sorted(out.glob("*.whl")):
        check_wheel(path)
    for version in pythons:
        smoke(version, out, native=not options.pure)
    say(f"\n{out}: " + ", ".join(sorted(path.name for path in out.iterdir())))
    say(f"tried with Python {', '.join(pythons)}")
    if missing := [version for version in PYTHONS if version not in pythons]:
        say(f"not tried with Python {', '.join(missing)}")


def interpreter(version: str) -> str | None:
    """A Python of this version, if there is one that starts."""
    for name in (f"python{version}", *Path.home().glob(f".pyenv/versions/{version}.*/bin/python")):
        path = shutil.which(name)
        command = [path or "false", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        if found.returncode == 0 and found.stdout.strip() == version:
            return path
    return None


def wheel(python: str, archive: Path, out: Path) -> None:
    """Build a wheel from a source distribution, in an environment of its own.

    A native wheel is named after the oldest glibc that it runs on, as PyPI demands. ExecuTorch's libraries stay where
    its own wheel has them.
    """
    with tempfile.TemporaryDirectory(prefix="wheel-") as place:
        run(python, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps", "-w", place, archive)
        (built,) = Path(place).glob("*.whl")
        if built.name.endswith("-any.whl"):
            shutil.move(built, out)
        else:
            run(sys.executable, "-m", "auditwheel", "repair", "--exclude", "libexecutorch*", "-w", out, built)


def check_archive(archive: Path) -> None:
    """A source distribution has the licence, a readme and the tests."""
    with tarfile.open(archive) as opened:
        names = {name.split("/", 1)[-1] for name in opened.getnames()}
    require(archive, names, ["LICENSE", "README.md", "pyproject.toml"])
    if not any(name.startswith("tests/") for name in names):
        sys.exit(f"{archive.name}: the tests are missing")


def check_wheel(path: Path) -> None:
    """A wheel has its types and its licences."""
    with zipfile.ZipFile(path) as opened:
        names = set(opened.namelist())
    package = path.name.split("-")[0]
    (information,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
    licences = ["LICENSE"] if package == "blobstore" else ["LICENSE", "third_party/xxhash/LICENSE"]
    require(path, names, [f"{package}/py.typed", *(f"{information}/licenses/{name}" for name in licences)])
    if strange := sorted(name for name in names if not name.startswith((f"{package}/", information))):
        sys.exit(f"{path.name}: it would install {strange[0]}")


def require(path: Path, names: set[str], wanted: list[str]) -> None:
    if missing := [name for name in wanted if name not in names]:
        sys.exit(f"{path.name}: {', '.join(missing)} missing")


def smoke(version: str, out: Path, *, native: bool) -> None:
    """Install the wheels into an empty environment and use them there."""
    with tempfile.TemporaryDirectory(prefix="smoke-") as place:
        environment = Path(place) / "venv"
        run(str(interpreter(version)), "-m", "venv", environment)
        python = environment / "bin" / "python"
        (pure,) = out.glob("blobstore-*.whl")
        wheels = [f"{pure}[cli]"]
        if native:
            wheels += out.glob(f"blobstore_runtime-*-cp{version.replace('.', '')}-*.whl")
        run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wheels)
        script = Path(__file__).with_name("smoke.py")
        run(python, "-I", "-W", "error", script, *(["--native"] if native else []), cwd=place)


def run(*command: str | Path, cwd: str | Path | None = None) -> None:
    """Run a command; the first that fails ends it all."""
    say(f"$ {' '.join(map(str, command))}")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if code := subprocess.run([str(part) for part in command], cwd=cwd, env=environment, check=False).returncode:
        sys.exit(f"that ended with {code}")


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
