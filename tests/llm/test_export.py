"""ExecuTorch's exporter for language models through the library: files, names, and what is refused (L1, D2, R2)."""

import copy
import operator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from blobstore import open_ptd, save_programs
from blobstore.errors import BlobStoreError, KeyConflictError, UnsupportedDataError
from blobstore.llm import export_llm
from blobstore.llm.names import checkpoint_names
from blobstore.lowering import BlobStorePartitioner
from blobstore.lowering.export import lower, quiet
from blobstore.runtime import BlobCache, Program
from tests.llm import llama
from tests.llm.llama import Llama

pytestmark = pytest.mark.long

with quiet():
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner


def test_foundation_and_adapter_are_files_of_their_own(live: Path) -> None:
    """Whether a tag has the ending of a file or not; what XNNPACK takes and what it does not is in one file (D2)."""
    assert {path.name for path in live.iterdir()} == {"model.pte", "base.ptd", "lora.ptd"}
    foundation, adapter = (BlobCache(live / name) for name in ("base.ptd", "lora.ptd"))
    assert set(adapter.tensors) == set(Llama().adapter(0))
    assert {"tok_embeddings.weight", "output.weight"} <= set(foundation.tensors)
    assert not any("lora" in key for key in foundation)


def test_names_are_those_of_the_checkpoint(live: Path) -> None:
    """Also where ExecuTorch wraps a layer for LoRA; its own name remains as another one (L1, U1)."""
    tensors = BlobCache([live / "base.ptd", live / "lora.ptd"]).tensors
    expected = {**Llama().checkpoint(0), **Llama().adapter(0)}
    assert {name for name in tensors if not tensors[name].refusal and not tensors[name].auxiliary} == set(expected)
    for name, tensor in expected.items():
        assert tensors[name].sizes == tuple(tensor.shape)
        values, _ = tensors.value(name)
        assert torch.equal(torch.from_numpy(values.copy()), tensor)
    wrapped = {name for name in Llama().checkpoint(0) if name.rpartition(".")[0].endswith(("wq", "wv", "w2"))}
    for name in expected:
        others = (f"{name.removesuffix('weight')}linear.weight",) if name in wrapped else ()
        assert tensors[name].aliases == others


def test_a_quantized_tensor_and_a_shared_one_have_their_names() -> None:
    """Quantized tensors have no memory of their own, by which they could be told apart (L1)."""
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32, bias=False)

    model = nn.Module()
    model.first, model.second, model.third, model.fourth = (nn.Linear(32, 32, bias=False) for _ in range(4))
    model.wrapped = Wrapper()
    model.third.weight = nn.Parameter(model.fourth.weight.data)
    quantize_(
        model,
        Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4),
        filter_fn=lambda module, name: name in {"first", "second", "wrapped.linear"},
    )
    assert checkpoint_names(model, Wrapper) == {
        "first.weight": ("first.weight",),
        "second.weight": ("second.weight",),
        "third.weight": ("third.weight", "fourth.weight"),
        "fourth.weight": ("fourth.weight", "third.weight"),
        "wrapped.linear.weight": ("wrapped.weight", "wrapped.linear.weight"),
    }


class Mixed(nn.Module):
    """An embedding, which XNNPACK does not take, and a linear layer, which it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(16, 8), nn.Linear(8, 8)

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.layer(self.embed(tokens))


@pytest.mark.parametrize(("inside", "outside"), [("x", "x.ptd"), ("x.ptd", "x"), ("x.ptd", "x.ptd")])
def test_a_tag_with_and_without_the_ending_is_one_file(inside: str, outside: str, tmp_path: Path) -> None:
    """ExecuTorch writes the file of such tags twice, and the second time without the weights of the first (R1, R2)."""
    torch.manual_seed(0)
    module, tokens = Mixed().eval(), torch.arange(4)
    manager = lower(
        {"forward": (module, (tokens,))},
        partitioners=lambda: [BlobStorePartitioner(XnnpackPartitioner(), tag=inside)],
        external_constants=lambda node: outside,
    )
    save_programs({"a": manager}, tmp_path)
    keys = set(open_ptd(tmp_path / "x.ptd"))
    assert "embed.weight" in keys and any(key.startswith("layer.weight@") for key in keys)
    method = Program(tmp_path / "a.pte", BlobCache(sorted(tmp_path.glob("*.ptd")))).method()
    assert torch.allclose(method(tokens), module(tokens), atol=1e-5)
    if inside == outside:
        manager.write_tensor_data_to_file(str(tmp_path))
        assert keys == set(open_ptd(tmp_path / "x.ptd"))


def test_a_function_may_return_both_forms_of_a_tag(tmp_path: Path) -> None:
    """All weights of one file get one tag, also if ExecuTorch itself writes the file (R2)."""
    module, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval(), torch.ones(1, 8)
    tag = {"0": "x", "2": "x.ptd"}
    manager = lower(
        {"forward": (module, (x,))},
        partitioners=lambda: [BlobStorePartitioner(XnnpackPartitioner(), tag=lambda name: tag.get(name[0], "x"))],
    )
    manager.write_tensor_data_to_file(str(tmp_path))
    keys = set(open_ptd(tmp_path / "x.ptd"))
    assert all(any(key.startswith(f"{name}@") for key in keys) for name, _ in module.named_parameters())


def test_two_parameters_on_one_memory_are_one(tmp_path: Path) -> None:
    """As `load_state_dict(assign=True)` leaves tied embeddings: an update under either name changes both (U1)."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
            self.head.weight = nn.Parameter(self.embed.weight.data)

        def forward(self, tokens: torch.Tensor) -> Any:
            return self.head(torch.relu(self.embed(tokens)))

    module, tokens = Tied().eval(), torch.arange(4)
    save_programs({"a": lower(module, tokens, tag="model")}, tmp_path)
    cache = BlobCache(tmp_path / "model.ptd")
    method = Program(tmp_path / "a.pte", cache).method()
    for name in ("embed.weight", "head.weight"):
        for update in (cache.update, cache.update_state_dict):
            weight = torch.randn(16, 8)
            update({name: weight})
            expected = nn.functional.linear(torch.relu(weight[tokens]), weight)
            assert torch.allclose(method(tokens), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("export.output_name", "settings", r"settings\.pte: this is a file of an unknown format"),
        ("export.output_name", f"{__file__}/model.pte", r"test_export\.py/model\.pte: Not a directory"),
        ("backend.coreml.enabled", True, r"backend\.coreml\.enabled"),
        ("backend.xnnpack.enabled", False, r"backend\.xnnpack\.enabled is false"),
        ("export.foundation_weights_file", "a/b", r"'a/b'"),
        ("export.lora_weights_file", "..", r"'\.\.'"),
    ],
)
def test_what_cannot_be_exported_is_refused_before_anything_is_loaded(
    option: str, value: Any, message: str, tmp_path: Path
) -> None:
    """The checkpoint does not exist (L1)."""
    config = llama.config(tmp_path, "none", tmp_path / "model.pte")
    (tmp_path / "settings.pte").write_text("precious")
    group, _, name = option.rpartition(".")
    setattr(operator.attrgetter(group)(config), name, value)
    given = copy.deepcopy(config)
    with pytest.raises(BlobStoreError, match=message):
        export_llm(config)
    assert config == given
    assert [path.read_text() for path in tmp_path.iterdir()] == ["precious"]


def test_only_a_configuration_is_taken() -> None:
    with pytest.raises(UnsupportedDataError, match="expected an LlmConfig, found a dict"):
        export_llm({"base": {}})


@pytest.mark.slow
def test_programs_that_share_a_foundation_share_its_file(tmp_path: Path) -> None:
    """Base and two adapters take a third of what ExecuTorch's exporter writes; nothing is replaced (L1, D2, B1)."""
    from executorch.examples.models.llama.export_llama_lib import export_llama

    model = Llama(dim=512, n_heads=8, n_kv_heads=8, hidden_dim=1024, vocab_size=62 + 62 * 62)
    llama.write_model(tmp_path, model, {"a": model.checkpoint(0), "b": model.checkpoint(1)})
    for seed, name in enumerate(("one", "two")):
        llama.write_peft(tmp_path / name, model.adapter(seed))
    sizes = {}
    for name, export in (("stock", export_llama), ("ours", export_llm)):
        folder = tmp_path / name
        folder.mkdir()
        for adapter in ("", "one", "two"):
            export(llama.config(tmp_path, "a", folder / f"{adapter or 'base'}.pte", adapter=adapter))
        sizes[name] = sum(path.stat().st_size for path in folder.iterdir())
    names = {"base.pte", "one.pte", "two.pte", "foundation.ptd", "one_lora.ptd", "two_lora.ptd"}
    assert {path.name for path in folder.iterdir()} == names
    assert sizes["ours"] <= 0.34 * sizes["stock"]
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(KeyConflictError, match="foundation"):
        export_llm(llama.config(tmp_path, "b", folder / "other.pte"))
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.slow
def test_weights_that_pt2e_quantizes_keep_their_names(folder: Path, tmp_path: Path) -> None:
    """`quantization.pt2e_quantize`: a strict update takes the checkpoint, and quantizes it with the same scales (L1, U1)."""
    from executorch.extension.llm.export.config.llm_config import Pt2eQuantize

    config = llama.config(folder, "a", tmp_path / "model.pte")
    config.quantization.pt2e_quantize = Pt2eQuantize.xnnpack_dynamic
    config.model.use_sdpa_with_kv_cache = False
    export_llm(config)
    cache = BlobCache(tmp_path / "foundation.ptd")
    method = Program(tmp_path / "model.pte", cache).method()
    before = {key: bytes(data) for key, data in cache.views()}
    tokens = (torch.tensor([[1, 2, 3]]), torch.tensor([0]))
    first = method(*tokens).clone()
    weights = Llama().checkpoint(0)
    cache.update_state_dict({**weights, "output.weight": -weights["output.weight"]})
    assert torch.equal(method(*tokens), -first)
    cache.update_state_dict(weights)
    assert {key: bytes(data) for key, data in cache.views()} == before


@pytest.mark.slow
def test_several_methods_in_one_program_share_their_weights(folder: Path, tmp_path: Path) -> None:
    """A method without and one with an adapter: one foundation, whose names are those of the checkpoint (L1, W1)."""
    from executorch.extension.llm.export.config.llm_config import MethodConfig

    config = llama.config(folder, "a", tmp_path / "model.pte")
    adapter = llama.config(folder, "a", tmp_path / "model.pte", adapter="one").base.lora_config
    config.multimethod.methods = [
        MethodConfig(method_name="base"),
        MethodConfig(method_name="tuned", lora_config=adapter),
    ]
    export_llm(config)
    cache = BlobCache([tmp_path / "foundation.ptd", tmp_path / "model_lora.ptd"])
    tensors = cache.tensors
    expected = {**Llama().checkpoint(0), **Llama().adapter(0)}
    assert {name for name in tensors if not tensors[name].refusal and not tensors[name].auxiliary} == set(expected)
    one, other = (Program(tmp_path / "model.pte", cache).method(name) for name in ("base", "tuned"))
    tokens = (torch.tensor([[1, 2, 3]]), torch.tensor([0]))
    assert not torch.equal(one(*tokens)[0], other(*tokens)[0])
    cache.update({name: torch.zeros_like(tensor) for name, tensor in Llama().adapter(0).items()})
    assert torch.allclose(one(*tokens)[0], other(*tokens)[0], atol=1e-5)
    cache.update_state_dict({**Llama().checkpoint(1), **Llama().adapter(1)})
