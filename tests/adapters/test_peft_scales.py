"""Scales, ranks and their patterns on the way to PEFT and back. PEFT itself is the oracle (L2)."""

import json
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file as load_safetensors
from safetensors.torch import save_file as save_safetensors
from torch import Tensor, nn

from blobstore import save_file
from blobstore.adapters import bind_adapter, export_peft, import_peft, read_adapter, save_adapter
from blobstore.errors import AdapterError, BlobStoreError, InvalidFileError, LayoutError
from tests.adapters import nets
from tests.adapters.llama import peft_model, peft_scales

IN, OUT = 8, 6


class Net(nn.Module):
    """Modules whose names sort on both sides of the `^` that an entry of a pattern may start with."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleDict({"DenseReluDense": nn.ModuleDict({"wi": nn.Linear(IN, OUT)})})
        self.self_attn = nn.ModuleDict({"q_proj": nn.Linear(IN, OUT)})
        self.cross = nn.ModuleDict({"q_proj": nn.Linear(IN, OUT), "wi": nn.Linear(IN, OUT)})


WI, SELF_Q, CROSS_Q, CROSS_WI = "encoder.DenseReluDense.wi", "self_attn.q_proj", "cross.q_proj", "cross.wi"
MODULES = [WI, SELF_Q, CROSS_Q, CROSS_WI]


def foundation(folder: Path) -> Path:
    save_file({f"{module}.weight": torch.ones(OUT, IN) for module in MODULES}, folder / "f.ptd")
    return folder / "f.ptd"


def pairs(ranks: Mapping[str, int]) -> dict[str, Tensor]:
    """Tensors without zeros."""
    tensors = {}
    for number, (module, rank) in enumerate(ranks.items(), 1):
        tensors[f"{module}.lora_a.weight"] = torch.full((rank, IN), number / 4)
        tensors[f"{module}.lora_b.weight"] = torch.full((OUT, rank), number / 8)
    return tensors


def write_peft(folder: Path, ranks: Mapping[str, int], **config: Any) -> Path:
    """An adapter of PEFT, whose configuration has the given order."""
    return nets.write_peft(folder, pairs(ranks), target_modules=sorted(ranks), **config)


def config_of(folder: Path) -> Any:
    return json.loads((folder / "adapter_config.json").read_text())


def scales_of(folder: Path, *, again: Path | None = None) -> dict[str, float]:
    """The scales of PEFT's own layers; a tensor that does not fit makes PEFT raise. Optionally, PEFT saves it again."""
    model = peft_model(folder, Net())
    if again is not None:
        model.save_pretrained(again)
    return peft_scales(model)


def trained(folder: Path, source: Path, ranks: Mapping[str, int], **options: Any) -> Path:
    """What is left of an imported adapter after training with these ranks: its metadata and its scale."""
    adapter = read_adapter(source)
    options = {"scale": adapter.scale, "metadata": dict(adapter.metadata), **options}
    save_adapter(folder / "trained.ptd", pairs(ranks), foundation=folder / "f.ptd", **options)
    return folder / "trained.ptd"


def test_another_scale_than_the_imported_one(tmp_path: Path) -> None:
    """The scale of the file counts, and not the configuration that its metadata remembers."""
    ranks = {SELF_Q: 2, CROSS_Q: 2}
    source = write_peft(tmp_path / "peft", ranks, r=2, lora_alpha=3, alpha_pattern={"self_attn.q_proj": 6})
    import_peft(source, tmp_path / "a.ptd", foundation=foundation(tmp_path))
    old = read_adapter(tmp_path / "a.ptd").scale or 0
    bind_adapter(tmp_path / "a.ptd", tmp_path / "b.ptd", foundation=tmp_path / "f.ptd", scale=old * 5)
    export_peft(tmp_path / "b.ptd", tmp_path / "out")
    assert scales_of(tmp_path / "out") == {SELF_Q: 3.0 * 5, CROSS_Q: 1.5 * 5}
    config = config_of(tmp_path / "out")
    assert list(config) == sorted(config)  # as PEFT does


ranks_of_modules = st.dictionaries(st.sampled_from(MODULES), st.integers(1, 40), min_size=1)
scales = (
    st.floats(-1e290, 1e290)
    | st.floats(0.01, 100)
    | st.builds(lambda one, other: one / other, st.integers(-99, 99), st.integers(1, 99))
)


@pytest.mark.long
@given(scale=scales, ranks=ranks_of_modules)
@example(scale=8 / 5, ranks={WI: 5, SELF_Q: 3})
@settings(max_examples=60)
def test_any_scale_and_ranks_come_back(scale: float, ranks: dict[str, int]) -> None:
    """What is exported can be imported: the same numbers, and at each step the same scale but for one rounding."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tensors = pairs(ranks)
        save_adapter(folder / "a.ptd", tensors, foundation=foundation(folder), scale=scale)
        export_peft(folder / "a.ptd", folder / "out")
        import_peft(folder / "out", folder / "b.ptd", foundation=folder / "f.ptd")
        back = read_adapter(folder / "b.ptd")
        assert abs((back.scale or 0) - scale) <= math.ulp(scale)
        assert back.tensors.keys() == tensors.keys()
        assert all(torch.equal(torch.tensor(back.tensors[name]), tensor) for name, tensor in tensors.items())
        export_peft(folder / "b.ptd", folder / "again")
        modules = [name.removesuffix(".lora_a.weight") for name in tensors if "lora_a" in name]
        for made, its in (("out", scale), ("again", back.scale or 0)):
            found = scales_of(folder / made)
            assert sorted(found) == sorted(modules)
            assert all(abs(one - its) <= math.ulp(its) for one in found.values())
        again, out = (load_safetensors(folder / name / "adapter_model.safetensors") for name in ("again", "out"))
        assert again.keys() == out.keys()
        assert all(torch.equal(again[key], tensor) for key, tensor in out.items())


@pytest.mark.long
@given(
    alpha=st.integers(1, 99) | st.floats(0.01, 100),
    rslora=st.booleans(),
    power=st.integers(-3, 3),
    old=st.integers(1, 20),
    ranks=ranks_of_modules,
)
@settings(max_examples=60)
def test_any_ranks_that_grew_come_back(alpha: float, rslora: bool, power: int, old: int, ranks: dict[str, int]) -> None:
    """As above for an imported adapter, with modules whose scales differ by a power of two."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks = {module: max(rank, old) for module, rank in ranks.items()}
        config = {"r": old, "lora_alpha": alpha, "use_rslora": rslora, "alpha_pattern": {"q_proj": alpha * 2.0**power}}
        source = write_peft(folder / "peft", dict.fromkeys(ranks, old), **config)
        import_peft(source, folder / "a.ptd", foundation=foundation(folder))
        export_peft(trained(folder, folder / "a.ptd", ranks), folder / "out")
        assert scales_of(folder / "out", again=folder / "again") == scales_of(folder / "again")  # PEFT sorts entries
        import_peft(folder / "out", folder / "b.ptd", foundation=folder / "f.ptd")
        scale, back = read_adapter(folder / "a.ptd").scale or 0, read_adapter(folder / "b.ptd")
        # either scale may be the common one
        moved = 2.0 ** round(math.log2((back.scale or 0) / scale))
        assert abs((back.scale or 0) - scale * moved) <= math.ulp(scale * moved)
        for key, tensor in pairs(ranks).items():
            factor = moved if "lora_b" in key else 1
            assert torch.equal(torch.tensor(back.tensors[key]) * factor, tensor)


@pytest.mark.parametrize("scale", [1e308, -1e308, 1e300])
def test_scales_that_no_alpha_has(tmp_path: Path, scale: float) -> None:
    """JSON has no infinity; nothing is written."""
    save_adapter(tmp_path / "a.ptd", pairs({SELF_Q: 3}), foundation=foundation(tmp_path), scale=scale)
    with pytest.raises(AdapterError, match=r"a\.ptd: .* 'self_attn.q_proj' .* rank 3 .* an alpha of -?(inf|3e\+300)"):
        export_peft(tmp_path / "a.ptd", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("module", ["a block", "é+(x)", "$", r"a\b", "[ab]"])
def test_names_that_an_entry_escapes(tmp_path: Path, module: str) -> None:
    """The two modules have other alphas, so at least one has an entry."""
    tensors = pairs({f"net.{module}": 2, f"{module}.q": 3})
    weights = {name.replace("lora_a", "base"): torch.ones(OUT, IN) for name in tensors if "lora_a" in name}
    save_file(weights, tmp_path / "f.ptd")
    save_adapter(tmp_path / "a.ptd", tensors, foundation=tmp_path / "f.ptd", scale=1.5)
    export_peft(tmp_path / "a.ptd", tmp_path / "out")
    assert len(config_of(tmp_path / "out")["alpha_pattern"]) == 1
    import_peft(tmp_path / "out", tmp_path / "b.ptd", foundation=tmp_path / "f.ptd")
    assert read_adapter(tmp_path / "b.ptd").scale == 1.5


@pytest.mark.parametrize("alpha", [3.0000001, 5, -7, 1e-300])
def test_scales_that_only_look_alike_are_refused(tmp_path: Path, alpha: float) -> None:
    """Only the rounding of a division is overlooked; more must be allowed."""
    ranks = {SELF_Q: 2, CROSS_Q: 2, WI: 2}
    source = write_peft(tmp_path / "peft", ranks, r=2, lora_alpha=3, alpha_pattern={"wi": alpha})
    with pytest.raises(AdapterError, match=r"DenseReluDense\.wi' the scale .* would be rounded .*--round"):
        import_peft(source, tmp_path / "a.ptd", foundation=foundation(tmp_path))
    assert not (tmp_path / "a.ptd").exists()
    import_peft(source, tmp_path / "a.ptd", foundation=foundation(tmp_path), round_values=True)
    export_peft(tmp_path / "a.ptd", tmp_path / "again")
    products(source, tmp_path / "again", rtol=1e-6)


def tensor_of(tensor: Any) -> Tensor:
    """A copy of an array, or a torch tensor of bfloat16."""
    return tensor if isinstance(tensor, Tensor) else torch.tensor(tensor)


def products(one: Path, other: Path, **tolerance: float) -> None:
    """Compare what two adapters add to each weight, in float64, with the scales that PEFT's own layers have."""
    sums = []
    for folder in (one, other):
        tensors = {
            name: tensor.double() for name, tensor in load_safetensors(folder / "adapter_model.safetensors").items()
        }
        path = "base_model.model."
        sums.append(
            {
                module: scale * tensors[f"{path}{module}.lora_B.weight"] @ tensors[f"{path}{module}.lora_A.weight"]
                for module, scale in scales_of(folder).items()
            }
        )
    assert sums[0].keys() == sums[1].keys()
    for module, product in sums[0].items():
        torch.testing.assert_close(product, sums[1][module], atol=1e-30, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_quotients_that_float32_has_room_for(tmp_path: Path, dtype: torch.dtype) -> None:
    """1.5 times a number of 16 bits is exact in float32: nothing is asked, and PEFT's files come back to the bit (L2)."""
    source = write_peft(tmp_path / "peft", {SELF_Q: 2, CROSS_Q: 2, WI: 2}, r=2, lora_alpha=3, alpha_pattern={"wi": 4.5})
    chance = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(tensor.shape, generator=chance).to(dtype)
        for name, tensor in load_safetensors(source / "adapter_model.safetensors").items()
    }
    save_safetensors(tensors, source / "adapter_model.safetensors")
    import_peft(source, tmp_path / "a.ptd", foundation=foundation(tmp_path))
    adapter = read_adapter(tmp_path / "a.ptd")
    assert adapter.scale == 1.5
    made = tensor_of(adapter.tensors[f"{WI}.lora_b.weight"])
    assert made.dtype is torch.float32
    assert torch.equal(made.double(), 1.5 * tensors[f"base_model.model.{WI}.lora_B.weight"].double())
    export_peft(tmp_path / "a.ptd", tmp_path / "again")
    again = load_safetensors(tmp_path / "again/adapter_model.safetensors")
    assert all(torch.equal(again[name], tensor) and again[name].dtype is dtype for name, tensor in tensors.items())
    assert scales_of(tmp_path / "again") == scales_of(source)
    numbers = {name: tensor_of(tensor) + 1 / 3 for name, tensor in adapter.tensors.items()}
    options = {"scale": adapter.scale, "metadata": dict(adapter.metadata)}
    save_adapter(tmp_path / "trained.ptd", numbers, foundation=tmp_path / "f.ptd", **options)
    export_peft(tmp_path / "trained.ptd", tmp_path / "trained")
    out = load_safetensors(tmp_path / "trained/adapter_model.safetensors")
    assert torch.equal(out[f"base_model.model.{WI}.lora_B.weight"], numbers[f"{WI}.lora_b.weight"])
    assert scales_of(tmp_path / "trained")[WI] == 1.5


HUGE = "1" + "0" * 400
HOSTILE = [
    "[]",
    '["a", "b", 1]',
    '[1, "b", 1, "FLOAT", "FLOAT", 1, 0]',
    '["a", "a", 1, "FLOAT", "FLOAT", 1, 0]',
    '["a", "b", 1, "LONG", "FLOAT", 1, 0]',
    '["a", "b", 1, "NONE", "FLOAT", 1, 0]',
    '["a", "b", 1, "FLOAT", "FLOAT", 1, 0, 1]',
    '["a", "b", 1, "FLOAT", "FLOAT", 1, 0, -1]',
    '["a", "b", 1, "FLOAT", "FLOAT", 1, 0, 0, 0]',
    *(
        f'["a", "b", {rank}, "FLOAT", "FLOAT", {factor}, {head_dim}]'
        for rank, factor, head_dim in (
            *((1, factor, 0) for factor in (HUGE, f"-{HUGE}", "true", '"1"', "NaN", "Infinity", "1e400", "5e-324")),
            *((1, factor, 0) for factor in ("-Infinity", "0", "null")),
            *((rank, 1, 0) for rank in (HUGE, f"-{HUGE}", "true", "1.0", "NaN", 0, 2, 9, "null")),
            *((1, 1, head_dim) for head_dim in (HUGE, f"-{HUGE}", "true", "2.0", "NaN", -2, 3, 8, 16, "null")),
        )
    ),
]


@pytest.mark.parametrize(
    "record",
    [
        "",
        "[]",
        "{}",
        '{"config": [], "modules": {}}',
        '{"config": {"task_type": 3}, "modules": {}}',
        '{"config": {"task_type": "\\ud800"}, "modules": {}}',
        '{"config": {"use_dora": "no"}, "modules": {}}',
        *(f'{{"config": {{}}, "modules": {{"cross.q_proj": {module}}}}}' for module in HOSTILE),
    ],
)
@pytest.mark.parametrize("rows", [OUT, 0])
def test_hostile_records(tmp_path: Path, rows: int, record: str) -> None:
    """The metadata of a file is checked before it is used, also numbers that no float or size can hold (B5)."""
    tensors = {"cross.q_proj.lora_a.weight": torch.ones(1, IN), "cross.q_proj.lora_b.weight": torch.ones(rows, 1)}
    metadata = {"blobstore.adapter.scale": "1.0", "blobstore.adapter.peft": record}
    save_file(tensors, tmp_path / "a.ptd", metadata=metadata)
    with pytest.raises(BlobStoreError, match=r"a\.ptd: .*(blobstore\.adapter\.peft|module 'cross\.q_proj')"):
        export_peft(tmp_path / "a.ptd", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"use_hf_rope": "false"}, "use_hf_rope must be true or false, found 'false'"),
        ({"use_hf_rope": 1}, "use_hf_rope must be true or false, found 1"),
        ({"head_dim": True}, "head_dim must be a positive even integer, found True"),
        ({"head_dim": -2}, "found -2"),
        ({"head_dim": 7}, "found 7"),
        ({"dim": 33, "n_heads": 4}, "found 33 and 4"),
        ({"head_dim": 8.0}, r"found 8\.0"),
        ({"dim": True, "n_heads": True}, "found True and True"),
    ],
)
def test_malformed_params(tmp_path: Path, params: Any, message: str) -> None:
    (tmp_path / "params.json").write_text(json.dumps(params))
    save_adapter(tmp_path / "a.ptd", pairs({SELF_Q: 3}), foundation=foundation(tmp_path), scale=1)
    with pytest.raises(InvalidFileError, match=rf"params\.json: .*{message}"):
        export_peft(tmp_path / "a.ptd", tmp_path / "out", params=tmp_path / "params.json")


def test_a_huge_size_of_heads(tmp_path: Path) -> None:
    """No rows are no heads either, of any size."""
    wq = "layers.0.attention.wq"
    save_file({f"{wq}.weight": torch.ones(0, IN)}, tmp_path / "f.ptd")
    tensors = {f"{wq}.lora_a.weight": torch.ones(1, IN), f"{wq}.lora_b.weight": torch.ones(0, 1)}
    save_adapter(tmp_path / "a.ptd", tensors, foundation=tmp_path / "f.ptd", scale=1)
    params = {"head_dim": 10**300}
    with pytest.raises(LayoutError, match="has 0 rows, which are no heads of 1000"):
        export_peft(tmp_path / "a.ptd", tmp_path / "out", params=params)
    halves = {name.replace(wq, "model.layers.0.self_attn.q_proj"): tensor for name, tensor in tensors.items()}
    source = nets.write_peft(tmp_path / "peft", halves)
    with pytest.raises(LayoutError, match="has 0 rows, which are no heads of 1000"):
        import_peft(source, tmp_path / "b.ptd", foundation=tmp_path / "f.ptd", params=params)
