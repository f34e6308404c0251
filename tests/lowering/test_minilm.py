"""A trained model: all-MiniLM-L6-v2, at two input lengths on one cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from blobstore.runtime import BlobCache, Program, delegate_stats
from examples.demo.models import encode, load_encoder, load_tokenizer
from tests.lowering.live import close, lower_through

pytestmark = pytest.mark.slow


def test_updates_of_a_trained_encoder(tmp_path: Path) -> None:
    """Both input lengths compute with the new weights after one update (W1, U1)."""
    encoder, tokenizer = load_encoder(), load_tokenizer()
    methods = {
        f"forward_{n}": (encoder, (torch.ones(1, n, dtype=torch.int64), torch.ones(1, n, dtype=torch.int64)))
        for n in (16, 32)
    }
    path = lower_through(methods, tmp_path)
    cache = BlobCache(tmp_path / "model.ptd")
    program = Program(path, cache)

    def check() -> None:
        for n in (16, 32):
            sentence = encode(tokenizer, "A cat sleeps on the warm windowsill.", n)
            with torch.no_grad():
                close(program.method(f"forward_{n}")(*sentence), encoder(*sentence))

    check()
    assert delegate_stats().names <= sum(not key.startswith("metadata.") for key in cache)
    original = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    with torch.no_grad():
        for i, parameter in enumerate(encoder.parameters()):
            parameter.mul_(1 + 0.02 * (i % 3))
    state = {name: tensor for name, tensor in encoder.state_dict().items() if name in cache.tensors or name in cache}
    assert len(state) > 90
    cache.update(state, finite=True)
    check()
    name = "bert.encoder.layer.3.attention.self.query.weight"
    with torch.no_grad():
        encoder.state_dict()[name].neg_()
    cache.update({name: encoder.state_dict()[name]})
    check()
    cache.revert()
    encoder.load_state_dict(original)
    check()
