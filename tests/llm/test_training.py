"""An adapter of a language model is trained on the device, and the running runner speaks with it (L3, T1, T2)."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from blobstore import save_programs
from blobstore.adapters import AdapterTags
from blobstore.llm import export_llm
from blobstore.runtime import BlobCache, Program, serving
from blobstore.training import AdamW, MeZO, TrainingProgram, lower_training
from tests.llm import llama
from tests.llm.conftest import silent
from tests.llm.llama import FEED_FORWARD, LORA_ALPHA, MODULES, PROJECTIONS, RANK, Llama
from tests.llm.test_runner import files, loaded

pytestmark = pytest.mark.long

LENGTH, STEPS, RATE = 16, 20, 0.01
SAYING = "to be or not to be that is the question"


@functools.cache
def module(model: Llama = Llama()) -> torch.nn.Module:  # noqa: B008
    """ExecuTorch's own eager model with its loss as output; only the adapter has gradients."""
    from executorch.examples.models.llama.llama_transformer import construct_transformer
    from executorch.examples.models.llama.model_args import ModelArgs

    targets = [{**PROJECTIONS, **FEED_FORWARD}[name] for name in MODULES]
    lora = {"r": RANK, "lora_alpha": LORA_ALPHA, "target_modules": targets}
    sizes = {"max_seq_len": LENGTH, "max_context_len": LENGTH, "generate_full_logits": True}
    made = construct_transformer(ModelArgs(**asdict(model), **sizes, **lora)).eval()
    made.load_state_dict({**model.checkpoint(0), **model.adapter(0)})
    plain: Any = type(made)

    class WithLoss(plain):
        def forward(self, tokens: Tensor, following: Tensor) -> Tensor:
            return functional.cross_entropy(super().forward(tokens).flatten(0, 1), following.flatten())

    made.__class__ = WithLoss
    for name, parameter in made.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return made


def batch() -> tuple[Tensor, Tensor]:
    ids = llama.make_tokenizer(Llama().vocab_size).encode(SAYING.replace(" ", "")).ids[: LENGTH + 1]
    tokens = torch.tensor([ids])
    assert tokens.shape == (1, LENGTH + 1)
    return tokens[:, :-1].clone(), tokens[:, 1:].clone()


@pytest.fixture(scope="module")
def folder_of_training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of `train.pte`, `foundation.ptd` and `adapter.ptd`."""
    folder = tmp_path_factory.mktemp("training")
    with silent():
        program = lower_training(module(), batch(), tag=AdapterTags())
    result = save_programs({"train": program}, folder, keep_small=1 << 14)
    assert sorted(path.name for path in result.data_files) == ["adapter.ptd", "foundation.ptd"]
    yield folder


def load(folder: Path) -> TrainingProgram:
    return TrainingProgram(
        folder / "train.pte", BlobCache(folder / "adapter.ptd", base=BlobCache(folder / "foundation.ptd"))
    )


@functools.cache
def of_torch() -> tuple[list[float], dict[str, Tensor]]:
    """The losses and the adapter of torch's own training."""
    eager: Any = copy.deepcopy(module())
    eager.train()
    trained = {name: parameter for name, parameter in eager.named_parameters() if parameter.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=RATE)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = eager(*batch())
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses, {name: parameter.detach() for name, parameter in trained.items()}


def test_losses_and_weights_are_those_of_torch(folder_of_training: Path) -> None:
    """Only the adapter's parameters are trained; the foundation's file is shared and does not change."""
    training = load(folder_of_training)
    assert set(training.named_parameters()) == set(Llama().adapter(0))
    optimizer = AdamW(training.named_parameters().values(), lr=RATE)
    losses = [float(training.step(optimizer, *batch())[0]) for _ in range(STEPS)]
    expected, adapter = of_torch()
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-4, atol=1e-4)
    assert losses[-1] < losses[0] / 4
    for name, tensor in training.named_parameters().items():
        torch.testing.assert_close(tensor, adapter[name], rtol=1e-3, atol=1e-4)
    base = training.program.cache.base
    assert base is not None and base.dirty == ()


def test_the_running_runner_speaks_with_what_was_trained(folder_of_training: Path, live: Path) -> None:
    """One commit changes the text to that of the eager model with torch's adapter, and a revert changes it back."""
    cache = BlobCache(live / "lora.ptd", base=BlobCache(live / "base.ptd"))
    runner = loaded(live, cache, live / "base.ptd")
    before = llama.text(runner)
    assert before == Llama().tell({**Llama().checkpoint(0), **Llama().adapter(0)})
    training = load(folder_of_training)
    optimizer = AdamW(training.named_parameters().values(), lr=RATE)
    for _ in range(STEPS):
        training.step(optimizer, *batch())
    assert llama.text(runner) == before
    generation = cache.generation
    assert training.publish(cache) == generation + 1
    after = llama.text(runner)
    assert after == Llama().tell({**Llama().checkpoint(0), **of_torch()[1]}) != before
    cache.revert()
    assert llama.text(runner) == before
    assert files(live)[1].exists()


@pytest.mark.slow
def test_a_quantized_program_learns_without_gradients(folder: Path, tmp_path: Path) -> None:
    """MeZO on the program that serves, with weights of 4 bits; another runner then says what the trained one says."""
    config = llama.config(folder, "a", tmp_path / "model.pte", adapter="one", quantized=True)
    config.debug.generate_full_logits = True
    config.export.foundation_weights_file, config.export.lora_weights_file = "base.ptd", "lora.ptd"
    with silent():
        export_llm(config)
    base = BlobCache(tmp_path / "base.ptd")
    own, serving_cache = (BlobCache(tmp_path / "lora.ptd", base=base) for _ in range(2))
    method = Program(tmp_path / "model.pte", own).method()
    tokens, following = batch()

    def loss() -> Tensor:
        return functional.cross_entropy(method(tokens, torch.tensor([0]))[0], following[0])

    optimizer = MeZO(own, lr=2e-3, seed=1)
    assert set(optimizer.names) == set(Llama().adapter(0))
    first = float(loss())
    for _ in range(200):
        optimizer.step(loss)
    assert float(loss()) < 0.8 * first
    assert base.dirty == ()
    with serving(serving_cache):
        runner = llama.runner(tmp_path / "model.pte", folder / "tokenizer.json", tmp_path / "base.ptd")
        before = llama.text(runner)
    trained = {name: torch.from_numpy(own.tensors.value(name)[0].copy()) for name in optimizer.names}
    serving_cache.update(trained)
    with serving(own):
        fresh = llama.runner(tmp_path / "model.pte", folder / "tokenizer.json", tmp_path / "base.ptd")
        assert llama.text(runner) == llama.text(fresh) != before
