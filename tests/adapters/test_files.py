"""Adapter files: what they record, what is a foundation, which tensors go where (D2)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from blobstore import BlobStore, load_file, open_ptd, save_file
from blobstore.adapters import AdapterTags, bind_adapter, foundation_fingerprint, read_adapter, save_adapter
from blobstore.errors import (
    AdapterError,
    BlobStoreError,
    FileAccessError,
    IntegrityError,
    InvalidFileError,
    InvalidTagError,
    LayoutError,
    OutputPathError,
    UnsupportedDataError,
    UpdateError,
)
from tests.adapters.nets import RANK, adapter_of


@pytest.fixture
def foundation(tmp_path: Path) -> Path:
    save_file({"l.0.weight": torch.arange(384.0).reshape(24, 16), "l.1.weight": torch.ones(8, 24)}, tmp_path / "f.ptd")
    return tmp_path / "f.ptd"


# Tags


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("l.0.lora_a.weight", "adapter"),
        ("base_model.model.l.0.lora_A.default.weight", "adapter"),
        ("l.0.LORA_B.weight", "adapter"),
        ("l.0.lora_a", "adapter"),
        ("lora_b.weight", "adapter"),
        ("l.0.weight", "foundation"),
        ("l.0.base.weight", "foundation"),
        ("explora_a.weight", "foundation"),
        ("l.lora_alpha", "foundation"),
    ],
)
def test_tags(name: str, file: str) -> None:
    """The same for a name and for the node that export makes of it."""
    tags = AdapterTags()
    assert tags(name) == file
    node = name.lower().replace(".", "_")
    assert tags(SimpleNamespace(op="placeholder", name=f"p_{node}")) == file
    assert tags(SimpleNamespace(op="get_attr", name=node)) == file


def test_own_tags() -> None:
    seen = []
    tags = AdapterTags("base.ptd", "side", is_adapter=lambda name: not seen.append(name) and name.endswith("_down"))
    assert tags("L.0.down") == tags(SimpleNamespace(op="placeholder", name="p_l_0_down")) == "side"
    assert tags("l.0.up") == "base"
    assert seen == ["l_0_down", "l_0_down", "l_0_up"]


@pytest.mark.parametrize("names", [("a/b", "c"), ("", "c"), ("a", ".."), ("a", "a"), ("a.ptd", "a"), ("a", 3)])
def test_tags_that_are_no_files(names: Any) -> None:
    with pytest.raises(InvalidTagError):
        AdapterTags(*names)


def test_tags_split_a_lowering(lora: Any) -> None:
    assert all("lora" in key or key.startswith("metadata.") for key in open_ptd(lora.adapter))
    assert not any("lora" in key for key in open_ptd(lora.foundation))
    adapter = read_adapter(lora.adapter)
    assert (adapter.foundation, adapter.scale) == (None, None)
    assert {name: array.shape for name, array in adapter.tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in adapter_of(0).items()
    }


# Fingerprints


def test_fingerprint_is_of_the_contents(foundation: Path, tmp_path: Path) -> None:
    expected = foundation_fingerprint(foundation)
    tensors = load_file(foundation)
    save_file(dict(reversed(tensors.items())), tmp_path / "again.ptd", metadata={"made": "later"})
    assert foundation_fingerprint(tmp_path / "again.ptd") == expected
    save_file({**tensors, **adapter_of(1)}, tmp_path / "both.ptd")
    assert foundation_fingerprint(tmp_path / "both.ptd") == expected
    for name, tensor in tensors.items():
        save_file({name: tensor}, tmp_path / f"{name}.ptd")
    assert foundation_fingerprint([tmp_path / f"{name}.ptd" for name in tensors]) == expected


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t | {"l.1.weight": t["l.1.weight"] * 2},
        lambda t: t | {"l.1.weight": t["l.1.weight"].reshape(24, 8)},
        lambda t: t | {"l.1.weight": t["l.1.weight"].view(torch.int32)},
        lambda t: t | {"more": torch.ones(1)},
        lambda t: {"l.0.weight": t["l.0.weight"], "l.2.weight": t["l.1.weight"]},
    ],
)
def test_fingerprint_tells_foundations_apart(foundation: Path, tmp_path: Path, change: Any) -> None:
    save_file(change(load_file(foundation)), tmp_path / "other.ptd")
    assert foundation_fingerprint(tmp_path / "other.ptd") != foundation_fingerprint(foundation)


def test_fingerprint_of_executorch_s_file_and_of_ours(lora: Any, tmp_path: Path) -> None:
    """That without digests is hashed, this one tells its own."""
    store = BlobStore()
    store.merge(open_ptd(lora.foundation))
    store.write_ptd(tmp_path / "ours.ptd")
    assert not open_ptd(lora.foundation).has_digests
    assert foundation_fingerprint(lora.foundation) == foundation_fingerprint(tmp_path / "ours.ptd")


def test_known_fingerprint(tmp_path: Path) -> None:
    """As docs/format.md defines it, put together by hand."""
    import struct

    import xxhash

    data = np.arange(3, dtype=np.float32)
    store = BlobStore()
    store.add("b", data)
    store.add("a", b"xyz")
    store.write_ptd(tmp_path / "f.ptd")
    text = b"BSFOUND0"
    text += struct.pack("<I", 1) + b"a" + b"\xff" + struct.pack("<Q", 3) + xxhash.xxh3_128_digest(b"xyz")
    text += struct.pack("<I", 1) + b"b" + b"\x06\x01" + struct.pack("<Q", 3) + b"\x00"
    text += struct.pack("<Q", 12) + xxhash.xxh3_128_digest(data.tobytes())
    assert foundation_fingerprint(tmp_path / "f.ptd") == xxhash.xxh3_128_hexdigest(text)


# Files


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_save_and_read(foundation: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {name: torch.nn.Parameter(tensor.to(dtype)) for name, tensor in adapter_of(1).items()}
    tensors["head.bias"] = torch.nn.Parameter(torch.ones(2))
    size = save_adapter(tmp_path / "a.ptd", tensors, foundation=foundation, scale=1 / 3, metadata={"made": "here"})
    assert size == (tmp_path / "a.ptd").stat().st_size
    adapter = read_adapter(tmp_path / "a.ptd")
    assert (adapter.scale, adapter.metadata) == (1 / 3, {"made": "here"})
    assert adapter.foundation == foundation_fingerprint(foundation)
    assert [(p.module, p.rank, p.in_features, p.out_features) for p in adapter.pairs] == [
        ("l.0", RANK, 16, 24),
        ("l.1", RANK, 24, 8),
    ]
    for name, found in adapter.tensors.items():
        assert torch.equal(torch.as_tensor(np.array(found) if isinstance(found, np.ndarray) else found), tensors[name])
    assert torch.equal(load_file(tmp_path / "a.ptd")["l.0.lora_a.weight"], tensors["l.0.lora_a.weight"].detach())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"l.0.lora_a.weight": None}, AdapterError, "a.ptd: 'l.0.lora_b.weight' has no lora_a beside it"),
        ({"l.0.lora_a.weight": torch.zeros(RANK + 1, 16)}, LayoutError, "a.ptd: .* has rank 4, .* rank 3"),
        ({"l.0.lora_a.weight": torch.zeros(RANK, 4, 4)}, LayoutError, "a.ptd: .* are not two matrices"),
        ({"l.0.lora_a.weight": torch.full((RANK, 16), float("nan"))}, UpdateError, "a.ptd: .*not finite"),
        (
            {"l.0.lora_a.x.weight": torch.zeros(RANK, 16), "l.0.lora_b.x.weight": torch.zeros(24, RANK)},
            AdapterError,
            "module 'l.0' has two pairs",
        ),
        (dict.fromkeys(adapter_of(1)), AdapterError, "no tensor has a name"),
        ({"l.0.lora_a.weight": "text"}, UnsupportedDataError, "expected a torch tensor"),
    ],
)
def test_what_is_not_saved(
    foundation: Path, tmp_path: Path, change: Any, error: type[BlobStoreError], message: str
) -> None:
    tensors = {name: t for name, t in {**adapter_of(1), **change}.items() if t is not None}
    with pytest.raises(error, match=message):
        save_adapter(tmp_path / "a.ptd", tensors, foundation=foundation, scale=1)
    assert not (tmp_path / "a.ptd").exists()


def test_wrong_arguments(foundation: Path, tmp_path: Path) -> None:
    good: dict[str, Any] = {"tensors": adapter_of(1), "foundation": foundation, "scale": 1}
    for change, error in (
        ({"scale": float("nan")}, AdapterError),
        ({"scale": None}, AdapterError),
        ({"scale": "x"}, AdapterError),
        ({"tensors": [1]}, UnsupportedDataError),
        ({"metadata": {"a": 1}}, UnsupportedDataError),
        ({"metadata": {"blobstore.adapter.scale": "1"}}, UnsupportedDataError),
        ({"metadata": 3}, UnsupportedDataError),
        ({"foundation": tmp_path / "none.ptd"}, FileAccessError),
        ({"foundation": []}, AdapterError),
        ({"foundation": 3}, FileAccessError),
    ):
        with pytest.raises(error):
            save_adapter(tmp_path / "a.ptd", **{**good, **change})
        assert not (tmp_path / "a.ptd").exists()
    before = foundation.read_bytes()
    with pytest.raises(OutputPathError):
        save_adapter(foundation, **good)
    assert foundation.read_bytes() == before


def test_an_adapter_is_no_foundation(foundation: Path, tmp_path: Path) -> None:
    save_adapter(tmp_path / "a.ptd", adapter_of(1), foundation=foundation, scale=1)
    save_file(adapter_of(2), tmp_path / "unbound.ptd")
    for path in (tmp_path / "a.ptd", tmp_path / "unbound.ptd"):
        with pytest.raises(AdapterError, match=f"{path.name}: is an adapter, not a foundation"):
            foundation_fingerprint(path)
    with pytest.raises(AdapterError, match=r"f.ptd: holds no adapter"):
        read_adapter(foundation)


def test_bind(foundation: Path, tmp_path: Path) -> None:
    save_file(adapter_of(1), tmp_path / "plain.ptd", metadata={"made": "here"})
    with pytest.raises(AdapterError, match=r"plain.ptd: records no scale"):
        bind_adapter(tmp_path / "plain.ptd", tmp_path / "bound.ptd", foundation=foundation)
    bind_adapter(tmp_path / "plain.ptd", tmp_path / "bound.ptd", foundation=foundation, scale=2)
    bound = read_adapter(tmp_path / "bound.ptd")
    assert (bound.foundation, bound.scale) == (foundation_fingerprint(foundation), 2)
    assert bound.metadata == {"made": "here"}
    with pytest.raises(OutputPathError):
        bind_adapter(tmp_path / "bound.ptd", tmp_path / "bound.ptd", foundation=foundation)


@pytest.mark.parametrize("text", ["nan", "x", "1e999", ""])
def test_metadata_of_somebody_else(foundation: Path, tmp_path: Path, text: str) -> None:
    save_file(adapter_of(1), tmp_path / "a.ptd", metadata={"blobstore.adapter.scale": text})
    with pytest.raises(InvalidFileError, match=r"a.ptd: the adapter's metadata is malformed"):
        read_adapter(tmp_path / "a.ptd")
    save_file(adapter_of(1), tmp_path / "a.ptd", metadata={"blobstore.adapter.foundation": text})
    with pytest.raises(InvalidFileError, match=r"a.ptd: the adapter's metadata is malformed"):
        read_adapter(tmp_path / "a.ptd")


def test_torn_and_damaged_files(foundation: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.ptd"
    save_adapter(path, adapter_of(1), foundation=foundation, scale=1)
    whole = path.read_bytes()
    for size in (0, 7, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(InvalidFileError, match=r"a.ptd"):
            read_adapter(path)
    path.write_bytes(whole)
    with open_ptd(path) as blobs:
        start, _ = blobs.byte_range("l.0.lora_a.weight")
    path.write_bytes(whole[:start] + bytes([whole[start] ^ 1]) + whole[start + 1 :])
    with pytest.raises(IntegrityError, match=r"a.ptd: .*l.0.lora_a.weight"):
        read_adapter(path)
