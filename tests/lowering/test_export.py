"""`lower` exports and lowers in one call, and `quiet` silences the libraries without swallowing what is the caller's."""

from __future__ import annotations

import logging
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from blobstore.core.formats.pte.program import read_program
from blobstore.errors import MissingDependencyError, UnsupportedDataError
from blobstore.lowering import lower, quiet
from tests.lowering import nets
from tests.lowering.live import close, inputs, plugin, seeded, write


def backends(path: Path) -> list[tuple[str, str]]:
    return [(delegate.method, delegate.backend) for delegate in read_program(path).delegates]


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "XnnpackBackend"),
        ({"partitioners": plugin()}, "BlobStoreBackend"),
        ({"partitioners": list}, None),
    ],
)
def test_the_partitioners_choose_the_backend(
    options: dict[str, Any], expected: str | None, stock_run: Any, tmp_path: Path
) -> None:
    """XNNPACK if none are given; an empty list delegates nothing (X1)."""
    module, example = seeded(nets.MLP), inputs(3, 16)
    path = write(lower({"forward": (module, example)}, **options), tmp_path)
    assert backends(path) == ([] if expected is None else [("forward", expected)])
    if expected != "BlobStoreBackend":
        close(stock_run(path, example)[0], module(*example))


@pytest.mark.long
def test_each_method_gets_partitioners_of_its_own(stock_run: Any, tmp_path: Path) -> None:
    """Partitioners keep state, so the function that makes them is called once for each method (W1)."""
    made: list[list[Any]] = []

    def make() -> list[Any]:
        made.append([])
        return made[-1]

    module = seeded(nets.MLP)
    methods = {"short": (module, inputs(1, 16)), "long": (module, inputs(5, 16))}
    path = write(lower(methods, partitioners=make), tmp_path)
    assert len(made) == 2
    for name, (_, example) in methods.items():
        close(stock_run(path, example, method=name)[0], module(*example))


def test_partitioners_that_are_no_function_are_refused_before_the_export(monkeypatch: pytest.MonkeyPatch) -> None:
    """ExecuTorch takes a list of partitioners; the message says what is taken here."""
    monkeypatch.setattr(torch.export, "export", lambda *_, **__: pytest.fail("exported"))
    for wrong in ([], plugin()(), plugin()()[0]):
        found = rf"found a {type(wrong).__name__}; write partitioners=lambda: \[\.\.\.\]$"
        with pytest.raises(UnsupportedDataError, match=f"must be a function that returns new partitioners, {found}"):
            lower({"forward": (nn.Identity().eval(), inputs(1))}, partitioners=wrong)  # type: ignore[arg-type]


def test_options_reach_executorch(tmp_path: Path) -> None:
    """Keyword arguments are fields of `ExecutorchBackendConfig`."""
    write(lower({"forward": (seeded(nets.MLP), inputs(3, 16))}, partitioners=list, external_constants=True), tmp_path)
    assert len(list(tmp_path.glob("*.ptd"))) == 1
    with pytest.raises(TypeError, match="no_such_option"):
        lower({"forward": (nn.Identity().eval(), inputs(1))}, partitioners=list, no_such_option=True)


def test_gradients_are_not_recorded() -> None:
    """A module with parameters that require gradients is exported as it runs on a device, and stays as it was."""
    module = seeded(nets.MLP)
    lower({"forward": (module, inputs(3, 16))}, partitioners=list)
    assert all(parameter.requires_grad for parameter in module.parameters()) and torch.is_grad_enabled()


def test_lowering_is_quiet(recwarn: pytest.WarningsRecorder, caplog: pytest.LogCaptureFixture) -> None:
    """Neither a warning nor a log message of the libraries reaches the caller."""
    lower({"forward": (seeded(nets.MLP), inputs(3, 16))})
    assert not recwarn.list and not caplog.records


def test_quiet_ends_with_its_block(caplog: pytest.LogCaptureFixture) -> None:
    """Also after an error; errors that are logged, and errors that are raised, come through."""
    with pytest.raises(ZeroDivisionError), quiet():
        warnings.warn("inside", stacklevel=1)
        logging.getLogger("some").warning("inside")
        logging.getLogger("some").error("an error")
        raise ZeroDivisionError
    assert [record.message for record in caplog.records] == ["an error"]
    logging.getLogger("some").warning("outside")
    assert caplog.records[-1].message == "outside"
    with pytest.warns(UserWarning, match="outside"):
        warnings.warn("outside", stacklevel=1)


def test_quiet_keeps_what_is_disabled_already() -> None:
    """A level that the application disabled stays disabled."""
    before = logging.root.manager.disable
    try:
        logging.disable(logging.ERROR)
        with quiet():
            pass
        assert logging.root.manager.disable == logging.ERROR
    finally:
        logging.disable(before)


def test_without_executorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "executorch.exir", None)  # type: ignore[arg-type]
    with pytest.raises(MissingDependencyError, match="needs executorch: pip install"):
        lower({"forward": (nn.Identity().eval(), inputs(1))})


def test_importing_the_package_imports_no_torch() -> None:
    """Names are imported when they are first used (D3)."""
    code = "import sys, blobstore.lowering; assert not {'torch', 'executorch'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
