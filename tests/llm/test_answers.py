"""The example whose users have adapters of their own (L3, D2)."""

from pathlib import Path

import pytest

from examples.llm import answers
from tests.llm.letters import TOKENS, eager

pytestmark = pytest.mark.slow


def test_two_users_at_once(exported: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Each answer is that of eager PyTorch with the user's adapter; and the example is short."""
    live = exported / "live"
    files = [live / "model.pte", exported / "tokenizer.json", live / "foundation.ptd", live / "model_lora.ptd"]
    adapters = [f"--adapter={name}={exported / name}.ptd" for name in ("one", "two")]
    users = ["--ask", "one", "once", "--ask", "two=0.5", "hello"]
    told = answers.main([*map(str, files), *adapters, *users, "--tokens", str(TOKENS)])
    assert told == [eager("once", "one"), eager("hello", "two", 0.5)]
    assert f"two=0.5: hello{told[1]}\n" in capfd.readouterr().out
    assert len(Path(answers.__file__).read_text(encoding="utf-8").splitlines()) <= 100
