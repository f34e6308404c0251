"""Packages for aarch64, on a machine of another kind: wheels from PyPI, and Debian's Python."""

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXECUTORCH = "executorch==1.5.1"
MAC = "arm64-macos"
DEBIAN = {"3.11": "bookworm", "3.13": "trixie"}  # a Python and the Debian that has it


def executorch(machine: str, version: str) -> Path:
    """The folder of ExecuTorch's package for a machine such as "aarch64", or a Mac, and a Python such as "3.11"."""
    return packages(machine, version, EXECUTORCH) / "executorch"


def packages(machine: str, version: str, *requirements: str) -> Path:
    """Unpack wheels without what they depend on; the folder, which is kept in build/."""
    names = "-".join(requirement.replace("==", "-") for requirement in requirements)
    folder = ROOT / "build" / "machines" / f"{machine}-{version}-{names}"
    done = folder / ".done"
    if done.exists():
        return folder
    wheels = folder.with_name(folder.name + ".wheels")
    linux = [f"{name}_{machine}" for name in ("manylinux_2_28", "manylinux_2_17", "manylinux2014")]
    platforms = ["macosx_14_0_arm64"] if machine == MAC else linux
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"),
            *("--only-binary=:all:", "--python-version", version),
            *(part for platform in platforms for part in ("--platform", platform)),
            *("--dest", str(wheels), *requirements),
        ],
        check=True,
    )
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as opened:
            opened.extractall(folder)
    done.touch()
    return folder


def python(version: str) -> Path:
    """Debian's Python for aarch64, unpacked; the folder that is its root. The machine itself gets nothing installed."""
    folder = ROOT / "build" / "machines" / f"aarch64-python{version}"
    done = folder / ".done"
    if done.exists():
        return folder
    state = folder.with_name(folder.name + ".apt")
    for path in (state / "lists" / "partial", state / "archives" / "partial"):
        path.mkdir(parents=True, exist_ok=True)
    (state / "status").touch()
    keys = "/usr/share/keyrings/debian-archive-keyring.gpg"
    (state / "sources.list").write_text(f"deb [signed-by={keys}] {mirror()} {DEBIAN[version]} main\n", encoding="utf-8")
    apt = [
        *("apt-get", "-qq", "-o", "APT::Architecture=arm64", "-o", "APT::Architectures=arm64"),
        *("-o", f"Dir::Etc::SourceList={state / 'sources.list'}", "-o", "Dir::Etc::SourceParts=/dev/null"),
        *("-o", f"Dir::State::Lists={state / 'lists'}", "-o", f"Dir::State::status={state / 'status'}"),
        *("-o", f"Dir::Cache={state}", "-o", f"Dir::Cache::archives={state / 'archives'}"),
        *("-o", "APT::Sandbox::User=root", "-o", "Debug::NoLocking=1"),
    ]
    install = ("install", "--download-only", "--yes", "--no-install-recommends", f"python{version}", "libstdc++6")
    subprocess.run([*apt, "update"], check=True)
    subprocess.run([*apt, *install], check=True, stdout=subprocess.DEVNULL)
    for package in (state / "archives").glob("*.deb"):
        subprocess.run(["dpkg-deb", "--extract", str(package), str(folder)], check=True)  # noqa: S607 - as apt-get
    if not (folder / "lib").exists():  # since Debian 13, only base-files has it
        (folder / "lib").symlink_to("usr/lib")
    done.touch()
    return folder


def mirror() -> str:
    """Where this machine, a Debian, has its packages from."""
    command = ["apt-get", "indextargets", "--format", "$(ORIGIN) $(LABEL) $(REPO_URI)", "Created-By: Packages"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return next(line.split()[2] for line in lines if line.startswith("Debian Debian "))
