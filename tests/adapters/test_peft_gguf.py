"""Adapters in GGUF, written by the `gguf` package as llama.cpp's converter does; PEFT's folders are the oracle (L2)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from blobstore import save_file
from blobstore.adapters import export_peft, import_peft, read_adapter
from blobstore.errors import AdapterError, BlobStoreError, InvalidFileError, LayoutError, UnsupportedDataError
from tests.adapters import test_peft_fused as phi
from tests.adapters.llama import NEIGHBOURS, executorch_llama, save_peft
from tests.adapters.test_peft import files, hf_foundation, peft_logits, safetensors_of
from tests.llm.families import neighbours

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def named(tensors: Mapping[str, Tensor], *, reordered: bool) -> dict[str, Tensor]:
    """PEFT's tensors under llama.cpp's names; q and k with the rows of Llama's checkpoints, if it reorders them."""
    made = {}
    for key, tensor in tensors.items():
        layer, module, half = re.fullmatch(r".*layers\.(\d+)\.(.*)\.lora_([AB])\.weight", key).groups()  # type: ignore[union-attr]
        moved = reordered and half == "B" and ("q_proj" in key or "k_proj" in key)
        rows = neighbours(tensor, NEIGHBOURS.head_dim) if moved else tensor
        made[f"blk.{layer}.{NAMES[module]}.weight.lora_{half.lower()}"] = rows
    return made


def write_gguf(
    path: Path,
    tensors: Mapping[str, Tensor],
    architecture: str,
    alpha: float | None = 6,
    more: Mapping[str, Any] | None = None,
    *,
    big_endian: bool = False,
    **fields: str,
) -> Path:
    """An adapter; `more` are fields beyond those that every adapter has."""
    import gguf

    order = gguf.GGUFEndian.BIG if big_endian else gguf.GGUFEndian.LITTLE
    writer = gguf.GGUFWriter(path, architecture, endianess=order)
    writer.add_string("general.type", fields.get("general", "adapter"))
    writer.add_string("adapter.type", fields.get("kind", "lora"))
    if alpha is not None:
        writer.add_float32("adapter.lora.alpha", alpha)
    for key, value in (more or {}).items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for name, tensor in tensors.items():
        if tensor.dtype is torch.bfloat16:
            data = tensor.contiguous().view(torch.uint8).numpy()
            writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(name, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def check_same_import(folder: Path, gguf: Path, peft: Path, **options: Any) -> None:
    """Both give the same adapter, `a.ptd` of the former and `b.ptd` of the latter."""
    read = []
    for name, source in (("a.ptd", gguf), ("b.ptd", peft)):
        import_peft(source, folder / name, **options)
        read.append(read_adapter(folder / name))
    one, other = read
    assert one.scale == other.scale
    assert one.contents.keys() == other.contents.keys()
    assert all(np.array_equal(one.value(name)[0], other.value(name)[0]) for name in one.contents)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_an_adapter_of_a_llama(tmp_path: Path, dtype: torch.dtype) -> None:
    """The tensors are those of PEFT's folder, with a rank of its own for each, and so is the folder that exporting
    gives (L2)."""
    save_peft(tmp_path / "peft", dtype=dtype, rank_pattern={"up_proj": 2})
    foundation, lowered = files(tmp_path, executorch_llama(hf_rope=False))
    gguf = write_gguf(tmp_path / "a.gguf", named(safetensors_of(tmp_path / "peft"), reordered=True), "llama")
    for like in (None, lowered):
        check_same_import(tmp_path, gguf, tmp_path / "peft", foundation=foundation, like=like)
    export_peft(tmp_path / "a.ptd", tmp_path / "again")
    again, tensors = safetensors_of(tmp_path / "again"), safetensors_of(tmp_path / "peft")
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[key], tensor) and again[key].dtype is dtype for key, tensor in tensors.items())
    if dtype is torch.float32:
        torch.testing.assert_close(peft_logits(tmp_path / "again"), peft_logits(tmp_path / "peft"))


def test_an_adapter_of_phi(tmp_path: Path) -> None:
    """llama.cpp keeps its fused modules, and the order of its rows (L2)."""
    phi.save_peft(tmp_path / "peft")
    gguf = write_gguf(tmp_path / "a.gguf", named(safetensors_of(tmp_path / "peft"), reordered=False), "phi3")
    check_same_import(tmp_path, gguf, tmp_path / "peft", foundation=phi.foundation(tmp_path))


def test_rows_that_cannot_be_brought_back(tmp_path: Path) -> None:
    """A program that rotates halves needs Hugging Face's order, and the file does not tell the size of a head."""
    save_peft(tmp_path / "peft")
    gguf = write_gguf(tmp_path / "a.gguf", named(safetensors_of(tmp_path / "peft"), reordered=True), "llama")
    message = r"a\.gguf: the rows of 'model.layers.0.self_attn.[qk]_proj' lie in llama"
    foundation, lowered = files(tmp_path, executorch_llama(hf_rope=True))
    with pytest.raises(AdapterError, match=message):
        import_peft(gguf, tmp_path / "a.ptd", foundation=foundation, like=lowered)
    with pytest.raises(AdapterError, match=message):
        import_peft(gguf, tmp_path / "a.ptd", foundation=hf_foundation(tmp_path))
    assert not (tmp_path / "a.ptd").exists()


@pytest.mark.parametrize(
    ("change", "fields", "error", "message"),
    [
        ({}, {"general": "model"}, AdapterError, "not a LoRA adapter"),
        ({}, {"kind": "control_vector"}, AdapterError, "not a LoRA adapter"),
        ({}, {"architecture": "mamba"}, AdapterError, "the architecture 'mamba' is not known"),
        ({"token_embd.weight.lora_a": (2, 4)}, {}, AdapterError, "'token_embd.weight' .* an adapter of an embedding"),
        ({"blk.0.ssm_in.weight.lora_a": (2, 4)}, {}, AdapterError, "'blk.0.ssm_in.weight' .* not known here"),
        ({"output_norm.weight": (4, 4)}, {}, AdapterError, "'output_norm.weight' .* no part of a LoRA pair"),
        ({"blk.1.attn_v.weight.lora_a": (2, 4)}, {}, AdapterError, "has lora_a, and no lora_b"),
        ({"blk.0.attn_v.weight.lora_b": (4, 3)}, {}, LayoutError, "must be matrices with one rank"),
    ],
)
def test_what_cannot_be_honoured(
    tmp_path: Path, change: Any, fields: Any, error: type[BlobStoreError], message: str
) -> None:
    """The message has the file and the name in it; nothing is written."""
    sizes = {"blk.0.attn_v.weight.lora_a": (2, 4), "blk.0.attn_v.weight.lora_b": (4, 2), **change}
    architecture = fields.pop("architecture", "llama")
    tensors = {name: torch.ones(size) for name, size in sizes.items()}
    gguf = write_gguf(tmp_path / "a.gguf", tensors, architecture, **fields)
    save_file({"layers.0.attention.wv.weight": torch.ones(4, 4)}, tmp_path / "f.ptd")
    with pytest.raises(error, match=rf"a\.gguf: .*{message}"):
        import_peft(gguf, tmp_path / "a.ptd", foundation=tmp_path / "f.ptd")
    assert not (tmp_path / "a.ptd").exists()


def small(tmp_path: Path, **options: Any) -> Path:
    """An adapter with ranks 2 and 4, and beside it the foundation `f.ptd`."""
    save_file({f"layers.{n}.attention.wv.weight": torch.ones(4, 4) for n in (0, 1)}, tmp_path / "f.ptd")
    sizes = {(0, "a"): (2, 4), (0, "b"): (4, 2), (1, "a"): (4, 4), (1, "b"): (4, 4)}
    tensors = {f"blk.{n}.attn_v.weight.lora_{half}": torch.ones(size) for (n, half), size in sizes.items()}
    return write_gguf(tmp_path / "a.gguf", tensors, "qwen2", **options)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("adapter.alora.invocation_tokens", [64, 65], "the adapter acts on a part of the tokens only"),
        ("adapter.lora.dropout", 0.5, "this field is unknown to this version"),
        ("adapter.r", 4, "this field is unknown to this version"),
        ("adapter.lora.something_new", False, ""),
        ("adapter.lora.task_name", "a task", ""),
        ("adapter.lora.prompt_prefix", "a prefix", ""),
        ("general.name", "a name", ""),
    ],
)
def test_fields_are_decided_as_those_of_peft(tmp_path: Path, field: str, value: Any, message: str) -> None:
    """What may change what the adapter computes is refused by its name, unless it is switched off (L2)."""
    adapter = small(tmp_path, more={field: value})
    if not message:
        import_peft(adapter, tmp_path / "a.ptd", foundation=tmp_path / "f.ptd")
        return
    with pytest.raises(AdapterError, match=rf"a\.gguf: {re.escape(field)} cannot be honoured: {message}"):
        import_peft(adapter, tmp_path / "a.ptd", foundation=tmp_path / "f.ptd")
    assert not (tmp_path / "a.ptd").exists()


@pytest.mark.parametrize("alpha", [0, None])
def test_an_adapter_without_alpha(tmp_path: Path, alpha: float | None) -> None:
    """llama.cpp's scale is then 1, for every rank."""
    import_peft(small(tmp_path, alpha=alpha), tmp_path / "a.ptd", foundation=tmp_path / "f.ptd")
    read = read_adapter(tmp_path / "a.ptd")
    for n, rank in ((0, 2), (1, 4)):
        a, b = (read.value(f"layers.{n}.attention.wv.lora_{half}.weight")[0] for half in "ab")
        assert np.array_equal(read.scale * (b @ a), np.full((4, 4), rank))


def test_a_big_endian_adapter(tmp_path: Path) -> None:
    """It is refused, and its numbers are not taken for others."""
    adapter = small(tmp_path, big_endian=True)
    with pytest.raises(UnsupportedDataError, match=r"a\.gguf: a big-endian file"):
        import_peft(adapter, tmp_path / "a.ptd", foundation=tmp_path / "f.ptd")
    assert not (tmp_path / "a.ptd").exists()


def test_files_that_are_no_gguf(tmp_path: Path) -> None:
    save_file({"layers.0.attention.wv.weight": torch.ones(4, 4)}, tmp_path / "f.ptd")
    sizes = {"blk.0.attn_v.weight.lora_a": (2, 4), "blk.0.attn_v.weight.lora_b": (4, 2)}
    whole = write_gguf(tmp_path / "w.gguf", {n: torch.ones(s) for n, s in sizes.items()}, "llama").read_bytes()
    import_peft(tmp_path / "w.gguf", tmp_path / "w.ptd", foundation=tmp_path / "f.ptd")
    for data in (b"", b"GGUF", b"\0" * 64, whole[:60], whole[:-8], b"\xff" * 200):
        (tmp_path / "a.gguf").write_bytes(data)
        with pytest.raises(InvalidFileError, match=r"a\.gguf"):
            import_peft(tmp_path / "a.gguf", tmp_path / "a.ptd", foundation=tmp_path / "f.ptd")
    (tmp_path / "a.gguf").unlink()
    with pytest.raises(BlobStoreError, match=r"a\.gguf: No such file"):
        import_peft(tmp_path / "a.gguf", tmp_path / "a.ptd", foundation=tmp_path / "f.ptd")
    assert not (tmp_path / "a.ptd").exists()
