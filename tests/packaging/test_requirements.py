"""Another version of torch, executorch or the native package: files work, and the rest says in one line what it needs (X1)."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import Requirement

import blobstore
from blobstore.core import requirements
from tests.helpers import machines, models
from tests.packaging.test_packaging import ROOT, project

EXTRA = "pip install '.[executorch]' in the clone"
RUNTIME = "pip install ./runtime_bindings in the clone"


def distribution(folder: Path, name: str, version: str, *needed: str) -> None:
    """What pip records of an installed package."""
    record = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    record.mkdir(parents=True)
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {one}" for one in needed),
    ]
    (record / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")


def run(folder: Path, code: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process that finds the packages in `folder` first."""
    code = f"import sys; sys.path.insert(0, {str(folder)!r})\n{code}"
    return subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True, check=False)


def error(folder: Path, code: str) -> str:
    """The last line of the traceback: the error, if its message is one line."""
    done = run(folder, code, "-W", "ignore")
    assert done.returncode == 1, done.stdout
    return done.stderr.splitlines()[-1]


LOWERING = [
    ("lowering", "from blobstore.lowering import lower"),
    ("lowering", "from blobstore.lowering import BlobStorePartitioner"),
    ("training", "from blobstore.training import lower_training"),
    ("training", "from blobstore.training import TrainingProgram"),
    ("lowering for OpenVINO", "from blobstore.lowering import openvino; openvino.openvino_partitioner()"),
    ("export_llm", "from blobstore.llm import export_llm"),
]


@pytest.mark.long
@pytest.mark.parametrize(("what", "code"), LOWERING, ids=[code.split()[-1] for _, code in LOWERING])
def test_lowering_names_both_versions(what: str, code: str, tmp_path: Path) -> None:
    distribution(tmp_path / "executorch", "executorch", "1.4.0")
    distribution(tmp_path / "torch", "torch", "2.12.1+cpu")
    prefix = "blobstore.core.errors.MissingDependencyError: "
    assert error(tmp_path / "executorch", code) == (
        f"{prefix}{what} needs executorch 1.5, found executorch 1.4.0: {EXTRA}"
    )
    assert error(tmp_path / "torch", code) == f"{prefix}{what} needs torch 2.13, found torch 2.12.1+cpu: {EXTRA}"


@pytest.mark.long
def test_the_command_for_language_models_has_no_traceback(tmp_path: Path) -> None:
    distribution(tmp_path, "executorch", "1.6.0")
    done = run(tmp_path, "import runpy; runpy.run_module('blobstore.export_llm', run_name='__main__')")
    assert done.returncode == 1
    assert done.stderr == f"error: export_llm needs executorch 1.5, found executorch 1.6.0: {EXTRA}\n"


def test_any_release_of_the_supported_version_passes_and_no_other() -> None:
    for version in ("1.5", "1.5.0", "1.5.1+cpu", "1.5.9", "1.5.0a0+git", "1.5rc1"):
        assert requirements.is_supported("executorch", version), version
    for version in ("1.4.9", "1.50", "1.6", "11.5", "2.0"):
        assert not requirements.is_supported("executorch", version), version


def test_without_them_the_message_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "installed", lambda package: None if package == "torch" else "1.5.1")
    with pytest.raises(blobstore.errors.MissingDependencyError) as caught:
        requirements.check_lowering()
    assert str(caught.value) == f"lowering needs torch 2.13, which is not installed: {EXTRA}"


CACHE = "from blobstore.runtime import BlobCache"


@pytest.mark.long
@pytest.mark.parametrize("version", ["1.4.0", "1.5.0", "1.5.2+cpu", "1.6.0"])
def test_the_runtime_names_the_executorch_that_it_was_built_for(version: str, tmp_path: Path) -> None:
    """ExecuTorch's C++ libraries promise nothing to what another release was compiled for."""
    distribution(tmp_path, "executorch", version)
    assert error(tmp_path, CACHE) == (
        "blobstore.core.errors.MissingDependencyError: "
        f"executorch-blobstore-runtime {blobstore.__version__} needs executorch 1.5.1, found executorch {version}: {EXTRA}"
    )


@pytest.mark.long
def test_the_native_package_of_another_release_is_refused(tmp_path: Path) -> None:
    """The interface between the two packages is private to each release."""
    distribution(tmp_path, "executorch-blobstore-runtime", "0.0.9", "executorch==1.5.1")
    assert error(tmp_path, CACHE) == (
        "blobstore.core.errors.MissingDependencyError: "
        f"blobstore {blobstore.__version__} needs executorch-blobstore-runtime {blobstore.__version__}, "
        f"found executorch-blobstore-runtime 0.0.9: {RUNTIME}"
    )


@pytest.mark.long
def test_a_native_module_for_another_executorch_is_an_error_of_the_library(tmp_path: Path) -> None:
    """With symbols that the installed libraries do not have; so it is where pip recorded nothing."""
    module = tmp_path / "blobstore_runtime"
    module.mkdir()
    (module / "__init__.py").touch()
    (module / "_native.py").write_text("raise ImportError('undefined symbol: _ZN10executorch')")
    message = error(tmp_path, CACHE)
    assert "MissingDependencyError: the native package is installed and does not load" in message
    assert "undefined symbol: _ZN10executorch" in message
    assert message.endswith("pip install --force-reinstall --no-deps ./runtime_bindings in the clone")


@pytest.mark.long
def test_a_library_of_executorch_that_does_not_load_is_an_error_of_the_library(tmp_path: Path) -> None:
    library = tmp_path / "executorch" / "lib" / "libexecutorch.so"
    library.parent.mkdir(parents=True)
    (library.parents[1] / "__init__.py").touch()
    library.write_bytes(b"not a library")
    message = error(tmp_path, CACHE)
    assert "MissingDependencyError: the native package is installed and does not load" in message
    assert str(library) in message


@pytest.mark.long
@pytest.mark.parametrize("version", ["1.0.0", "9.9.9", None])
def test_files_work_with_any_version_or_none(version: str | None, tmp_path: Path) -> None:
    """Writing, reading, comparing, deduplicating, the report, a release; the packages of that name cannot even be imported."""
    for name in ("torch", "executorch"):
        if version is not None:
            distribution(tmp_path / "packages", name, version)
    blobstore.save_file({"a": np.ones(64, np.float32), "b": np.ones(64, np.float32)}, tmp_path / "w.ptd")
    models.decoder().write(tmp_path, "m")
    code = f"""
import os; os.chdir({str(tmp_path)!r})
sys.modules |= dict.fromkeys(["torch", "executorch", "blobstore_runtime"])
import blobstore, numpy
assert blobstore.load_file("w.ptd")["a"].sum() == 64
blobstore.save_file({{"a": numpy.zeros(64, numpy.float32)}}, "x.ptd")
assert blobstore.report("w.ptd").files
assert blobstore.dedup_programs("m.pte", "slim").data_files
from blobstore.releases import publish, pull
publish(["w.ptd"], "releases", name="m", version="1")
pull("releases/m/1", "device")
from blobstore.cli import main
for command in ("inspect", "verify", "report"):
    sys.argv = ["blobstore", command, "w.ptd", "slim/m.pte"]
    try: main()
    except SystemExit as left: assert left.code == 0, command
"""
    done = run(tmp_path / "packages", code, "-W", "error")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_the_versions_are_those_that_the_packages_ask_for() -> None:
    """The extra, the native package and the pages agree with what is checked."""
    extras = project(ROOT)["project"]["optional-dependencies"]
    wanted = {one.name: str(one.specifier) for one in map(Requirement, extras["executorch"])}
    assert wanted.keys() == requirements.SUPPORTED.keys()
    for package, specifier in wanted.items():
        assert requirements.is_supported(package, specifier.removeprefix("==").replace(".*", ".0"))
    (runtime,) = extras["runtime"]
    assert runtime == f"executorch-blobstore-runtime=={blobstore.__version__}"
    native = project(ROOT / "runtime_bindings")
    (pin,) = native["project"]["optional-dependencies"]["executorch"]
    assert f"=={pin.removeprefix('executorch==')}" == wanted["executorch"]
    assert pin in native["build-system"]["requires"]
    assert pin == machines.EXECUTORCH
    assert requirements.is_supported("executorch", pin.removeprefix("executorch=="))
