"""optimum-executorch with our recipe, and its own loader on the result (L1, L4)."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from blobstore.errors import MissingDependencyError
from tests.helpers.native_build import ROOT

# It needs other versions of these than the tests do. None of them is torch, or needs another one.
PACKAGES = ("optimum-executorch==1.1.0", "optimum==2.3.0", "transformers==5.0.0rc1", "tokenizers==0.22.2")
WITH_THEIRS = ("huggingface_hub==1.3.7", "httpx")

SCRIPT = """
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

folder = Path(sys.argv[1])
torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3)
model = LlamaForCausalLM(config).eval()
if sys.argv[2] == "make":
    model.save_pretrained(folder / "hf")
else:
    import blobstore.runtime  # the delegate
    from optimum.executorch import ExecuTorchModelForCausalLM

    tokens = torch.tensor([[5]])
    found = []
    for name in ("xnnpack", "single"):
        loaded = ExecuTorchModelForCausalLM.from_pretrained(str(folder / name))
        found.append(loaded.forward(input_ids=tokens, cache_position=torch.tensor([0])))
    assert torch.equal(*found)
    torch.testing.assert_close(found[0], model(tokens).logits, rtol=1e-4, atol=1e-4)
    print("the same")
"""


def test_without_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the package."""
    monkeypatch.setitem(sys.modules, "optimum", None)
    monkeypatch.delitem(sys.modules, "blobstore.optimum", raising=False)
    with pytest.raises(MissingDependencyError, match="pip install optimum-executorch"):
        import blobstore.optimum  # noqa: F401


@pytest.fixture(scope="module")
def overlay() -> Path:
    """A folder with the packages, beside the environment and not in it."""
    folder = ROOT / "build" / "optimum"
    if not (folder / "optimum").exists():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--target", folder]
        subprocess.run([*pip, *WITH_THEIRS], check=True)
        subprocess.run([*pip, "--upgrade", "--no-deps", *PACKAGES], check=True)
    return folder


@pytest.mark.slow
def test_its_command_and_its_loader(overlay: Path, tmp_path: Path) -> None:
    """The command exports with the recipe, `fuse` makes one file, and the loader computes the bits of a stock export."""
    path = os.pathsep.join([str(overlay), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}

    def run(*arguments: object) -> str:
        done = subprocess.run(
            [sys.executable, *map(str, arguments)], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("-c", SCRIPT, tmp_path, "make")
    for recipe in ("xnnpack", "xnnpack-blobstore"):
        command = ["-m", "blobstore.optimum", "export", "executorch", "-m", tmp_path / "hf", "--max_seq_len", 32]
        run(*command, "--recipe", recipe, "-o", tmp_path / recipe)
    ours = tmp_path / "xnnpack-blobstore"
    run("-m", "blobstore", "verify", ours / "model.ptd")
    listed = run("-m", "blobstore", "inspect", ours / "model.ptd")
    assert "model.model.layers.1.self_attn.q_proj.weight" in listed
    (tmp_path / "single").mkdir()
    run("-m", "blobstore", "fuse", ours / "model.pte", ours / "model.ptd", "-o", tmp_path / "single/model.pte")
    for name in ("xnnpack", "single"):
        shutil.copy(tmp_path / "hf/config.json", tmp_path / name)
    assert "the same" in run("-c", SCRIPT, tmp_path, "load")
