"""Training without gradients, by programs that only serve."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from blobstore.core.errors import TrainingError
from blobstore.core.reprs import count, line
from blobstore.runtime.cache import BlobCache, check_cache
from blobstore.runtime.native import is_utf8, native

__all__ = ["MeZO"]


class MeZO:
    """Zeroth-order descent on tensors of a cache, as in MeZO (Malladi et al., 2023, arXiv:2305.17333, algorithm 1).

    A step chooses a direction z, whose numbers have the normal distribution, computes the loss at w + eps z and at
    w - eps z, and commits w - lr (difference of the losses / 2 eps) z. So a program that only serves can learn, quantized
    and delegated as it is.

    A step commits each tensor three times, so give it a cache that nobody else serves from: one on the same foundation
    with the same adapter. During a step there is a copy of the tensors that are trained, and nothing more. Directions
    depend on nothing but the seed, the number of the step, and the names, and are those of C++. Only one thread at a time
    may use an optimizer.

    Args:
        cache: the cache of the programs that compute the loss.
        lr: the learning rate.
        eps: how far the tensors are moved, in both directions.
        seed: of the directions, from 0 to 2**64 - 1.
        names: the tensors to train, float32. By default all of them in the cache's own files, without those of its base.

    Attributes:
        cache: as given.
        names: the tensors that are trained, sorted.

    Raises:
        TrainingError: an option is impossible, or there is nothing to train.
        KeyNotFoundError: the cache has no tensor of that name.
        UnsupportedOperationError: a tensor has another dtype, is in the base, or cannot be changed.
        UpdateError: the blob of a tensor does not contain it, because it was quantized, packed or combined.
        UnsupportedDataError: `cache` is not a `BlobCache`.
    """

    def __init__(
        self, cache: BlobCache, *, lr: float = 1e-6, eps: float = 1e-3, seed: int = 0, names: Iterable[str] = ()
    ) -> None:
        check_cache(cache, "the cache of MeZO")
        self.cache = cache
        self._native: Any = native.MeZO(
            cache._native, _number("lr", lr), _number("eps", eps), _count("seed", seed), _names(names)
        )
        self.names: tuple[str, ...] = tuple(self._native.names)

    @property
    def lr(self) -> float:
        """The learning rate, which may be changed between steps."""
        return float(self._native.options[0])

    @lr.setter
    def lr(self, lr: float) -> None:
        _, eps, seed = self._native.options
        self._native.set_options(_number("lr", lr), eps, seed)

    @property
    def steps(self) -> int:
        """How many steps were made. To go on with an adapter that was saved, set what it was then."""
        return int(self._native.steps)

    @steps.setter
    def steps(self, steps: int) -> None:
        self._native.steps = _count("steps", steps)

    def step(self, loss: Callable[[], Any]) -> float:
        """Make one step.

        Args:
            loss: runs the program and returns its loss, a number or a tensor with one element. It is called twice and
                should compute the same each time.

        Returns:
            The mean of the two losses.

        Raises:
            NotFiniteLossError: a loss is infinite or NaN.
            TrainingError: `loss` cannot be called, or returns no number; or no loaded program takes one of the tensors. After these and any other error, also of `loss`,
                the tensors are as before the step.
        """
        if not callable(loss):
            raise TrainingError(f"MeZO: expected a function that returns the loss, found a {type(loss).__name__}")
        return float(self._native.step(lambda: _number("the loss", loss())))

    def __repr__(self) -> str:
        lr, eps, seed = self._native.options
        tensors, steps = count(len(self.names), "tensor"), count(self.steps, "step")
        return line("MeZO", self.cache.name, tensors, f"lr={lr:g}, eps={eps:g}, seed={seed}", steps)


def _names(names: Any) -> list[str]:
    try:
        chosen = [names] if isinstance(names, str) else list(names)
    except (TypeError, ValueError):
        chosen = [None]
    if not all(isinstance(name, str) and is_utf8(name) for name in chosen):
        raise TrainingError(f"MeZO: names must be those of tensors, not {names!r}")
    return chosen


def _number(what: str, value: Any) -> float:
    try:
        if not isinstance(value, str | bytes | bytearray):
            return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # torch raises RuntimeError for several elements
        pass
    raise TrainingError(f"MeZO: {what} must be a number, not a {type(value).__name__}")


def _count(what: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 64:
        raise TrainingError(f"MeZO: {what} must be an integer from 0 to 2**64 - 1, not {value!r}")
    return value
