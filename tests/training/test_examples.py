"""The training examples: accuracy rises, bases do not change, answers are from one generation (T1, T2, D2, W1)."""

import hashlib
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from blobstore import open_ptd
from blobstore.adapters import inspect_adapters
from blobstore.runtime import BlobCache
from blobstore.training import TrainingProgram
from tests.helpers.beside import load_example
from tests.lowering.live import close

pytestmark = pytest.mark.long


def test_xor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Both optimizers, compared with torch.optim.SGD on the module in eager mode (T1)."""
    xor = load_example("xor", monkeypatch)
    steps = 200
    xor.export(tmp_path)
    for name, momentum, rate in (("torch.optim.SGD", xor.MOMENTUM, xor.RATE), ("ExecuTorch's SGD", 0, 10 * xor.RATE)):
        losses, again, scores = xor.run(tmp_path, xor.OPTIMIZERS[name], steps)
        torch.manual_seed(0)
        network = xor.Net()
        optimizer = torch.optim.SGD(network.parameters(), lr=rate, momentum=momentum)
        expected = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = functional.cross_entropy(network(xor.INPUTS), xor.LABELS)
            loss.backward()
            optimizer.step()
            expected.append(float(loss.detach()))
        assert losses == pytest.approx(expected, rel=1e-3)
        assert again == losses[steps // 2 :]
        close(scores, network(xor.INPUTS), 1e-3)
        assert scores.argmax(1).tolist() == [0, 1, 1, 0]


def test_train_and_serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every answer during training is that of one published generation (T2, B3)."""
    example = load_example("train_and_serve", monkeypatch)
    digits, network = example.tilted_digits(), example.upright_network()
    example.export(network, tmp_path)
    result = example.run(network, digits, tmp_path, steps=200, every=5)
    assert len(result.published) == 41  # the first are the initial weights
    found = example.check(network, result, digits)
    assert len(found) == len(result.answers) > len(digits.test)
    assert all(generation is not None for _, generation in found)
    served = {generation for _, generation in found}
    assert max(served) == max(result.published) and len(served) > 2
    curve = example.shares(result, digits)
    assert curve[-1][1] > max(0.85, curve[0][1])
    example.print_summary(result, digits)
    example.plot(result, digits, tmp_path / "picture.html")
    page = (tmp_path / "picture.html").read_text()
    assert "milliseconds" in page and "published" in page


@pytest.mark.slow
def test_lora_minilm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Both tasks are learned, the files have what they should, and steps are those of eager PyTorch (D2, U2)."""
    example, layers = load_example("lora_minilm", monkeypatch), 6
    network = example.export(layers, tmp_path)
    foundation = tmp_path / "foundation.ptd"
    digest = hashlib.sha256(foundation.read_bytes()).digest()
    tuned = example.run(network, tmp_path, steps=40)
    assert hashlib.sha256(foundation.read_bytes()).digest() == digest

    # an adapter has no tensors of the base, the base has none of the adapters, and they fit
    trained = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
    frozen = {
        name for name, _ in network.named_parameters() if "pooler" not in name
    } - trained  # the pooler is not used
    with open_ptd(foundation) as base:
        assert frozen <= set(base) and not trained & set(base)
        size = sum(tensor.nbytes for tensor in network.state_dict().values())
        assert foundation.stat().st_size < 1.1 * size  # it serves both programs and has each weight once
    for one in tuned.values():
        with open_ptd(one.path) as adapter:
            assert {key for key in adapter if not key.startswith("metadata.")} == trained
        assert one.path.stat().st_size < 0.01 * foundation.stat().st_size
    report = inspect_adapters(foundation, [one.path for one in tuned.values()])
    assert all(adapter.fits and adapter.scale == example.ALPHA / example.RANK for adapter in report.adapters)

    # the gradients, and so the adapters, are those of eager PyTorch
    base_cache = BlobCache(foundation)
    training = TrainingProgram(tmp_path / "train.pte", BlobCache(tmp_path / "adapter.ptd", base=base_cache))
    optimizer = torch.optim.Adam(training.named_parameters().values(), lr=1e-3)
    module = example.TrainingClassifier(layers).eval()
    module.load_state_dict(network.state_dict())
    own = torch.optim.Adam([p for p in module.parameters() if p.requires_grad], lr=1e-3)
    for start in (0, 8, 16):
        batch = [part[start : start + 8] for part in tuned["topics"].task.train]
        own.zero_grad()
        loss = module(*batch)
        loss.backward()
        close(training.step(optimizer, *batch)[0], loss, 1e-4)
        if start == 16:
            for name, parameter in module.named_parameters():
                if parameter.grad is not None:
                    close(training.named_gradients()[name], parameter.grad, 1e-3)
        own.step()
    assert not base_cache.dirty
    assert (base_cache.stats.private_bytes or 0) < 1 << 16  # only the ends of segments are copied
    assert all(one.before < 0.4 and one.after > 0.85 for one in tuned.values())
