"""Checkpoints: resuming, deltas, crashes, and other readers of the files (T1, T2, D2, W1)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from blobstore import BlobStore, errors, open_ptd
from blobstore.lowering.export import lower, quiet
from blobstore.runtime import BlobCache, Program
from blobstore.training import TrainingProgram
from tests.helpers.beside import run_script, running
from tests.helpers.waiting import until
from tests.training import nets
from tests.training.test_steps import same, sgd, state, values

Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.02, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.02)),
    "groups": lambda p: torch.optim.AdamW(
        [{"params": list(p)[:1], "lr": 0.1}, {"params": list(p)[1:], "betas": (0.5, 0.7)}], weight_decay=0.2
    ),
}


def made(kind: str, training: TrainingProgram) -> torch.optim.Optimizer:
    return OPTIMIZERS[kind](training.named_parameters().values())


def run(training: TrainingProgram, optimizer: Any, joint: nets.Joint, steps: int) -> list[float]:
    return [training.step(optimizer, *joint.batches[turn % len(joint.batches)])[0].item() for turn in range(steps)]


class Run:
    """Two steps of Adam on a network, and the state behind them."""

    def __init__(self, folder: Path, joint: nets.Joint | None = None) -> None:
        self.joint = joint or nets.xor()
        self.training = self.joint.load(folder)
        self.optimizer = made("adam", self.training)
        self.steps(2)

    def steps(self, count: int) -> None:
        run(self.training, self.optimizer, self.joint, count)
        self.before = self.state()

    def state(self) -> dict[str, Tensor]:
        return state(self.training, self.optimizer)

    def refuses(self, path: Path, error: Any, match: str | None = None, **options: Any) -> None:
        """Loading is an error, and changes nothing."""
        with pytest.raises(error, match=match):
            self.training.load(path, **{"optimizer": self.optimizer, **options})
        assert same(self.state(), self.before)


@pytest.fixture
def adam(tmp_path: Path) -> Run:
    return Run(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("make", [nets.xor, nets.norm, nets.lora], ids=["xor", "buffers", "lora"])
def test_a_resumed_run_has_the_same_losses(make: Callable[[], nets.Joint], optimizer: str, tmp_path: Path) -> None:
    """After a load, the following losses are equal to the bit, in the same program and in another (T2)."""
    joint = make()
    training = joint.load(tmp_path)
    ours = made(optimizer, training)
    run(training, ours, joint, 6)
    size = training.save(tmp_path / "checkpoint", ours)
    assert size == (tmp_path / "checkpoint").stat().st_size
    expected, end = run(training, ours, joint, 6), state(training, ours)
    resumed = joint.load(tmp_path)
    other = made(optimizer, resumed)
    for group in other.param_groups:
        group["lr"] = 123.0  # the checkpoint restores it
    resumed.load(tmp_path / "checkpoint", other)
    assert run(resumed, other, joint, 6) == expected
    assert same(state(resumed, other), end)
    training.load(tmp_path / "checkpoint", ours)  # also restores the run that saved it
    assert run(training, ours, joint, 6) == expected


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(), inner, max_size=3)
    ),
    max_leaves=6,
)


@pytest.mark.long
@given(
    kind=st.sampled_from(sorted(OPTIMIZERS)),
    steps=st.integers(0, 3),
    option=_values,
    kept=st.none() | st.integers() | st.floats(allow_nan=False),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.uint8]),
    sizes=st.lists(st.integers(0, 3), max_size=3),
)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_state_of_an_optimizer_is_restored(
    kind: str, steps: int, option: Any, kept: Any, dtype: torch.dtype, sizes: list[int], tmp_path: Path
) -> None:
    """Options and entries of the state come back exactly, for values of any plain kind (T2)."""
    joint = nets.xor()
    training = joint.load(tmp_path)
    optimizer = made(kind, training)
    run(training, optimizer, joint, steps)
    optimizer.param_groups[0]["option"] = option
    tensor = (torch.rand(sizes) * 3).to(dtype)
    first = training.named_parameters()["first.weight"]
    if steps:  # code that adds to a state must keep what torch expects
        optimizer.state[first]["more"] = [tensor, {"kept": kept}, (tensor,)]
    training.save(tmp_path / "checkpoint", optimizer)
    other = made(kind, training)
    training.load(tmp_path / "checkpoint", other)
    expected, found = optimizer.state_dict(), other.state_dict()
    assert repr(found["param_groups"]) == repr(expected["param_groups"])
    assert found["state"].keys() == expected["state"].keys()
    for number, entry in expected["state"].items():
        assert entry.keys() == found["state"][number].keys()
        for key, value in entry.items():
            back = found["state"][number][key]
            if isinstance(value, Tensor):
                assert torch.equal(back, value)
                assert (back.dtype, back.shape) == (value.dtype, value.shape)
            elif key == "more":
                # torch converts tensors of a state to the parameter's dtype
                assert torch.equal(back[0], tensor.to(back[0].dtype))
                assert (back[1], type(back[2])) == ({"kept": kept}, tuple)
            else:
                assert back == value


@pytest.mark.long
def test_contents_of_the_file(tmp_path: Path) -> None:
    """Without an optimizer the file has the parameters, the buffers, and one opaque blob."""
    joint = nets.norm()
    training = joint.load(tmp_path)
    run(training, sgd(training), joint, 3)
    training.save(tmp_path / "checkpoint.ptd", metadata={"made by": "a test"})
    with open_ptd(tmp_path / "checkpoint.ptd", verify=True) as file:
        tensors = {**training.named_parameters(), **training.named_buffers()}
        assert {key for key in file if file.get_tensor_layout(key)} == set(tensors)
        assert len(file) == len(tensors) + 1
        assert file.metadata["made by"] == "a test"
    cache = BlobCache(tmp_path / "checkpoint.ptd")
    assert all(torch.equal(cache.torch(key), tensor) for key, tensor in tensors.items())


@pytest.mark.long
def test_stock_executorch_trains_on(tmp_path: Path) -> None:
    """ExecuTorch's own training starts a program with external weights from the checkpoint (T2)."""
    with quiet():
        from executorch.extension.pybindings.portable_lib import _load_for_executorch
        from executorch.extension.training import get_sgd_optimizer
        from executorch.extension.training.pybindings._training_module import TrainingModule
    joint = nets.xor(external=True)
    training = joint.load(tmp_path)
    optimizer = torch.optim.Adam(training.named_parameters().values())
    run(training, optimizer, joint, 5)
    training.save(tmp_path / "checkpoint.ptd", optimizer)
    with quiet():
        stock = TrainingModule(_load_for_executorch(str(tmp_path / "train.pte"), str(tmp_path / "checkpoint.ptd")))
    plain = get_sgd_optimizer(training.named_parameters(), 0.1, 0, 0, 0, False)
    theirs = None
    for _ in range(5):
        loss = stock.forward_backward("forward", list(joint.batches[0]))[0]
        assert torch.equal(training.step(plain, *joint.batches[0])[0], loss)
        theirs = theirs or get_sgd_optimizer(stock.named_parameters(), 0.1, 0, 0, 0, False)
        theirs.step(stock.named_gradients())


@pytest.mark.long
@pytest.mark.parametrize("base", [False, True])
def test_stock_executorch_infers(base: bool, tmp_path: Path, stock_run: Any, module_runner: Any) -> None:
    """A checkpoint is a data file of an inference program, of ExecuTorch and here; a delta needs its base too (T2, D1)."""
    joint = nets.lora()
    training = joint.load(tmp_path)
    run(training, sgd(training), joint, 5)
    x = joint.batches[0][0]
    manager = lower({"forward": (nets.Scores(joint.model), (x,))}, partitioners=list, external_constants=True)
    (tmp_path / "model.pte").write_bytes(bytes(manager.buffer))
    model = joint.eager()
    model.load_state_dict(training.named_parameters(), strict=False)
    training.save(tmp_path / "delta.ptd", base=[tmp_path / "foundation.ptd"])
    own = Program(tmp_path / "model.pte", data=[tmp_path / "foundation.ptd", tmp_path / "delta.ptd"]).method()(x)
    if base:
        (found,) = module_runner(
            tmp_path / "model.pte", [tmp_path / "foundation.ptd", tmp_path / "delta.ptd"], [x.numpy()]
        )
        found = torch.from_numpy(found.copy())
    else:
        whole = BlobStore()
        whole.merge(open_ptd(tmp_path / "foundation.ptd"))
        whole.merge(open_ptd(tmp_path / "delta.ptd"))
        whole.write_ptd(tmp_path / "whole.ptd")
        (found,) = stock_run(tmp_path / "model.pte", [x], tmp_path / "whole.ptd")
    for one in (found, own):
        torch.testing.assert_close(one, nets.Scores(model)(x).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_a_checkpoint_while_others_train(tmp_path: Path) -> None:
    """Each file is a single state of the run, after the number of steps that its optimizer has counted (B3)."""
    joint = nets.xor()
    training, alone = joint.load(tmp_path), TrainingProgram(tmp_path / "train.pte")
    ours, theirs = made("adam", training), made("adam", alone)
    taken = []

    def train() -> None:
        training.step(ours, *joint.batches[0])
        taken.append(1)

    files = []
    with running(train, train) as failures:
        for number in range(8):
            files.append(tmp_path / f"{number}.ptd")
            training.save(files[-1], ours)
            enough = len(taken) + 20
            until(lambda: len(taken) >= enough or failures)  # noqa: B023
    resumed = TrainingProgram(tmp_path / "train.pte")
    steps = 0
    for file in files:
        other = made("adam", resumed)
        resumed.load(file, other)
        entry = next(iter(other.state_dict()["state"].values()), {"step": 0})
        for _ in range(int(entry["step"]) - steps):
            alone.step(theirs, *joint.batches[0])
        steps = int(entry["step"])
        assert same(state(resumed, other), state(alone, theirs))
    assert steps > 50


@pytest.mark.long
def test_a_delta_has_only_what_changed(tmp_path: Path) -> None:
    """Tensors that a base has with the same bytes are not written again (D2)."""
    joint = nets.xor(external=True)
    training = joint.load(tmp_path)
    foundation = tmp_path / "_default_external_constant.ptd"
    training.save(tmp_path / "none", base=[foundation])
    with open_ptd(tmp_path / "none") as file:
        assert not [key for key in file if file.get_tensor_layout(key)]
    with torch.no_grad():
        training.named_parameters()["second.bias"].add_(1)
    training.save(tmp_path / "one", base=[foundation])
    with open_ptd(tmp_path / "one") as file:
        assert [key for key in file if file.get_tensor_layout(key)] == ["second.bias"]
    with torch.no_grad():
        training.named_parameters()["first.bias"].add_(1)
    training.save(tmp_path / "two", base=[foundation, tmp_path / "one"])  # on another delta
    with open_ptd(tmp_path / "two") as file:
        assert [key for key in file if file.get_tensor_layout(key)] == ["first.bias"]
    expected = state(training)
    for name, base in (("two", [foundation, tmp_path / "one"]), ("one", [foundation]), ("none", [foundation])):
        fresh = joint.load(tmp_path)
        fresh.load(tmp_path / name, base=base)
        if name == "two":
            assert same(state(fresh), expected)
    assert same(state(fresh), values(dict(joint.model.named_parameters())))


@pytest.mark.long
def test_a_delta_without_its_base(tmp_path: Path) -> None:
    """A missing or different base is an error that names the tensor (B5)."""
    adam = Run(tmp_path, nets.xor(external=True))
    training, optimizer = adam.training, adam.optimizer
    training.save(tmp_path / "first", optimizer)
    with torch.no_grad():
        training.named_parameters()["second.bias"].add_(1)
    adam.before = adam.state()
    training.save(tmp_path / "delta", optimizer, base=[tmp_path / "first"])
    other = BlobStore()
    with open_ptd(tmp_path / "first") as file:
        for key in file:
            if layout := file.get_tensor_layout(key):
                data = bytes(len(file.get_data(key))) if key == "optimizer/first.bias/exp_avg" else file.get_data(key)
                other.add(key, data, layout=layout)
    other.write_ptd(tmp_path / "other")
    for base, reason in (
        ((), r"'first\.weight' is not in the checkpoint.*first; none is given"),
        ("_default_external_constant.ptd", r"base, first, is not .*external_constant"),
        ("other", r"'optimizer/first\.bias/exp_avg'"),
    ):
        adam.refuses(tmp_path / "delta", errors.CheckpointError, reason, base=base and [tmp_path / base])
    adam.refuses(tmp_path / "delta", errors.FileAccessError, base=[tmp_path / "missing"])
    training.load(tmp_path / "delta", optimizer, base=[tmp_path / "first"])
    assert same(adam.state(), adam.before)


@pytest.mark.long
def test_frozen_weights_must_be_the_same(tmp_path: Path) -> None:
    """A checkpoint is refused after the frozen weights have changed."""
    joint = nets.lora()
    training = joint.load(tmp_path)
    run(training, sgd(training), joint, 2)
    training.save(tmp_path / "checkpoint")
    before = state(training)
    training.program.cache.update({"base.1.bias": torch.ones(16)})
    with pytest.raises(errors.CheckpointError, match="other frozen weights"):
        training.load(tmp_path / "checkpoint")
    assert same(state(training), before)
    training.program.cache.revert()
    training.load(tmp_path / "checkpoint")


@pytest.mark.long
@pytest.mark.parametrize("other", ["names", "shape", "dtype", "buffers"])
def test_a_checkpoint_of_another_model(other: str, tmp_path: Path) -> None:
    """Other names, shapes, dtypes or buffers are refused, and nothing changes."""
    adam = Run(tmp_path, nets.norm() if other == "buffers" else nets.xor())
    training = adam.training
    if other == "names":
        nets.lora().load(tmp_path / "other").save(tmp_path / "checkpoint")
    else:
        changed = dict(training._parameters), dict(training._buffers)
        if other == "shape":
            training._parameters["second.weight"] = torch.zeros(3, 10)
        elif other == "dtype":
            training._parameters["second.weight"] = torch.zeros(2, 10, dtype=torch.float64)
        else:
            del training._buffers["norm.running_mean"]
        training.save(tmp_path / "checkpoint")
        training._parameters, training._buffers = changed
    expected = {"names": "lacks", "shape": "3, 10", "dtype": "double", "buffers": "norm.running_mean"}[other]
    reason = rf"of another model than .*train\.pte.*{expected}"
    adam.refuses(tmp_path / "checkpoint", errors.CheckpointError, reason)


def test_another_optimizer(adam: Run, tmp_path: Path) -> None:
    """Another class, other groups, or an optimizer without access to its state is refused, and nothing changes."""
    training, optimizer = adam.training, adam.optimizer
    parameters = list(training.named_parameters().values())
    training.save(tmp_path / "checkpoint", optimizer)
    training.save(tmp_path / "without")
    adam.steps(1)
    for wrong, reason in (
        (made("momentum", training), "that of optimizer Adam, not of SGD"),
        (torch.optim.Adam(parameters[:2]), "parameter groups"),
    ):
        adam.refuses(tmp_path / "checkpoint", errors.CheckpointError, reason, optimizer=wrong)
        assert not wrong.state
    adam.refuses(tmp_path / "without", errors.CheckpointError, "no state of an optimizer")
    with quiet():
        from executorch.extension.training import get_sgd_optimizer
    own = get_sgd_optimizer(training.named_parameters(), 0.1, 0.9, 0, 0, False)
    with pytest.raises(errors.UnsupportedOperationError, match="cannot be saved or restored"):
        training.save(tmp_path / "new", own)
    adam.refuses(
        tmp_path / "checkpoint", errors.UnsupportedOperationError, "cannot be saved or restored", optimizer=own
    )
    optimizer.param_groups[0]["strange"] = object()
    with pytest.raises(errors.UnsupportedDataError, match="optimizer/0/strange has type object"):
        training.save(tmp_path / "new", optimizer)
    assert not (tmp_path / "new").exists()
    assert same(adam.state(), adam.before)
    training.load(tmp_path / "checkpoint")  # without its optimizer


def test_damaged_checkpoints(adam: Run, tmp_path: Path) -> None:
    """After truncation or a changed byte, loading is an error or has no effect on the values (B5)."""
    path = tmp_path / "checkpoint"
    adam.training.save(path, adam.optimizer)
    whole = path.read_bytes()
    adam.steps(1)
    after = adam.before
    bad = [whole[:cut] for cut in range(0, len(whole), 509)]
    for at in range(0, len(whole), 97):
        bad.append(whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1 :])
    harmless = 0
    for content in bad:
        path.write_bytes(content)
        try:
            adam.training.load(path, adam.optimizer)
        except (errors.InvalidFileError, errors.FileAccessError):
            assert same(adam.state(), after)
        else:
            harmless += 1  # padding between blobs
            assert not same(adam.state(), after)
            adam.steps(1)
            assert same(adam.state(), after)
    assert harmless < len(bad) / 3
    store = BlobStore()
    for name, tensor in adam.training.named_parameters().items():
        store.add(name, tensor)
    store.write_ptd(path)
    adam.refuses(path, errors.InvalidFileError, "not a checkpoint")


@pytest.mark.long
def test_files_that_are_in_use_are_not_overwritten(tmp_path: Path) -> None:
    """The program, its data files and the bases are refused as targets."""
    joint = nets.lora()
    training = joint.load(tmp_path)
    files = {path: path.read_bytes() for path in tmp_path.iterdir()}
    training.save(tmp_path / "base")
    for name in ("train.pte", "foundation.ptd", "adapter.ptd", "base"):
        with pytest.raises(errors.OutputPathError):
            training.save(tmp_path / name, base=[tmp_path / "base"])
    with pytest.raises(errors.FileAccessError):
        training.save(tmp_path / "no folder" / "checkpoint")
    assert all(path.read_bytes() == content for path, content in files.items())


_BEGIN = """
import sys, threading, torch
from pathlib import Path
from blobstore.errors import TrainingError
from blobstore.runtime import Program
from blobstore.training import TrainingProgram
from tests.helpers.beside import in_child, running
folder = Path(sys.argv[1])
torch.set_num_threads(1)
"""
_FORKING = """
training = TrainingProgram(folder / "train.pte")
optimizer = torch.optim.Adam(training.named_parameters().values(), lr=0.02)
batch = torch.tensor([[0.0, 0], [0, 1], [1, 0], [1, 1]]), torch.tensor([0, 1, 1, 0])
training.step(optimizer, *batch)
before = {name: tensor.clone() for name, tensor in training.named_parameters().items()}

def goes_on():
    training.step(optimizer, *batch)
    assert not all(torch.equal(training.named_parameters()[name], before[name]) for name in before)

assert in_child(goes_on)() == 0
with training.locked():
    assert in_child(goes_on)() == 0  # this thread holds the lock
assert all(torch.equal(training.named_parameters()[name], before[name]) for name in before)

def refuses():
    for use in (lambda: training.step(optimizer, *batch), lambda: training.save(sys.argv[1] + "/new")):
        try:
            use()
        except TrainingError as error:
            assert "forked" in str(error)
        else:
            raise SystemExit(1)

inside, leave = threading.Event(), threading.Event()
def hold():
    with training.locked():
        inside.set()
        leave.wait()
thread = threading.Thread(target=hold, daemon=True)
thread.start()
inside.wait()
assert in_child(refuses)() == 0
leave.set()
thread.join()
training.step(optimizer, *batch)
"""


@pytest.mark.long
def test_after_fork(tmp_path: Path) -> None:
    """A child has its own run; a child that was forked in the middle of a step gets an error."""
    nets.xor().write(tmp_path)
    run_script(_BEGIN + _FORKING, tmp_path)


_FORKING_IN_A_CALL = """
method = Program(folder / "train.pte").method()
batch = torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 0])
parameter = method.output_memory(len(method.outputs) - 1)
parameter.fill_(3)
def check():
    for _ in range(2):
        method(*batch)
    assert bool((parameter == 3).all())

with running(lambda: method(*batch)):
    for _ in range(50):
        assert in_child(check)() == 0
"""


@pytest.mark.long
def test_a_method_in_a_call_of_another_thread_at_a_fork(tmp_path: Path) -> None:
    """The method is not loaded again in the child, which would reset parameters that tensors refer to (T2)."""
    nets.convolutions().write(tmp_path)
    run_script(_BEGIN + _FORKING_IN_A_CALL, tmp_path)


@pytest.mark.long
def test_optimizers_with_named_parameters(tmp_path: Path) -> None:
    """An optimizer over (name, parameter) pairs keeps its names when its state is restored."""
    joint = nets.norm()
    first, second = joint.load(tmp_path / "first"), joint.load(tmp_path / "second")
    old = torch.optim.SGD(first.named_parameters().items(), lr=0.1, momentum=0.9)
    new = torch.optim.SGD(list(second.named_parameters().items())[::-1], lr=0.2, momentum=0.1)
    first.step(old, *joint.batches[0])
    first.save(tmp_path / "checkpoint.ptd", old)
    second.load(tmp_path / "checkpoint.ptd", new)
    (group,) = new.param_groups
    assert (group["lr"], group["momentum"]) == (0.1, 0.9)
    named = second.named_parameters()
    assert group["param_names"] == list(named)[::-1]
    assert all(tensor is named[name] for name, tensor in zip(group["param_names"], group["params"], strict=True))
    first.step(old, *joint.batches[1])
    second.step(new, *joint.batches[1])
    assert same(first.named_parameters(), second.named_parameters())
