"""Names of Hugging Face's Hub, whose files lie in the cache of `huggingface_hub` (L2)."""

import builtins
from pathlib import Path
from typing import Any

import pytest
import torch

from blobstore.adapters import import_peft, load_adapter, load_adapters, read_adapter
from blobstore.errors import FileAccessError
from tests.adapters.caches import X, eager, open_lora
from tests.adapters.nets import RANK, SCALE, adapter_of, write_peft

COMMITS = {"main": "1" * 40, "v2": "2" * 40}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache with two revisions of `ann/polite`, where `huggingface_hub` itself finds them."""
    import huggingface_hub

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    place = tmp_path / "hub/models--ann--polite"
    for seed, (revision, commit) in enumerate(COMMITS.items(), 1):
        for folder in ("refs", f"snapshots/{commit}"):
            (place / folder).mkdir(parents=True, exist_ok=True)
        (place / "refs" / revision).write_text(commit)
        for file in write_peft(tmp_path / revision, adapter_of(seed)).iterdir():
            (place / "snapshots" / commit / file.name).symlink_to(file)
        found = huggingface_hub.snapshot_download("ann/polite", revision=revision, local_files_only=True)
        assert Path(found) == place / "snapshots" / commit


def test_names_of_the_hub(hub: None, lora: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Imported and loaded from the cache, without a network; a folder of this name comes first."""
    monkeypatch.chdir(tmp_path)
    import_peft("ann/polite", tmp_path / "a.ptd", foundation=lora.foundation)
    expected = adapter_of(1)
    assert all(torch.equal(torch.tensor(t), expected[n]) for n, t in read_adapter(tmp_path / "a.ptd").tensors.items())
    cache, method = open_lora(lora)
    load_adapter(cache, "ann/polite", program_scale=SCALE)
    assert torch.allclose(method(*X), eager(1), atol=1e-5)
    load_adapters(cache, [("ann/polite@v2", 1.0)], program_scale=SCALE)
    assert torch.allclose(method(*X), eager(2), atol=1e-5)
    write_peft(tmp_path / "ann/polite", adapter_of(3, rank=RANK))
    load_adapter(cache, "ann/polite", program_scale=SCALE)
    assert torch.allclose(method(*X), eager(3), atol=1e-5)


def test_names_that_are_not_in_the_cache(hub: None, lora: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The message says how to fetch them, and errno that there is no such file."""
    cache, _ = open_lora(lora)
    for name, message in (
        ("ann/rude", r"ann/rude: No such file .*`hf download ann/rude`"),
        ("ann/polite@v3", "`hf download ann/polite --revision v3`"),
        ("ann/polite..name", r"`hf download"),
        ("ann/none.ptd", "No such file or directory$"),
        ("a/b/c", "No such file or directory$"),
    ):
        with pytest.raises(FileAccessError, match=message) as error:
            load_adapter(cache, name, program_scale=SCALE)
        assert error.value.errno == 2
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "huggingface_hub":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(FileAccessError, match="install huggingface_hub"):
        load_adapter(cache, "ann/polite", program_scale=SCALE)
