"""Lowering works with one version of ExecuTorch, and an error names that version and what another one does differently."""

import ast
import dataclasses
import importlib
import importlib.metadata
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import blobstore
import blobstore.lowering
from blobstore.errors import MissingDependencyError
from blobstore.lowering.export import quiet

with quiet():
    from blobstore.runtime import executorch

PUBLIC = {
    "executorch.backends.xnnpack.partition.xnnpack_partitioner",
    "executorch.exir",
    "executorch.extension.llm.runner",
    "executorch.runtime",
}


def pretend_version(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    actual = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == "executorch" else actual(name))


@pytest.mark.parametrize("version", ["1.5", "1.5.0", "1.5.1+cpu", "1.5.9"])
def test_the_supported_version_passes(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed ExecuTorch passes, and so do other releases of its version (X1)."""
    executorch.check()
    pretend_version(monkeypatch, version)
    executorch.check()


@pytest.mark.parametrize("version", ["1.4.0", "1.6.0", "1.50", "2.0.0+cpu"])
def test_another_version_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if everything that is checked looks the same: the message names both versions (X1)."""
    pretend_version(monkeypatch, version)
    with pytest.raises(MissingDependencyError) as caught:
        executorch.check()
    assert f"needs executorch 1.5, found executorch {version}: its internals look the same" in str(caught.value)


def changed_parameters(self: Any, quant_params: Any, xnn_graph: Any, scales: Any = None) -> None: ...


def extended_fields() -> type:
    field = ("_later", int, dataclasses.field(default=0))
    return dataclasses.make_dataclass("PreprocessResult", [field], bases=(executorch.PreprocessResult,))


CHANGES: dict[str, tuple[str, str, Callable[[], Any] | None, str]] = {
    "another parameter": (
        "executorch.backends.xnnpack.operators.node_visitor",
        "NodeVisitor.get_quant_params",
        lambda: changed_parameters,
        "NodeVisitor.get_quant_params takes (self, quant_params, xnn_graph, scales), "
        "expected (self, quant_params, xnn_graph, external_tag)",
    ),
    "a method that is gone": (
        "executorch.backends.xnnpack._passes.fuse_batch_norm",
        "FuseBatchNormPass._fuse_ops",
        None,
        "no executorch.backends.xnnpack._passes.fuse_batch_norm.FuseBatchNormPass._fuse_ops",
    ),
    "a function that is gone": (
        "executorch.backends.xnnpack.utils.utils",
        "get_tensor_name",
        None,
        "no executorch.backends.xnnpack.utils.utils.get_tensor_name",
    ),
    "another field of what is constructed": (
        "executorch.exir.backend.backend_details",
        "PreprocessResult",
        extended_fields,
        "PreprocessResult takes (processed_bytes, debug_handle_map, data_store_output, _delegate_info_meta, _later)",
    ),
    "a field of what is read that is gone": (
        "executorch.backends.xnnpack.serialization.xnnpack_graph_schema",
        "XNNConv2d",
        lambda: dataclasses.make_dataclass("XNNConv2d", ["filter_id"]),
        "XNNConv2d takes (filter_id), expected (filter_id, bias_id)",
    ),
}


@pytest.mark.parametrize("version", ["1.5.2", "1.6.0"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_differs_is_named(change: str, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the version says that nothing changed; of what is only read, further fields do not matter (X1)."""
    module, path, make, difference = CHANGES[change]
    *owners, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    if make is None:
        monkeypatch.delattr(owner, name)
    else:
        monkeypatch.setattr(owner, name, make())
    pretend_version(monkeypatch, version)
    with pytest.raises(MissingDependencyError) as caught:
        executorch.check()
    assert f"needs executorch 1.5, found executorch {version}: {difference}" in str(caught.value)


def test_all_differences_are_in_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executorch.NodeVisitor, "get_quant_params", changed_parameters)
    monkeypatch.delattr(executorch.FuseBatchNormPass, "_fuse_ops")
    with pytest.raises(MissingDependencyError, match=r"get_quant_params takes .*; no .*FuseBatchNormPass\._fuse_ops"):
        executorch.check()


@pytest.mark.parametrize("name", ["BlobStorePartitioner", "BlobStoreBackend", "register_inner"])
def test_the_check_comes_with_the_first_use(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lowers cannot be imported on another version; the error is one of the library's, once more at each try."""
    for module in [
        module for module in sys.modules if re.match(r"blobstore\.(lowering\.|runtime\.executorch$)", module)
    ]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.delitem(vars(blobstore.lowering), name, raising=False)  # which keeps what others have used
    pretend_version(monkeypatch, "1.6.0")
    for _ in range(2):
        with pytest.raises(MissingDependencyError, match=r"needs executorch 1\.5, found executorch 1\.6\.0"):
            getattr(blobstore.lowering, name)


def test_a_module_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """An import that fails is one of the differences."""
    gone = "executorch.backends.xnnpack._passes.decompose_batch_norm"
    monkeypatch.setitem(sys.modules, gone, None)  # type: ignore[arg-type]
    monkeypatch.delitem(sys.modules, "blobstore.runtime.executorch")
    with pytest.raises(MissingDependencyError, match=rf"needs executorch 1\.5, found .*: no {gone}"):
        importlib.import_module("blobstore.runtime.executorch")


def test_without_executorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says how to install it."""

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(
        MissingDependencyError,
        match=r"needs executorch 1\.5, which is not installed: pip install '\.\[executorch\]' in the clone",
    ):
        executorch.check()


def imports(module: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


@pytest.mark.long
def test_one_module_imports_internals() -> None:
    """Everything else uses the public API, or that module (X1)."""
    folder = Path(blobstore.__file__).parent
    own = Path(executorch.__file__)
    for module in sorted(folder.rglob("*.py")):
        found = {name for name in imports(module) if name.split(".")[0] == "executorch"}
        assert module == own or found <= PUBLIC, f"{module} imports {sorted(found - PUBLIC)}"
