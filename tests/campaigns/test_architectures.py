"""Twelve families of transformers, each through its exporter and ours; and what the campaign makes of findings (L1)."""

from unittest.mock import Mock

import pytest
import torch

from campaigns.architectures.process import try_one
from campaigns.architectures.table import PAGE, TOLERANCE, failures, read_results, table

FAMILIES = (
    *("bert", "distilbert", "electra", "gpt2", "llama", "mistral"),
    *("opt", "qwen2", "qwen3", "resnet", "roberta", "vit"),
)


@pytest.mark.long
@pytest.mark.parametrize("kind", FAMILIES)
def test_family(kind: str) -> None:
    """Deduplicated, it keeps its bits; nothing stays silently as it was, and almost everything follows an update."""
    found = try_one(kind, seconds=1200)
    assert found["result"] == "works", found
    assert failures([found]) == []


def test_the_page_has_the_results() -> None:
    """The table is that of the file, in which nothing is wrong."""
    found = read_results()
    assert set(FAMILIES) <= {kind for kind, one in found.items() if one["result"] == "works"}
    assert table(found) in PAGE.read_text(encoding="utf-8")
    assert failures(found.values()) == []


def test_what_is_wrong_is_said() -> None:
    counts = {"parameters": 100, "follow": 95, "bits": True, "refused": [], "silent": []}
    fine = {"kind": "a", "class": "A", "result": "works", **counts}
    assert failures([fine]) == []
    assert len(failures([{**fine, "follow": 94}, {**fine, "bits": False}, {**fine, "silent": ["w"]}])) == 3
    assert failures([{"kind": "b", "result": "ours", "message": "it fell"}]) == ["b: it fell"]
    assert failures([{"kind": "c", "result": "theirs", "message": "no"}]) == []


@pytest.mark.parametrize("moves", [True, False])
def test_as_far_from_eager_mode_as_stock_is_right_if_it_moves(monkeypatch: pytest.MonkeyPatch, moves: bool) -> None:
    """A parameter that matters and moves nothing is silent, whatever the outputs are near to."""
    from campaigns.architectures import trial

    tried = trial._Updates.__new__(trial._Updates)
    tried.model, tried.inputs = torch.nn.Linear(4, 2), {"input": torch.ones(1, 4)}
    tried.tuned = {name: value + 1 for name, value in tried.model.state_dict().items()}
    tried.cache, tried.tolerance = Mock(), TOLERANCE
    still = trial._eager(tried.model, tried.inputs)[0] + 0.01
    monkeypatch.setattr(tried, "_ours", lambda: [trial._eager(tried.model, tried.inputs)[0] + 0.01 if moves else still])
    monkeypatch.setattr(trial, "_exported", lambda *_: lambda **_: tried._ours())
    found = tried.tried()
    assert (found["follow"], found["silent"]) == ((10, []) if moves else (0, ["weight", "bias"]))


def test_distances() -> None:
    """Outputs are compared by name; infinities that both have are equal, and masked numbers hide no difference."""
    from campaigns.architectures.trial import _distance, _tensors

    def far(ours: list[float], theirs: list[float]) -> float:
        return _distance([torch.tensor(ours)], [torch.tensor(theirs)])

    inf, masked = float("inf"), torch.finfo().min
    assert (far([1, -inf], [1, -inf]), far([1, masked], [1, masked]), far([1, inf], [1, -inf])) == (0, 0, inf)
    assert far([2, masked], [1, masked]) == far([2, -inf], [1, -inf]) == far([2], [1]) == 1
    one, other = torch.ones(1), torch.zeros(2)
    assert [*map(id, _tensors({"b": one, "a": [None, other]}))] == [*map(id, _tensors({"a": [None, other], "b": one}))]


def test_what_becomes_of_a_type_without_a_tiny_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a model it is a part, without a `forward` nobody can export it, and otherwise the campaign falls short."""
    from campaigns.architectures import trial

    for error, result in ((trial.PartError(), "part"), (NotImplementedError(), "theirs"), (ValueError(), "untried")):
        monkeypatch.setattr(trial, "tiny", Mock(side_effect=error))
        assert trial.trial("a")["result"] == result
