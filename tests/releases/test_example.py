"""One process serves and checks every answer while another publishes ten versions (F1, D2)."""

from pathlib import Path

import pytest
import torch

from tests.helpers.beside import load_example


@pytest.mark.long
def test_ten_versions_reach_a_running_program(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is taken without loading anything again, and no answer mixes two."""
    example = load_example("releases", monkeypatch)
    assert example.run(tmp_path, 10) == 0
    assert "0 of them wrong" in capsys.readouterr().out


def test_check_finds_wrong_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example's own check detects an answer of a mix of versions, and one of a version that was not there."""
    example = load_example("releases", monkeypatch)
    old, new, mixed = example.network(1), example.network(2), example.network(1)
    mixed.first.load_state_dict(example.network(3).first.state_dict())
    with torch.no_grad():
        scores = [net(example.question()) for net in (old, new, mixed)]
    answers = [
        example.Answer(one, oldest, newest)
        for one, oldest, newest in [(scores[0], 1, 2), (scores[1], 1, 2), (scores[2], 1, 3), (scores[0], 2, 3)]
    ]
    assert example.check(answers, 3) == [1, 2, None, None]
