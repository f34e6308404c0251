"""Nothing reports what users do: no package that is installed with this one, and no connection that nobody asked for."""

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import Requirement

import blobstore
from blobstore.core.distribution import DISTRIBUTION, OPENVINO
from tests.packaging.test_packaging import ROOT, project

REPORTERS = re.compile(
    r".*(telemetry|analytics|appinsights|applicationinsights|snowplow|sentry|posthog|mixpanel|amplitude|bugsnag|rollbar).*"
    r"|segment|scarf.*|logfire|newrelic|ddtrace|datadog|honeybadger|raygun4py|airbrake|wandb|comet[-_]ml|countly.*"
)


def needed(name: str, extras: set[str], seen: set[tuple[str, str]]) -> None:
    """Add what a package with these extras asks for, and what that asks for, as far as it is installed."""
    for extra in extras:
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        try:
            listed = metadata.requires(name) or ()
        except metadata.PackageNotFoundError:
            continue  # of an extra that is not installed
        for requirement in map(Requirement, listed):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                needed(re.sub(r"[-_.]+", "-", requirement.name).lower(), {"", *requirement.extras}, seen)


def test_no_extra_installs_a_package_that_reports() -> None:
    extras = project(ROOT)["project"]["optional-dependencies"]
    seen: set[tuple[str, str]] = set()
    needed(DISTRIBUTION, {"", *extras}, seen)
    names = {name for name, _ in seen}
    assert {"numpy", "torch", "executorch", "typer", "urllib3", "certifi"} <= names  # the last one is indirect
    assert {name for name in names if REPORTERS.fullmatch(name)} == set()


def test_openvino_is_installed_without_the_package_that_reports() -> None:
    """So it is no extra; the pages and the message have the line that leaves that package out."""
    listed = metadata.requires("openvino") if "openvino" in installed() else ["openvino-telemetry"]
    assert any(REPORTERS.fullmatch(Requirement(one).name) for one in listed or ())
    assert "openvino-telemetry" not in installed()
    assert "--no-deps" in OPENVINO
    for path in [ROOT / "README.md", ROOT / "Makefile", *(ROOT / "docs").rglob("*.md")]:
        lines = path.read_text(encoding="utf-8").replace("\\\n", "").splitlines()
        for line in lines:
            if re.search(r"pip install .*\bopenvino\b", line):
                assert "--no-deps" in line, f"{path}: {line}"


def installed() -> set[str]:
    return {re.sub(r"[-_.]+", "-", one.metadata["Name"]).lower() for one in metadata.distributions()}


WATCH = """
import sys
NETWORK = {"socket.connect", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo", "socket.gethostbyname",
           "socket.gethostbyaddr", "urllib.Request", "http.client.connect", "subprocess.Popen", "os.system"}
def watch(event, arguments):
    if event in NETWORK:
        print("NETWORK", event, arguments, file=sys.stderr, flush=True)
sys.addaudithook(watch)
"""


def watched(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a process that reports each use of the network and each process that it starts."""
    command = [sys.executable, "-W", "ignore", "-c", WATCH + code]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_the_watch_sees_a_connection(tmp_path: Path) -> None:
    code = "import socket\ntry: socket.create_connection(('127.0.0.1', 1), 1)\nexcept OSError: pass"
    done = watched(code, tmp_path)
    assert "NETWORK socket.connect" in done.stderr


@pytest.mark.long
def test_commands_without_a_url_use_no_network_and_start_no_process(tmp_path: Path) -> None:
    blobstore.save_file({"w": np.ones((8, 8), np.float32), "b": np.ones(64, np.float32)}, tmp_path / "w.ptd")
    lines = [
        "--version",
        "inspect w.ptd",
        "verify w.ptd --json",
        "convert w.ptd w.safetensors",
        "diff w.ptd w.safetensors",
        "report . --html report.html",
        "dedup w.ptd -o out",
        "publish w.ptd -o releases --name m --version 1",
        "pull releases/m/1 device",
        "gc releases",
        "push oci:layout:1 releases/m/1",
        "pull oci:layout:1 other",
        "gc device",
        "packed list packed",
    ]
    code = f"""
from blobstore.cli import main
for line in {lines!r}:
    sys.argv = ["blobstore", *line.split()]
    try: main()
    except SystemExit as left: print(line, left.code)
"""
    (tmp_path / "packed").mkdir()
    done = watched(code, tmp_path)
    assert done.returncode == 0, done.stderr
    for line in lines:
        assert re.search(rf"^{re.escape(line)} [01]$", done.stdout, re.MULTILINE), (line, done.stderr)
    assert "NETWORK" not in done.stderr, done.stderr


@pytest.mark.slow
@pytest.mark.long
def test_importing_and_running_use_no_network(tmp_path: Path) -> None:
    """Everything that is public, with torch and executorch, and a program that runs."""
    code = """
import torch, blobstore
for module in dir(blobstore):
    value = getattr(blobstore, module)
    for name in getattr(value, "__all__", ()): getattr(value, name)
layer = torch.nn.Linear(2, 2).eval()
program = blobstore.lowering.lower(layer, (torch.ones(1, 2),), tag="model")
blobstore.save_programs({"model": program}, "out")
blobstore.runtime.Program("out/model.pte", blobstore.runtime.BlobCache("out/model.ptd")).method()(torch.ones(1, 2))
print("done")
"""
    done = watched(code, tmp_path)
    assert done.stdout.splitlines()[-1] == "done", done.stderr
    used = [line for line in done.stderr.splitlines() if "NETWORK socket" in line or "NETWORK urllib" in line]
    assert used == []


def test_the_native_library_knows_no_network() -> None:
    sources = [path for path in (ROOT / "runtime_bindings").rglob("*") if path.suffix in {".cpp", ".h"}]
    assert len(sources) > 100
    for path in sources:
        assert not re.search(r"<sys/socket\.h>|<netdb\.h>|<curl/", path.read_text(encoding="utf-8")), path
