"""An unknown key: what it may have been meant for, and that the keys of a file are contents."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import blobstore
from blobstore import errors
from blobstore.core.formats.keys import near, prefix_apart, suggest
from blobstore.core.formats.pte.program import content_key
from blobstore.core.memory.digest import digest
from blobstore.core.memory.layout import ScalarType, TensorLayout
from blobstore.lowering import lower
from blobstore.runtime import BlobCache
from blobstore.runtime.native import native

NAMES = ["encoder.layers.0.weight", "encoder.layers.1.weight", "encoder.layers.0.bias", "head.weight"]
CONTENT = content_key(digest(b"1234"), TensorLayout(ScalarType.FLOAT, (1,)))


LANGUAGES = pytest.mark.parametrize("near", [near, native.near_names], ids=["Python", "C++"])
Near = Callable[[str, list[str]], list[str]]


@LANGUAGES
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("encoder.layers.0.wieght", "encoder.layers.0.weight"),
        ("layers.0.weight", "encoder.layers.0.weight"),
        ("model.head.weight", "head.weight"),
        ("Head.Weight", "head.weight"),
        ("head.weights", "head.weight"),
    ],
)
def test_the_nearest_name_comes_first(near: Near, name: str, expected: str) -> None:
    assert near(name, NAMES)[0] == expected
    assert len(near(name, NAMES)) <= 3
    assert near(name, [*NAMES, *NAMES]) == near(name, NAMES)  # two files have each


@LANGUAGES
@given(st.data())
def test_a_typo_in_a_name_of_many(near: Near, data: st.DataObject) -> None:
    """A character too many, too few, or wrong, or two that changed places (U1)."""
    name = data.draw(st.lists(st.sampled_from("abcdefgh._0123456789"), min_size=6, unique=True).map("".join))
    at = data.draw(st.integers(0, len(name) - 2))
    typo = data.draw(
        st.sampled_from(
            [
                name[:at] + name[at + 1 :],
                name[:at] + "X" + name[at:],
                name[:at] + "X" + name[at + 1 :],
                name[:at] + name[at + 1] + name[at] + name[at + 2 :],
            ]
        )
    )
    if typo != name:
        assert name in near(typo, ["tokenizer", name, "UPPER.CASE.NAMES"])


@pytest.mark.parametrize("name", ["tokenizer", "", "q", "encoder", "\ud800", 3, None])
def test_nothing_is_near(name: Any) -> None:
    assert not near(name, NAMES)
    assert name in ("\ud800", 3, None) or not native.near_names(name, NAMES)
    assert suggest(name, NAMES) == suggest(name, []) == ""


@LANGUAGES
def test_among_very_many_only_what_contains_the_name(near: Near) -> None:
    many = [f"layers.{i}.weight" for i in range(100_000)]
    assert list(near("model.layers.777.weight", many)) == ["layers.777.weight"]
    assert not near("layers.777.weihgt", many)


@pytest.fixture
def named(tmp_path: Path) -> Path:
    blobstore.save_file({name: np.zeros(3, np.float32) for name in NAMES}, tmp_path / "named.ptd")
    return tmp_path / "named.ptd"


LOOKING: dict[str, Callable[[BlobCache, str], Any]] = {
    "update": lambda cache, name: cache.update({name: np.zeros(3, np.float32)}),
    "update_blobs": lambda cache, name: cache.update_blobs({name: bytes(12)}),
    "transaction": lambda cache, name: set_in_transaction(cache, name),
    "get_data": lambda cache, name: cache.get_data(name),
    "layout": lambda cache, name: cache.layout(name),
    "numpy": lambda cache, name: cache.numpy(name),
    "torch": lambda cache, name: cache.torch(name),
    "load_data_into": lambda cache, name: cache.load_data_into(name, bytearray(12)),
    "tensors": lambda cache, name: cache.tensors[name],
    "value": lambda cache, name: cache.tensors.value(name),
    "version": lambda cache, name: cache.version(name),
    "alignment": lambda cache, name: cache.alignment(name),
    "digest": lambda cache, name: cache.digest(name),
    "revert": lambda cache, name: cache.revert(name),
}


def set_in_transaction(cache: BlobCache, name: str) -> None:
    with cache.transaction() as transaction:
        transaction[name] = np.zeros(3, np.float32)


@pytest.mark.parametrize("call", LOOKING)
def test_a_cache_names_near_keys_or_says_that_keys_are_contents(named: Path, tmp_path: Path, call: str) -> None:
    """As `dedup` makes them of programs whose tensors have no names."""
    with pytest.raises(errors.KeyNotFoundError, match=r"'head\.wieght'.*; did you mean 'head\.weight'\?"):
        LOOKING[call](BlobCache(named), "head.wieght")
    blobstore.save_file({CONTENT: np.zeros(1, np.float32)}, tmp_path / "shared.ptd")
    with pytest.raises(errors.KeyNotFoundError, match=r"'head\.weight'.*are contents, not names: .*--names"):
        LOOKING[call](BlobCache(tmp_path / "shared.ptd"), "head.weight")


def test_a_state_dict_with_a_wrong_name(named: Path, tmp_path: Path) -> None:
    with pytest.raises(errors.UpdateError, match=r"none of the tensors given.*; did you mean 'head\.weight'\?"):
        BlobCache(named).update_state_dict({"head.wieght": np.zeros(3, np.float32)})
    blobstore.save_file({CONTENT: np.zeros(1, np.float32)}, tmp_path / "shared.ptd")
    with pytest.raises(errors.UpdateError, match=r"are contents, not names"):
        BlobCache(tmp_path / "shared.ptd").update_state_dict({"head.weight": np.zeros(1, np.float32)})


def test_data_maps_and_stores_name_near_keys(named: Path) -> None:
    store = blobstore.BlobStore()
    store.add("head.weight", b"1")
    with pytest.raises(errors.KeyNotFoundError, match=r"did you mean 'head\.weight'"):
        store.tag("head.wieght")
    data_map = blobstore.open_ptd(named)
    with pytest.raises(errors.KeyNotFoundError, match=r"named\.ptd: no key 'head\.wieght' among 4 keys; did you mean"):
        data_map["head.wieght"]
    assert data_map.get("head.wieght") is None and data_map.get("head.wieght", 3) == 3
    assert data_map.get("head.weight") is not None


def test_a_prefix_is_said_once_and_not_with_every_name() -> None:
    """Such as what data parallelism puts in front of all names."""
    longer = [f"module.{name}" for name in NAMES]
    said = {"given_in": "the file", "known_in": "the model"}
    assert prefix_apart(longer, NAMES, **said) == (
        "the names in the file have the prefix 'module.', which those of the model lack"
    )
    assert prefix_apart(NAMES[:2], longer, **said) == (
        "the names of the model have the prefix 'module.', which those in the file lack"
    )
    for one, other in (([], NAMES), (NAMES, []), (NAMES, NAMES), ([*longer, "other"], NAMES), (["a."], ["a.", "a"])):
        assert prefix_apart(one, other, **said) == ""


def test_a_checkpoint_with_a_prefix_is_one_line(tmp_path: Path) -> None:
    """However many layers there are, and on whichever side the prefix is."""
    model = torch.nn.Sequential(*(torch.nn.Linear(1, 1) for _ in range(200)))
    wrapped = torch.nn.Sequential()
    wrapped.add_module("module", model)
    for name, module in (("plain", model), ("wrapped", wrapped)):
        blobstore.torch.save_model(module, tmp_path / f"{name}.ptd")
    with pytest.raises(errors.CheckpointError, match="in the file have the prefix 'module.', which those of the model"):
        blobstore.torch.load_model(model, tmp_path / "wrapped.ptd")
    with pytest.raises(errors.CheckpointError, match="of the model have the prefix 'module.', which those in the file"):
        blobstore.torch.load_model(wrapped, tmp_path / "plain.ptd")
    blobstore.save_file({"x": np.ones(1)}, tmp_path / "other.ptd")
    with pytest.raises(errors.CheckpointError) as found:
        blobstore.torch.load_model(model, tmp_path / "other.ptd")
    assert "and 380 others; unexpected 'x'" in str(found.value) and len(str(found.value)) < 600


@pytest.mark.long
def test_what_load_does_not_take_is_said_what_takes_it(tmp_path: Path) -> None:
    """`load` takes keys, as they are in data files; a checkpoint has names, perhaps with a prefix."""
    model = torch.nn.Linear(8, 2).eval()
    blobstore.save_programs({"m": lower(model, (torch.ones(1, 8),), tag="m")}, tmp_path)
    cache = BlobCache(tmp_path / "m.ptd")
    state = {name: value.detach() for name, value in model.named_parameters()}
    blobstore.save_file(state, tmp_path / "checkpoint.ptd")
    with pytest.raises(
        errors.KeyNotFoundError, match=r"it is a tensor of the model: update_state_dict\(load_file\(path\)\)"
    ):
        cache.load(tmp_path / "checkpoint.ptd")
    cache.update_state_dict(blobstore.load_file(tmp_path / "checkpoint.ptd"))
    blobstore.save_file({f"module.{name}": value for name, value in state.items()}, tmp_path / "wrapped.ptd")
    with pytest.raises(errors.KeyNotFoundError, match="the names in the file have the prefix 'module.'"):
        cache.load(tmp_path / "wrapped.ptd")
    with pytest.raises(errors.KeyNotFoundError, match="no key and no tensor 'module.weight'; .* may be 'weight' here"):
        cache["module.weight"]
