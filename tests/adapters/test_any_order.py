"""Loading, scaling, merging, undoing, updating and reverting in any order leaves exactly the bytes of a model (N1, B3)."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from blobstore import save_file
from blobstore.adapters import load_adapter, merge_adapter, save_adapter, set_adapter_strength
from blobstore.errors import AdapterError
from blobstore.runtime import BlobCache, make_working_copy
from tests.adapters.caches import bits

pytestmark = pytest.mark.long

SHAPES = {"m.lora_a": (2, 5), "m.lora_b": (7, 2)}
WEIGHTS = ("m.weight", "v.weight")
ADAPTERS = 3
strengths = st.sampled_from([0.0, 0.5, 1.0, -1.0, 1 / 3, 1e-3])


def matrices(seed: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {name: generator.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}


class AnyOrder(RuleBasedStateMachine):
    """The model is a dict of bytes; `loaded` and `merged` are what the cache must know."""

    @initialize(mode=st.sampled_from(["private", "copy", "shared"]))
    def open(self, mode: Any) -> None:
        self.folder = Path(tempfile.mkdtemp())
        weights = {name: np.random.default_rng(9).standard_normal((7, 5), np.float32) for name in WEIGHTS}
        foundation, adapter = self.folder / "foundation.ptd", self.folder / "adapter.ptd"
        save_file(weights, foundation)
        save_file({name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}, adapter)
        for seed in range(ADAPTERS):
            save_adapter(self.folder / f"{seed}.ptd", matrices(seed), foundation=foundation, scale=1)
        self.mode = mode
        if mode == "shared":
            make_working_copy([foundation, adapter], self.folder / "work.ptd")
        files = [self.folder / "work.ptd"] if mode == "shared" else [foundation, adapter]
        self.cache = BlobCache(files, mode)
        self.file = bits(self.cache)
        self.expected = dict(self.file)
        self.loaded: tuple[int, dict[str, bytes]] | None = None
        self.merged: list[
            tuple[Any, str, bytes, bytes, bytes]
        ] = []  # handle, weight, bytes before, after, and unmerged

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self.cache.close()
            shutil.rmtree(self.folder)

    def _unmerged(self, weight: str) -> bytes:
        """A weight without the adapters that are merged into it."""
        found = self.expected[weight]
        for _, name, _, after, unmerged in self.merged:
            if (name, after) == (weight, found):
                return unmerged
        return found

    def _is_foundation(self) -> bool:
        return all(self._unmerged(weight) == self.file[weight] for weight in WEIGHTS)

    def _lora(self, seed: int, strength: float) -> None:
        tensors = matrices(seed)
        self.expected["m.lora_a"] = tensors["m.lora_a"].tobytes()
        b = tensors["m.lora_b"]
        self.expected["m.lora_b"] = (b if strength == 1 else b * np.float32(strength)).tobytes()
        self.loaded = (seed, {name: self.expected[name] for name in SHAPES})

    @rule(seed=st.integers(0, ADAPTERS - 1), strength=strengths)
    def load(self, seed: int, strength: float) -> None:
        if self._is_foundation():
            load_adapter(self.cache, self.folder / f"{seed}.ptd", strength=strength)
            self._lora(seed, strength)
        else:
            with pytest.raises(AdapterError, match="made for foundation"):
                load_adapter(self.cache, self.folder / f"{seed}.ptd", strength=strength)

    @rule(strength=strengths)
    def scale(self, strength: float) -> None:
        intact = self.loaded is not None and all(self.expected[name] == data for name, data in self.loaded[1].items())
        if self.loaded is not None and intact and (strength == 0 or self._is_foundation()):
            set_adapter_strength(self.cache, strength)
            self._lora(self.loaded[0], strength)
        else:
            why = (
                "no adapter was loaded" if self.loaded is None else "made for foundation" if intact else "changed after"
            )
            with pytest.raises(AdapterError, match=why):
                set_adapter_strength(self.cache, strength)

    @rule(weight=st.sampled_from(WEIGHTS), seed=st.integers(0, 50), alpha=st.sampled_from([1.0, -0.5, 0.0]))
    def merge(self, weight: str, seed: int, alpha: float) -> None:
        before, tensors = self.expected[weight], matrices(seed)
        handle = merge_adapter(self.cache, tensors, alpha, names={"m": weight})
        assert handle.weights == (weight,)
        product = tensors["m.lora_b"].astype(np.float64) @ tensors["m.lora_a"].astype(np.float64)
        found = self.cache.numpy(weight)
        wanted = np.frombuffer(before, np.float32).reshape(7, 5) + alpha * product
        np.testing.assert_allclose(found, wanted, 1e-5, 1e-5)
        unmerged = self._unmerged(weight)
        self.expected[weight] = found.tobytes()
        self.merged.append((handle, weight, before, found.tobytes(), unmerged))

    @precondition(lambda self: self.merged)
    @rule(data=st.data())
    def undo(self, data: Any) -> None:
        number = data.draw(st.integers(0, len(self.merged) - 1))
        handle, weight, before, after, _ = self.merged[number]
        if self.expected[weight] == after:
            handle.undo()
            self.expected[weight] = before
            del self.merged[number]
        with pytest.raises(AdapterError):  # it was undone already, or something came later
            handle.undo()

    @rule(key=st.sampled_from([*WEIGHTS, *SHAPES]), value=st.sampled_from([0.0, -0.0, 1.5]))
    def update(self, key: str, value: float) -> None:
        data = np.full(SHAPES.get(key, (7, 5)), value, np.float32)
        self.cache.update({key: data})
        self.expected[key] = data.tobytes()

    @precondition(lambda self: self.mode != "shared")
    @rule(keys=st.none() | st.sets(st.sampled_from([*WEIGHTS, *SHAPES])))
    def revert(self, keys: set[str] | None) -> None:
        self.cache.revert(keys)
        for key in self.file if keys is None else keys:
            self.expected[key] = self.file[key]

    @invariant()
    def bytes_are_those_of_the_model(self) -> None:
        if hasattr(self, "cache"):
            assert bits(self.cache) == self.expected


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=40, stateful_step_count=30)
