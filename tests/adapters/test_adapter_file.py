"""Adapter files, fingerprints of foundations, and the files that tags choose (D2)."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from blobstore import BlobStore, errors, load_file, open_ptd, save_file
from blobstore.adapters import AdapterTags, bind_adapter, foundation_fingerprint, read_adapter, save_adapter
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
    """A name and the node that export makes of it get the same file."""
    tags = AdapterTags()
    assert tags(name) == file
    node = name.lower().replace(".", "_")
    assert tags(SimpleNamespace(op="placeholder", name=f"p_{node}")) == file
    assert tags(SimpleNamespace(op="get_attr", name=node)) == file


def test_own_tags() -> None:
    """`is_adapter` gets the name in one form, from either place."""
    seen = []
    tags = AdapterTags("base.ptd", "side", is_adapter=lambda name: not seen.append(name) and name.endswith("_down"))
    assert tags("L.0.down") == tags(SimpleNamespace(op="placeholder", name="p_l_0_down")) == "side"
    assert tags("l.0.up") == "base"
    assert seen == ["l_0_down", "l_0_down", "l_0_up"]


@pytest.mark.parametrize("names", [("a/b", "c"), ("", "c"), ("a", ".."), ("a", "a"), ("a.ptd", "a"), ("a", 3)])
def test_invalid_tags(names: Any) -> None:
    """Both must be plain file names, and different."""
    with pytest.raises(errors.InvalidTagError):
        AdapterTags(*names)


def test_tags_split_a_lowering(lora: Any) -> None:
    """The branches are in one file and everything else in the other (D2)."""
    assert all("lora" in key or key.startswith("metadata.") for key in open_ptd(lora.adapter))
    assert not any("lora" in key for key in open_ptd(lora.foundation))
    adapter = read_adapter(lora.adapter)
    assert (adapter.foundation, adapter.scale) == (None, None)
    assert {name: array.shape for name, array in adapter.tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in adapter_of(0).items()
    }


# Fingerprints


def test_fingerprint_is_of_the_contents(foundation: Path, tmp_path: Path) -> None:
    """Order, metadata, adapter tensors and the split into files do not matter."""
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
def test_fingerprints_differ(foundation: Path, tmp_path: Path, change: Any) -> None:
    """Values, shapes, dtypes, keys and their number all count."""
    save_file(change(load_file(foundation)), tmp_path / "other.ptd")
    assert foundation_fingerprint(tmp_path / "other.ptd") != foundation_fingerprint(foundation)


def test_fingerprint_with_and_without_digests(lora: Any, tmp_path: Path) -> None:
    """A file of ExecuTorch, which has no digests, has the same fingerprint as the rewritten one."""
    store = BlobStore()
    store.merge(open_ptd(lora.foundation))
    store.write_ptd(tmp_path / "ours.ptd")
    assert not open_ptd(lora.foundation).has_digests
    assert foundation_fingerprint(lora.foundation) == foundation_fingerprint(tmp_path / "ours.ptd")


def test_files_of_a_foundation_agree(foundation: Path, tmp_path: Path) -> None:
    """One key has one content and one layout in all of them."""
    for other in (np.full((8, 24), 2, np.float32), np.ones((24, 8), np.float32)):
        save_file({"l.1.weight": other}, tmp_path / "other.ptd")
        with pytest.raises(errors.KeyConflictError, match=r"l\.1\.weight"):
            foundation_fingerprint([foundation, tmp_path / "other.ptd"])


def test_known_fingerprint(tmp_path: Path) -> None:
    """The fingerprint is the one that docs/format.md defines, computed here by hand."""
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
    """Tensors, scale, foundation and metadata come back, and `load_file` reads the tensors too (D2)."""
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
        ({"l.0.lora_a.weight": None}, errors.AdapterError, "a.ptd: 'l.0.lora_b.weight' has no lora_a beside it"),
        ({"l.0.lora_a.weight": torch.zeros(RANK + 1, 16)}, errors.LayoutError, "a.ptd: .* has rank 4, .* rank 3"),
        ({"l.0.lora_a.weight": torch.zeros(RANK, 4, 4)}, errors.LayoutError, "a.ptd: .* must both be matrices"),
        ({"l.0.lora_a.weight": torch.full((RANK, 16), float("nan"))}, errors.UpdateError, "a.ptd: .*not finite"),
        (
            {"l.0.lora_a.x.weight": torch.zeros(RANK, 16), "l.0.lora_b.x.weight": torch.zeros(24, RANK)},
            errors.AdapterError,
            "module 'l.0' has two pairs",
        ),
        (dict.fromkeys(adapter_of(1)), errors.AdapterError, "no tensor has a part lora_a or lora_b"),
        ({"l.0.lora_a.weight": "text"}, errors.UnsupportedDataError, "expected a torch tensor"),
    ],
)
def test_broken_adapters_are_not_saved(
    foundation: Path, tmp_path: Path, change: Any, error: type[errors.BlobStoreError], message: str
) -> None:
    """The message names the file and the tensor, and nothing is written (B5)."""
    tensors = {name: t for name, t in {**adapter_of(1), **change}.items() if t is not None}
    with pytest.raises(error, match=message):
        save_adapter(tmp_path / "a.ptd", tensors, foundation=foundation, scale=1)
    assert not (tmp_path / "a.ptd").exists()


def test_wrong_arguments(foundation: Path, tmp_path: Path) -> None:
    """Each is a BlobStoreError, and no file appears or changes."""
    good: dict[str, Any] = {"tensors": adapter_of(1), "foundation": foundation, "scale": 1}
    for change, error in (
        ({"scale": float("nan")}, errors.AdapterError),
        ({"scale": 10**400}, errors.AdapterError),
        ({"metadata": {"blobstore.adapter.scale": "1"}}, errors.UnsupportedDataError),
        ({"foundation": tmp_path / "none.ptd"}, errors.FileAccessError),
        ({"foundation": []}, errors.AdapterError),
    ):
        with pytest.raises(error):
            save_adapter(tmp_path / "a.ptd", **{**good, **change})
        assert not (tmp_path / "a.ptd").exists()
    before = foundation.read_bytes()
    with pytest.raises(errors.OutputPathError):
        save_adapter(foundation, **good)
    assert foundation.read_bytes() == before


def test_adapters_and_foundations_are_told_apart(foundation: Path, tmp_path: Path) -> None:
    """An adapter is refused as a foundation, and a foundation as an adapter (D2)."""
    save_adapter(tmp_path / "a.ptd", adapter_of(1), foundation=foundation, scale=1)
    save_file(adapter_of(2), tmp_path / "unbound.ptd")
    for path in (tmp_path / "a.ptd", tmp_path / "unbound.ptd"):
        with pytest.raises(errors.AdapterError, match=f"{path.name}: this file is an adapter, not a foundation"):
            foundation_fingerprint(path)
    with pytest.raises(errors.AdapterError, match=r"f.ptd: not an adapter"):
        read_adapter(foundation)


def test_bind(foundation: Path, tmp_path: Path) -> None:
    """Binding adds the foundation and keeps metadata; the scale must be recorded or given (D2)."""
    save_file(adapter_of(1), tmp_path / "plain.ptd", metadata={"made": "here"})
    with pytest.raises(errors.AdapterError, match=r"plain.ptd: records no scale"):
        bind_adapter(tmp_path / "plain.ptd", tmp_path / "bound.ptd", foundation=foundation)
    bind_adapter(tmp_path / "plain.ptd", tmp_path / "bound.ptd", foundation=foundation, scale=2)
    bound = read_adapter(tmp_path / "bound.ptd")
    assert (bound.foundation, bound.scale) == (foundation_fingerprint(foundation), 2)
    assert bound.metadata == {"made": "here"}
    with pytest.raises(errors.OutputPathError):
        bind_adapter(tmp_path / "bound.ptd", tmp_path / "bound.ptd", foundation=foundation)


@pytest.mark.parametrize("text", ["nan", "x", "1e999", "", "0" * 31 + "x", "a" * 33, "A" * 32])
def test_malformed_metadata(foundation: Path, tmp_path: Path, text: str) -> None:
    """A recorded scale or fingerprint is checked when the file is read (B5)."""
    save_file(adapter_of(1), tmp_path / "a.ptd", metadata={"blobstore.adapter.scale": text})
    with pytest.raises(errors.InvalidFileError, match=r"a.ptd: the adapter's metadata is malformed"):
        read_adapter(tmp_path / "a.ptd")
    save_file(adapter_of(1), tmp_path / "a.ptd", metadata={"blobstore.adapter.foundation": text})
    with pytest.raises(errors.InvalidFileError, match=r"a.ptd: the adapter's metadata is malformed"):
        read_adapter(tmp_path / "a.ptd")


def test_damaged_files(foundation: Path, tmp_path: Path) -> None:
    """A changed byte is an error that names the file (B5)."""
    path = tmp_path / "a.ptd"
    save_adapter(path, adapter_of(1), foundation=foundation, scale=1)
    whole = path.read_bytes()
    with open_ptd(path) as blobs:
        start, _ = blobs.byte_range("l.0.lora_a.weight")
    path.write_bytes(whole[:start] + bytes([whole[start] ^ 1]) + whole[start + 1 :])
    with pytest.raises(errors.IntegrityError, match=r"a.ptd: .*l.0.lora_a.weight"):
        read_adapter(path)


def test_names_in_both_languages(tmp_path: Path) -> None:
    """The library and the tags agree on which keys are LoRA's, also beyond ASCII (D2)."""
    for name in (
        *("lora_a", "x.LoRA_B.y", "lora_ab", "\u212alora_a", "lora_a\u212a"),
        *("\u0130lora_b", "lora_a\u0130", "\xe9lora_a"),
    ):
        save_file({name: np.ones(1, np.float32), "w": np.ones(1, np.float32)}, tmp_path / "f.ptd")
        save_file({"w": np.ones(1, np.float32)}, tmp_path / "g.ptd")
        left_out = foundation_fingerprint(tmp_path / "f.ptd") == foundation_fingerprint(tmp_path / "g.ptd")
        assert left_out == (AdapterTags()(name) == "adapter"), name
