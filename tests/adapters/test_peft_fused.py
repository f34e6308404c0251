"""Adapters of Phi's fused modules, for programs that have their parts. PEFT's own Phi is the oracle (L2)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blobstore import save_file
from blobstore.adapters import export_peft, import_peft, load_adapter, merge_adapter, read_adapter, save_adapter
from blobstore.errors import InvalidFileError, KeyNotFoundError, LayoutError
from blobstore.runtime import BlobCache
from tests.adapters import llama
from tests.adapters.llama import hf_model, peft_model
from tests.adapters.test_peft import check_same, safetensors_of
from tests.llm.families import FAMILIES, HEADS, HIDDEN, KV_HEADS, MODULES, executorch_model, own_names

PHI = FAMILIES["phi 4"]
Q, KV = HEADS * PHI.head_dim, KV_HEADS * PHI.head_dim


def phi() -> Any:
    """Hugging Face's Phi-3, whose layout Phi-4 mini has, with random weights."""
    return hf_model("phi 4")


def foundation(folder: Path) -> Path:
    """With the tables of a program that rotates halves, as all programs for Phi do."""
    table = torch.outer(torch.arange(8), torch.arange(1, PHI.head_dim // 2 + 1)).float().cos()
    weights = own_names(PHI, phi().state_dict())
    save_file({**weights, "freqs_cos": torch.cat([table, table], 1)}, folder / "f.ptd")
    return folder / "f.ptd"


def save_peft(folder: Path, **config: Any) -> dict[str, Tensor]:
    """Have PEFT save a random adapter; returns the weights with the adapter merged."""
    llama.save_peft(folder, "phi 4", **{"r": 3, **config})
    return peft_model(folder, phi()).merge_and_unload().state_dict()


def check_merged(cache: BlobCache, weights: dict[str, Tensor]) -> None:
    for name, rows in own_names(PHI, weights).items():
        torch.testing.assert_close(torch.tensor(cache.numpy(name)), rows, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("imported", [True, False], ids=["imported", "as it is"])
def test_fused_modules_are_split_by_rows(tmp_path: Path, imported: bool) -> None:
    """The weights of the parts are the rows of what PEFT merges; exporting gives PEFT's files again (L2)."""
    want = save_peft(tmp_path / "peft", alpha_pattern={"gate_up_proj": 3})
    base = foundation(tmp_path)
    source = tmp_path / "peft"
    if imported:
        import_peft(source, tmp_path / "a.ptd", foundation=base)
        assert len(read_adapter(tmp_path / "a.ptd").pairs) == 2 * 7
        export_peft(tmp_path / "a.ptd", tmp_path / "again")
        check_same(source, tmp_path / "again", phi())
        source = tmp_path / "a.ptd"
    cache = BlobCache(base)
    merge_adapter(cache, source)
    check_merged(cache, want)


def test_the_parts_as_rows_of_a_program(tmp_path: Path) -> None:
    """With room for rank 8 in each part, by `like` and as it is: the same tensors (L2)."""
    save_peft(tmp_path / "peft")
    base = foundation(tmp_path)
    module = executorch_model(PHI, phi(), llama.CONTEXT, r=8, lora_alpha=16, target_modules=MODULES)
    room = {name: tensor.detach() for name, tensor in module.named_parameters() if "lora_" in name}
    save_adapter(tmp_path / "room.ptd", room, foundation=base, scale=2)
    import_peft(tmp_path / "peft", tmp_path / "a.ptd", foundation=base, like=tmp_path / "room.ptd")
    adapter = read_adapter(tmp_path / "a.ptd")
    source = safetensors_of(tmp_path / "peft")
    for first, last, part in ((0, Q, "wq"), (Q, Q + KV, "wk"), (Q + KV, Q + 2 * KV, "wv")):
        path = "base_model.model.model.layers.1.self_attn.qkv_proj"
        b = torch.tensor(adapter.tensors[f"layers.1.attention.{part}.lora_b.weight"])
        a = torch.tensor(adapter.tensors[f"layers.1.attention.{part}.lora_a.weight"])
        assert torch.equal(b[:, :3], source[f"{path}.lora_B.weight"][first:last])
        assert torch.equal(a[:3], source[f"{path}.lora_A.weight"])
        assert not b[:, 3:].any() and not a[3:].any()
    cache = BlobCache(tmp_path / "room.ptd", base=BlobCache(base))
    load_adapter(cache, tmp_path / "peft")
    for name, tensor in adapter.tensors.items():
        assert torch.equal(torch.tensor(cache.numpy(name)), torch.tensor(tensor))
    export_peft(tmp_path / "a.ptd", tmp_path / "again")
    check_same(tmp_path / "peft", tmp_path / "again", phi())


def test_parts_that_were_trained_apart_go_out(tmp_path: Path) -> None:
    """PEFT computes with the exported adapter what the parts do: the ranks lie behind each other (L2)."""
    save_peft(tmp_path / "peft")
    base = foundation(tmp_path)
    import_peft(tmp_path / "peft", tmp_path / "a.ptd", foundation=base)
    adapter = read_adapter(tmp_path / "a.ptd")
    generator = torch.Generator().manual_seed(4)
    trained = {n: torch.tensor(t) + 0.1 * torch.randn(t.shape, generator=generator) for n, t in adapter.tensors.items()}
    options = {"foundation": base, "scale": adapter.scale or 0, "metadata": dict(adapter.metadata)}
    save_adapter(tmp_path / "b.ptd", trained, **options)
    export_peft(tmp_path / "b.ptd", tmp_path / "out")
    want = peft_model(tmp_path / "out", phi()).merge_and_unload().state_dict()
    cache = BlobCache(base)
    merge_adapter(cache, tmp_path / "b.ptd")
    check_merged(cache, want)
    config = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert sorted(set(config["rank_pattern"].values())) == [6, 9]
    record = json.loads(adapter.metadata["blobstore.adapter.peft"])
    del record["modules"]["layers.0.attention.wk"]
    options["metadata"] = {"blobstore.adapter.peft": json.dumps(record)}
    kept = {name: tensor for name, tensor in trained.items() if "layers.0.attention.wk" not in name}
    save_adapter(tmp_path / "c.ptd", kept, **options)
    with pytest.raises(InvalidFileError, match=r"does not fit module 'layers\.0\.attention\.wv'"):
        export_peft(tmp_path / "c.ptd", tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("imported", [True, False], ids=["imported", "as it is"])
def test_parts_that_do_not_fit(tmp_path: Path, imported: bool) -> None:
    """The message names the part that is missing, or the features of all; a program with the fused module takes it whole."""
    save_peft(tmp_path / "peft", target_modules=["qkv_proj"])

    def use(weights: dict[str, Tensor]) -> BlobCache:
        save_file(weights, tmp_path / "f.ptd")
        if imported:
            import_peft(
                tmp_path / "peft", tmp_path / "a.ptd", foundation=tmp_path / "f.ptd", params={"use_hf_rope": True}
            )
        cache = BlobCache(tmp_path / "f.ptd")
        merge_adapter(cache, tmp_path / ("a.ptd" if imported else "peft"))
        return cache

    whole = {**own_names(PHI, phi().state_dict()), "freqs_cos": torch.cos(torch.ones(4, 4))}
    with pytest.raises(KeyNotFoundError, match=r"'layers\.0\.self_attn\.k_proj'.*'layers\.0\.attention\.wk'"):
        use({name: tensor for name, tensor in whole.items() if "layers.0.attention.wk" not in name})
    with pytest.raises(LayoutError, match=r"qkv_proj\.lora_B\.weight' gives 128 features, and its parts in"):
        use({**whole, "layers.0.attention.wk.weight": torch.ones(KV - 8, Q)})
    cache = use(dict(phi().state_dict()))
    assert set(cache.dirty) == {f"model.layers.{n}.self_attn.qkv_proj.weight" for n in (0, 1)}


def test_a_llama_with_names_of_a_fused_module(tmp_path: Path) -> None:
    """`names` maps a fused module as a whole, or its parts."""
    save_peft(tmp_path / "peft", target_modules=["gate_up_proj"])
    other = nn.ModuleDict({"a": nn.Linear(Q, HIDDEN), "b": nn.Linear(Q, HIDDEN), "whole": nn.Linear(Q, 2 * HIDDEN)})
    save_file({f"{n}.{k}": t for n in (0, 1) for k, t in other.state_dict().items()}, tmp_path / "f.ptd")
    names = {}
    for number in (0, 1):
        names[f"model.layers.{number}.mlp.gate_proj"] = f"{number}.a"
        names[f"model.layers.{number}.mlp.up_proj"] = f"{number}.b"
    import_peft(tmp_path / "peft", tmp_path / "a.ptd", foundation=tmp_path / "f.ptd", names=names)
    assert [pair.module for pair in read_adapter(tmp_path / "a.ptd").pairs] == ["0.a", "0.b", "1.a", "1.b"]
    names = {f"model.layers.{number}.mlp.gate_up_proj": f"{number}.whole" for number in (0, 1)}
    import_peft(tmp_path / "peft", tmp_path / "a.ptd", foundation=tmp_path / "f.ptd", names=names)
    assert [pair.module for pair in read_adapter(tmp_path / "a.ptd").pairs] == ["0.whole", "1.whole"]
