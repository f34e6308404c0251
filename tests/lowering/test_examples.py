"""The example tunes the program, and eager PyTorch computes the same with what it learned."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.helpers.beside import load_example


@pytest.fixture
def zeroth_order(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_example("zeroth_order", monkeypatch)


@pytest.mark.long
def test_digits(zeroth_order: ModuleType, tmp_path: Path) -> None:
    """Zeroth-order tuning of a small classifier (T1, U2)."""
    torch.manual_seed(0)
    task = zeroth_order.digits()
    with torch.no_grad():
        before, after, eager = zeroth_order.run(task, 300, tmp_path)
    assert after > before + 0.05
    assert after == eager


@pytest.mark.slow
def test_sentences(zeroth_order: ModuleType, tmp_path: Path) -> None:
    """The same for a part of a trained sentence encoder (U2)."""
    torch.manual_seed(0)
    task = zeroth_order.sentences()
    with torch.no_grad():
        before, after, eager = zeroth_order.run(task, 150, tmp_path)
    assert after >= max(0.6, before + 0.3)
    assert after == eager
