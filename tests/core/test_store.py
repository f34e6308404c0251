"""BlobStore: what it accepts, shares, refuses and writes."""

import itertools
import math
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from blobstore import BlobStore, FileSlice, MergedDataMap, ScalarType, TensorLayout, errors, open_ptd
from blobstore.testing import strategies


def only_entry(data, **options):
    store = BlobStore()
    store.add("x", data, **options)
    (entry,) = store.entries()
    return entry


def sizes_of(path):
    with open_ptd(path) as data_map:
        return {key: len(data) for key, data in data_map.views()}


# What add accepts


def test_opaque_buffers():
    """Anything with the buffer protocol is a blob (R1)."""
    for data in (b"abc", bytearray(b"abc"), memoryview(b"abc"), memoryview(b"xabcx")[1:4]):
        assert only_entry(data).layout is None
        assert bytes(only_entry(data).data) == b"abc"
    assert bytes(only_entry(memoryview(np.ones((2, 2)))).data) == np.ones(4).tobytes()
    assert len(only_entry(memoryview(np.ones((2, 0)))).data) == 0


# What add refuses; the store is as before


def test_quantized_tensors_are_refused_with_advice():
    with pytest.warns(UserWarning, match="deprecated"):
        tensor = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    with pytest.raises(errors.UnsupportedDataError, match=r"qint8.*int_repr"):
        only_entry(tensor)


def test_bad_keys_alignments_and_tags():
    """Keys are non-empty text without NUL, tags are plain names of files (R1)."""
    for key in ("", "a\0b", 3, None, b"bytes", "\ud800"):
        with pytest.raises(errors.InvalidKeyError):
            BlobStore().add(key, b"")
    for alignment in (0, -1, 1.0, True, "16", None, 2**30 + 1):
        with pytest.raises(errors.InvalidAlignmentError, match="'k'"):
            BlobStore().add("k", b"", alignment=alignment)
    for tag in ("", ".", "..", "a/b", "/a", "a\\b", "../a", "a..b", " a", "a\n", "a\0", "c:x", "x" * 201, 3, b"a"):
        with pytest.raises(errors.InvalidTagError):
            BlobStore().add("k", b"", tag=tag)


def test_one_key_two_contents():
    """Other bytes, another layout or another tag under a key are refused, and nothing changes (R1)."""
    store = BlobStore()
    store.add("k", b"12345678", tag="a", layout=TensorLayout(ScalarType.FLOAT, (2,)))
    for data, tag, layout in [
        (b"12345679", "a", TensorLayout(ScalarType.FLOAT, (2,))),
        (b"12345678", "a", TensorLayout(ScalarType.FLOAT, (2, 1))),
        (b"12345678", "a", None),
        (b"12345678", "b", TensorLayout(ScalarType.FLOAT, (2,))),
        (b"12345678", None, TensorLayout(ScalarType.FLOAT, (2,))),
    ]:
        with pytest.raises(errors.KeyConflictError, match="'k'"):
            store.add("k", data, tag=tag, layout=layout)
    assert store.stats.keys == store.stats.blobs == 1


def test_equal_digests_are_confirmed_by_bytes(monkeypatch):
    """A collision, accidental or made, never merges two blobs (R1)."""
    from blobstore.core import store as module
    from blobstore.core.memory.digest import Digest

    monkeypatch.setattr(module, "digest", lambda data: Digest(len(data), bytes(16)))
    store = BlobStore()
    store.add("a", b"first")
    store.add("b", b"other")
    store.add("c", b"first")
    assert store.stats.blobs == 2
    with pytest.raises(errors.KeyConflictError):
        store.add("a", b"other")


# Sharing


def test_duplicates_and_tied_weights_are_stored_once(tmp_path):
    """Under any keys (R1)."""
    weight = torch.randn(10, 20)
    store = BlobStore()
    store.add("embed", weight, alignment=16)
    store.add("head", weight, alignment=24)
    store.add("copy", weight.clone(), alignment=5)
    store.add("flat", weight.flatten())
    assert store.stats.blobs == 1
    assert store.stats.saved_bytes == 3 * 800
    store.write_ptd(tmp_path / "s.ptd")
    with open_ptd(tmp_path / "s.ptd") as data_map:
        assert {data_map.byte_range(key) for key in data_map} == {data_map.byte_range("embed")}
        assert data_map.byte_range("embed")[0] % math.lcm(16, 24, 5, 128) == 0
        assert data_map.get_tensor_layout("flat").sizes == (200,)


def test_alignment_of_a_key_added_twice_is_the_common_multiple(tmp_path):
    """One that is too large is refused (R1)."""
    store = BlobStore()
    store.add("k", b"x", alignment=6)
    store.add("k", b"x", alignment=4)
    assert store.entries()[0].alignment == 12
    with pytest.raises(errors.InvalidAlignmentError):
        store.add("k", b"x", alignment=2**30 - 1)
    store.add("other", b"y", alignment=2**29 - 1)
    with pytest.raises(errors.InvalidAlignmentError, match="common multiple"):
        store.write_ptd(tmp_path / "x.ptd")
    assert not os.listdir(tmp_path)


# Writing


def test_one_file_a_tag(tmp_path):
    """Untagged blobs go to a file of their own (R1)."""
    store = BlobStore()
    store.add("base", b"1" * 10, tag="foundation")
    store.add("lora", b"2" * 20, tag="adapter.ptd")
    store.add("shared", b"1" * 10, tag="adapter.ptd")
    store.add("rest", b"3" * 30)
    paths = store.write(tmp_path, metadata={"k": "v"})
    assert {tag: path.name for tag, path in paths.items()} == {
        "foundation": "foundation.ptd",
        "adapter.ptd": "adapter.ptd",
        "blobs": "blobs.ptd",
    }
    assert sizes_of(tmp_path / "foundation.ptd") == {"base": 10}
    assert sizes_of(tmp_path / "adapter.ptd") == {"lora": 20, "shared": 10}
    assert sizes_of(tmp_path / "blobs.ptd") == {"rest": 30}
    store.write_ptd(tmp_path / "one.ptd", tag="foundation")
    assert (tmp_path / "one.ptd").read_bytes() != b""
    assert sizes_of(tmp_path / "one.ptd") == {"base": 10}
    with pytest.raises(errors.InvalidTagError, match="unused"):
        store.write_ptd(tmp_path / "one.ptd", tag="unused")


def test_two_tags_that_name_one_file_are_refused(tmp_path):
    store = BlobStore()
    store.add("a", b"1", tag="x")
    store.add("b", b"2", tag="x.ptd")
    with pytest.raises(errors.OutputPathError, match=r"x\.ptd"):
        store.write(tmp_path)
    assert not os.listdir(tmp_path)


def test_all_files_or_none(tmp_path):
    """If one file cannot be written, no other is replaced (B5)."""
    memory = bytearray(b"changes")
    store = BlobStore()
    store.add("a", b"fine", tag="a")
    store.add("b", memory, tag="b")
    BlobStore().write_ptd(tmp_path / "a.ptd")
    old = (tmp_path / "a.ptd").read_bytes()
    memory[0] = 0
    with pytest.raises(errors.DataChangedError, match="'b'"):
        store.write(tmp_path)
    assert os.listdir(tmp_path) == ["a.ptd"]
    assert (tmp_path / "a.ptd").read_bytes() == old


def test_a_tensor_changed_after_add(tmp_path):
    """Writing it is an error that names the key (B5)."""
    for size in (10, 1 << 19):
        tensor = torch.zeros(size)
        store = BlobStore()
        store.add("weight", tensor)
        tensor[size - 1] = 1
        with pytest.raises(errors.DataChangedError, match=r"'weight' changed after"):
            store.write_ptd(tmp_path / "x.ptd")
        assert not os.listdir(tmp_path)
        tensor[size - 1] = 0
        store.write_ptd(tmp_path / "x.ptd")
        (tmp_path / "x.ptd").unlink()


def test_output_that_is_an_input(tmp_path):
    """It is refused unless `force` is set (B5)."""
    path = tmp_path / "in.ptd"
    BlobStore().write_ptd(path)
    before = path.read_bytes()
    by_slice, by_base = BlobStore(), BlobStore(base=[path])
    by_slice.add("k", FileSlice(path))
    data_map = open_ptd(path)
    stores = [by_slice, by_base]
    for other in (data_map, MergedDataMap([data_map]), by_slice, by_base):
        stores.append(BlobStore())
        stores[-1].merge(other)
    (tmp_path / "link.ptd").symlink_to(path)
    os.link(path, tmp_path / "second name.ptd")
    for store, name in itertools.product(stores, ("in.ptd", "link.ptd", "second name.ptd")):
        with pytest.raises(errors.OutputPathError, match=r"in\.ptd"):
            store.write_ptd(tmp_path / "." / name)
        store.add("one more", b"x", tag="in")
        with pytest.raises(errors.OutputPathError, match=r"in\.ptd"):
            store.write(tmp_path)
    assert path.read_bytes() == before


def test_write_makes_its_folder(tmp_path, monkeypatch):
    """A missing folder is made, and gone again after an error; one that was there stays (B5)."""
    memory = bytearray(b"changes")
    store = BlobStore()
    store.add("a", memory)
    memory[0] = 0
    (tmp_path / "there").mkdir()
    for place in ("there", "there/new", "new/and/deep"):
        with pytest.raises(errors.DataChangedError):
            store.write(tmp_path / place)
    assert list(tmp_path.rglob("*")) == [tmp_path / "there"]
    memory[0] = ord("c")
    monkeypatch.chdir(tmp_path)
    for place in ("out", "new/and/deep"):
        assert store.write(place) == {"blobs": Path(place, "blobs.ptd")}
        assert sizes_of(tmp_path / place / "blobs.ptd") == {"a": 7}


@pytest.mark.long
@given(st.dictionaries(strategies.keys, st.tuples(strategies.tensors(), strategies.alignments), max_size=8))
def test_round_trip_and_determinism(contents):
    """Keys and blobs keep the order in which they were added; a store filled from a file has its order (R3)."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in ("a.ptd", "b.ptd"):
            store = BlobStore()
            for key, ((data, layout), alignment) in contents.items():
                store.add(key, data, alignment=alignment, layout=layout)
            store.write_ptd(folder / file)
        again = BlobStore()
        again.merge(open_ptd(folder / "a.ptd"))
        again.write_ptd(folder / "c.ptd")
        for file in ("b.ptd", "c.ptd"):
            assert (folder / "a.ptd").read_bytes() == (folder / file).read_bytes()
        with open_ptd(folder / "a.ptd", verify=True) as data_map:
            assert list(data_map) == [data_map.get_key(i) for i in range(len(contents))] == list(contents)
            assert data_map.extents == sorted(data_map.extents)
            assert [data_map.byte_range(key) for key in data_map] == [
                data_map.extents[data_map.segment_of(key)] for key in contents
            ]
            first_uses = list(dict.fromkeys(data_map.segment_of(key) for key in contents))
            assert first_uses == list(range(len(first_uses)))
            assert all(data_map.byte_range(key)[0] % alignment == 0 for key, (_, alignment) in contents.items())
            assert len(first_uses) == len({data for (data, _), _ in contents.values()})


# A base that is deployed already


def test_base_is_not_written_again(tmp_path):
    """Keys that are deployed already are checked, counted, and left out (D2)."""
    foundation = BlobStore()
    foundation.add("a", b"a" * 100)
    foundation.add("b", torch.ones(3))
    foundation.write_ptd(tmp_path / "foundation.ptd")

    store = BlobStore(base=[tmp_path / "foundation.ptd"])
    store.add("a", b"a" * 100)
    store.add("b", torch.ones(3))
    store.add("new", b"n")
    store.add("same bytes, other key", b"a" * 100)
    assert (store.stats.base_keys, store.stats.base_bytes, store.stats.keys) == (2, 112, 2)
    store.write_ptd(tmp_path / "rest.ptd")
    assert sizes_of(tmp_path / "rest.ptd") == {"new": 1, "same bytes, other key": 100}
    for data in (b"b" * 100, torch.ones(25)):
        with pytest.raises(errors.KeyConflictError, match=r"'a'.*foundation\.ptd"):
            store.add("a", data)


def test_bases_that_contradict_each_other(tmp_path):
    """One key with two contents is a conflict (R5)."""
    for name, data in [("one", b"1"), ("two", b"2")]:
        store = BlobStore()
        store.add("k", data)
        store.write_ptd(tmp_path / f"{name}.ptd")
    with pytest.raises(errors.KeyConflictError, match=r"'k'.*one\.ptd.*two\.ptd"):
        BlobStore(base=[tmp_path / "one.ptd", tmp_path / "two.ptd"])


# Merging, and ExecuTorch's own store


def test_merge_keeps_tags_alignments_and_layouts(tmp_path):
    """From a store and from a file (R1, R4)."""
    theirs = BlobStore()
    theirs.add("a", torch.zeros(2), alignment=64, tag="x")
    theirs.add("b", b"b")
    ours = BlobStore()
    ours.merge(theirs, tag="default")
    assert [(e.key, e.alignment, ours.tag(e.key), e.layout) for e in ours.entries()] == [
        ("a", 64, "x", TensorLayout(ScalarType.FLOAT, (2,))),
        ("b", 1, "default", None),
    ]
    theirs.write_ptd(tmp_path / "x.ptd")
    again = BlobStore()
    again.merge(open_ptd(tmp_path / "x.ptd"))
    assert [(e.key, e.alignment) for e in again.entries()] == [("a", 64), ("b", 1)]
    with pytest.raises(errors.KeyNotFoundError, match="'c'"):
        ours.tag("c")
    with pytest.raises(errors.UnsupportedDataError, match="dict"):
        ours.merge({"k": b""})


def test_named_data_of_executorch_both_ways(tmp_path):
    """ExecuTorch's own store can be merged, and takes what is in this one (R1)."""
    from executorch.exir._serialize._named_data_store import NamedDataStore

    theirs = NamedDataStore()
    theirs.add_named_data("w", torch.arange(6.0).reshape(2, 3), alignment=32, external_tag="file")
    theirs.add_named_data("w2", torch.arange(6.0).reshape(2, 3), external_tag="file")
    theirs.add_named_data("opaque", b"bytes", alignment=8)
    output = theirs.get_named_data_store_output()

    store = BlobStore()
    store.merge(output)
    assert (store.tag("w"), store.tag("opaque"), store.stats.blobs) == ("file", None, 2)
    from blobstore.lowering import to_named_data

    back = to_named_data(store)
    assert sorted(back.buffers) == sorted(output.buffers)
    for theirs_files, ours_files in [
        (output.pte_data, back.pte_data),
        (output.external_data["file"], back.external_data["file"]),
    ]:
        assert theirs_files.keys() == ours_files.keys()
        for key, entry in theirs_files.items():
            assert ours_files[key].tensor_layout == entry.tensor_layout
            assert ours_files[key].alignment == entry.alignment
            assert back.buffers[ours_files[key].buffer_index] == output.buffers[entry.buffer_index]
    again = NamedDataStore()
    again.merge_named_data_store(back)  # ExecuTorch itself takes it


# The store against a dictionary


class StoreMachine(RuleBasedStateMachine):
    """A store does what a dictionary with three rules does."""

    @initialize()
    def start(self):
        self.folder = tempfile.TemporaryDirectory()
        self.store = BlobStore()
        self.model = {}

    def teardown(self):
        self.folder.cleanup()

    def expect(self, model, key, data, layout, tag, alignment):
        """The new model, or None if the store must refuse."""
        if key not in model:
            return {**model, key: (data, layout, tag, alignment)}
        old_data, old_layout, old_tag, old_alignment = model[key]
        if (data, layout, tag) != (old_data, old_layout, old_tag):
            return None
        return {**model, key: (data, layout, tag, math.lcm(alignment, old_alignment))}

    @rule(
        key=st.sampled_from("abcdef"),
        tensor=strategies.tensors(),
        tag=st.sampled_from([None, "t", "u"]),
        alignment=strategies.alignments,
    )
    def add(self, key, tensor, tag, alignment):
        data, layout = tensor
        after = self.expect(self.model, key, data, layout, tag, alignment)
        try:
            address = self.store.add(key, data, layout=layout, tag=tag, alignment=alignment)
        except errors.KeyConflictError:
            assert after is None
        else:
            assert after is not None
            assert address.nbytes == len(data)
            self.model = after

    @rule(others=st.dictionaries(st.sampled_from("defghi"), strategies.tensors(), max_size=4))
    def merge(self, others):
        other, after = BlobStore(), self.model
        for key, (data, layout) in others.items():
            other.add(key, data, layout=layout)
            after = None if after is None else self.expect(after, key, data, layout, None, 1)
        try:
            self.store.merge(other)
        except errors.KeyConflictError:
            assert after is None
        else:
            self.model = after

    @rule()
    def write_and_read_back(self):
        paths = self.store.write(self.folder.name)
        assert set(paths) == {tag or "blobs" for _, _, tag, _ in self.model.values()}
        found = {}
        for tag, path in paths.items():
            with open_ptd(path, verify=True) as data_map:
                for key in data_map:
                    tag_now = None if tag == "blobs" else tag
                    found[key] = (
                        data_map.bytes(key),
                        data_map.get_tensor_layout(key),
                        tag_now,
                        data_map.alignment(key),
                    )
        assert found == self.model

    @invariant()
    def counts(self):
        if not hasattr(self, "store"):
            return
        stats, contents = self.store.stats, [data for data, *_ in self.model.values()]
        assert (stats.keys, len(self.store), set(self.store)) == (len(contents), len(contents), set(self.model))
        assert stats.total_bytes == sum(map(len, contents))
        assert stats.blobs == len(set(contents))
        assert stats.unique_bytes == sum(map(len, set(contents)))


StoreMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=15)
TestStoreMachine = StoreMachine.TestCase
