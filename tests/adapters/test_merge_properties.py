"""Merging and undoing restores every bit, for all weights and adapters (B3)."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blobstore import save_file
from blobstore.adapters import merge_adapter
from blobstore.runtime import BlobCache, make_working_copy
from tests.adapters.caches import bits

DTYPES = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}


@st.composite
def cases(draw: Any) -> Any:
    out, rank = draw(st.integers(1, 9)), draw(st.integers(1, 16))
    inner = draw(st.integers(1, 14) | st.sampled_from([70, 3000]))  # around the tiles, and more than one block
    return {
        "shape": (out, rank, inner),
        "dtype": draw(st.sampled_from(list(DTYPES))),
        "adapter_dtype": draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16])),
        "alphas": draw(st.lists(st.floats(-4, 4), min_size=1, max_size=4)),
        "dirty": draw(st.booleans()),
        "mode": draw(st.sampled_from(["private", "copy", "shared"])),
        "seed": draw(st.integers(0, 2**16)),
    }


@given(cases())
@settings(max_examples=60)
def test_merge_then_undo(case: Any) -> None:
    generator = torch.Generator().manual_seed(case["seed"])
    out, rank, inner = case["shape"]
    dtype = case["dtype"]
    weight = torch.randn(out, inner, generator=generator).to(dtype)
    weight[0, 0] = -0.0
    with tempfile.TemporaryDirectory() as folder:
        save_file({"m.weight": weight, "other": torch.ones(3)}, Path(folder, "model.ptd"))
        make_working_copy(Path(folder, "model.ptd"), Path(folder, "w.ptd"))
        with BlobCache(Path(folder, "w.ptd"), case["mode"]) as cache:
            if case["dirty"]:
                weight = torch.randn(out, inner, generator=generator).to(dtype)
                cache.update({"m.weight": weight})
            states, handles, expected = [], [], weight
            for alpha in case["alphas"]:
                a = torch.randn(rank, inner, generator=generator).to(case["adapter_dtype"])
                b = torch.randn(out, rank, generator=generator).to(case["adapter_dtype"])
                states.append(bits(cache))
                handles.append(merge_adapter(cache, {"m.lora_a": a, "m.lora_b": b}, alpha, scale=0.5))
                wide = DTYPES[dtype]
                expected = (expected.to(wide) + alpha * 0.5 * (b.to(wide) @ a.to(wide))).to(dtype)
                tolerance = 4 * torch.finfo(dtype).eps
                np.testing.assert_allclose(
                    cache.torch("m.weight").to(torch.float64), expected.to(torch.float64), tolerance, 10 * tolerance
                )
                expected = cache.torch("m.weight").clone()
            for handle, state in zip(reversed(handles), reversed(states), strict=True):
                handle.undo()
                assert bits(cache) == state
