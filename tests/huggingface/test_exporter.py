"""transformers' exporter through ours: one data file, and the text of eager mode with any weights (L1)."""

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, StaticCache
from transformers.exporters.base import ExportedModel
from transformers.exporters.configs import ExecutorchConfig

from blobstore import errors, open_ptd
from blobstore.adapters import merge_adapter
from blobstore.lowering import quiet
from blobstore.runtime import BlobCache
from blobstore.transformers import BlobStoreExporter, load
from blobstore.transformers.exporter import FORMAT, _Tracing

PROMPT = torch.tensor([[7, 9, 11, 13, 17, 19]])
NEW_TOKENS = 8
CONFIG = LlamaConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    initializer_range=0.3,
    tie_word_embeddings=False,
)


def llama(seed: int) -> Any:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(CONFIG).eval()
    for norm in (tensor for name, tensor in model.named_parameters() if "norm" in name):
        norm.data.uniform_(0.5, 1.5)
    return model


def text(model: Any) -> list[int]:
    """The greedy text of eager mode."""
    return model.generate(PROMPT, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)[0].tolist()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def exported() -> ExportedModel:
    generation = GenerationConfig(
        cache_implementation="static", max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
    )
    inputs = {"input_ids": PROMPT, "attention_mask": torch.ones_like(PROMPT)}
    with quiet():
        return BlobStoreExporter().export_for_generation(
            llama(0), inputs, ExecutorchConfig(), generation_config=generation
        )


@pytest.fixture(scope="module")
def folder(exported: ExportedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exported")
    exported.save_pretrained(path)
    return path


@pytest.mark.long
def test_files(folder: Path) -> None:
    """The stages share one data file, whose keys are names of the checkpoint; all that transformers expects is beside it."""
    names = {"config.json", "decode.pte", "export.json", "generation_config.json", "model.ptd", "prefill.pte"}
    assert {path.name for path in folder.iterdir()} == names
    state = llama(0).state_dict()
    assert set(BlobCache(folder / "model.ptd").tensors) >= set(state)
    with open_ptd(folder / "model.ptd") as data:
        assert "model.embed_tokens.weight" in data
    weights = sum(tensor.nbytes for tensor in state.values())
    assert weights < (folder / "model.ptd").stat().st_size < 1.5 * weights


@pytest.mark.way
@pytest.mark.long
def test_text_follows_updates(folder: Path) -> None:
    """Every text is that of eager mode: of the checkpoint, of a fine-tune that a strict update brings, and again after."""
    model = load(folder)
    assert model.generate(PROMPT)[0].tolist() == text(llama(0))
    tuned = llama(1)
    model.cache.update_state_dict(tuned.state_dict())
    assert text(tuned) != text(llama(0))
    assert model.generate(PROMPT)[0].tolist() == text(tuned)
    model.cache.revert()
    assert model.generate(PROMPT, max_new_tokens=3)[0].tolist() == text(llama(0))[: PROMPT.shape[1] + 3]


@pytest.mark.long
def test_adapters_of_peft(folder: Path, tmp_path: Path) -> None:
    """A folder of PEFT is merged, and taken out again."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    torch.manual_seed(2)
    with quiet():
        adapted = peft.get_peft_model(llama(0), config).eval()
        adapted.save_pretrained(tmp_path / "lora")
    model = load(folder)
    merged = merge_adapter(model.cache, tmp_path / "lora")
    expected = text(copy.deepcopy(adapted).merge_and_unload())
    assert expected != text(llama(0))
    assert model.generate(PROMPT)[0].tolist() == expected
    merged.undo()
    assert model.generate(PROMPT)[0].tolist() == text(llama(0))


@pytest.mark.long
def test_cache_of_the_caller(folder: Path) -> None:
    """Both stages change the key/value cache that was given, where it is; its contents are those of eager mode."""
    model, ours = load(folder), StaticCache(config=CONFIG, max_cache_len=PROMPT.shape[1] + NEW_TOKENS)
    model.generate(PROMPT, max_new_tokens=4, cache=ours)
    keys = ours.layers[0].keys
    theirs = StaticCache(config=CONFIG, max_cache_len=PROMPT.shape[1] + NEW_TOKENS)
    llama(0).generate(PROMPT, max_new_tokens=4, do_sample=False, pad_token_id=0, cache=theirs)
    assert int(ours.get_seq_length()) == int(theirs.get_seq_length()) == PROMPT.shape[1] + 3
    torch.testing.assert_close(keys, theirs.layers[0].keys, rtol=1e-4, atol=1e-5)
    at = torch.tensor([[int(ours.get_seq_length())]])
    room = torch.arange(ours.layers[0].max_cache_len) <= at
    decode = model.runners["decode"]
    out = decode(input_ids=torch.tensor([[5]]), attention_mask=room[None, None], position_ids=at, cache=ours)
    assert out["cache"] is ours
    assert ours.layers[0].keys.data_ptr() == keys.data_ptr()
    assert keys[0, 0, int(at)].abs().sum() > 0
    with pytest.raises(errors.InputError, match="'cache' has room for 5 tokens, the program for 14"):
        model.generate(PROMPT, max_new_tokens=2, cache=StaticCache(config=CONFIG, max_cache_len=5))


@pytest.mark.long
def test_transformers_own_model(exported: ExportedModel, folder: Path, tmp_path: Path) -> None:
    """transformers' `ExportedModel` loads and runs what was saved, also before it is saved; saving it again copies it."""
    cache = BlobCache(folder / "model.ptd")
    again = ExportedModel.from_pretrained(folder, cache=cache)
    assert again.export_format == FORMAT
    arguments = {"input_ids": PROMPT, "position_ids": torch.arange(PROMPT.shape[1])[None]}
    for model in (exported, again):
        kv = StaticCache(config=CONFIG, max_cache_len=PROMPT.shape[1] + NEW_TOKENS)
        logits = model.runners["prefill"](**arguments, cache=kv).logits
        torch.testing.assert_close(logits, llama(0)(PROMPT).logits, rtol=1e-4, atol=1e-5)
    assert {runner.cache for runner in again.runners.values()} == {cache}
    again.save_pretrained(tmp_path)
    for name in ("prefill.pte", "decode.pte", "model.ptd"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()
    with pytest.raises(errors.InputError, match="the argument 'input_ids' is missing"):
        again.runners["prefill"](position_ids=arguments["position_ids"])


@pytest.mark.long
def test_name_on_the_hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name stands for its folder in the local cache. Nothing is fetched, and what is missing is one error."""
    snapshot = tmp_path / "models--we--tiny/snapshots/0123"
    shutil.copytree(folder, snapshot)
    (tmp_path / "models--we--tiny/refs").mkdir()
    (tmp_path / "models--we--tiny/refs/main").write_text("0123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert load("we/tiny").generate(PROMPT)[0].tolist() == text(llama(0))
    with pytest.raises(errors.FileAccessError, match=r"fetch it with `hf download we/other`"):
        load("we/other")
    (snapshot / "model.ptd").unlink()
    with pytest.raises(
        errors.FileAccessError, match=r"lacks model.ptd; fetch it completely with `hf download we/tiny`"
    ):
        load("we/tiny")


@pytest.mark.long
def test_incomplete_folders(folder: Path, tmp_path: Path) -> None:
    """The message names the file that is missing, or is of another exporter."""
    with pytest.raises(errors.FileAccessError, match=r"export\.json"):
        load(tmp_path)
    shutil.copytree(folder, tmp_path / "some")
    (tmp_path / "some/decode.pte").unlink()
    with pytest.raises(errors.FileAccessError, match=r"decode\.pte"):
        load(tmp_path / "some")
    manifest = json.loads((folder / "export.json").read_text())
    (tmp_path / "export.json").write_text(json.dumps({**manifest, "export_format": "executorch"}))
    with pytest.raises(errors.InvalidFileError, match="expected the format 'executorch-blobstore', found 'executorch'"):
        load(tmp_path)
    (tmp_path / "export.json").write_text("[]")
    with pytest.raises(errors.InvalidFileError, match="not what transformers' exporters write"):
        load(tmp_path)


def test_other_backends_are_refused() -> None:
    """Weights can be changed under XNNPACK only."""
    with pytest.raises(errors.UnsupportedOperationError, match="backend 'mlx'"):
        BlobStoreExporter().export(llama(0), {"input_ids": PROMPT}, ExecutorchConfig(backend="mlx"))


@pytest.fixture
def traced() -> Iterator[Any]:
    """The decoder of a Llama, traced as a part of it."""
    model, tracing = llama(0), _Tracing()
    tracing._root = model
    with quiet():
        yield tracing.export_program(model.model, {"input_ids": PROMPT}, ExecutorchConfig())[0]


@pytest.mark.long
def test_parts_have_the_names_of_the_whole(traced: Any) -> None:
    """A stage of a part of the model has the checkpoint's names, too, so that all stages share its weights."""
    assert set(traced.graph_signature.parameters) == {
        name for name, _ in llama(0).named_parameters() if name != "lm_head.weight"
    }
