"""Folders of PEFT that programs take as they are, without an import. PEFT's own models are the oracles (L2, L3)."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file as load_safetensors

from blobstore import adapters
from blobstore.errors import AdapterError, BlobStoreError, FileAccessError, InvalidFileError, KeyNotFoundError
from tests.adapters.caches import X, bits, eager, merged, open_lora, open_plain
from tests.adapters.nets import RANK, SCALE, LoraNet, adapter_of, make, with_adapter, write_peft

NAME = "adapter_model.safetensors"


def test_a_folder_instead_of_a_file(lora: Any, tmp_path: Path) -> None:
    """It is exchanged, scaled and taken back; the sum with another one has the strength of each (L2)."""
    one = write_peft(tmp_path / "one", adapter_of(1))
    cache, method = open_lora(lora)
    first = method(*X).clone()
    before = bits(cache)
    adapters.load_adapter(cache, one, program_scale=SCALE)
    assert torch.allclose(method(*X), eager(1), atol=1e-5)
    adapters.set_adapter_strength(cache, 0)
    assert torch.allclose(method(*X), merged(1, 0), atol=1e-5)
    adapters.set_adapter_strength(cache, 1)
    assert torch.allclose(method(*X), eager(1), atol=1e-5)
    cache.revert()
    assert bits(cache) == before
    assert torch.equal(method(*X), first)
    two = write_peft(tmp_path / "two", adapter_of(2, rank=1))
    bound = tmp_path / "bound.ptd"
    adapters.save_adapter(bound, adapter_of(3, rank=2), foundation=lora.foundation, scale=SCALE)
    adapters.load_adapters(cache, [bound, (two, 0.5)], program_scale=SCALE)
    both = {
        name: torch.cat([adapter_of(3, rank=2)[name], tensor * (0.5 if "lora_b" in name else 1)], int("lora_b" in name))
        for name, tensor in adapter_of(2, rank=1).items()
    }
    with torch.no_grad():
        assert torch.allclose(method(*X), with_adapter(make(LoraNet), both)(*X), atol=1e-5)
    adapters.set_adapter_strengths(cache, [0, 0])
    assert torch.allclose(method(*X), merged(1, 0), atol=1e-5)


def test_a_folder_is_merged_and_taken_out(plain: Any, tmp_path: Path) -> None:
    """Into the weights of a program without branches, also under names that the caller gives (L2)."""
    folder = write_peft(tmp_path / "peft", adapter_of(1))
    cache, method = open_plain(plain)
    before = bits(cache)
    done = adapters.merge_adapter(cache, folder)
    assert torch.allclose(method(*X), merged(1, SCALE), atol=1e-4)
    done.undo()
    assert bits(cache) == before
    renamed = write_peft(tmp_path / "renamed", {name.replace("l.0", "x.y"): t for name, t in adapter_of(1).items()})
    with pytest.raises(KeyNotFoundError, match=r"renamed: module 'x\.y' has no adapter in"):
        adapters.merge_adapter(cache, renamed)
    adapters.merge_adapter(cache, renamed, names={"x.y": "l.0.weight"})
    assert torch.allclose(method(*X), merged(1, SCALE), atol=1e-4)


def test_what_it_says_of_itself(lora: Any, tmp_path: Path) -> None:
    """Reading a folder gives PEFT's own names and numbers; what needs a file says so (L2)."""
    folder = write_peft(tmp_path / "peft", adapter_of(1))
    adapter = adapters.read_adapter(folder)
    assert (adapter.scale, adapter.foundation, adapter.metadata) == (SCALE, None, {})
    assert [pair.module for pair in adapter.pairs] == ["base_model.model.l.0", "base_model.model.l.1"]
    tensors = load_safetensors(folder / NAME)
    assert adapter.contents.keys() == tensors.keys()
    assert all(torch.equal(torch.tensor(adapter.tensors[name]), tensor) for name, tensor in tensors.items())
    assert adapter.nbytes == sum(tensor.nbytes for tensor in tensors.values())
    assert adapter.problems() == []
    with pytest.raises(AdapterError, match="peft: this is a folder of PEFT"):
        _ = adapter.blobs
    with pytest.raises(AdapterError, match="peft: records no foundation"):
        adapters.combine_adapters([folder], tmp_path / "sum.ptd", foundation=lora.foundation)


def test_folders_that_cannot_be_read(lora: Any, tmp_path: Path) -> None:
    """The message names the file; what was loaded stays."""
    cache, method = open_lora(lora)
    first = method(*X).clone()
    folder = write_peft(tmp_path / "peft", adapter_of(1))

    def refused(error: type[BlobStoreError], match: str) -> None:
        with pytest.raises(error, match=match):
            adapters.load_adapter(cache, folder, program_scale=SCALE)
        assert cache.dirty == ()
        assert torch.equal(method(*X), first)

    whole = (folder / NAME).read_bytes()
    for bad in (b"", whole[:7], whole[:100], whole[:-1], b"\xff" * 64, whole + b"x"):
        (folder / NAME).write_bytes(bad)
        refused(InvalidFileError, rf"peft/{NAME}")
    (folder / NAME).unlink()
    refused(FileAccessError, rf"peft/{NAME}")
    (folder / NAME).write_bytes(whole)
    for text in ("", "[]", "{", '"LORA"', "[" * 100_000, "\xff", '{"peft_type": "LORA", "r": 1e3}', "{} x"):
        (folder / "adapter_config.json").write_bytes(text.encode("latin-1"))
        refused(InvalidFileError, r"peft/adapter_config\.json")
    (folder / "adapter_config.json").unlink()
    refused(FileAccessError, r"peft/adapter_config\.json")
    shutil.rmtree(folder)
    refused(FileAccessError, "peft")
    write_peft(folder, adapter_of(1, rank=RANK + 1))
    refused(AdapterError, r"peft: module 'l\.0' has rank 4, but of the 3 in")
    shutil.rmtree(folder)
    tensors = adapter_of(1)
    tensors["l.0.lora_b.weight"][0, 0] = float("nan")
    write_peft(folder, tensors)
    refused(BlobStoreError, "not finite")
    shutil.rmtree(folder)
    write_peft(folder, {name: tensor.to(torch.int32) for name, tensor in adapter_of(1).items()})
    refused(BlobStoreError, "has dtype I32, expected a float")


def test_a_file_that_was_truncated_since(lora: Any, tmp_path: Path) -> None:
    """The strength cannot be changed any more, and the process lives."""
    folder = write_peft(tmp_path / "peft", adapter_of(1))
    cache, method = open_lora(lora)
    adapters.load_adapter(cache, folder, program_scale=SCALE)
    (folder / NAME).write_bytes(b"")
    with pytest.raises(FileAccessError, match=NAME):
        adapters.set_adapter_strength(cache, 0.5)
    assert torch.allclose(method(*X), eager(1), atol=1e-5)
