"""Adapters that PEFT saved, in and out. PEFT itself, and eager models of both kinds, are the oracles (L2)."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from blobstore import adapters, errors, save_file
from blobstore.adapters.peft_folder import read_peft
from blobstore.lowering.export import lower
from blobstore.runtime import BlobCache, Program
from tests.adapters import llama
from tests.adapters.nets import adapter_of, write_peft
from tests.helpers.models import quiet
from tests.llm.families import MODULES
from tests.lowering.live import plugin, write


def tensors_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in (*module.named_parameters(), *module.named_buffers())}


def files(folder: Path, module: torch.nn.Module, *, tables: bool = True) -> tuple[Path, Path]:
    """A foundation and an adapter with the names of a module, as lowering with AdapterTags splits them."""
    tensors = tensors_of(module)
    base = {n: t for n, t in tensors.items() if "lora_" not in n and (tables or "freqs" not in n)}
    save_file(base, folder / "foundation.ptd")
    lora = {n: t for n, t in tensors.items() if "lora_" in n}
    adapters.save_adapter(folder / "lowered.ptd", lora, foundation=folder / "foundation.ptd", scale=1.0)
    return folder / "foundation.ptd", folder / "lowered.ptd"


def hf_foundation(folder: Path) -> Path:
    save_file(dict(llama.hf_model().state_dict()), folder / "foundation.ptd")
    return folder / "foundation.ptd"


def safetensors_of(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file as load

    return load(folder / "adapter_model.safetensors")


def check_same(one: Path, other: Path, base: Any = None) -> None:
    """The same tensors to the bit, with the same scales in PEFT's own layers, of the same base and task."""
    left, right = safetensors_of(one), safetensors_of(other)
    assert left.keys() == right.keys()
    for key, tensor in left.items():
        assert tensor.dtype == right[key].dtype
        assert tensor.shape == right[key].shape
        assert torch.equal(tensor.view(torch.uint8), right[key].view(torch.uint8))
    scales, want = (llama.peft_scales(llama.peft_model(folder, base)) for folder in (other, one))
    assert scales.keys() == want.keys()
    for module, scale in want.items():
        assert abs(scales[module] - scale) <= math.ulp(scale)  # not every scale is alpha divided by the rank
    before, after = (json.loads((folder / "adapter_config.json").read_text()) for folder in (one, other))
    for field in ("peft_type", "base_model_name_or_path", "task_type"):
        assert after.get(field) == before.get(field)


def peft_logits(folder: Path) -> torch.Tensor:
    """What PEFT computes with an adapter that it loads."""
    return llama.hf_logits(llama.peft_model(folder))


def edit(folder: Path, **fields: Any) -> None:
    """Change fields of a saved configuration."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    llama.save_peft(tmp_path / "peft")
    return tmp_path / "peft"


@pytest.mark.parametrize(
    ("hf_rope", "told", "config", "scale"),
    [
        (True, "by the tables", {}, 6 / 4),
        (True, "by params", {}, 6 / 4),
        (False, "by params", {}, 6 / 4),
        (False, "by the tables", {"lora_alpha": 5}, 5 / 4),
        (False, "by the tables", {"lora_alpha": 5, "use_rslora": True}, 5 / 2),
        (False, "by the tables", {"r": 3, "use_rslora": True}, 6 / 3**0.5),
        (False, "by the tables", {"lora_dropout": 0.3, "init_lora_weights": "gaussian"}, 6 / 4),
        (False, "by the tables", {"rank_pattern": {"q_proj": 2}}, 6 / 4),
        (False, "by the tables", {"alpha_pattern": {"model.layers.1.mlp.up_proj": 12, "v_proj": 3}}, 6 / 4),
        (False, "by the tables", {"rank_pattern": {"q_proj": 3}, "alpha_pattern": {"q_proj": 4.5}}, 6 / 4),
    ],
)
def test_llama_computes_what_peft_does(
    tmp_path: Path, hf_rope: bool, told: str, config: dict[str, Any], scale: float
) -> None:
    """ExecuTorch's Llama, in Hugging Face's order of rows and in its own, with the imported tensors. The scale is PEFT's;
    where modules have other ones, lora_b makes up for them, without rounding (L2)."""
    want = llama.save_peft(tmp_path / "peft", **config)
    module = llama.executorch_llama(hf_rope=hf_rope, alpha=scale * llama.RANK)
    foundation, lowered = files(tmp_path, module, tables=told == "by the tables")
    params = None if told == "by the tables" else {**llama.PARAMS, "use_hf_rope": hf_rope}
    adapters.import_peft(tmp_path / "peft", tmp_path / "a.ptd", foundation=foundation, like=lowered, params=params)
    adapter = adapters.read_adapter(tmp_path / "a.ptd")
    assert adapter.scale == scale
    module.load_state_dict({name: torch.tensor(array) for name, array in adapter.tensors.items()}, strict=False)
    with torch.no_grad():
        torch.testing.assert_close(module(llama.TOKENS), want, rtol=1e-4, atol=1e-4)
    assert (want - llama.hf_logits(llama.hf_model())).abs().max() > 1
    adapters.export_peft(tmp_path / "a.ptd", tmp_path / "again")
    check_same(tmp_path / "peft", tmp_path / "again")
    torch.testing.assert_close(peft_logits(tmp_path / "again"), want)


def test_an_unknown_order_of_rows_is_refused(tmp_path: Path, saved: Path) -> None:
    """Without tables and params.json only adapters of other modules are taken, imported or as they are."""
    foundation, lowered = files(tmp_path, llama.executorch_llama(hf_rope=True), tables=False)
    save_file(llama.own_names(llama.hf_model().state_dict(), hf_rope=True), tmp_path / "f.ptd")
    cache = BlobCache(tmp_path / "f.ptd")

    def take(folder: Path, **options: Any) -> None:
        adapters.import_peft(folder, tmp_path / "a.ptd", foundation=foundation, like=lowered, **options)

    for use in (take, lambda folder: adapters.merge_adapter(cache, folder)):
        with pytest.raises(errors.AdapterError, match=r"peft: .*layers\.0\.attention\.w[qk].*--params"):
            use(saved)
    assert cache.dirty == ()
    llama.save_peft(tmp_path / "v", target_modules=["v_proj", "down_proj"])
    take(tmp_path / "v")
    adapters.merge_adapter(cache, tmp_path / "v")
    assert len(cache.dirty) == 4
    with pytest.raises(errors.LayoutError, match="no heads of 24"):
        take(saved, params={"head_dim": 24})


@pytest.mark.slow_for("delegated")
@pytest.mark.long
@pytest.mark.parametrize("delegated", [False, True], ids=["portable", "delegated"])
def test_a_lowered_program_computes_what_peft_does(tmp_path: Path, delegated: bool) -> None:
    """Rank 2 and three of seven modules, in a program with rank 4 in all: the rest is zero. The same as a folder (L2, L3)."""
    small = {"r": 2, "lora_alpha": 3, "target_modules": ["q_proj", "o_proj", "up_proj"]}
    patterns = {
        "rank_pattern": {"up_proj": 3},
        "alpha_pattern": {"up_proj": 4.5, "o_proj": 6, r"layers.1.self_attn\.q_proj": 12},
    }
    want = llama.save_peft(tmp_path / "peft", **small, **patterns)
    tags = adapters.AdapterTags()
    module = llama.executorch_llama(hf_rope=False, alpha=6)
    manager = lower(
        {"forward": (module, (llama.TOKENS,))},
        partitioners=plugin(tags) if delegated else list,
        external_constants=tags,
    )
    pte = write(manager, tmp_path / "out")
    foundation, lowered = tmp_path / "out/foundation.ptd", tmp_path / "out/adapter.ptd"
    adapters.import_peft(tmp_path / "peft", tmp_path / "a.ptd", foundation=foundation, like=lowered)
    cache = BlobCache(lowered, base=BlobCache(foundation))
    method = Program(pte, cache).method()
    for adapter in (tmp_path / "a.ptd", tmp_path / "peft"):
        adapters.load_adapter(cache, adapter, program_scale=6 / 4)
        torch.testing.assert_close(method(llama.TOKENS), want, rtol=1e-3, atol=1e-3)
        cache.revert()
    with pytest.raises(
        errors.AdapterError, match=r"peft: its scale is 1\.5, and no file of .* records that of the programs"
    ):
        adapters.load_adapter(cache, tmp_path / "peft")
    adapters.export_peft(tmp_path / "a.ptd", tmp_path / "again")
    check_same(tmp_path / "peft", tmp_path / "again")


@pytest.mark.parametrize("hf_rope", [True, False], ids=["halves", "neighbours"])
def test_merging_into_the_weights_of_a_llama(tmp_path: Path, hf_rope: bool) -> None:
    """The weights are those of PEFT's `merge_and_unload`, in the order of rows that the program has (L2)."""
    llama.save_peft(tmp_path / "peft", alpha_pattern={"v_proj": 12})
    tensors = tensors_of(llama.executorch_llama(hf_rope=hf_rope))
    save_file({n.replace(".linear.", "."): t for n, t in tensors.items() if "lora_" not in n}, tmp_path / "f.ptd")
    adapters.import_peft(tmp_path / "peft", tmp_path / "a.ptd", foundation=tmp_path / "f.ptd")
    cache = BlobCache(tmp_path / "f.ptd")
    want = llama.peft_model(tmp_path / "peft").merge_and_unload().state_dict()
    for adapter in (tmp_path / "a.ptd", tmp_path / "peft"):
        merged = adapters.merge_adapter(cache, adapter)
        for name, tensor in llama.own_names(want, hf_rope=hf_rope).items():
            torch.testing.assert_close(torch.tensor(cache.numpy(name)), tensor, rtol=1e-5, atol=1e-5)
        merged.undo()


@pytest.mark.parametrize("prefix", ["", "model.", "base_model.model.", "wrapper.inner."])
def test_names_behind_those_of_a_wrapper(tmp_path: Path, saved: Path, prefix: str) -> None:
    """Exporters wrap models; PEFT's own wrapper has a base_layer."""
    end = ".base_layer.weight" if prefix == "base_model.model." else ".weight"
    tensors = {
        prefix + (name.removesuffix(".weight") + end if "proj" in name else name): tensor
        for name, tensor in llama.hf_model().state_dict().items()
    }
    save_file(tensors, tmp_path / "f.ptd")
    adapters.import_peft(saved, tmp_path / "a.ptd", foundation=tmp_path / "f.ptd")
    assert f"{prefix}model.layers.0.mlp.up_proj.lora_b.weight" in adapters.read_adapter(tmp_path / "a.ptd").contents


def test_modules_that_are_not_found(tmp_path: Path, saved: Path) -> None:
    """The message has all names that were tried; several candidates are refused; `names` decides."""
    state = llama.hf_model().state_dict()
    save_file({n: t for n, t in state.items() if "layers.1.mlp.up_proj" not in n}, tmp_path / "f.ptd")
    with pytest.raises(errors.KeyNotFoundError, match=r"'layers.1.mlp.up_proj' or 'layers.1.feed_forward.w3'"):
        adapters.import_peft(saved, tmp_path / "a.ptd", foundation=tmp_path / "f.ptd")
    save_file({f"{part}.{n}": t for n, t in state.items() for part in ("left", "right")}, tmp_path / "f.ptd")
    with pytest.raises(errors.AdapterError, match=r"may be any of 'left\.model\S+', 'right\.model\S+'.*names="):
        adapters.import_peft(saved, tmp_path / "a.ptd", foundation=tmp_path / "f.ptd")
    names = {
        n.removesuffix(".weight"): f"right.{n.removesuffix('.weight')}" for n in state if any(t in n for t in MODULES)
    }
    adapters.import_peft(saved, tmp_path / "a.ptd", foundation=tmp_path / "f.ptd", names=names)
    assert all(name.startswith("right.") for name in adapters.read_adapter(tmp_path / "a.ptd").contents)
    with pytest.raises(errors.KeyNotFoundError, match="module 'nowhere' for"):
        nowhere = {**names, "model.layers.0.mlp.up_proj": "nowhere"}
        adapters.import_peft(saved, tmp_path / "a.ptd", foundation=tmp_path / "f.ptd", names=nowhere)
    with pytest.raises(
        errors.KeyNotFoundError, match="names has 'layers.0.nothing', but adapter_model.safetensors has no such"
    ):
        adapters.import_peft(
            saved, tmp_path / "a.ptd", foundation=tmp_path / "f.ptd", names={"layers.0.nothing": "right"}
        )
    with pytest.raises(errors.AdapterError, match="two modules of PEFT are module"):
        twice = {**names, "model.layers.0.mlp.up_proj": "right.model.layers.1.mlp.up_proj"}
        adapters.import_peft(saved, tmp_path / "a.ptd", foundation=tmp_path / "f.ptd", names=twice)


def test_float64_would_be_rounded(tmp_path: Path) -> None:
    """To the float32 of the programs, which must be allowed; a file of its own keeps all bits (L2)."""
    from safetensors.torch import save_file as save

    llama.save_peft(tmp_path / "peft", dtype=torch.float64)
    foundation, lowered = files(tmp_path, llama.executorch_llama(hf_rope=False))
    third = {name: torch.full_like(tensor, 1 / 3) for name, tensor in safetensors_of(tmp_path / "peft").items()}
    save(third, tmp_path / "peft/adapter_model.safetensors")
    adapters.import_peft(tmp_path / "peft", tmp_path / "a.ptd", foundation=foundation)
    adapters.export_peft(tmp_path / "a.ptd", tmp_path / "again")
    check_same(tmp_path / "peft", tmp_path / "again")
    with pytest.raises(errors.AdapterError, match="is double, and would be rounded to the float of"):
        adapters.import_peft(tmp_path / "peft", tmp_path / "a.ptd", foundation=foundation, like=lowered)
    adapters.import_peft(tmp_path / "peft", tmp_path / "a.ptd", foundation=foundation, like=lowered, round_values=True)
    assert float(next(iter(adapters.read_adapter(tmp_path / "a.ptd").tensors.values())).max()) == pytest.approx(1 / 3)


REFUSED = [
    ("use_dora", True),
    ("modules_to_save", ["lm_head"]),
    ("trainable_token_indices", [1]),
    ("lora_bias", True),
    ("fan_in_fan_out", True),
    ("layer_replication", [[0, 2]]),
    ("target_parameters", ["experts.weight"]),
    ("megatron_config", {"a": 1}),
    ("alora_invocation_tokens", [1]),
    ("arrow_config", {"top_k": 2}),
    ("use_qalora", True),
    ("use_bdlora", {"nblocks": 2}),
    ("kasa_config", {"beta": 1}),
    ("monteclora_config", {"samples": 2}),
    ("ensure_weight_tying", True),
    ("bias", "all"),
    ("bias", "lora_only"),
    ("init_lora_weights", "pissa"),
    ("init_lora_weights", "pissa_niter_4"),
    ("init_lora_weights", "olora"),
    ("init_lora_weights", "loftq"),
    ("init_lora_weights", "corda"),
    ("init_lora_weights", "lora_ga"),
    ("init_lora_weights", "mica"),
    ("peft_type", "ADALORA"),
    ("peft_type", None),
    ("use_something_new", True),
    ("alpha_pattern", {".*proj": 3}),
    ("alpha_pattern", {"q_proj": 7}),
    ("rank_pattern", {"q_proj": 2}),
]
MALFORMED = [
    ("r", 0),
    ("r", True),
    ("r", "8"),
    ("r", 2**40),
    ("lora_alpha", "16"),
    ("lora_alpha", float("nan")),
    ("lora_alpha", float("inf")),
    ("lora_alpha", 10**400),
    ("use_rslora", 1),
    ("rank_pattern", [1]),
    ("rank_pattern", {"q_proj": 2.5}),
    ("alpha_pattern", {"q_proj": None}),
]
HONOURED = {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights"}


def test_every_field_of_peft_is_decided(saved: Path) -> None:
    """It is refused, or changes nothing; a new version of PEFT with a new field makes this test fail (L2)."""
    with quiet():
        from peft import LoraConfig
    refused = {field for field, _ in REFUSED}
    scales = [pair.scale for pair in read_peft(saved).pairs]
    for name in {field.name for field in dataclasses.fields(LoraConfig)} - refused - HONOURED:
        edit(saved, **{name: {"a": 1}})
        assert [pair.scale for pair in read_peft(saved).pairs] == scales, name


@pytest.mark.parametrize(
    ("error", "field", "value"),
    [*((errors.AdapterError, *case) for case in REFUSED), *((errors.InvalidFileError, *case) for case in MALFORMED)],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    tmp_path: Path, saved: Path, error: type[errors.BlobStoreError], field: str, value: Any
) -> None:
    """Nothing is written, and nothing is ignored (L2)."""
    edit(saved, **{field: value})
    if (error, field) == (errors.AdapterError, "rank_pattern"):
        edit(saved, r=3)
    with pytest.raises(error, match=field):
        adapters.import_peft(saved, tmp_path / "a.ptd", foundation=hf_foundation(tmp_path))
    assert not (tmp_path / "a.ptd").exists()


@pytest.mark.parametrize("value", [None, False, [], {}])
def test_fields_that_are_switched_off_do_no_harm(tmp_path: Path, saved: Path, value: Any) -> None:
    """Also those of later versions, and those that an older version does not write."""
    edit(saved, use_something_new=value)
    adapters.import_peft(saved, tmp_path / "a.ptd", foundation=hf_foundation(tmp_path))
    path = saved / "adapter_config.json"
    kept = ("peft_type", "r", "lora_alpha")
    path.write_text(json.dumps({name: field for name, field in json.loads(path.read_text()).items() if name in kept}))
    adapters.import_peft(saved, tmp_path / "a.ptd", foundation=hf_foundation(tmp_path))


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("base_model.model.model.embed_tokens.lora_embedding_A", "an adapter of an embedding"),
        ("base_model.model.model.embed_tokens.base_layer.weight", "of an adapter of an embedding"),
        ("base_model.model.lm_head.base_layer.weight", "of an adapter of lm_head, .*without save_embedding_layers"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector", "the magnitude of use_dora"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias", "the bias of lora_bias"),
        ("base_model.model.model.layers.0.self_attn.q_proj.base_layer.bias", "a bias of the base model"),
        ("base_model.model.lm_head.weight", "no part of a LoRA pair"),
        ("base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight", "has no lora_B beside it"),
        ("model.layers.0.self_attn.q_proj.lora_A.weight", "belong to one module"),
    ],
)
def test_tensors_that_cannot_be_honoured_are_refused_by_name(
    tmp_path: Path, saved: Path, key: str, message: str
) -> None:
    from safetensors.torch import save_file as save

    save({**safetensors_of(saved), key: torch.ones(4, 32)}, saved / "adapter_model.safetensors")
    with pytest.raises(errors.AdapterError, match=message) as error:
        adapters.import_peft(saved, tmp_path / "a.ptd", foundation=hf_foundation(tmp_path))
    assert key in str(error.value)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite(tmp_path: Path, number: float) -> None:
    """The message names PEFT's file and key, not those of the output; nothing is written (L2)."""
    save_file({"l.0.weight": torch.ones(24, 16), "l.1.weight": torch.ones(8, 24)}, tmp_path / "f.ptd")
    tensors = adapter_of(1)
    tensors["l.1.lora_b.weight"][3, 1] = number
    source = write_peft(tmp_path / "peft", tensors)
    with pytest.raises(
        errors.UpdateError, match=r"adapter_model\.safetensors: 'base_model.model.l.1.lora_B.weight' has values"
    ):
        adapters.import_peft(source, tmp_path / "a.ptd", foundation=tmp_path / "f.ptd")
    assert not (tmp_path / "a.ptd").exists()


def test_shapes_and_ranks_that_do_not_fit(tmp_path: Path, saved: Path) -> None:
    foundation, lowered = files(tmp_path, llama.executorch_llama(hf_rope=False, rank=3))
    with pytest.raises(errors.AdapterError, match="has rank 4, but the programs have room for 3 only"):
        adapters.import_peft(saved, tmp_path / "a.ptd", foundation=foundation, like=lowered)
    foundation, lowered = files(tmp_path, llama.executorch_llama(hf_rope=False, targets=["q_proj"]))
    with pytest.raises(errors.KeyNotFoundError, match=r"is not in \S+lowered\.ptd, which has no '"):
        adapters.import_peft(saved, tmp_path / "a.ptd", foundation=foundation, like=lowered)
    state = dict(llama.hf_model().state_dict())
    state["model.layers.0.mlp.up_proj.weight"] = torch.ones(95, 64)
    save_file(state, tmp_path / "f.ptd")
    with pytest.raises(
        errors.LayoutError, match=r"make \[96, 64\], but 'model.layers.0.mlp.up_proj.weight' in .* is \[95, 64\]"
    ):
        adapters.import_peft(saved, tmp_path / "a.ptd", foundation=tmp_path / "f.ptd")
    with pytest.raises(errors.OutputPathError):
        adapters.import_peft(saved, tmp_path / "f.ptd", foundation=tmp_path / "f.ptd")


def test_numbers_that_a_power_of_two_would_round(tmp_path: Path) -> None:
    """A subnormal number that is halved loses a bit: refused, and not rounded silently (L2)."""
    from safetensors.torch import save_file as save

    llama.save_peft(tmp_path / "peft", alpha_pattern={"q_proj": 3})
    tensors = safetensors_of(tmp_path / "peft")
    tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"][0, 0] = 3 * 2.0**-149
    save(tensors, tmp_path / "peft/adapter_model.safetensors")
    with pytest.raises(errors.AdapterError, match=r"q_proj\.lora_B\.weight'.* numbers would be rounded.*--round"):
        adapters.import_peft(tmp_path / "peft", tmp_path / "a.ptd", foundation=hf_foundation(tmp_path))


def test_an_adapter_that_was_trained_since(tmp_path: Path) -> None:
    """What uses the room of the program goes out with its rank and the same scale, and PEFT computes the same (L2)."""
    llama.save_peft(tmp_path / "peft", r=2, lora_alpha=3, target_modules=["q_proj", "up_proj"])
    module = llama.executorch_llama(hf_rope=False, alpha=1.5 * llama.RANK)
    foundation, lowered = files(tmp_path, module)
    adapters.import_peft(tmp_path / "peft", tmp_path / "a.ptd", foundation=foundation, like=lowered)
    adapter = adapters.read_adapter(tmp_path / "a.ptd")
    generator = torch.Generator().manual_seed(9)
    trained = {
        name: torch.tensor(array) + 0.1 * torch.randn(array.shape, generator=generator)
        for name, array in adapter.tensors.items()
    }
    adapters.save_adapter(
        tmp_path / "b.ptd", trained, foundation=foundation, scale=adapter.scale or 0, metadata=dict(adapter.metadata)
    )
    with pytest.raises(errors.AdapterError, match=r"attention\.wk.*--params"):
        adapters.export_peft(tmp_path / "b.ptd", tmp_path / "out")
    adapters.export_peft(tmp_path / "b.ptd", tmp_path / "out", params=llama.PARAMS, base_model="some/base")
    config = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "some/base"
    module.load_state_dict(trained, strict=False)
    with torch.no_grad():
        want = module(llama.TOKENS)
    torch.testing.assert_close(peft_logits(tmp_path / "out"), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("hf_rope", [True, False])
def test_an_adapter_that_peft_did_not_make(tmp_path: Path, hf_rope: bool) -> None:
    """It gets the names of Hugging Face and a configuration; PEFT loads it and computes the same (L2)."""
    module = llama.executorch_llama(hf_rope=hf_rope)
    foundation, _ = files(tmp_path, module)
    lora = {name: tensor for name, tensor in tensors_of(module).items() if "lora_" in name}
    adapters.save_adapter(tmp_path / "a.ptd", lora, foundation=foundation, scale=6 / 4)
    params = {**llama.PARAMS, "use_hf_rope": hf_rope}
    adapters.export_peft(tmp_path / "a.ptd", tmp_path / "out", params=params)
    with torch.no_grad():
        torch.testing.assert_close(peft_logits(tmp_path / "out"), module(llama.TOKENS), rtol=1e-4, atol=1e-4)
    adapters.import_peft(tmp_path / "out", tmp_path / "b.ptd", foundation=foundation, params=params)
    for name, array in adapters.read_adapter(tmp_path / "b.ptd").tensors.items():
        assert torch.equal(torch.tensor(array), lora[name])


@pytest.mark.long
def test_adapters_that_cannot_go_out(tmp_path: Path, lora: Any) -> None:
    """No scale, tensors without a pair, files of another format in the way."""
    with pytest.raises(errors.AdapterError, match="records no scale"):
        adapters.export_peft(lora.adapter, tmp_path / "out")
    tensors = {"l.lora_a.weight": torch.ones(1, 2), "l.lora_b.weight": torch.ones(3, 1)}
    adapters.save_adapter(tmp_path / "a.ptd", {**tensors, "norm": torch.ones(1)}, foundation=lora.foundation, scale=1)
    with pytest.raises(errors.AdapterError, match="'norm' belong to no pair"):
        adapters.export_peft(tmp_path / "a.ptd", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    adapters.save_adapter(tmp_path / "a.ptd", tensors, foundation=lora.foundation, scale=1)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/adapter_model.safetensors").write_text("something else")
    with pytest.raises(errors.OutputPathError):
        adapters.export_peft(tmp_path / "a.ptd", tmp_path / "out")
    assert (tmp_path / "out/adapter_model.safetensors").read_text() == "something else"
