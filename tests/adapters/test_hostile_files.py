"""Adapters whose bytes, metadata or records are wrong lead to errors of the library, never to a crash (B5, N1)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blobstore import BlobStore, save_file
from blobstore.adapters import (
    foundation_fingerprint,
    inspect_adapters,
    load_adapter,
    merge_adapter,
    read_adapter,
    set_adapter_strength,
)
from blobstore.core.memory.layout import ScalarType
from blobstore.errors import BlobStoreError
from blobstore.logical.records import ModelTensor, Operation, Record, Records, Step, records_key
from blobstore.runtime import BlobCache
from tests.adapters.caches import bits

NAMES = ["m.lora_a", "m.lora_b", "m.weight", "x", ""]
names = st.sampled_from(NAMES) | st.text(max_size=5)
numbers = st.sampled_from([0, 1, 2, 3, -1, 2**31, 2**32 + 1, 2**62, -(2**63), 2**63 - 1]) | st.integers(0, 20)
sources = st.builds(
    ModelTensor,
    names,
    st.sampled_from(list(ScalarType)),
    st.lists(numbers, max_size=4).map(tuple),
    st.lists(names, max_size=2).map(tuple),
)
steps = st.builds(
    Step,
    st.sampled_from(list(Operation)),
    st.lists(numbers, max_size=4).map(tuple),
    st.lists(st.floats(), max_size=2).map(tuple),
    st.lists(names, max_size=2).map(tuple),
)
keys = st.sampled_from(["m.lora_a", "m.lora_b", "m.lora_a@0", "m.lora_b@0", "gone"])
records = st.builds(
    Record,
    keys,
    st.sampled_from([0, 4, 24, 2**63]),
    st.lists(sources, min_size=1, max_size=3).map(tuple),
    st.lists(steps, max_size=3).map(tuple),
    auxiliary=st.booleans(),
    refusal=st.sampled_from(["", "", "a reason"]),
)
files = st.builds(
    Records,
    st.just("XnnpackBackend"),
    st.lists(records, max_size=4).map(tuple),
    st.lists(sources, max_size=2).map(tuple),
    st.lists(names, max_size=2).map(tuple),
    st.lists(names, max_size=2).map(tuple),
)


def use(path: Path, folder: Path) -> None:
    """Everything that takes an adapter works, or says what is wrong and changes nothing."""
    with BlobCache([folder / "foundation.ptd", folder / "adapter.ptd"]) as cache:
        before = bits(cache)
        for function in (load_adapter, merge_adapter):
            try:
                function(cache, path)
                set_adapter_strength(cache, 0.5)
            except BlobStoreError:
                pass
            cache.revert()
            assert bits(cache) == before
    try:
        adapter = read_adapter(path)
    except BlobStoreError:
        return
    adapter.problems()
    for name in adapter.contents:
        try:
            assert adapter.value(name)[0].shape == adapter.contents[name].sizes
        except BlobStoreError:
            pass
    inspect_adapters(folder / "foundation.ptd", path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    place = tmp_path_factory.mktemp("hostile")
    save_file({"m.weight": np.ones((3, 2), np.float32)}, place / "foundation.ptd")
    halves = {"m.lora_a": np.zeros((1, 2), np.float32), "m.lora_b": np.zeros((3, 1), np.float32)}
    save_file(halves, place / "adapter.ptd")
    return place


@pytest.mark.slow
@pytest.mark.long
@given(files, st.booleans(), st.sampled_from(["1", "-1e308", "1e-320"]))
@settings(max_examples=300)
def test_hostile_records(folder: Path, described: Records, with_layouts: bool, scale: str) -> None:
    """Records may say anything about blobs of any size."""
    store = BlobStore()
    for key, shape in (("m.lora_a", (1, 2)), ("m.lora_b", (3, 1))):
        data = np.ones(shape, np.float32)
        store.add(key, data if with_layouts else data.tobytes())
        store.add(f"{key}@0", np.arange(6, dtype=np.float32).tobytes())
    packed = described.pack()
    store.add(records_key(packed), packed)
    print_ = foundation_fingerprint(folder / "foundation.ptd")
    path = folder / "hostile.ptd"
    store.write_ptd(path, metadata={"blobstore.adapter.foundation": print_, "blobstore.adapter.scale": scale})
    use(path, folder)
