"""Steps of training programs, compared with eager PyTorch (T1, T2)."""

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from blobstore import errors
from blobstore.lowering.export import quiet
from blobstore.runtime import BlobCache, Program
from blobstore.training import TrainingProgram
from tests.helpers import models
from tests.training import nets

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.02),
}
# The kernels add float32 in another order than eager PyTorch, and the differences accumulate over the steps.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def sgd(training: TrainingProgram, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(training.named_parameters().values(), **{"lr": 0.1, **options})


def eager_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: nets.Batch) -> Tensor:
    optimizer.zero_grad()
    outputs = model(*batch)
    loss: Tensor = outputs[0] if isinstance(outputs, tuple) else outputs
    loss.backward()
    optimizer.step()
    return loss.detach()


def values(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def state(training: TrainingProgram, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Tensor]:
    """Copies of all tensors of a run."""
    kept = optimizer.state_dict()["state"] if optimizer else {}
    tensors = {f"{number}/{key}": value for number, entry in kept.items() for key, value in entry.items()}
    tensors = {key: value for key, value in tensors.items() if isinstance(value, Tensor)}
    return values({**training.named_parameters(), **training.named_buffers(), **tensors})


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.long
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "make",
    [
        nets.xor,
        lambda: nets.xor(external=True),
        nets.convolutions,
        lambda: nets.convolutions(external=True),
        nets.norm,
        nets.lora,
    ],
    ids=["xor", "xor external", "convolutions", "convolutions external", "buffers", "lora"],
)
def test_steps_are_those_of_eager(make: Callable[[], nets.Joint], optimizer: str, tmp_path: Path) -> None:
    """Losses, gradients, parameters and buffers of 20 steps (T1)."""
    joint = make()
    training, eager = joint.load(tmp_path), joint.eager()
    ours = OPTIMIZERS[optimizer](training.named_parameters().values())
    trained = [parameter for parameter in eager.parameters() if parameter.requires_grad]
    theirs = OPTIMIZERS[optimizer](trained)
    for turn in range(20):
        batch = joint.batches[turn % len(joint.batches)]
        loss = training.step(ours, *batch)[0]
        torch.testing.assert_close(loss, eager_step(eager, theirs, batch), **CLOSE)
        for name, gradient in training.named_gradients().items():
            torch.testing.assert_close(gradient, eager.get_parameter(name).grad, **CLOSE)
        for name, parameter in training.named_parameters().items():
            torch.testing.assert_close(parameter, eager.get_parameter(name).detach(), **CLOSE)
        for name, buffer in training.named_buffers().items():
            torch.testing.assert_close(buffer, eager.get_buffer(name), **CLOSE)
    assert set(training.named_parameters()) == {n for n, p in eager.named_parameters() if p.requires_grad}


@pytest.mark.long
@pytest.mark.parametrize("external", [False, True])
def test_tensors_are_the_runtimes_memory(external: bool, tmp_path: Path) -> None:
    """They are valid before the first step and always the same, and the program reads what is written to them."""
    joint = nets.xor(external=external)
    training = joint.load(tmp_path)
    parameters, gradients = training.named_parameters(), training.named_gradients()
    for name, parameter in joint.model.named_parameters():
        assert torch.equal(parameters[name], parameter)
        assert parameters[name].shape == gradients[name].shape
        assert not gradients[name].any()
    with torch.no_grad():
        parameters["second.weight"].zero_()
        parameters["second.bias"].zero_()
    loss = training.forward_backward(*joint.batches[0])[0]
    assert loss.item() == pytest.approx(np.log(2), abs=1e-6)
    assert gradients["second.weight"].any()
    assert all(training.named_parameters()[name] is parameters[name] for name in parameters)
    assert all(training.named_gradients()[name] is gradients[name] for name in gradients)
    assert all(parameters[name].grad is gradients[name] for name in parameters)
    del training
    gc.collect()
    parameters["first.weight"].add_(1)  # the tensors keep the memory alive
    assert torch.isfinite(gradients["first.weight"]).all()


def test_outputs_have_memory_of_their_own(tmp_path: Path) -> None:
    """A later step does not change them."""
    joint = nets.xor()
    training = joint.load(tmp_path)
    optimizer = sgd(training)
    outputs = [training.step(optimizer, *joint.batches[0])[0] for _ in range(3)]
    assert len({loss.item() for loss in outputs}) == 3
    assert len(training.forward_backward(*joint.batches[0])) == 2


def test_a_loop_of_ones_own(tmp_path: Path) -> None:
    """Gradients stay attached after zero_grad; the thread that holds the lock may take it again."""
    joint = nets.xor()
    training, eager = joint.load(tmp_path), joint.eager()
    ours, theirs = sgd(training, momentum=0.9), torch.optim.SGD(eager.parameters(), lr=0.1, momentum=0.9)
    for turn in range(10):
        ours.zero_grad(set_to_none=turn % 2 == 0)
        with training.locked():
            loss = training.forward_backward(*joint.batches[0])[0]
            torch.nn.utils.clip_grad_norm_(training.named_parameters().values(), 0.1)
            ours.step()
        theirs.zero_grad()
        expected = eager(*joint.batches[0])[0]
        expected.backward()
        torch.nn.utils.clip_grad_norm_(eager.parameters(), 0.1)
        theirs.step()
        torch.testing.assert_close(loss, expected.detach(), **CLOSE)


def test_numpy_inputs(tmp_path: Path) -> None:
    """From numpy inputs come numpy outputs."""
    joint = nets.xor()
    training = joint.load(tmp_path)
    outputs = training.step(sgd(training), *(tensor.numpy() for tensor in joint.batches[0]))
    assert all(isinstance(output, np.ndarray) for output in outputs)


@pytest.mark.long
def test_frozen_weights_are_shared_with_the_cache(tmp_path: Path) -> None:
    """They are not copied: the next step uses a commit to them (D1)."""
    joint = nets.lora()
    training, eager = joint.load(tmp_path), joint.eager()
    batch = joint.batches[0]
    training.forward_backward(*batch)
    new = torch.randn(16, 16)
    training.program.cache.update({"base.0.weight": new})
    with torch.no_grad():
        eager.get_parameter("base.0.weight").copy_(new)
    torch.testing.assert_close(training.forward_backward(*batch)[0], eager(*batch).detach(), **CLOSE)
    assert "base.0.weight" not in training.named_parameters()


@pytest.mark.long
def test_two_trainings_on_one_cache_are_independent(tmp_path: Path) -> None:
    """A step of one changes neither the other nor the cache."""
    joint = nets.lora()
    first = joint.load(tmp_path)
    second = TrainingProgram(tmp_path / "train.pte", first.program.cache)
    before = values(second.named_parameters())
    first.step(sgd(first), *joint.batches[0])
    assert same(before, second.named_parameters())
    assert not same(before, first.named_parameters())
    assert not first.program.cache.dirty


@pytest.mark.long
@pytest.mark.parametrize("make", [nets.convolutions, nets.norm], ids=["convolutions", "buffers"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite(make: Callable[[], nets.Joint], bad: float, tmp_path: Path) -> None:
    """It is an error, skipped or accepted; unless accepted, nothing changes."""
    joint = make()
    training = joint.load(tmp_path)
    optimizer = torch.optim.Adam(training.named_parameters().values())
    good = joint.batches[0]
    wrong = (torch.full_like(good[0], bad), *good[1:])
    training.step(optimizer, *good)

    before = state(training, optimizer)
    with pytest.raises(errors.NotFiniteLossError, match="the loss is"):
        training.step(optimizer, *wrong)
    assert same(before, state(training, optimizer))
    assert not torch.isfinite(training.step(optimizer, *wrong, on_nan="skip")[0])
    assert same(before, state(training, optimizer))
    training.step(optimizer, *good)
    assert torch.isfinite(torch.stack([tensor.sum() for tensor in state(training, optimizer).values()])).all()
    training.step(optimizer, *wrong, on_nan="accept")
    assert not all(torch.isfinite(tensor).all() for tensor in training.named_parameters().values())
    with pytest.raises(errors.TrainingError, match="on_nan must be .*, not 'ignore'"):
        training.step(optimizer, *good, on_nan="ignore")  # type: ignore[arg-type]


@pytest.mark.long
def test_inputs_that_do_not_fit_change_nothing(tmp_path: Path) -> None:
    """Neither parameters nor buffers."""
    joint = nets.norm()
    training = joint.load(tmp_path)
    before = state(training)
    for inputs in ((), joint.batches[0][:1], (torch.zeros(4, 1, 9, 9), joint.batches[0][1])):
        with pytest.raises(errors.InputError):
            training.step(sgd(training), *inputs)
    assert same(before, state(training))


def test_programs_that_are_not_for_training(tmp_path: Path) -> None:
    """The message names what the program lacks."""
    pte = models.mlp().write(tmp_path)
    with pytest.raises(errors.ProgramError, match=r"model\.pte.*'forward' is not a training program.*_export_forward"):
        TrainingProgram(pte)
    with pytest.raises(errors.MethodNotFoundError, match="'train'"):
        TrainingProgram(pte, method="train")
    with pytest.raises(errors.FileAccessError):
        TrainingProgram(tmp_path / "missing.pte")
    (tmp_path / "bad.pte").write_bytes(b"no program")
    with pytest.raises(errors.InvalidFileError):
        TrainingProgram(tmp_path / "bad.pte")


@pytest.mark.parametrize(
    ("method", "value"),
    [("gradients_index", -1), ("gradients_index", 3), ("gradients_index", 0), ("parameters_index", 2**40)],
)
def test_contradictory_metadata(method: str, value: int, tmp_path: Path) -> None:
    """Indices that contradict the outputs are an error when the program is loaded (B5)."""
    with quiet():
        from executorch.exir._serialize._program import deserialize_pte_binary, serialize_pte_binary
        from executorch.exir.schema import Int
    file = deserialize_pte_binary(nets.xor().files["train.pte"])
    (plan,) = (p for p in file.program.execution_plan if p.name == f"__et_training_{method}_forward")
    plan.values[plan.outputs[0]].val = Int(value)
    (tmp_path / "train.pte").write_bytes(bytes(serialize_pte_binary(file)))
    with pytest.raises(errors.ProgramError, match="not a training program"):
        TrainingProgram(tmp_path / "train.pte")


@pytest.mark.long
def test_outputs_without_planned_memory(tmp_path: Path) -> None:
    """The runtime cannot share memory that ExecuTorch did not plan."""
    with quiet():
        from executorch.exir.passes import MemoryPlanningPass
    joint = nets.xor()
    manager = nets.lower_joint(
        joint.eager(), joint.batches[0], memory_planning_pass=MemoryPlanningPass(alloc_graph_output=False)
    )
    (tmp_path / "train.pte").write_bytes(bytes(manager.buffer))
    with pytest.raises(errors.UnsupportedOperationError, match="no memory that was planned for it"):
        TrainingProgram(tmp_path / "train.pte")


@pytest.mark.long
def test_missing_external_weights(tmp_path: Path) -> None:
    """They are named when the program is loaded."""
    pte = nets.xor(external=True).write(tmp_path)
    with pytest.raises(errors.KeyNotFoundError, match="first.weight"):
        TrainingProgram(pte, BlobCache())


def test_asking_for_memory_again_takes_none(tmp_path: Path) -> None:
    """Tensors over the same output do not accumulate memory."""
    method = Program(nets.xor().write(tmp_path)).method()

    def private() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) << 10

    for _ in range(1000):
        method.output_memory(0)
    before = private()
    for _ in range(150_000):
        method.output_memory(0)
    assert private() - before < 1 << 20


def test_memory_of_wrong_outputs(tmp_path: Path) -> None:
    """Wrong indices are errors; `call_first` accepts any count."""
    method = Program(nets.xor().write(tmp_path)).method()
    for index in (10, 2**31):
        with pytest.raises(errors.InputError, match="is not a tensor"):
            method.output_memory(index)
    metadata = Program(tmp_path / "train.pte").method("__et_training_gradients_index_forward")
    with pytest.raises(errors.InputError, match="is not a tensor"):
        metadata.output_memory(0)
    outputs = method(*nets.xor().batches[0])
    for count in (0, 2, 10, 99):
        for mine, all_ in zip(method.call_first(count, *nets.xor().batches[0]), outputs, strict=False):
            assert torch.equal(mine, all_)
        assert len(method.call_first(count, *nets.xor().batches[0])) == min(count, 10)


def test_steps_of_several_threads_take_turns(tmp_path: Path) -> None:
    """Steps do not interleave: several threads together make the same run as one."""
    joint = nets.xor()
    training, alone = joint.load(tmp_path), TrainingProgram(tmp_path / "train.pte")
    ours, theirs = sgd(training, momentum=0.9), sgd(alone, momentum=0.9)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: training.step(ours, *joint.batches[0]), range(100)))
    for _ in range(100):
        alone.step(theirs, *joint.batches[0])
    assert same(training.named_parameters(), alone.named_parameters())


class Failing(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        raise RuntimeError("no step today")


@pytest.mark.long
def test_optimizers_that_fail_or_are_none_change_nothing(tmp_path: Path) -> None:
    """The buffers are restored, and here the parameters are unchanged too."""
    joint = nets.norm()
    training = joint.load(tmp_path)
    parameters = list(training.named_parameters().values())
    before = state(training)
    copies = [tensor.clone() for tensor in parameters]
    wrong: dict[str, Any] = {
        "no step today": Failing(parameters),
        "dense gradients": torch.optim.SparseAdam(parameters),
        "in locked.*closure": torch.optim.LBFGS(parameters),
        "expected an optimizer, found a StepLR": torch.optim.lr_scheduler.StepLR(sgd(training), 1),
        "expected an optimizer, found a type": torch.optim.SGD,
        "expected an optimizer, found a float": 0.1,
        "parameters that do not belong to this program": torch.optim.SGD(copies, lr=0.1),
    }
    for message, optimizer in wrong.items():
        with pytest.raises(errors.TrainingError, match=message):
            training.step(optimizer, *joint.batches[0])
        assert same(before, state(training))


@pytest.mark.long
def test_buffers_without_names_are_not_forgotten(tmp_path: Path) -> None:
    """They cannot be saved or restored, and the errors say so."""
    batches = nets.norm().batches
    training = nets._joint(nets.seeded(nets.Norm), batches).load(tmp_path)
    assert not training.named_buffers()
    with pytest.raises(errors.UnsupportedOperationError, match=r"2 buffers that have no names.*emit_mutable_buffer"):
        training.save(tmp_path / "checkpoint.ptd")
    assert not (tmp_path / "checkpoint.ptd").exists()
    wrong = (torch.full_like(batches[0][0], float("nan")), batches[0][1])
    with pytest.raises(errors.NotFiniteLossError, match="nothing but 2 buffers without names was changed"):
        training.step(sgd(training), *wrong)
