"""Each package of an extra is missing once: what needs it says so in one line, and everything else works (D3, E5).

Which packages there are is read from pyproject.toml, and which commands and names from the package itself. What each of
them does with all packages is the oracle: without a package it does the same, or names an extra that has the package.
"""

import functools
import importlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

import blobstore
from blobstore import save_file
from blobstore.cli.app import COMMANDS
from tests.helpers import models
from tests.packaging.test_packaging import OF_CONTRIBUTORS, ROOT, project

pytestmark = pytest.mark.long

EXTRAS: dict[str, list[str]] = project(ROOT)["project"]["optional-dependencies"]
# Each takes ten seconds of a processor; one of each kind is tried in every run
ALWAYS = {"typer", "msgspec", "torch", "executorch", "obstore", "zstandard"}
# Packages in no extra, which a message names themselves
ALONE = {"ml-dtypes", "hypothesis", "pytest", "optimum-executorch"}

COMMAND_LINES = [
    "dedup m.pte -o slim",
    "run m.pte",
    "fuse m.pte -o fused.pte",
    "inspect w.ptd m.pte w.safetensors",
    "inspect --json w.ptd",
    "verify w.ptd",
    "diff w.ptd w.ptd",
    "convert w.ptd converted.safetensors",
    "delta b.ptd w.ptd -o deltas",
    "report w.ptd m.pte",
    "report w.gguf",
    "report w.ptd --html report.html",
    "report w.ptd --tui",
    "report https://localhost:1/w.ptd",
    "report s3://nowhere/w.ptd",
    "publish w.ptd -o out --name a --version 2",
    "publish w.ptd -o signed --name a --version 2 --sign key.pem",
    "publish w.ptd -o encrypted --name a --version 2 --sign encrypted.pem",
    "gc releases",
    "push oci:layout:1 releases/a/1",
    "push localhost:1/a:1 releases/a/1",
    "pull releases/a/1 device",
    "pull releases/a/1 device --verify",
    "pull releases/a/1 device --key key.pem",
    "pull oci:nowhere:1 device",
    "pull localhost:1/a:1 device",
    "pull https://localhost:1/a/1/index.json device",
    "gc device",
    "adapters list w.ptd w.ptd",
    "adapters import peft --foundation w.ptd -o imported.ptd",
    "adapters export w.ptd -o exported",
    "adapters combine w.ptd=0.5 --foundation w.ptd -o combined.ptd",
    "pool add pool w.ptd --as w@1",
    "pool ls pool",
    "pool get pool w@0 -o restored",
    "packed list packed",
    "packed verify packed",
    "packed gc packed --limit 1GB",
]
CALLS = [
    "blobstore.save_file({'w': [1]}, 'saved.ptd')",
    "blobstore.load_file('w.ptd')",
    "blobstore.load_file('w.ptd', framework='pt')",
    "blobstore.load_file('bf16.safetensors', framework='np')",
    "blobstore.safe_open('w.ptd', framework='pt').get_tensor('w')",
    "blobstore.safe_open('w.ptd', framework='pt', device='meta').get_tensor('w')",
    "blobstore.open_ptd('w.ptd')['w']",
    "blobstore.open_ptd('w.ptd').torch('w')",
    "blobstore.report(['w.ptd', 'm.pte'])",
    "blobstore.report('memory://nothing')",
    "blobstore.dedup_programs('m.pte', 'slim')",
    "blobstore.fuse_programs('m.pte', 'fused.pte')",
    "blobstore.save_programs({}, 'saved')",
    "blobstore.torch.load_file('w.ptd')",
    "blobstore.torch.save_file({}, 'empty.ptd')",
    "blobstore.torch.load_model(None, 'w.ptd')",
    "blobstore.torch.save_model(None, 'saved.ptd')",
    "blobstore.lowering.lower(None)",
    "module('blobstore.lowering.openvino').openvino_partitioner()",
    "blobstore.training.lower_training(None, (), tag='t')",
    "blobstore.training.TrainingProgram('m.pte', None)",
    "blobstore.llm.export_llm(None)",
    "blobstore.runtime.BlobCache('w.ptd').numpy('w')",
    "blobstore.runtime.BlobCache('w.ptd').torch('w')",
    "blobstore.runtime.Program('m.pte', None).method()",
    "blobstore.runtime.PackedStore('packed')",
    "blobstore.adapters.read_adapter('w.ptd')",
    "blobstore.adapters.import_peft('peft', 'imported.ptd', foundation='w.ptd')",
    "blobstore.pool.Pool('pool').versions()",
    "blobstore.releases.publish('w.ptd', 'out', name='b', version='1')",
    "blobstore.releases.pull('releases/a/1', 'device')",
]
MODULES = ["blobstore", "blobstore.export_llm", "blobstore.optimum"]
"""What is run as `python -m`."""

# A process in which packages are hidden behaves as one in which they were never installed.
HIDING = """
import contextlib, importlib, importlib.metadata, io, json, runpy, sys, time, warnings
warnings.simplefilter("ignore")
time.sleep = lambda seconds: None  # a server that is not there is asked again
hidden, entries = json.load(sys.stdin)
distributions, names = hidden
for name in names:
    sys.modules[name] = None
original = importlib.metadata.Distribution.from_name.__func__
def from_name(cls, name):
    if name.lower().replace("_", "-") in distributions:
        raise importlib.metadata.PackageNotFoundError(name)
    return original(cls, name)
importlib.metadata.Distribution.from_name = classmethod(from_name)

import blobstore
"""

# Runs each entry in turn.
CHILD = f"""{HIDING}
def run(kind, text):
    if kind == "call":
        return eval(text, {{"blobstore": blobstore, "module": importlib.import_module}})
    if kind == "name":
        module, _, name = text.rpartition(":")
        return getattr(importlib.import_module(module), name)
    sys.argv = text.split()
    if kind == "module":
        return runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    from blobstore.cli import main
    return main()

results = []
for kind, text in entries:
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.TextIOWrapper(io.BytesIO(), "utf-8")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            run(kind, text)
            how = "done"
        except SystemExit as left:
            how = f"exit {{left.code}}"
        except BaseException as error:
            how = f"{{type(error).__name__}}: {{error}}"
    for stream in (out, err):
        stream.flush()
    results.append([how, err.buffer.getvalue().decode().strip()])
print("RESULTS" + json.dumps(results))
"""

# What people and their tools do first, with the package and with each module that it lists.
LOOKING = """
import inspect, pydoc, rlcompleter
import blobstore
modules = [f"blobstore.{name}" for name in dir(blobstore) if inspect.ismodule(getattr(blobstore, name))]
for name in ["blobstore", *modules]:
    module = eval(name)
    assert module.__doc__.splitlines()[0] in pydoc.plain(pydoc.render_doc(module))
    inspect.getmembers(module)
    rlcompleter.Completer({"blobstore": blobstore}).complete(f"{name}.", 0)
    print(name, *dir(module), flush=True)
"""


def packages(extra: str) -> set[str]:
    """The distributions of an extra and of the extras that it includes."""
    found: set[str] = set()
    for requirement in EXTRAS[extra]:
        if included := re.match(r"executorch-blobstore\[(.+)\]", requirement):
            found.update(*map(packages, included[1].split(",")))
        else:
            found.add(re.split(r"[<>=~! ]", requirement)[0].lower())
    return found


OF_USERS = {extra: packages(extra) for extra in EXTRAS.keys() - OF_CONTRIBUTORS}
OPTIONAL = sorted(set().union(*OF_USERS.values()) | ALONE)


@functools.cache
def owners_of_names() -> Mapping[str, list[str]]:
    """The distributions of each name that can be imported; the records of all packages are read for it."""
    return metadata.packages_distributions()


def imported_as(distribution: str) -> list[str]:
    """The names under which the modules of a distribution are imported; none if it is not installed here."""
    found = [
        name
        for name, owners in owners_of_names().items()
        if distribution in {owner.lower().replace("_", "-") for owner in owners}
    ]
    return sorted(name for name in found if not name.startswith("_"))


def public_names() -> Iterator[str]:
    """Every name of every public module, as `module:name`."""
    modules = set(dir(blobstore)) - set(blobstore.__all__) - {"__version__"}
    for module in ["blobstore", *(f"blobstore.{name}" for name in sorted(modules)), "blobstore.testing.strategies"]:
        for name in importlib.import_module(module).__all__:
            yield f"{module}:{name}"


def entries() -> list[tuple[str, str]]:
    return [
        *(("command", f"blobstore {line}") for line in COMMAND_LINES),
        *(("module", name if name != "blobstore" else "blobstore --version") for name in MODULES),
        *(("name", name) for name in public_names()),
        *(("call", call) for call in CALLS),
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the entries find."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    from safetensors.torch import save_file as save_safetensors
    from torch import bfloat16, ones

    from blobstore.releases import publish

    path = tmp_path_factory.mktemp("packages")
    save_file({"w": np.zeros(2)}, path / "w.ptd")
    save_file({"w": np.ones(2)}, path / "b.ptd")
    save_safetensors({"w": ones(2)}, path / "w.safetensors")
    save_safetensors({"w": ones(2, dtype=bfloat16)}, path / "bf16.safetensors")
    models.mlp().write(path, "m")
    (path / "w.gguf").write_bytes(b"GGUF" + bytes(100))
    key = ec.generate_private_key(ec.SECP256R1())
    (path / "key.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    (path / "encrypted.pem").write_text(
        "-----BEGIN ENCRYPTED SIGSTORE PRIVATE KEY-----\ne30=\n-----END ENCRYPTED SIGSTORE PRIVATE KEY-----\n"
    )
    (path / "peft").mkdir()
    (path / "packed").mkdir()
    publish(path / "w.ptd", path / "releases", name="a", version="1", plain=True)
    with blobstore.pool.Pool(path / "pool", create=True) as pool:
        pool.add(path / "w.ptd", "w@0")
    return path


def outcomes(folder: Path, tmp_path: Path, distribution: str, names: list[str]) -> list[list[str]]:
    """How each entry ends, and what it writes to standard error, in a copy of the folder."""
    place = tmp_path / "place"
    shutil.copytree(folder, place)
    run = [sys.executable, "-c", CHILD]
    told = json.dumps([[[distribution], names], entries()])
    done = subprocess.run(run, input=told, capture_output=True, text=True, check=False, cwd=place)
    assert "RESULTS" in done.stdout, done.stderr[-3000:]
    results: list[list[str]] = json.loads(done.stdout.rpartition("RESULTS")[2])
    return results


@pytest.fixture(scope="module")
def usual(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """How each entry ends if every package is there that is installed here."""
    return outcomes(folder, tmp_path_factory.mktemp("usual"), "", [])


def message_of(kind: str, how: str, written: str) -> str:
    """What tells an outcome from another one: the error, or the exit code with the line that is written last."""
    if kind in ("command", "module") and written:
        how = f"{how}: {written.splitlines()[-1]}"
    how = re.sub(r"after \d+ seconds and \d+ attempts", "after …", how)  # waits are random
    return re.sub(r"sha256:[0-9a-f]+", "sha256:…", how)  # which of several objects it is depends on threads


def says_what_is_missing(distribution: str, kind: str, how: str, written: str) -> bool:
    """Whether this is one line that names the distribution itself or an extra that has it."""
    message = message_of(kind, how, written)
    if kind == "command":
        right = re.match(r"exit 3: blobstore: ", message) and len(written.splitlines()) == 1
    elif kind == "module":  # what is imported first may write warnings
        right = re.match(r"exit 3: blobstore: |exit 1: error: ", message) and "Traceback" not in written
    else:
        right = message.startswith("MissingDependencyError: ")
    extras = re.findall(r"pip install '\.\[(\w+)\]' in the clone", message)
    ours = {"executorch-blobstore-runtime": "./runtime-bindings in the clone"}
    itself = f"pip install {ours.get(distribution, distribution)}" in message.replace("_", "-")
    return bool(right) and (itself or any(distribution in OF_USERS[extra] for extra in extras))


@pytest.mark.slow
@pytest.mark.parametrize(
    "distribution", [pytest.param(name, marks=[] if name in ALWAYS else pytest.mark.slow) for name in OPTIONAL]
)
def test_a_missing_package_is_named_where_it_is_needed(
    distribution: str, folder: Path, usual: list[list[str]], tmp_path: Path
) -> None:
    without = outcomes(folder, tmp_path, distribution, imported_as(distribution))
    wrong = [
        (kind, text, expected, found)
        for (kind, text), expected, found in zip(entries(), usual, without, strict=True)
        if message_of(kind, *found) != message_of(kind, *expected)
        and not says_what_is_missing(distribution, kind, *found)
    ]
    assert not wrong, "\n".join(map(str, wrong))


def test_nothing_ends_with_a_traceback(usual: list[list[str]]) -> None:
    """The entries are what they should be: each ends well, or with an error of this library."""
    for (kind, text), (how, written) in zip(entries(), usual, strict=True):
        assert "Traceback" not in written and "Usage:" not in written, (kind, text, written)
        if kind in ("command", "module"):
            assert re.fullmatch(r"done|exit [013]", how), (kind, text, how)
        elif kind == "name":
            assert how == "done", (text, how)
        else:
            assert how == "done" or hasattr(blobstore.errors, how.partition(":")[0]), (text, how)
        if "MissingDependencyError" in how or "to be installed" in written:
            assert "pip install" in how + written, (kind, text, how, written)


def test_every_command_is_tried() -> None:
    assert {line.split()[0] for line in COMMAND_LINES} == COMMANDS.keys()


def test_every_public_module_has_a_call() -> None:
    """Those that have something to call which needs a package."""
    called = {match for call in CALLS for match in re.findall(r"blobstore\.(\w+)\.", call)}
    assert called >= set(dir(blobstore)) - set(blobstore.__all__) - {
        *("__version__", "errors", "numpy", "programs", "reporting", "store", "testing")
    }


NEEDED = {
    "pool": {"Pool": {"obstore", "deltalake", "duckdb", "zstandard", "blake3"}},
    "releases": {"pull": {"msgspec"}, "publish": {"msgspec", "zstandard", "deltalake"}},
    "runtime": {"BlobCache": {"executorch-blobstore-runtime"}},
    "lowering": {"lower": {"torch", "executorch"}},
    "training": {"TrainingProgram": {"torch", "executorch", "executorch-blobstore-runtime"}},
    "testing": {"NamedDataMapContract": {"pytest"}},
}
"""Some names, and what each does not come without."""


@pytest.mark.long_for("executorch")
@pytest.mark.parametrize(
    "extra",
    [
        pytest.param(
            extra, marks=[] if extra in {None, "pool", "releases", "runtime", "executorch"} else pytest.mark.slow
        )
        for extra in [None, *sorted(OF_USERS)]
    ],
)
def test_help_and_completion_list_what_each_extra_brings(extra: str | None) -> None:
    """In an environment that has the packages of this extra only."""
    there = OF_USERS[extra] if extra else set()
    hidden = sorted({*OPTIONAL, "torch"} - there)
    told = json.dumps([[hidden, [name for one in hidden for name in imported_as(one)]], []])
    run = [sys.executable, "-c", HIDING + LOOKING]
    done = subprocess.run(run, input=told, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    check_listing(done.stdout, lambda needed: needed <= there)


def check_listing(written: str, has: Callable[[set[str]], bool]) -> None:
    """That a module lists the names of NEEDED which can be imported, and no others of them."""
    listed = {line.split()[0]: line.split()[1:] for line in written.splitlines()}
    assert {"save_file", "report", "runtime", "lowering", "pool"} <= set(listed["blobstore"])
    for module, names in NEEDED.items():
        for name, needed in names.items():
            assert (name in listed.get(f"blobstore.{module}", [])) is has(needed), (module, name)
