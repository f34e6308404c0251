"""The second half of the demo: weights that change between two calls, and two adapters on one foundation.

It runs on the slim programs of the first half, in the native runtime. What is updated are tensors that kernels read
directly, the embeddings and the layer norms.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from blobstore.errors import InvalidFileError
from blobstore.store import BlobStore

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from blobstore.demo.models import SentenceEncoder
    from blobstore.runtime import Program

__all__ = ["LiveResult", "print_live", "run_live"]

WORDS = "embeddings.word_embeddings.weight"
SENTENCES = ("The dog sleeps.", "The cat sleeps.")
TOLERANCE = 1e-5  # of a cosine, between XNNPACK's and torch's float32


@dataclass(frozen=True)
class LiveResult:
    """What was seen.

    Attributes:
        lengths: the input lengths, each a program on the one cache.
        before, updated, reverted: the similarity of `SENTENCES` at each length: with the weights as trained, with
            the word vector of one animal in place of the other's, and after `revert`.
        update_seconds: the commit.
        foundation: the similarity on the foundation alone, while both adapters are in use.
        adapters: the same on each adapter, by its name.
        adapter_bytes: what each adapter's file takes.
        private_bytes: memory of this process' own that both adapters' caches take together; None where the system
            does not tell.
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


def run_live(directory: Path, lengths: tuple[int, ...]) -> LiveResult:
    """Update, revert, and run two adapters at once; every result is compared with torch.

    Args:
        directory: the folder with the slim programs; the adapters' files are written to `adapters` beside it.
        lengths: the input lengths of the encoder's programs.

    Raises:
        MissingDependencyError: the native runtime is not installed.
        InvalidFileError: a program computes something else than torch with the same weights.
    """
    import torch

    from blobstore.demo import models
    from blobstore.runtime import BlobCache, Program

    encoder, tokenizer = models.load_encoder(), models.load_tokenizer()
    data = directory / "minilm.ptd"

    def similarity(program: Program, length: int) -> float:
        forward = program.method()
        one, two = (forward(*models.encode(tokenizer, text, length))[0][0] for text in SENTENCES)
        return float(one @ two)

    def expected(weights: Mapping[str, Tensor]) -> float:
        return _eager(encoder, weights, *(models.encode(tokenizer, text, lengths[0]) for text in SENTENCES))

    with BlobCache(data) as cache:
        programs = {length: Program(directory / f"minilm-{length}.pte", cache) for length in lengths}
        before = [similarity(programs[length], length) for length in lengths]

        dog, cat = (tokenizer.token_to_id(word) for word in ("dog", "cat"))
        words = cache.torch(WORDS).clone()
        words[dog] = words[cat]
        start = time.perf_counter()
        cache.update({WORDS: words})
        update_seconds = time.perf_counter() - start
        updated = [similarity(programs[length], length) for length in lengths]
        _check(directory, updated, expected({WORDS: words}))
        cache.revert()
        reverted = [similarity(programs[length], length) for length in lengths]
        if reverted != before:
            raise InvalidFileError(directory, "a reverted cache does not compute what it did before")

        folder = directory.parent / "adapters"
        folder.mkdir(exist_ok=True)
        paths, weights = {}, {}
        norms = [key for key in cache if ".LayerNorm." in key]
        for number, name in enumerate(("adapter-a", "adapter-b"), 1):
            noise = torch.Generator().manual_seed(number)
            weights[name] = {
                key: cache.torch(key) * (1 + 0.3 * torch.randn(cache.torch(key).shape, generator=noise))
                for key in norms
            }
            store = BlobStore()
            for key, tensor in weights[name].items():
                store.add(key, tensor)
            paths[name] = folder / f"{name}.ptd"
            store.write_ptd(paths[name])
        caches = {name: BlobCache(path, base=cache) for name, path in paths.items()}
        adapted = {name: Program(directory / f"minilm-{lengths[0]}.pte", own) for name, own in caches.items()}
        found = {name: similarity(program, lengths[0]) for name, program in adapted.items()}
        for name, value in found.items():
            _check(directory, [value], expected(weights[name]))
        own = [one.stats.private_bytes for one in caches.values()]
        return LiveResult(
            lengths=lengths,
            before=before,
            updated=updated,
            reverted=reverted,
            update_seconds=update_seconds,
            foundation=similarity(programs[lengths[0]], lengths[0]),
            adapters=found,
            adapter_bytes={name: path.stat().st_size for name, path in paths.items()},
            private_bytes=None if None in own else sum(size or 0 for size in own),
        )


def _eager(encoder: SentenceEncoder, weights: Mapping[str, Tensor], *inputs: tuple[Tensor, Tensor]) -> float:
    """The similarity that torch computes with other weights."""
    import torch

    named = {f"bert.{key}": tensor for key, tensor in weights.items()}
    with torch.no_grad():
        one, two = (torch.func.functional_call(encoder, named, pair)[0] for pair in inputs)
    return float(one @ two)


def _check(directory: Path, found: list[float], expected: float) -> None:
    for value in found:
        if abs(value - expected) > TOLERANCE:
            raise InvalidFileError(directory, f"a program computes a similarity of {value}, torch {expected}")


def print_live(result: LiveResult, console: Console) -> None:
    """Tell what was seen."""
    from rich.table import Table

    live = Table(title=f"Live: similarity of {SENTENCES[0]!r} and {SENTENCES[1]!r}", title_justify="left")
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
