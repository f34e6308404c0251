"""A language model with LoRA adapters in ExecuTorch's own runner: exchanging an adapter, and what live weights cost."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Row, in_own_process, ratio_row, settle, show, side_by_side, without_bar
from blobstore.adapters import load_adapter, read_adapter, save_adapter
from blobstore.llm import Conversation, Runners, export_llm
from blobstore.lowering.export import quiet
from blobstore.runtime import BlobCache, PackedStore, Program, serving
from tests.llm.llama import LORA_ALPHA, RANK, Llama, config, runner, text, write_model, write_peft

TITLE = "A language model in ExecuTorch's runner"
_MODEL = Llama(dim=384, n_layers=8, n_heads=6, n_kv_heads=6, vocab_size=62 + 62 * 62, hidden_dim=1408)
_TOKENS = 16
_EXCHANGE_MS = 5
_SAID = 24


def rows(folder: Path) -> Iterator[Row]:
    """Measure everything; `folder` is for files."""
    with _silent(), quiet():
        in_own_process(_write, folder)  # an application does not export
        from executorch.extension.llm.custom_ops import custom_ops  # noqa: F401

        stock = _stock(folder)
        live = _live(folder, BlobCache(_files(folder)))
        assert text(live) == text(stock)
    yield from _exchanges(folder)
    with _silent():
        again = [
            _stock(folder),
            _live(folder, BlobCache(_files(folder))),
        ]  # in the other order: the first is the slower
        pairs = [(live, stock), (again[1], again[0])]
        # processor time, because two threads on two busy cores wait for each other as long as others like
        times = [
            side_by_side(_generating(ours), _generating(theirs), rounds=101, clock=time.process_time)
            for ours, theirs in [*pairs, (again[0], stock)]
        ]
    yield ratio_row(
        f"generate {_TOKENS} tokens with live weights, against stock, processor time",
        sum(ours for ours, _ in times[:2]) / 2,
        sum(theirs for _, theirs in times[:2]) / 2,
        at_most=1.02,
    )
    work = "  stock once more, loaded later, against the stock one above"
    yield without_bar(ratio_row(work, *times[2], at_most=1.02))
    with _silent():
        ours, theirs = side_by_side(
            lambda: _live(folder, BlobCache(_files(folder))), lambda: _stock(folder), rounds=15, before=settle
        )
    yield ratio_row("load the program on a new cache, against stock", ours, theirs, at_most=1.25)
    yield from _requests(folder)


def _exchanges(folder: Path) -> Iterator[Row]:
    """What it costs to exchange an adapter, where a packed store is, which every load uses, and without one."""
    store = PackedStore(folder / "packed")
    with _silent():
        Program(folder / "live" / "model.pte", BlobCache(_files(folder), packed=store)).method("forward")
        caches = [BlobCache(_files(folder), packed=store), BlobCache(_files(folder))]
        runners = [_live(folder, cache) for cache in caches]  # noqa: F841 - their delegates follow
    adapters = [read_adapter(folder / f"{number}.ptd").tensors for number in range(2)]
    first = sorted(adapters[0])[0]
    turn = iter(range(10**6))

    def exchange(cache: BlobCache) -> object:
        return cache.update(adapters[next(turn) % 2])

    def one_tensor() -> object:
        return caches[0].update({first: adapters[next(turn) % 2][first]})

    sources = [[np.array(tensor) for tensor in adapter.values()] for adapter in adapters]
    blobs, packed = ([np.zeros_like(array) for array in sources[0]] for _ in range(2))

    def copies() -> None:
        for source, blob, on in zip(sources[next(turn) % 2], blobs, packed, strict=True):
            np.copyto(blob, source)
            np.copyto(on, blob)

    def against_load(work: Callable[[], object]) -> tuple[float, float]:
        return side_by_side(work, lambda: _stock(folder), rounds=31, before=settle)

    with _silent():
        read = side_by_side(
            lambda: load_adapter(caches[0], folder / f"{next(turn) % 2}.ptd"), lambda: None, rounds=31, before=settle
        )[0]
        exchanged = against_load(lambda: exchange(caches[0]))
        others = {
            "without a packed store": against_load(lambda: exchange(caches[1])),
            f"one of its {len(adapters[0])} tensors alone": against_load(one_tensor),
            "only the copies, into the blobs and on from there": against_load(copies),
        }
    assert store.stats.written > 0 and store.stats.repacked == 0, store.stats
    parameters = sum(tensor.numel() for tensor in _MODEL.checkpoint(0).values()) / 1e6
    what = f"exchange an adapter of rank {RANK} for queries and values, {parameters:.0f} million parameters"
    yield Row(f"{what}, from its file", show(read), f"at most {_EXCHANGE_MS} ms", read <= _EXCHANGE_MS / 1000)
    yield _share("  one that was read before, against loading the program with it", *exchanged)
    for work, seconds in others.items():
        yield without_bar(_share(f"  {work}, against the same", *seconds))


def _share(work: str, seconds: float, of: float) -> Row:
    return Row(
        work, f"{seconds / of:.2%} of its time ({show(seconds)} against {show(of)})", "at most 1 %", seconds <= of / 100
    )


def _requests(folder: Path) -> Iterator[Row]:
    """What it costs that each request names its adapter, on one runner."""
    live = folder / "live"
    layer = BlobCache(live / "model_lora.ptd", base=BlobCache(live / "foundation.ptd"))
    with _silent():
        one = runner(live / "model.pte", folder / "model" / "tokenizer.json", live / "foundation.ptd")
        runners = Runners([(one, layer)], {str(number): folder / f"{number}.ptd" for number in range(2)})

    def twice(adapter: str, strength: float, conversation: Conversation | None = None) -> list[float]:
        """The seconds of a request for one token, and of the same request again."""
        seconds = []
        for _ in range(2):
            start = time.perf_counter()
            options: Any = {"max_new_tokens": 1, "temperature": 0, "conversation": conversation}
            runners.generate("once", adapter, strength, **options)
            seconds.append(time.perf_counter() - start)
        return seconds

    with _silent():
        twice("0", 1)
        adapters = [twice(str((number + 1) % 2), 1) for number in range(31)]
        strengths = [twice("0", 0.5 + number % 2 / 2) for number in range(31)]
        talks = [twice("0", 1, Conversation("once" * _SAID)) for _ in range(31)]
    for what, pairs in (("adapter than the one before it", adapters), ("strength", strengths)):
        other, same = (statistics.median(seconds) for seconds in zip(*pairs, strict=True))
        yield Row(
            f"what a request costs that has another {what}, its first token, beyond one that has the same",
            f"{show(max(other - same, 0))} ({show(other)} against {show(same)})",
            f"at most {_EXCHANGE_MS} ms",
            other - same <= _EXCHANGE_MS / 1000,
        )
    again, kept = (statistics.median(seconds) for seconds in zip(*talks, strict=True))
    yield ratio_row(
        f"answer in a conversation of {2 * _SAID} tokens on its key/value cache, first token, against reading it again",
        kept,
        again,
        at_least=2,
    )


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


def _files(folder: Path) -> list[Path]:
    return [folder / "live" / "foundation.ptd", folder / "live" / "model_lora.ptd"]


def _live(folder: Path, cache: BlobCache) -> Any:
    """The program with live weights in ExecuTorch's runner, on a cache."""
    with serving(cache):
        return _ready(runner(folder / "live" / "model.pte", folder / "model" / "tokenizer.json", _files(folder)[0]))


def _stock(folder: Path) -> Any:
    return _ready(runner(folder / "stock" / "model.pte", folder / "model" / "tokenizer.json"))


def _ready(one: Any) -> Any:
    """A runner that has loaded its program, as it does when it generates for the first time."""
    text(one, tokens=1)
    return one


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
