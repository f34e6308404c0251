"""Adapters for programs of ExecuTorch's own exporter, exchanged by file in the stock runtime (L1, L2, D2)."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from blobstore import fuse_programs, open_ptd
from blobstore.adapters import import_for_program, read_adapter
from blobstore.errors import AdapterError, KeyNotFoundError, LayoutError, OutputPathError
from tests.adapters.llama import PARAMS, RANK, TOKENS, executorch_llama, hf_logits, hf_model, save_peft
from tests.adapters.nets import LoraLinear, adapter_of, lower_stock, write_peft
from tests.helpers.models import quiet

pytestmark = pytest.mark.slow

HALVES = {**PARAMS, "use_hf_rope": True}
TARGETS = ["q_proj", "v_proj", "up_proj"]


def export(folder: Path, peft: Path, **lora: Any) -> Path:
    """What export_llm does with XNNPACK, a file for the foundation and one for the adapter."""
    with quiet():
        from executorch.examples.models.llama.convert_weights import load_and_convert_unsloth_to_meta

        module = executorch_llama(hf_rope=True, targets=TARGETS, **lora)
        module.load_state_dict(load_and_convert_unsloth_to_meta(str(peft / "adapter_model.safetensors")), strict=False)
    return lower_stock(module, (TOKENS,), folder).rename(folder / "lora.pte").parent


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("stock")
    want = save_peft(folder / "first", seed=1, target_modules=TARGETS, lora_alpha=6)
    export(folder / "out", folder / "first", alpha=6)
    return SimpleNamespace(folder=folder, first=folder / "first", out=folder / "out", want=want)


@pytest.fixture
def run(stock: Any, stock_run: Any, tmp_path: Path) -> Any:
    """What the stock runtime computes with another file of the adapter."""

    def with_file(lora: Path) -> torch.Tensor:
        files = [stock.out / "lora.pte", stock.out / "foundation.ptd", lora]
        fuse_programs(files, tmp_path / "one.pte")
        return stock_run(tmp_path / "one.pte", (TOKENS,))[0]

    return with_file


def test_another_adapter_by_file(stock: Any, run: Any, tmp_path: Path) -> None:
    """The stock runtime computes what PEFT does with each adapter: same, smaller, other scale, fewer modules (L2)."""
    torch.testing.assert_close(run(stock.out / "lora.ptd"), stock.want, rtol=1e-3, atol=1e-3)
    for seed, config in enumerate(
        (
            {"target_modules": TARGETS, "lora_alpha": 6},
            {"target_modules": ["q_proj"], "r": 2, "lora_alpha": 5},
            {"target_modules": TARGETS, "r": 3, "use_rslora": True},
            {"target_modules": TARGETS, "alpha_pattern": {"q_proj": 7}, "lora_alpha": 7},
        ),
        start=2,
    ):
        want = save_peft(tmp_path / f"{seed}", seed=seed, **config)
        new = tmp_path / f"{seed}.ptd"
        import_for_program(
            tmp_path / f"{seed}", new, program=stock.out / "lora.pte", exported_with=stock.first, params=HALVES
        )
        assert set(open_ptd(new)) == set(open_ptd(stock.out / "lora.ptd"))
        torch.testing.assert_close(run(new), want, rtol=1e-3, atol=1e-3)
        assert (want - hf_logits(hf_model())).abs().max() > 0.1


def test_the_same_adapter_gives_the_same_blobs(stock: Any, tmp_path: Path) -> None:
    """To the bit (L2)."""
    new = tmp_path / "same.ptd"
    import_for_program(stock.first, new, program=stock.out / "lora.pte", exported_with=stock.first, params=HALVES)
    old, again = open_ptd(stock.out / "lora.ptd"), open_ptd(new)
    assert {key: old.bytes(key) for key in old} == {key: again.bytes(key) for key in again}


def test_files_of_the_exporter_are_recognized(stock: Any) -> None:
    """The message says what they are, and how adapters for them are made."""
    with pytest.raises(AdapterError, match=r"lora\.ptd: its keys are digests.*adapters import --program"):
        read_adapter(stock.out / "lora.ptd")


def test_what_is_refused(stock: Any, tmp_path: Path) -> None:
    """By name, and nothing is written (L2)."""
    options = {"program": stock.out / "lora.pte", "exported_with": stock.first, "params": HALVES}
    output = tmp_path / "new.ptd"
    for config, error, message in (
        ({"r": RANK + 1}, AdapterError, rf"has rank {RANK + 1}, but .*lora\.pte has room for {RANK} only"),
        ({"target_modules": ["o_proj"]}, KeyNotFoundError, "self_attn.o_proj' is not in"),
        ({"use_dora": True}, AdapterError, "use_dora"),
    ):
        save_peft(tmp_path / "peft", **{"target_modules": ["v_proj"], **config})
        with pytest.raises(error, match=message):
            import_for_program(tmp_path / "peft", output, **options)
    save_peft(tmp_path / "other", seed=7, target_modules=TARGETS)
    with pytest.raises(AdapterError, match=r"does not look up 'base_model\S+lora_A\.weight'.*exported with another"):
        import_for_program(stock.first, output, **{**options, "exported_with": tmp_path / "other"})
    with pytest.raises(AdapterError, match=r"layers\.0\.attention\.wq.*--params"):
        import_for_program(stock.first, output, **{**options, "params": None})
    with pytest.raises(LayoutError, match="no heads of 128"):
        import_for_program(stock.first, output, **{**options, "params": {"head_dim": 128}})
    with pytest.raises(OutputPathError):
        import_for_program(stock.first, stock.out / "lora.pte", **options)
    assert not output.exists()


def test_a_program_with_an_untrained_adapter(tmp_path: Path) -> None:
    """Its lora_b are zero, and two of one shape have one key, so they cannot be told apart."""
    sizes = {"l.0": (16, 24), "l.1": (24, 24)}
    old = {f"{name}.lora_a.weight": torch.full((3, inputs), 1.5) for name, (inputs, _) in sizes.items()}
    old |= {f"{name}.lora_b.weight": torch.zeros(24, 3) for name in sizes}

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l = nn.ModuleList(LoraLinear(*size) for size in sizes.values())

        def forward(self, x: torch.Tensor) -> Any:
            return self.l[1](torch.relu(self.l[0](x)))

    module = Net().eval()
    module.load_state_dict({**module.state_dict(), **old})
    program = lower_stock(module, (torch.ones(3, 16),), tmp_path / "out")
    exported, new = (
        write_peft(tmp_path / name, tensors) for name, tensors in (("old", old), ("new", {**old, **adapter_of(1)}))
    )
    with pytest.raises(AdapterError, match=re.escape("have one key, because their bytes were equal at export")):
        import_for_program(new, tmp_path / "a.ptd", program=program, exported_with=exported)
