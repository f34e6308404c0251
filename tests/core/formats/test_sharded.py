"""Sharded checkpoints: an index stands for the tensors of its files, in every command that takes a checkpoint (R2)."""

import json
import pickle

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import given
from hypothesis import strategies as st

import blobstore
from blobstore.errors import BlobStoreError, InvalidFileError
from blobstore.pool import Pool
from blobstore.programs import dedup_programs
from blobstore.releases import publish
from tests.helpers.terminal import printed as run

INDEX = "model.safetensors.index.json"
VARIANT = "model.safetensors.index.fp16.json"
TENSORS = {f"layer{number}.weight": np.arange(64, dtype=np.float32) + number for number in range(4)}
SHARDS = {
    "model-00001-of-00002.safetensors": ["layer1.weight", "layer3.weight"],
    "model-00002-of-00002.safetensors": ["layer0.weight", "layer2.weight"],
}


@pytest.fixture
def index(tmp_path, request):
    """A checkpoint of two shards, by the name of its index."""
    folder, file = tmp_path / "in", getattr(request, "param", INDEX)
    folder.mkdir()
    for name, keys in SHARDS.items():
        safetensors.numpy.save_file({key: TENSORS[key] for key in keys}, folder / name, {"format": "pt"})
    homes = {key: name for key in TENSORS for name, keys in SHARDS.items() if key in keys}
    (folder / file).write_text(json.dumps({"metadata": {"total_size": 1024}, "weight_map": homes}))
    return folder / file


both = pytest.mark.parametrize("index", [INDEX, VARIANT], indirect=True)


def test_it_is_a_data_map(index):
    """All tensors in the order of the index, as views of the shards."""
    with blobstore.open_any(index) as data_map:
        assert list(data_map) == list(TENSORS)
        for key, tensor in TENSORS.items():
            np.testing.assert_array_equal(data_map.numpy(key), tensor)
        assert [path.name for path in data_map.sources] == [index.name, *sorted(SHARDS, reverse=True)]
        loaded = blobstore.load_file(index)
        assert list(loaded) == list(TENSORS)
        assert all(torch.equal(loaded[key], torch.from_numpy(tensor)) for key, tensor in TENSORS.items())
        again = pickle.loads(pickle.dumps(data_map))  # noqa: S301 - its own
        assert dict(again.views()) == dict(data_map.views())
    assert again.metadata == {"format": "pt"}


@both
def test_commands_that_read_and_write_checkpoints(index, tmp_path):
    """`inspect`, `verify`, `convert`, `diff`, `delta` and `report`."""
    whole = tmp_path / "whole.safetensors"
    safetensors.numpy.save_file(TENSORS, whole, {"format": "pt"})
    (listed,) = json.loads(run("inspect", index, "--json"))
    assert {blob["key"] for blob in listed["blobs"]} == set(TENSORS)
    assert listed["size"] == sum(path.stat().st_size for path in index.parent.iterdir())
    assert "ok" in run("verify", index)
    run("convert", index, tmp_path / "out.ptd")
    run("convert", whole, tmp_path / "whole.ptd")
    assert dict(blobstore.open_ptd(tmp_path / "out.ptd").views()) == dict(
        blobstore.open_ptd(tmp_path / "whole.ptd").views()
    )
    compared = run("diff", index, whole, code=1)
    assert "safetensors in shards" in compared and "the same: 4 keys" in compared
    run("diff", index, index)
    safetensors.numpy.save_file({**TENSORS, "new": np.ones(8, np.float32)}, tmp_path / "tuned.safetensors")
    run("delta", index, tmp_path / "tuned.safetensors", "-o", tmp_path / "delta")
    assert list(safetensors.numpy.load_file(tmp_path / "delta" / "tuned.safetensors")) == ["new"]
    safetensors.numpy.save_file({"layer0.weight": TENSORS["layer0.weight"]}, tmp_path / "base.safetensors")
    run("delta", tmp_path / "base.safetensors", index, "-o", tmp_path / "delta")
    whole_name = "model.safetensors" if index.name == INDEX else "model.fp16.safetensors"
    assert set(safetensors.numpy.load_file(tmp_path / "delta" / whole_name)) == {*TENSORS} - {"layer0.weight"}
    (tmp_path / "folder").mkdir()
    run("convert", index, tmp_path / "folder")
    assert [path.name for path in (tmp_path / "folder").iterdir()] == [f"{whole_name.removesuffix('.safetensors')}.ptd"]
    report = json.loads(run("report", index, "--json", "--no-cache"))
    assert sorted(file["path"].rpartition("/")[2] for file in report["files"]) == sorted(SHARDS)


def test_names_of_tensors(lowered, tmp_path):
    """`dedup --names` gives the names of all shards."""
    model = lowered.mlp()
    state = {key: value.numpy() for key, value in model.methods["forward"][0].state_dict().items()}
    keys = sorted(state)
    homes = {}
    for number, part in enumerate((keys[::2], keys[1::2])):
        safetensors.numpy.save_file({key: state[key] for key in part}, tmp_path / f"{number}.safetensors")
        homes.update(dict.fromkeys(part, f"{number}.safetensors"))
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": homes}))
    result = dedup_programs([model.write(tmp_path)], tmp_path / "out", names=tmp_path / INDEX)
    assert set(keys) <= set(blobstore.open_ptd(result.data_files[0]))


@both
def test_files_that_are_kept(index, tmp_path):
    """A pool and a release get the shards, too, also when these are given as well."""
    pool = Pool(tmp_path / "pool", create=True)
    for version, given_paths in (("1", [index]), ("2", [*index.parent.iterdir()])):
        pool.add(given_paths, f"m@{version}")
        pool.get(f"m@{version}", tmp_path / version)
        assert {path.name: path.read_bytes() for path in (tmp_path / version).iterdir()} == {
            path.name: path.read_bytes() for path in index.parent.iterdir()
        }
        publish(given_paths, tmp_path / "releases", name=f"m{version}", version="1")
        listed = json.loads((tmp_path / "releases" / f"m{version}" / "1" / "index.json").read_text())
        assert {file["name"] for file in listed["files"]} == {index.name, *SHARDS}


@pytest.mark.parametrize("link", [False, True])
def test_a_missing_shard_is_one_error(index, tmp_path, link):
    """Of every command that takes an index; it names the index and the shard, or the link that leads nowhere."""
    gone = index.parent / next(iter(SHARDS))
    gone.unlink()
    if link:
        gone.symlink_to("nowhere")
    commands = [
        ["inspect", index],
        ["verify", index],
        ["convert", index, tmp_path / "out.ptd"],
        ["diff", index, index],
        ["delta", index, index.parent / next(reversed(SHARDS)), "-o", tmp_path / "delta"],
        ["delta", index.parent / next(reversed(SHARDS)), index, "-o", tmp_path / "delta"],
        ["report", index, "--no-cache"],
        ["publish", index, "-o", tmp_path / "releases", "--name", "m", "--version", "1"],
        ["pool", "add", tmp_path / "pool", index, "--as", "m@1"],
        ["pool", "add", tmp_path / "pool", *([index.parent] if link else [index, gone]), "--as", "m@1"],
    ]
    for command in commands:
        output = run(*command, code=1 if command[0] == "verify" and not link else 3)
        assert gone.name in output and "cannot print" not in output, command


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda text: text[:-3], "the index is not JSON"),
        (lambda _: "[]", "no weight_map"),
        (lambda _: '{"weight_map": {"w": 5}}', "no weight_map"),
        (lambda _: "[" * 100_000, "nested too deeply"),
        (lambda _: '{"weight_map": {"w": "a", "w": "b"}}', "key 'w' occurs twice"),
        (lambda text: text.replace("model-00001", "../model-00001"), r"tensor 'layer1.weight' is in '../model-00001"),
        (lambda text: text.replace("model-00001", "/model-00001"), r"tensor 'layer1.weight' is in '/model-00001"),
        (
            lambda text: text.replace("model-00001", "model-00003"),
            r"the shard model-00003.*, which has 'layer1.weight', is missing",
        ),
        (
            lambda text: text.replace('"layer1.weight"', '"layer9.weight"'),
            r"expected tensor 'layer9.weight' in model-00001",
        ),
    ],
)
def test_a_bad_index_is_told(index, change, reason):
    """The error names the index, the tensor and the shard."""
    index.write_text(change(index.read_text()))
    with pytest.raises(InvalidFileError, match=reason) as error:
        blobstore.open_any(index)
    assert str(error.value).startswith(str(index))


def test_a_damaged_shard_is_named(index):
    """A truncated one, for example."""
    shard = index.parent / next(iter(SHARDS))
    shard.write_bytes(shard.read_bytes()[:-4])
    with pytest.raises(InvalidFileError, match=shard.name):
        blobstore.open_any(index)


@pytest.mark.long
@given(
    st.recursive(
        st.none() | st.text() | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_any_json_is_an_error_or_a_map(tmp_path_factory, tree):
    """Nothing else is raised."""
    path = tmp_path_factory.getbasetemp() / INDEX
    path.write_text(json.dumps({"weight_map": tree}))
    try:
        assert len(blobstore.open_any(path)) == 0
    except BlobStoreError:
        pass


def test_a_name_in_two_shards_is_taken_from_that_of_the_index(index):
    """The other one is never returned, whatever opens the checkpoint."""
    for name in SHARDS:
        safetensors.numpy.save_file(
            {**safetensors.numpy.load_file(index.parent / name), "both": np.full(4, int(name[10]), np.float32)},
            index.parent / name,
        )
    for name in SHARDS:
        tree = json.loads(index.read_text())
        tree["weight_map"]["both"] = name
        index.write_text(json.dumps(tree))
        expected = np.full(4, int(name[10]), np.float32)
        np.testing.assert_array_equal(blobstore.load_file(index, "np")["both"], expected)
        np.testing.assert_array_equal(blobstore.open_any(index).numpy("both"), expected)
