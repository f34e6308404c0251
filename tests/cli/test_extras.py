"""A command or a module whose packages are not installed says in one line which extra has them (M1)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from blobstore import save_file

pytestmark = pytest.mark.long

RELEASES = [
    "publish w.ptd -o out --name a --version 2",
    "compact -o releases --name a --version 2 --base 1",
    "push oci:layout:1 releases/a/1",
    "push localhost:1/a:1 releases/a/1",
    "pull releases/a/1 device",
    "pull releases/a/1 device --merge",
    "pull releases/a/1 device --verify",
    "pull releases/a/1 device --plan",
    "pull releases/a/1 device --commit fetched",
    "pull oci:layout:1 device",
    "pull localhost:1/a:1 device",
    "pull https://localhost:1/a/1/index.json device",
    "gc device",
]
SIGNED = ["publish w.ptd -o out --name a --version 2 --sign key.pem", "pull releases/a/1 device --key key.pem"]
# The extra, its packages that are missing, and commands that need them
CASES = [
    ("cli", ["typer"], ["inspect w.ptd", "pull releases/a/1 device"]),
    ("cli", ["rich"], ["inspect w.ptd", "pull releases/a/1 device"]),
    ("releases", ["msgspec", "urllib3", "zstandard", "cryptography", "nacl"], RELEASES),
    ("releases", ["msgspec"], RELEASES),
    ("releases", ["urllib3"], [one for one in RELEASES if "localhost" in one]),
    ("releases", ["zstandard"], RELEASES[:2]),
    ("releases", ["cryptography"], SIGNED),
    ("report", ["fsspec"], ["report https://localhost:1/w.ptd"]),
    ("tui", ["textual"], ["report w.ptd --tui"]),
    ("gguf", ["gguf"], ["report w.gguf"]),
    (
        "runtime",
        ["blobstore_runtime"],
        ["packed list .", "packed verify .", "packed gc .", "adapters list w.ptd w.ptd"],
    ),
]
# Each command in turn; the packages stay hidden
RUN = """
import sys
for name in {packages!r}: sys.modules[name] = None
from blobstore.cli import main
for command in {commands!r}:
    sys.argv = ["blobstore", *command.split()]
    try: main()
    except SystemExit as left: print(left.code, file=sys.stderr)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from blobstore.releases import publish

    path = tmp_path_factory.mktemp("extras")
    save_file({"w": np.zeros(2)}, path / "w.ptd")
    (path / "w.gguf").write_bytes(b"GGUF" + bytes(100))
    (path / "key.pem").write_text("none")
    publish(path / "w.ptd", path / "releases", name="a", version="1")
    return path


@pytest.mark.parametrize(("extra", "packages", "commands"), CASES, ids=[f"{one[0]}-{one[1][0]}" for one in CASES])
def test_one_line_names_the_extra(folder: Path, extra: str, packages: list[str], commands: list[str]) -> None:
    code = RUN.format(packages=packages, commands=commands)
    run = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(run, capture_output=True, text=True, check=False, cwd=folder)
    lines = done.stderr.splitlines()
    assert len(lines) == 2 * len(commands), done.stderr  # a message, and the code
    for command, message, exit_code in zip(commands, lines[::2], lines[1::2], strict=True):
        assert exit_code == "3", command
        assert message.startswith("blobstore: "), command
        assert re.search(rf"""pip install ['"]executorch-blobstore\[{extra}\]['"]""", message), (command, message)


@pytest.mark.parametrize("module", ["adapters", "llm", "lowering", "runtime", "training"])
@pytest.mark.parametrize("package", ["torch", "executorch", "blobstore_runtime"])
def test_a_module_names_the_extra(module: str, package: str) -> None:
    """Where a name of a public module needs a package that is not there, the error is the library's."""
    code = f"""
import importlib, sys
sys.modules[{package!r}] = None
from blobstore.errors import MissingDependencyError
def use(what):
    try: what()
    except MissingDependencyError as error: assert "pip install 'executorch-blobstore[" in str(error), error
def names():
    module = importlib.import_module("blobstore.{module}")
    for name in module.__all__: use(lambda: getattr(module, name))
use(names)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
