"""Random updates, reverts, loads, methods, programs and caches: outputs equal those of eager modules (U1, B3)."""

import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor

from blobstore.runtime import BlobCache, Program
from tests.lowering import nets
from tests.lowering.live import close, inputs, lower_through, seeded

pytestmark = pytest.mark.long

_EXAMPLE = inputs(2, 3, 6, 6)
_GROUPS = (
    ("conv.weight", "conv.bias", "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"),
    ("plain.weight", "plain_norm.running_mean", "plain_norm.running_var"),
    ("fc.weight", "fc_norm.weight", "fc_norm.bias", "fc_norm.running_mean", "fc_norm.running_var"),
)
_files: list[Path] = []


def _lowered() -> Path:
    if not _files:
        directory = Path(tempfile.mkdtemp(prefix="lowered-"))
        module = seeded(nets.ConvNorm)
        lower_through({"forward": (module, _EXAMPLE)}, directory / "a")
        with torch.no_grad():
            module.fc.weight.neg_()
        lower_through({"forward": (module, _EXAMPLE)}, directory / "b")
        _files.append(directory)
    return _files[0]


class Machine(RuleBasedStateMachine):
    """Each cache has a state dict beside it, which is the model."""

    caches = Bundle("caches")

    def __init__(self) -> None:
        super().__init__()
        self.directory = _lowered()
        self.states: list[tuple[BlobCache, dict[str, Tensor]]] = []
        self.methods: list[tuple[int, object]] = []
        self.module = seeded(nets.ConvNorm)
        self.original = {name: tensor.clone() for name, tensor in self.module.state_dict().items()}
        self.scratch = Path(tempfile.mkdtemp(prefix="machine-"))

    @initialize(target=caches)
    def first(self) -> int:
        return self.open()

    @rule(target=caches)
    def open(self) -> int:
        self.states.append((BlobCache(self.directory / "a" / "model.ptd"), dict(self.original)))
        self.methods.append(
            (len(self.states) - 1, Program(self.directory / "a" / "model.pte", self.states[-1][0]).method())
        )
        return len(self.states) - 1

    @rule(cache=caches)
    def another_program(self, cache: int) -> None:
        if len(self.methods) < 8:
            self.methods.append(
                (cache, Program(self.directory / "a" / "model.pte", self.states[cache][0]).load_method())
            )

    @rule(cache=caches, group=st.sampled_from(_GROUPS), seed=st.integers(0, 1000))
    def update(self, cache: int, group: tuple[str, ...], seed: int) -> None:
        found, state = self.states[cache]
        generator = torch.Generator().manual_seed(seed)
        changes = {name: torch.rand(state[name].shape, generator=generator) + 0.1 for name in group}
        found.update(changes)
        state.update(changes)

    @rule(cache=caches, group=st.sampled_from(_GROUPS))
    def refused(self, cache: int, group: tuple[str, ...]) -> None:
        found, state = self.states[cache]
        changes = {name: torch.zeros_like(state[name]) for name in group}
        changes[group[0]] = torch.zeros(1, 1)
        try:
            found.update(changes)
        except ValueError:
            return
        raise AssertionError("a wrong shape was accepted")

    @rule(cache=caches)
    def revert(self, cache: int) -> None:
        found, state = self.states[cache]
        found.revert()
        state.update(self.original)

    @rule(cache=caches, other=caches)
    def carry_over(self, cache: int, other: int) -> None:
        (source, held), (target, state) = self.states[cache], self.states[other]
        source.save(self.scratch / "whole.ptd")
        target.load(self.scratch / "whole.ptd")
        state.update(held)

    @rule(cache=caches)
    def load(self, cache: int) -> None:
        found, state = self.states[cache]
        found.load(self.directory / "b" / "model.ptd")
        state.update(self.original)
        state["fc.weight"] = -self.original["fc.weight"]

    @invariant()
    def outputs_are_those_of_eager(self) -> None:
        for cache, method in self.methods:
            self.module.load_state_dict(self.states[cache][1])
            with torch.no_grad():
                close(method(*_EXAMPLE), self.module(*_EXAMPLE))  # type: ignore[operator]

    def teardown(self) -> None:
        shutil.rmtree(self.scratch)


Machine.TestCase.settings = settings(max_examples=15, stateful_step_count=15, suppress_health_check=list(HealthCheck))
test_machine = Machine.TestCase
