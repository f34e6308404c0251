"""A language model with LoRA adapters in ExecuTorch's own runner: exchanging an adapter, and what live weights cost."""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, ratio_row, settle, show, side_by_side
from blobstore.adapters import load_adapter, save_adapter
from blobstore.llm import export_llm
from blobstore.lowering.export import quiet
from blobstore.runtime import BlobCache, serving
from tests.llm.llama import LORA_ALPHA, RANK, Llama, config, runner, text, write_model, write_peft

TITLE = "A language model in ExecuTorch's runner"
_MODEL = Llama(dim=384, n_layers=8, n_heads=6, n_kv_heads=6, vocab_size=62 + 62 * 62, hidden_dim=1408)
_TOKENS = 64
_EXCHANGE_MS = 5


def rows(folder: Path) -> Iterator[Row]:
    """Measure everything; `folder` is for files."""
    with _silent(), quiet():
        _write(folder)
        from executorch.extension.llm.custom_ops import custom_ops  # noqa: F401
        from executorch.runtime import Runtime

        cache = BlobCache([folder / "live" / "foundation.ptd", folder / "live" / "model_lora.ptd"])
        tokenizer = folder / "model" / "tokenizer.json"
        with serving(cache):
            live = runner(folder / "live" / "model.pte", tokenizer, folder / "live" / "foundation.ptd")
            text(live)
        stock = runner(folder / "stock" / "model.pte", tokenizer)
        assert text(live) == text(stock)
    turn = iter(range(10**6))

    def exchange() -> object:
        return load_adapter(cache, folder / f"{next(turn) % 2}.ptd")

    def load() -> object:
        program = Runtime.get().load_program(folder / "stock" / "model.pte")
        return program, program.load_method("forward")

    with _silent():
        exchanged, loaded = side_by_side(exchange, load, rounds=15, before=settle)
    parameters = sum(tensor.numel() for tensor in _MODEL.checkpoint(0).values()) / 1e6
    what = f"exchange an adapter of rank {RANK} for queries and values, {parameters:.0f} million parameters"
    yield Row(what, show(exchanged), f"at most {_EXCHANGE_MS} ms", exchanged <= _EXCHANGE_MS / 1000)
    yield ratio_row("&nbsp;&nbsp;against loading the program with the other adapter", exchanged, loaded, at_most=0.01)
    cache.revert()
    with _silent():
        ours, theirs = side_by_side(_generating(live), _generating(stock), rounds=31)
    yield ratio_row(f"generate {_TOKENS} tokens with live weights, against stock", ours, theirs, at_most=1.02)


def _write(folder: Path) -> None:
    """Write the program with live weights to `live`, the stock one to `stock`, and adapters `0.ptd` and `1.ptd`."""
    from executorch.examples.models.llama.export_llama_lib import export_llama

    model = folder / "model"
    write_model(model, _MODEL, {"base": _MODEL.checkpoint(0)})
    adapters = [_MODEL.adapter(seed, ("wq", "wv"), 0.1) for seed in range(2)]
    write_peft(model / "adapter", adapters[0])
    for name, export in (("live", export_llm), ("stock", export_llama)):
        (folder / name).mkdir()
        export(config(model, "base", folder / name / "model.pte", adapter="adapter"))
    for number, adapter in enumerate(adapters):
        foundation = folder / "live" / "foundation.ptd"
        save_adapter(folder / f"{number}.ptd", adapter, foundation=foundation, scale=LORA_ALPHA / RANK)


def _generating(runner: Any) -> Callable[[], object]:
    return lambda: text(runner, tokens=_TOKENS)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Keep what the exporter and the runner print, also from C++, out of the table."""
    kept = [os.dup(number) for number in (1, 2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        for number in (1, 2):
            os.dup2(nowhere, number)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(level)
        for number, descriptor in zip((1, 2), kept, strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.close(nowhere)
