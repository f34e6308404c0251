"""`lower` exports and lowers in one call, and `quiet` silences the libraries without swallowing what is the caller's."""

import logging
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from blobstore import save_programs
from blobstore.core.formats.pte.program import read_program
from blobstore.errors import InputError, MissingDependencyError, UnsupportedDataError, UpdateError
from blobstore.lowering import lower, quiet
from blobstore.runtime import BlobCache, Program
from tests.lowering import nets
from tests.lowering.live import close, inputs, plugin, seeded, write

with quiet():
    from executorch.exir import ExecutorchBackendConfig


def backends(path: Path) -> list[tuple[str, str]]:
    return [(delegate.method, delegate.backend) for delegate in read_program(path).delegates]


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, "XnnpackBackend"), ({"partitioners": plugin()}, "BlobStoreBackend"), ({"partitioners": list}, None)],
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


class Sorted(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:  # decided by the values
            return x.sort().values
        return x


@pytest.mark.parametrize(("module", "inputs"), [(nn.Linear(4, 2), torch.ones(1, 7)), (Sorted(), torch.ones(3))])
def test_what_torch_cannot_export_is_refused(module: nn.Module, inputs: torch.Tensor) -> None:
    """With one of our errors, in one line, that names the method; what torch raised is its cause."""
    with pytest.raises(
        UnsupportedDataError, match=r"^method 'encode' cannot be exported with these inputs: \w+"
    ) as caught:
        lower({"encode": (module.eval(), (inputs,))})
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is not None


def test_what_executorch_cannot_lower_is_refused() -> None:
    def refusing() -> list[Any]:
        class Broken:
            def partition(self, program: Any) -> Any:
                raise RuntimeError("a graph\nthe reason")

        return [Broken()]

    with pytest.raises(UnsupportedDataError, match="^ExecuTorch cannot lower Linear: .*"):
        lower(nn.Linear(4, 2).eval(), (torch.ones(1, 4),), partitioners=refusing)


def test_partitioners_that_are_no_function_are_refused_before_the_export(monkeypatch: pytest.MonkeyPatch) -> None:
    """ExecuTorch takes a list of partitioners; the message says what is taken here."""
    monkeypatch.setattr(torch.export, "export", lambda *_, **__: pytest.fail("exported"))
    for wrong in ([], plugin()(), plugin()()[0]):
        found = rf"found a {type(wrong).__name__}; write partitioners=lambda: \[\.\.\.\]$"
        with pytest.raises(UnsupportedDataError, match=f"must be a function that returns new partitioners, {found}"):
            lower({"forward": (nn.Identity().eval(), inputs(1))}, partitioners=wrong)  # type: ignore[arg-type]


@pytest.mark.long
def test_options_reach_executorch(tmp_path: Path) -> None:
    """`external_constants` by itself, the others in an `ExecutorchBackendConfig`."""
    write(lower({"forward": (seeded(nets.MLP), inputs(3, 16))}, partitioners=list, external_constants=True), tmp_path)
    assert len(list(tmp_path.glob("*.ptd"))) == 1
    config = ExecutorchBackendConfig(external_constants=True)
    write(lower({"forward": (seeded(nets.MLP), inputs(3, 16))}, partitioners=list, config=config), tmp_path / "config")
    assert len(list((tmp_path / "config").glob("*.ptd"))) == 1


@pytest.mark.long
def test_a_module_and_its_inputs(stock_run: Any, tmp_path: Path) -> None:
    """As torch takes them; with a tag, all weights are in its file and can be changed by name (U1)."""
    module, example = seeded(nets.MLP), inputs(3, 16)
    close(stock_run(write(lower(module, example), tmp_path), example)[0], module(*example))
    result = save_programs({"model": lower(module, example, tag="weights")}, tmp_path / "live")
    assert [path.name for path in result.data_files] == ["weights.ptd"]
    cache = BlobCache(result.data_files[0])
    assert set(cache.tensors) == set(module.state_dict())
    method = Program(tmp_path / "live" / "model.pte", cache).method()
    close(method(*example), module(*example))
    torch.testing.assert_close(cache[next(iter(module.state_dict()))], next(iter(module.state_dict().values())))


class Biases(nn.Module):
    """As in Swin: a table that is looked up by an index; both are viewed in another shape, and the table in two."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, 6))
        self.linear = nn.Linear(6, 6)
        self.register_buffer("index", torch.arange(6).reshape(2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        looked_up = self.table.view(-1)[self.index.view(-1)] + self.table.view(2, 12).sum()
        return torch.sin(self.linear(x) + looked_up + self.table.view(24, 1).view(4, 6).sum(0))


@pytest.mark.parametrize("partitioners", [None, list])
def test_views_of_constants_in_a_data_file_follow(partitioners: Any, stock_run: Any, tmp_path: Path) -> None:
    """Outside of delegates, too: ExecuTorch alone cannot write them down (U1, W2)."""
    module, example = seeded(Biases), inputs(2, 6)
    path = write(lower(module, example, tag="model", partitioners=partitioners), tmp_path)
    if partitioners is list:  # the others need a runtime that has the plug-in
        close(stock_run(path, example, tmp_path / "model.ptd")[0], module(*example))
    cache = BlobCache(tmp_path / "model.ptd")
    method = Program(path, cache).method()
    close(method(*example), module(*example))
    tuned = seeded(Biases, 1)
    tuned.index.copy_(torch.tensor([[5, 3, 1], [0, 2, 4]]))
    state = module.state_dict()
    for name, tensor in tuned.state_dict().items():
        before = module(*example)
        cache.update({name: tensor})
        state[name].copy_(tensor)
        close(method(*example), module(*example))
        assert not torch.allclose(before, module(*example))


@pytest.mark.long
def test_inputs_have_the_names_of_the_parameters(tmp_path: Path) -> None:
    """So a method is called as its module is (U1)."""

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, query: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return self.linear(query) * scale

    module, query, scale = seeded(Weighted), torch.randn(2, 4), torch.full((2, 4), 3.0)
    path = write(lower(module, (query, scale)), tmp_path)
    method = Program(path).method()
    assert [info.name for info in method.inputs] == ["query", "scale"]
    assert method.state_memory() == {}
    for out in (
        method(query, scale=scale),
        method(scale=scale, query=query),
        *method.execute(query=query, scale=scale),
    ):
        close(out, module(query, scale))
    with pytest.raises(InputError, match=r"no input 'bias'; the names are: 'query', 'scale'"):
        method(query, bias=scale)
    with pytest.raises(InputError, match="input 'query' is given twice"):
        method(query, query=query)
    with pytest.raises(InputError, match="input 'scale' is missing"):
        method(query=query)
    for wrong in ((), (query,), (query, scale, scale)):
        with pytest.raises(InputError, match=rf"{len(wrong)} were given; the names are: 'query', 'scale'"):
            method(*wrong)
    with pytest.raises(InputError, match=r"input 1 \('scale'\) is"):
        method(query, scale.double())


@pytest.mark.long
def test_a_number_among_the_inputs_has_no_name(tmp_path: Path) -> None:
    """ExecuTorch has a place for the names of tensors only; the message counts instead."""

    class Scaled(nn.Module):
        def forward(self, query: torch.Tensor, times: int) -> torch.Tensor:
            return query * times

    method = Program(write(lower(Scaled().eval(), (torch.ones(2), 3)), tmp_path)).method()
    assert [info.name for info in method.inputs] == ["query", ""]
    close(method(torch.ones(2), 3), torch.full((2,), 3.0))
    with pytest.raises(InputError, match="input 1 is missing"):
        method(query=torch.ones(2))
    with pytest.raises(InputError, match="no input 'times'; the names are: 'query'$"):
        method(torch.ones(2), times=3)


@pytest.mark.long
def test_an_input_with_the_name_of_a_buffer_has_none(tmp_path: Path) -> None:
    """ExecuTorch looks tensors up by name, and would find the input where the buffer was meant."""

    class Named(nn.Module):
        x: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("x", torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.x

    method = Program(write(lower(Named().eval(), (torch.ones(3),)), tmp_path)).method()
    assert [info.name for info in method.inputs] == [""]
    with pytest.raises(InputError, match="the program records none"):
        method(x=torch.ones(3))


@pytest.mark.parametrize(
    ("model", "args", "message"),
    [
        (nn.Identity(), None, r"lower\(model, \(x,\)\)"),
        ({"forward": (nn.Identity(), inputs(1))}, inputs(1), "found a dict with inputs"),
        ("model", None, "found a str"),
        ({"forward": nn.Identity()}, None, r"method 'forward': expected \(module, inputs\), found a Identity"),
        (nn.Identity(), "x", "expected a tuple of example inputs, found a str"),
    ],
)
def test_what_is_no_model(model: Any, args: Any, message: str) -> None:
    with pytest.raises(UnsupportedDataError, match=message):
        lower(model, args)


@pytest.mark.long
def test_two_models_in_one_folder(tmp_path: Path) -> None:
    """A strict update asks for the tensors of the programs that are loaded, not for those of their neighbours (W1)."""

    class One(nn.Module):
        def __init__(self, name: str, rows: int) -> None:
            super().__init__()
            self.name = name
            setattr(self, name, nn.Linear(8, rows))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return getattr(self, self.name)(x)  # type: ignore[no-any-return]

    x = torch.ones(1, 8)
    models = {"a": One("a", 2).eval(), "b": One("b", 4).eval()}
    for name, module in models.items():
        save_programs({name: lower(module, (x,), tag="model")}, tmp_path)
    cache = BlobCache(tmp_path / "model.ptd")
    with pytest.raises(UpdateError, match="lacks 'b.weight', 'b.bias'"):
        cache.update_state_dict(models["a"].state_dict())  # nothing is loaded, so the whole file counts
    method = Program(tmp_path / "a.pte", cache).method()
    new = One("a", 2).eval()
    cache.update_state_dict(new.state_dict())
    close(method(x), new(x))
    with pytest.raises(UpdateError, match="lacks 'a.bias'"):
        cache.update_state_dict({"a.weight": new.state_dict()["a.weight"]})
    with pytest.raises(UpdateError, match=r"the names in the state dict have the prefix 'module\.'"):
        cache.update_state_dict({f"module.{name}": value for name, value in new.state_dict().items()})
    both = Program(tmp_path / "b.pte", cache).method()
    with pytest.raises(UpdateError, match="lacks 'b.weight', 'b.bias'"):
        cache.update_state_dict(new.state_dict())
    close(both(x), models["b"](x))


@pytest.mark.long
def test_gradients_are_not_recorded() -> None:
    """A module with parameters that require gradients is exported as it runs on a device, and stays as it was."""
    module = seeded(nets.MLP)
    lower({"forward": (module, inputs(3, 16))}, partitioners=list)
    assert all(parameter.requires_grad for parameter in module.parameters()) and torch.is_grad_enabled()


@pytest.mark.long
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
    with pytest.raises(MissingDependencyError, match="needs all of executorch: pip install"):
        lower({"forward": (nn.Identity().eval(), inputs(1))})


def test_importing_the_package_imports_no_torch() -> None:
    """Names are imported when they are first used (D3)."""
    code = "import sys, blobstore.lowering; assert not {'torch', 'executorch'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
