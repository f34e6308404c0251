"""An adapter of a language model is trained on the device (L3, T1, T2).

That the running runner then speaks with it, test_app.py shows."""

import copy
import functools
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


def train(eager: Any, batch: tuple[Tensor, Tensor]) -> list[float]:
    """torch's own training of what has gradients; the losses."""
    optimizer = torch.optim.AdamW([one for one in eager.parameters() if one.requires_grad], lr=RATE)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = eager(*batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


def test_losses_and_weights_are_those_of_torch(tmp_path: Path) -> None:
    """Only the adapter's parameters are trained; the foundation's file is shared and does not change."""
    with silent():
        program = lower_training(module(), batch(), tag=AdapterTags())
    save_programs({"train": program}, tmp_path, keep_small=1 << 14)
    cache = BlobCache(tmp_path / "adapter.ptd", base=BlobCache(tmp_path / "foundation.ptd"))
    training = TrainingProgram(tmp_path / "train.pte", cache)
    assert set(training.named_parameters()) == set(Llama().adapter(0))
    optimizer = AdamW(training.named_parameters().values(), lr=RATE)
    losses = [float(training.step(optimizer, *batch())[0]) for _ in range(STEPS)]
    eager = copy.deepcopy(module()).train()
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(train(eager, batch())), rtol=1e-4, atol=1e-4)
    assert losses[-1] < losses[0] / 4
    for name, tensor in training.named_parameters().items():
        torch.testing.assert_close(tensor, eager.get_parameter(name).detach(), rtol=1e-3, atol=1e-4)
    assert cache.base is not None and cache.base.dirty == ()


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
