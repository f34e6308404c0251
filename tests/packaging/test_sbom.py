"""What a package consists of and needs, as the build writes it (CycloneDX, PEP 770); `make dist` does so for all."""

import hashlib
import importlib.util
import json
import re
import subprocess
import sys
import venv
import zipfile
from email.parser import Parser
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import blobstore
from tests.helpers import native_build

ROOT = Path(__file__).parents[2]
LICENCES = "BSD-3-Clause AND BSD-2-Clause AND MIT AND Apache-2.0 AND MPL-2.0"
"""Of the native wheel: its own, and those of what is compiled into it or into ExecuTorch's libraries."""

NATIVE = ROOT / "runtime_bindings"
BASE = ("flatbuffers", "numpy", "xxhash")
OPTIONAL = ("rich", "typer", "urllib3")


def packaging_sbom() -> Any:
    """`packaging/sbom.py`; there is another package of the name of its folder."""
    spec = importlib.util.spec_from_file_location("packaging_sbom", ROOT / "packaging" / "sbom.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sbom = packaging_sbom()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the Python package."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (path,) = folder.iterdir()  # the document is not left beside it
    return path


@pytest.mark.long
def test_the_wheel_says_that_all_of_it_is_ours(wheel: Path) -> None:
    document = sbom.embedded(wheel)
    component = document["metadata"]["component"]
    assert (component["name"], component["version"]) == ("executorch-blobstore", blobstore.__version__)
    assert document["compositions"] == [{"aggregate": "complete", "assemblies": [component["bom-ref"]]}]
    assert "components" not in document


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment for which pip recorded the wheel, and some packages that are installed here."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(site)
    (own,) = site.glob("*.dist-info")
    (own / "direct_url.json").write_text(json.dumps({"url": wheel.as_uri(), "archive_info": {}}))
    for name in (*BASE, *OPTIONAL, "pluggy"):
        record = site / f"{name}-{metadata.version(name)}.dist-info"
        record.mkdir()
        (record / "METADATA").write_text(metadata.distribution(name).read_text("METADATA") or "", encoding="utf-8")
    return folder / "bin" / "python"


@pytest.mark.long
def test_a_published_file_has_its_hashes_and_what_pip_installs_with_it(
    wheel: Path, environment: Path, tmp_path: Path
) -> None:
    """With their versions and licences. Nothing else of the environment is there, and no path of this machine."""
    path = sbom.write(wheel, wheel, environment, tmp_path)
    assert path == tmp_path / f"{wheel.name}.cdx.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    hashes = {one["alg"]: one["content"] for one in document["metadata"]["component"]["hashes"]}
    assert hashes["SHA-256"] == hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert "file:" not in path.read_text(encoding="utf-8")
    parts = {one["name"]: one for one in document["components"]}
    assert {name: one["scope"] for name, one in parts.items()} == {
        **dict.fromkeys(BASE, "required"),
        **dict.fromkeys(OPTIONAL, "optional"),
    }
    for name, one in parts.items():
        assert one["licenses"] and one["purl"] == f"pkg:pypi/{name}@{metadata.version(name)}"


def test_a_document_that_breaks_the_schema_is_refused() -> None:
    good = {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1}
    sbom.check(json.dumps(good), "good")
    for changes in ({"version": "one"}, {"components": [{"name": "without a type"}]}, {"unknown": 1}):
        with pytest.raises(SystemExit, match="bad: not a CycloneDX document"):
            sbom.check(json.dumps({**good, **changes}), "bad")


@pytest.mark.long
def test_the_native_library_is_installed_with_its_parts(tmp_path: Path) -> None:
    """Without Python, for applications in C++. Nothing is compiled for it."""
    native_build.need()
    native_build.configure(NATIVE, tmp_path / "build")
    text = (tmp_path / "build" / "sbom.cdx.json").read_text(encoding="utf-8")
    sbom.check(text, "sbom.cdx.json")
    document = json.loads(text)
    assert document["metadata"]["component"]["version"] == blobstore.__version__
    parts = {one["name"]: one for one in document["components"]}
    assert parts.keys() == {"xxHash", "executorch", "zstd"}
    assert parts["executorch"]["version"] == metadata.version("executorch").partition("+")[0]
    header = (NATIVE / "third_party" / "xxhash" / "xxhash.h").read_bytes()
    assert parts["xxHash"]["hashes"] == [{"alg": "SHA-256", "content": hashlib.sha256(header).hexdigest()}]
    numbers = re.findall(rb"#define XXH_VERSION_(?:MAJOR|MINOR|RELEASE) +(\d+)", header)
    assert parts["xxHash"]["version"] == b".".join(numbers).decode()
    sources = NATIVE / "third_party" / "zstd"
    numbers = re.findall(
        r"#define ZSTD_VERSION_(?:MAJOR|MINOR|RELEASE) +(\d+)", (sources / "zstddeclib.c").read_text("utf-8")
    )
    assert parts["zstd"]["version"] == ".".join(numbers)
    digest = hashlib.sha256((sources / "zstddeclib.c").read_bytes()).hexdigest()
    assert parts["zstd"]["hashes"] == [{"alg": "SHA-256", "content": digest}]
    provenance = (sources / "README.md").read_text("utf-8")
    assert digest in provenance and f"zstd {parts['zstd']['version']}" in provenance
    install = (tmp_path / "build" / "cmake_install.cmake").read_text(encoding="utf-8")
    assert re.search(r'/share/blobstore_runtime" TYPE FILE FILES "[^"]*/sbom\.cdx\.json"', install)


def test_the_native_package_has_the_licences_of_what_is_compiled_into_it() -> None:
    """nanobind and the map in it are compiled in, too. Their licences ask for a copy of their texts."""
    about = (NATIVE / "pyproject.toml").read_text(encoding="utf-8")
    assert f'license = "{LICENCES}"' in about
    assert 'license-files = ["LICENSE", "third_party/*/LICENSE", "third_party/executorch/*"]' in about
    theirs = metadata.distribution("nanobind")
    (installed,) = (path for path in theirs.files or () if path.name == "LICENSE")
    assert Path(str(installed.locate())).read_text() == (NATIVE / "third_party" / "nanobind" / "LICENSE").read_text()
    header = Path(str(theirs.locate_file("nanobind/ext/robin_map/include/tsl/robin_map.h"))).read_text()
    words = re.sub(r"[\s*]+", " ", header.split("*/")[0])
    assert " ".join((NATIVE / "third_party" / "robin_map" / "LICENSE").read_text().split()) in words


@pytest.mark.long
def test_the_installed_native_package_has_its_document() -> None:
    """It was built by scikit-build-core, from a clone or for a release."""
    pytest.importorskip("blobstore_runtime")
    files = metadata.files("executorch-blobstore-runtime") or []
    (path,) = (one for one in files if "sboms/" in str(one) and one.name == "executorch-blobstore-runtime.cdx.json")
    text = Path(str(path.locate())).read_text(encoding="utf-8")
    sbom.check(text, path.name)
    document = json.loads(text)
    parts = {one["name"]: one["version"] for one in document["components"]}
    assert parts.keys() == {"xxHash", "nanobind", "robin-map", "executorch", "zstd"}
    about = Parser().parsestr(metadata.distribution("executorch-blobstore-runtime").read_text("METADATA") or "")
    assert about["License-Expression"] == LICENCES
    assert {f"third_party/{name}/LICENSE" for name in ("executorch", "nanobind", "robin_map", "xxhash", "zstd")} <= set(
        about.get_all("License-File") or ()
    )
