"""The measures of the soak: every mixture of weights differs from a complete commit, and growth from noise."""

import numpy as np
import pytest

from campaigns import network
from campaigns.soak.measure import ALLOWED, growth
from campaigns.soak.worker import Worker, WrongError


def compute(weights):
    hidden = network.INPUT @ weights["a.weight"].T + weights["a.bias"]
    return hidden @ weights["b.weight"].T + weights["b.bias"]


@pytest.mark.parametrize("value", [1, 2, 37, network.LARGEST])
def test_outputs_are_exact(value):
    assert set(compute(network.weights(value)).ravel().tolist()) == {network.expected(value)}
    assert Worker.value_of(float(network.expected(value))) == value


def test_any_mixture_of_two_commits_is_found():
    for old, new in ((1, 2), (2, 1), (7, 60), (59, 60)):
        for number in range(1, 15):
            chosen = [name for bit, name in enumerate(network.SHAPES) if number >> bit & 1]
            mixed = {**network.weights(old), **{name: network.weights(new)[name] for name in chosen}}
            with pytest.raises(WrongError):
                Worker.value_of(Worker.only(compute(mixed), "an output"))


def test_one_element_of_another_commit_is_found():
    with pytest.raises(WrongError):
        Worker.only(np.array([3, 3, 4], np.float32), "a reading")


def test_growth_differs_from_noise():
    flat = [dict.fromkeys(ALLOWED, 100 + number % 2) for number in range(30)]
    assert growth(flat) == {}
    leaking = [{**one, "descriptors": 100 + number} for number, one in enumerate(flat)]
    assert list(growth(leaking)) == ["descriptors"]
