"""Weights in ExecuTorch's own runner change between two generations, and the text is that of a fresh export (L1, L3)."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from blobstore.adapters import load_adapter, load_adapters, save_adapter
from blobstore.errors import AdapterError, UpdateError
from blobstore.runtime import BlobCache, make_working_copy, serving
from tests.llm import llama
from tests.llm.llama import LORA_ALPHA, RANK, Llama

pytestmark = pytest.mark.long

Stock = Callable[..., str]


def files(live: Path) -> list[Path]:
    return [live / "base.ptd", live / "lora.ptd"]


def loaded(live: Path, cache: BlobCache, data: Path) -> Any:
    """ExecuTorch's runner on the cache. It loads its method when it generates for the first time."""
    with serving(cache):
        runner = llama.runner(live / "model.pte", live.parent / "tokenizer.json", data)
        llama.text(runner)
    return runner


def whole(checkpoint: int, adapter: int) -> Mapping[str, Tensor]:
    """The state dict of a fine-tune with its adapter."""
    return {**Llama().checkpoint(checkpoint), **Llama().adapter(adapter)}


@functools.cache
def eager(checkpoint: int, adapter: int) -> str:
    """The text of eager PyTorch, which is that of a stock export: `test_texts_of_stock_exports`."""
    return Llama().tell(whole(checkpoint, adapter))


@pytest.mark.slow
def test_texts_of_stock_exports(stock: Stock) -> None:
    """What the tests below compare with is what a fresh stock export says with the other weights (L3)."""
    assert stock("a", "two") == eager(0, 1)
    assert stock("b", "two") == eager(1, 1)


@pytest.mark.slow
def test_an_adapter_is_exchanged_in_the_running_runner(live: Path, stock: Stock, tmp_path: Path) -> None:
    """By a file that is bound to the foundation, by tensors, and back; each text is that of a stock export (L3, D2, U1)."""
    one, two = stock("a", "one"), eager(0, 1)
    assert one == eager(0, 0) != two
    cache = BlobCache(live / "lora.ptd", base=BlobCache(live / "base.ptd"))
    runner = loaded(live, cache, live / "base.ptd")
    assert llama.text(runner) == one
    save_adapter(tmp_path / "two.ptd", Llama().adapter(1), foundation=live / "base.ptd", scale=LORA_ALPHA / RANK)
    load_adapter(cache, tmp_path / "two.ptd")
    assert llama.text(runner) == two
    cache.revert()
    assert llama.text(runner) == one
    halves = {name: tensor / (2 if "lora_b" in name else 1) for name, tensor in Llama().adapter(1).items()}
    save_adapter(tmp_path / "half.ptd", halves, foundation=live / "base.ptd", scale=2 * LORA_ALPHA / RANK)
    with pytest.raises(AdapterError, match=r"its scale is 4\.0, that of the adapter in .* is 2\.0; give"):
        load_adapter(cache, tmp_path / "half.ptd")
    load_adapters(cache, [tmp_path / "half.ptd"])  # the export says what the program multiplies with
    assert llama.text(runner) == two
    cache.revert()
    cache.update(Llama().adapter(1))
    assert llama.text(runner) == two


def test_a_whole_fine_tune_is_exchanged_through_a_working_copy(live: Path, stock: Stock, tmp_path: Path) -> None:
    """Embeddings and norms, which ExecuTorch reads from its own map, follow as well as what XNNPACK packs (L3, B3, B4)."""
    copy = tmp_path / "live.ptd"
    make_working_copy(files(live), copy)
    cache = BlobCache(copy, "shared")
    runner = loaded(live, cache, copy)
    assert llama.text(runner) == stock("a", "one")
    cache.update_state_dict(whole(1, 1))
    assert llama.text(runner) == eager(1, 1) != eager(0, 1)
    for path in files(live):
        cache.load(path)
    assert llama.text(runner) == stock("a", "one")


def test_a_working_copy_runs_where_no_cache_is_served(live: Path, stock: Stock, tmp_path: Path) -> None:
    """One file for clients that take one path: foundation and adapter (L1, L4)."""
    make_working_copy(files(live), tmp_path / "one.ptd")
    runner = llama.runner(live / "model.pte", live.parent / "tokenizer.json", tmp_path / "one.ptd")
    assert llama.text(runner) == stock("a", "one")


@pytest.mark.slow
def test_exchanges_on_a_quantized_foundation(folder: Path, stock: Stock, tmp_path: Path) -> None:
    """8da4w with embeddings of 4 bits: adapters by tensors, and whole fine-tunes by the files of another export (L1, L3)."""
    from blobstore.llm import export_llm

    for name, checkpoint, adapter in (("live", "a", "one"), ("other", "b", "two")):
        (tmp_path / name).mkdir()
        given = llama.config(folder, checkpoint, tmp_path / name / "model.pte", adapter=adapter, quantized=True)
        export_llm(given)
    data = [[tmp_path / name / f"{file}.ptd" for file in ("foundation", "model_lora")] for name in ("live", "other")]
    copy = tmp_path / "copy.ptd"
    make_working_copy(data[0], copy)
    cache = BlobCache(copy, "shared")
    with serving(cache):
        runner = llama.runner(tmp_path / "live" / "model.pte", folder / "tokenizer.json", copy)
        assert llama.text(runner) == stock("a", "one", quantized=True)
    cache.update(Llama().adapter(1))
    assert llama.text(runner) == stock("a", "two", quantized=True)
    for path in data[1]:
        cache.load(path)
    assert llama.text(runner) == stock("b", "two", quantized=True) != stock("a", "two", quantized=True)
    cache.update(Llama().adapter(0))
    for path in data[0]:
        cache.load(path)
    assert llama.text(runner) == stock("a", "one", quantized=True)


@pytest.mark.slow
def test_tied_embeddings_are_changed_under_either_name(stock: Stock, tmp_path: Path) -> None:
    """The checkpoint has one tensor under two names; the program uses it in and outside of XNNPACK (L3, U1)."""
    from blobstore.llm import export_llm

    model = Llama()
    checkpoints = {name: model.checkpoint(seed, tied=True) for seed, name in enumerate(("a", "b"))}
    llama.write_model(tmp_path, model, checkpoints)
    live, copy = tmp_path / "live", tmp_path / "copy.ptd"
    live.mkdir()
    export_llm(llama.config(tmp_path, "a", live / "model.pte"))
    make_working_copy(live / "foundation.ptd", copy)
    cache = BlobCache(copy, "shared")
    runner = loaded(live, cache, copy)
    assert llama.text(runner) == stock("a", model=tmp_path)
    for left_out in ("tok_embeddings.weight", "output.weight"):
        for name in ("b", "a"):
            cache.update_state_dict({key: value for key, value in checkpoints[name].items() if key != left_out})
            assert llama.text(runner) == stock(name, model=tmp_path)
    with pytest.raises(UpdateError, match=r"tok_embeddings\.weight|output\.weight"):
        cache.update_state_dict({**checkpoints["a"], "output.weight": torch.zeros(model.vocab_size, model.dim)})
