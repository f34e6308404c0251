"""Room for adapters at export, and adapters by hydra's overrides (L1, L2, L3)."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from blobstore.adapters import load_adapter, read_adapter
from blobstore.errors import AdapterError, BlobStoreError
from blobstore.llm import export_llm
from blobstore.runtime import BlobCache, serving
from tests.llm import llama
from tests.llm.llama import LORA_ALPHA, RANK, Llama

pytestmark = pytest.mark.long


def exported(folder: Path, target: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """What the command line says when all is given by overrides."""
    target.mkdir()
    overrides = {
        "base.model_class": "llama3_2",
        "base.params": folder / "params.json",
        "base.checkpoint": folder / "a.pth",
        "base.tokenizer_path": folder / "tokenizer.json",
        "base.metadata": f"'{llama.METADATA}'",
        "model.use_kv_cache": "true",
        "model.use_sdpa_with_kv_cache": "true",
        "backend.xnnpack.enabled": "true",
        "backend.xnnpack.extended_ops": "true",
        "export.max_seq_length": 128,
        "export.max_context_length": 128,
        "export.output_name": target / "model.pte",
        "export.output_dir": target,
        "hydra.run.dir": target / "hydra",
    }
    arguments = [f"{name}={value}" for name, value in overrides.items()]
    command = [sys.executable, "-m", "blobstore.export_llm", *arguments, *more]
    return subprocess.run(command, cwd=target, capture_output=True, text=True, check=False)


def runner_on(cache: BlobCache, folder: Path, target: Path) -> Any:
    with serving(cache):
        runner = llama.runner(target / "model.pte", folder / "tokenizer.json", target / "foundation.ptd")
        llama.text(runner)
    return runner


def cache_of(target: Path) -> BlobCache:
    return BlobCache(target / "model_lora.ptd", base=BlobCache(target / "foundation.ptd"))


@pytest.mark.slow
def test_room_by_overrides(folder: Path, tmp_path: Path) -> None:
    """Until an adapter comes, the program is that of the checkpoint; then any adapter of PEFT that fits in (L1, L2)."""
    target = tmp_path / "out"
    done = exported(folder, target, f"room.r={2 * RANK}", "room.modules=[q_proj,v_proj,gate_up_proj,down_proj]")
    assert done.returncode == 0, done.stdout + done.stderr
    room = read_adapter(target / "model_lora.ptd")
    assert room.scale == 1
    modules = {"attention.wq", "attention.wv", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3"}
    assert {pair.module for pair in room.pairs} == {f"layers.0.{module}" for module in modules}
    assert {pair.rank for pair in room.pairs} == {2 * RANK}
    cache = cache_of(target)
    runner = runner_on(cache, folder, target)
    nothing = {name: torch.zeros_like(tensor) for name, tensor in Llama().adapter(0).items()}
    base = Llama().tell({**Llama().checkpoint(0), **nothing})
    assert llama.text(runner) == base
    for seed in (0, 1):
        llama.write_peft(tmp_path / f"{seed}", Llama().rotated(Llama().adapter(seed)))
        load_adapter(cache, tmp_path / f"{seed}")
        assert llama.text(runner) == Llama().tell({**Llama().checkpoint(0), **Llama().adapter(seed)}) != base
    with pytest.raises(AdapterError, match=r"wq' has rank 24, but of the 16 in"):
        wide = {
            name: tensor.repeat((3, 1) if "lora_a" in name else (1, 3)) for name, tensor in Llama().adapter(0).items()
        }
        llama.write_peft(tmp_path / "wide", wide, r=3 * RANK)
        load_adapter(cache, tmp_path / "wide")
    cache.revert()
    assert llama.text(runner) == base


@pytest.mark.slow
def test_an_adapter_by_overrides(folder: Path, tmp_path: Path) -> None:
    """`base.lora_config` is None at first, and ExecuTorch's own command cannot set what is inside of it."""
    lora = "base.lora_config.adapter_"
    peft = folder / "one"
    done = exported(
        folder,
        tmp_path / "out",
        f"{lora}checkpoint={peft}/adapter_model.safetensors",
        f"{lora}config={peft}/adapter_config.json",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert read_adapter(tmp_path / "out/model_lora.ptd").scale == LORA_ALPHA / RANK
    runner = runner_on(cache_of(tmp_path / "out"), folder, tmp_path / "out")
    assert llama.text(runner) == Llama().tell({**Llama().checkpoint(0), **Llama().adapter(0)})


@pytest.mark.slow_for("a module", "two ways")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["backend.vulkan.enabled=true"], "error: backend.vulkan.enabled: "),
        (["room.r=8", "room.modules=[q_proj,lm_head]"], "error: room.modules: 'lm_head' can have no adapter"),
        (["room.r=8", "room.modules=[q_proj]", "base.lora_config.adapter_checkpoint=x"], "error: room and base.lora"),
    ],
    ids=["a backend", "a module", "two ways"],
)
def test_the_command_says_in_one_line_what_is_wrong(tmp_path: Path, arguments: list[str], message: str) -> None:
    """Before anything is loaded, without a traceback, and with the code 1 as other errors of the exporter (L1)."""
    done = exported(tmp_path, tmp_path / "out", *arguments)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(message), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("room", "message"),
    [
        (8, "room must be a mapping with r and modules, not a int"),
        ({"r": 8, "modules": ["q_proj"], "rank": 3}, "room has 'rank'"),
        ({"r": 0, "modules": ["q_proj"]}, "room.r must be a positive integer, found 0"),
        ({"r": True, "modules": ["q_proj"]}, "found True"),
        ({"r": 1 << 31, "modules": ["q_proj"]}, "room.r must be less than 2147483648"),
        ({"r": 8, "modules": "q_proj"}, "room.modules must be a list"),
        ({"r": 8, "modules": []}, "room.modules must be a list"),
        ({"r": 8}, "room.modules must be a list"),
        ({"r": 8, "modules": [3]}, "room.modules: 3 can have no adapter"),
        ({"r": 8, "modules": ["embed_tokens"]}, "room.modules: 'embed_tokens' can have no adapter"),
        ({"r": 8, "modules": ["q_proj"], "alpha": 0}, "room.alpha must be a positive number, found 0"),
        ({"r": 8, "modules": ["q_proj"], "alpha": float("nan")}, "room.alpha must be a positive number, found nan"),
    ],
)
def test_rooms_that_are_none(room: Any, message: str, tmp_path: Path) -> None:
    """Nothing is read or written."""
    with pytest.raises(BlobStoreError, match=message):
        export_llm(llama.config(tmp_path, "none", tmp_path / "model.pte"), room=room)
    assert not list(tmp_path.iterdir())


def test_a_rank_that_memory_cannot_hold_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from blobstore.llm.room import add_room, zeros_for

    def refuse(shape: Any) -> torch.Tensor:
        raise RuntimeError("can't allocate memory")

    config = llama.config(tmp_path, "none", tmp_path / "model.pte")
    config.base.params = str(tmp_path / "params.json")
    Path(config.base.params).write_text('{"dim": 64, "n_layers": 1, "n_heads": 4, "vocab_size": 32}', encoding="utf-8")
    add_room(config, {"r": 1 << 30, "modules": ["q_proj"]})
    monkeypatch.setattr(torch, "zeros", refuse)
    with pytest.raises(
        BlobStoreError, match=r"room.r is 1073741824: there is no memory for \[1073741824, 64\] at 'layers.0"
    ):
        zeros_for(config)
