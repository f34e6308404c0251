"""The second half of the demo: weights that change between two calls, and two adapters on one foundation.

It runs the slim programs of the first half in the native runtime. It updates tensors that kernels read directly: the
tables of embeddings.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from blobstore.adapters import merge_adapter, read_adapter, save_adapter
from blobstore.core.errors import InvalidFileError
from blobstore.core.text import size
from examples.demo.starts import Start, measure_starts

if TYPE_CHECKING:
    from rich.box import Box
    from rich.console import Console
    from torch import Tensor

    from blobstore.runtime import BlobCache, Program

__all__ = ["LiveResult", "print_live", "run_live", "table_box"]

WORDS = "embeddings.word_embeddings.weight"
POSITIONS = "embeddings.position_embeddings"
RANK, ALPHA = 4, 8
SENTENCES = ("The dog sleeps.", "The cat sleeps.")
TOLERANCE = 1e-5  # of a cosine, between the float32 kernels of XNNPACK and torch


@dataclass(frozen=True)
class LiveResult:
    """The results in the native runtime.

    Attributes:
        lengths: the input lengths, each of a program on the same cache.
        before, updated, reverted: the similarity of `SENTENCES` at each length: with the trained weights, after the
            word vector of one animal was replaced by that of the other, and after `revert`.
        update_seconds: the duration of the commit.
        foundation: the similarity on the foundation alone, while both adapters are in use.
        adapters: the similarity with each adapter, by its name.
        adapter_bytes: the size of each adapter's file, by its name.
        private_bytes: memory that both adapters take beyond the pages of the foundation's file; None if the system
            cannot measure it.
        starts: load and first call of one program without a packed store, and with packed weights on disk.
    """

    lengths: tuple[int, ...]
    before: list[float]
    updated: list[float]
    reverted: list[float]
    update_seconds: float
    foundation: float
    adapters: dict[str, float]
    adapter_bytes: dict[str, int]
    private_bytes: int | None
    starts: tuple[Start, Start]


def run_live(directory: Path, lengths: tuple[int, ...]) -> LiveResult:
    """Update, revert, and run two adapters at once; every result is compared with torch.

    Args:
        directory: the folder with the slim programs; the adapters' files are written to `adapters` beside it.
        lengths: the input lengths of the encoder's programs.

    Raises:
        MissingDependencyError: the native runtime is not installed.
        InvalidFileError: a program computes something else than torch with the same weights.
    """
    from blobstore.runtime import BlobCache

    compare = _Comparison(directory, lengths[0])
    with BlobCache(directory / "minilm.ptd") as cache:
        before, updated, reverted, update_seconds = _update(compare, cache, lengths)
        paths = _write_adapters(cache, directory.parent / "adapters")
        caches = {name: BlobCache(directory / "minilm.ptd") for name in paths}  # all map the same pages
        for name, path in paths.items():
            merge_adapter(caches[name], path)
        programs = {name: compare.program(lengths[0], own) for name, own in caches.items()}
        adapters = {name: compare.similarity(program, lengths[0]) for name, program in programs.items()}
        for name, found in adapters.items():
            compare.check([found], _merged(cache, paths[name]))
        private = [own.stats.private_bytes for own in caches.values()]
        return LiveResult(
            lengths=lengths,
            before=before,
            updated=updated,
            reverted=reverted,
            update_seconds=update_seconds,
            foundation=compare.similarity(compare.program(lengths[0], cache), lengths[0]),
            adapters=adapters,
            adapter_bytes={name: path.stat().st_size for name, path in paths.items()},
            private_bytes=None if None in private else sum(one or 0 for one in private),
            starts=measure_starts(
                directory / f"minilm-{lengths[0]}.pte", directory / "minilm.ptd", directory.parent / "packed"
            ),
        )


class _Comparison:
    """The similarity of `SENTENCES`, computed by the programs in a folder and by torch.

    Args:
        directory: the folder with the slim programs.
        length: the input length for torch.
    """

    def __init__(self, directory: Path, length: int) -> None:
        from examples.demo import models

        self._directory = directory
        self._length = length
        self._encoder, tokenizer = models.load_encoder(), models.load_tokenizer()
        self.word_id: Callable[[str], int | None] = tokenizer.token_to_id
        self._encode: Callable[[str, int], tuple[Tensor, Tensor]] = lambda text, length: models.encode(
            tokenizer, text, length
        )

    def program(self, length: int, cache: BlobCache) -> Program:
        """The program for an input length."""
        from blobstore.runtime import Program

        return Program(self._directory / f"minilm-{length}.pte", cache)

    def similarity(self, program: Program, length: int) -> float:
        """The similarity that a program computes."""
        one, two = (program.method()(*self._encode(text, length))[0] for text in SENTENCES)
        return float(one @ two)

    def check(self, found: list[float], weights: Mapping[str, Tensor]) -> None:
        """Compare similarities with the one that torch computes with these weights in place of the trained ones.

        Raises:
            InvalidFileError: one of them differs.
        """
        import torch

        named = {f"bert.{key}": tensor for key, tensor in weights.items()}
        with torch.no_grad():
            inputs = (self._encode(text, self._length) for text in SENTENCES)
            one, two = (torch.func.functional_call(self._encoder, named, pair)[0] for pair in inputs)
        expected = float(one @ two)
        for value in found:
            if abs(value - expected) > TOLERANCE:
                raise InvalidFileError(
                    self._directory, f"a program computes a similarity of {value}, torch computes {expected}"
                )


def _update(
    compare: _Comparison, cache: BlobCache, lengths: tuple[int, ...]
) -> tuple[list[float], list[float], list[float], float]:
    """Replace a word vector in all programs and revert.

    Returns:
        The similarities at each length before, with the new vector, and after the revert; and the seconds of the
        commit.
    """
    programs = {length: compare.program(length, cache) for length in lengths}

    def similarities() -> list[float]:
        return [compare.similarity(program, length) for length, program in programs.items()]

    before = similarities()
    words = cache.torch(WORDS)
    words[compare.word_id("dog")] = words[compare.word_id("cat")]
    start = time.perf_counter()
    cache.update({WORDS: words})
    seconds = time.perf_counter() - start
    updated = similarities()
    compare.check(updated, {WORDS: words})
    cache.revert()
    reverted = similarities()
    if reverted != before:
        raise InvalidFileError(cache.paths[0], "the programs compute other similarities after a revert than before")
    return before, updated, reverted, seconds


def _write_adapters(cache: BlobCache, folder: Path) -> dict[str, Path]:
    """Write two LoRA adapters of the table of positions, and return the files by the adapters' names."""
    import torch

    count, width = cache.numpy(f"{POSITIONS}.weight").shape
    folder.mkdir(exist_ok=True)
    paths = {name: folder / f"{name}.ptd" for name in ("adapter-a", "adapter-b")}
    for seed, path in enumerate(paths.values(), 1):
        noise = torch.Generator().manual_seed(seed)
        tensors = {
            f"{POSITIONS}.lora_a.weight": torch.randn(RANK, width, generator=noise),
            f"{POSITIONS}.lora_b.weight": 0.03 * torch.randn(count, RANK, generator=noise),
        }
        save_adapter(path, tensors, foundation=cache.paths, scale=ALPHA / RANK)
    return paths


def _merged(cache: BlobCache, path: Path) -> dict[str, Tensor]:
    """The weights of a foundation with an adapter, computed by torch."""
    import torch

    adapter = read_adapter(path)
    tensors = {name: torch.from_numpy(adapter.value(name)[0].copy()) for name in adapter.contents}
    product = tensors[f"{POSITIONS}.lora_b.weight"] @ tensors[f"{POSITIONS}.lora_a.weight"]
    return {f"{POSITIONS}.weight": cache.torch(f"{POSITIONS}.weight") + ALPHA / RANK * product}


def table_box(console: Console) -> Box | None:
    """The lines around the cells of a table; None where the output is read by a program."""
    from rich.box import HEAVY_HEAD

    return HEAVY_HEAD if console.is_terminal else None


def print_live(result: LiveResult, console: Console) -> None:
    """Print the results."""
    from rich.table import Table

    live = Table(
        title=f"Live: similarity of {SENTENCES[0]!r} and {SENTENCES[1]!r}", title_justify="left", box=table_box(console)
    )
    live.add_column("weights")
    for length in result.lengths:
        live.add_column(f"{length}", justify="right")
    live.add_row("as trained", *(f"{value:.4f}" for value in result.before))
    live.add_row("the dog's word vector is the cat's", *(f"{value:.4f}" for value in result.updated))
    live.add_row("reverted", *(f"{value:.4f}" for value in result.reverted))
    console.print(live)
    console.print(
        f"One update of {result.update_seconds * 1e3:.0f} ms, seen by all {len(result.lengths)} programs at their next "
        "call; nothing was loaded again."
    )
    console.print()
    console.print("Two adapters in use at once on one foundation:")
    console.print(f"  foundation {result.foundation:.4f}", highlight=False)
    for name, value in result.adapters.items():
        console.print(f"  {name}  {value:.4f}  ({result.adapter_bytes[name]:,} bytes)", highlight=False)
    if result.private_bytes is not None:
        console.print(f"Memory of their own, beyond the foundation's shared pages: {result.private_bytes:,} bytes.")
    console.print()
    (plain, second), taken = result.starts, ""
    if plain.anonymous is not None and second.anonymous is not None:
        taken = f", {size(max(second.anonymous, 0))} of memory instead of {size(max(plain.anonymous, 0))}"
    console.print(
        f"A second start with packed weights on disk: {second.seconds * 1e3:.0f} ms for load and first call instead of "
        f"{plain.seconds * 1e3:.0f} ms{taken}."
    )
    for reason in second.reasons:
        console.print(f"  Weights were packed again: {reason}")
