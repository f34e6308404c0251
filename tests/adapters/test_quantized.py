"""Programs with int8 weights: adapters are quantized with the recorded scales (U2, X1)."""

from pathlib import Path
from typing import Any

import pytest
import torch

from blobstore.adapters import load_adapters, merge_adapter, save_adapter, set_adapter_strengths
from blobstore.errors import UpdateError
from blobstore.lowering.export import quiet
from blobstore.runtime import BlobCache, Program
from tests.adapters.caches import bits
from tests.adapters.nets import SCALE, LoraNet, PlainNet, adapter_of, make, with_adapter
from tests.lowering.live import close, inputs, lower_exported

pytestmark = pytest.mark.long


def quantized(module: torch.nn.Module, example: Any, folder: Path) -> tuple[BlobCache, Any]:
    """A cache of the module, lowered with dynamic int8 quantization, and the method on it."""
    with quiet():
        from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
            XNNPACKQuantizer,
            get_symmetric_quantization_config,
        )
        from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

        from blobstore.lowering import restore_names

        quantizer = XNNPACKQuantizer().set_global(
            get_symmetric_quantization_config(is_per_channel=True, is_dynamic=True)
        )
        prepared = prepare_pt2e(torch.export.export(module, example, strict=True).module(), quantizer)
        prepared(*example)
        converted = convert_pt2e(prepared)
        restore_names(converted, module)
        exported = torch.export.export(converted, example, strict=True)
    path = lower_exported(exported, folder)
    cache = BlobCache(folder / "model.ptd")
    return cache, Program(path, cache).method()


def test_several_on_a_quantized_foundation(tmp_path: Path) -> None:
    """Two adapters whose ranks together are those of one give its blobs, to the bit (L3)."""
    example, whole = inputs(3, 16), adapter_of(1)
    cache, method = quantized(with_adapter(make(LoraNet), whole), example, tmp_path)
    before = bits(cache)
    parts = {
        "first": {n: t[:1] if "lora_a" in n else t[:, :1] for n, t in whole.items()},
        "rest": {n: t[1:] if "lora_a" in n else t[:, 1:] for n, t in whole.items()},
    }
    for name, tensors in parts.items():
        save_adapter(tmp_path / f"{name}.ptd", tensors, foundation=tmp_path / "model.ptd", scale=SCALE)
    load_adapters(cache, [])
    none = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    with torch.no_grad():
        close(method(*example), with_adapter(make(LoraNet), none)(*example), 0.05)
    load_adapters(cache, [tmp_path / "first.ptd", tmp_path / "rest.ptd"])
    assert bits(cache) == before
    set_adapter_strengths(cache, [0.5, 0.5])
    half = {name: tensor / 2 if "lora_b" in name else tensor for name, tensor in whole.items()}
    with torch.no_grad():
        close(method(*example), with_adapter(make(LoraNet), half)(*example), 0.05)


def test_merge_needs_the_float_weights(tmp_path: Path) -> None:
    """The cache cannot give the float weights back, so the caller must (X1, B3)."""
    example, module = inputs(3, 16), make(PlainNet)
    cache, method = quantized(module, example, tmp_path)
    before, small = bits(cache), {name: tensor / 5 for name, tensor in adapter_of(1).items()}
    with pytest.raises(
        UpdateError,
        match=r"cannot be merged into 'l.0.weight' as it is: .*quantize channel; give its float tensor in `weights`$",
    ):
        merge_adapter(cache, small, scale=SCALE)
    assert bits(cache) == before
    state = module.state_dict()
    handle = merge_adapter(cache, small, scale=SCALE, weights=state)
    with torch.no_grad():
        for i, layer in enumerate(module.l):
            layer.weight += SCALE * (small[f"l.{i}.lora_b.weight"] @ small[f"l.{i}.lora_a.weight"])
        close(method(*example), module(*example), 0.1)
    handle.undo()
    assert bits(cache) == before
