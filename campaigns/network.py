"""A network whose output shows the weights that it was computed from.

All its weights have one value. With that value `v` and an input of ones, the hidden layer is 65 v and the output
4160 v² + v. For whole numbers up to `LARGEST` float32 computes this exactly, in any order, so a call that sees weights
of two commits cannot give an output that belongs to one commit.
"""

from collections.abc import Iterable

import numpy as np

LARGEST = 60
SHAPES = {"a.weight": (64, 64), "a.bias": (64,), "b.weight": (16, 64), "b.bias": (16,)}
INPUT = np.ones((2, 64), np.float32)


def weights(value: int) -> dict[str, np.ndarray]:
    """All weights of the network with one value."""
    return {name: np.full(shape, value, np.float32) for name, shape in SHAPES.items()}


def expected(value: int) -> int:
    """Every element of the output for weights of this value."""
    return 4160 * value * value + value


def weight_keys(keys: Iterable[str]) -> list[str]:
    """The keys of a data file that are weights, without the records about them."""
    return [key for key in keys if not key.startswith("metadata.")]
