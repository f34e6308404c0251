"""Changing a cache: a state machine compared with a dict of arrays, and updates that must be refused (U1, B3)."""

import os
import re
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from blobstore import BlobStore, errors, open_ptd, save_file
from blobstore.runtime import BlobCache, make_working_copy
from tests.runtime.blobs import foundation_arrays, write_foundation

KEYS = sorted(foundation_arrays())
SHARED_BYTES = {"tied", "pages", "again", "small"}


def changed(array, seed):
    if array.dtype.kind == "f":
        return np.full_like(array, seed / 8)
    return np.full_like(array, seed % 100)


class CacheMachine(RuleBasedStateMachine):
    """Two caches, the upper one with an adapter and the other as its base; the model is a dict for each."""

    mode = "private"

    @initialize()
    def open(self):
        self.folder = tempfile.TemporaryDirectory()
        path = Path(self.folder.name, "foundation.ptd")
        write_foundation(path)
        self.clean = foundation_arrays()
        self.model = dict(self.clean)
        self.base = BlobCache(path, self.mode)
        self.adapter_clean = {"adapter": np.arange(2000, dtype=np.float32), "row": np.ones((2, 5), np.float32)}
        save_file(self.adapter_clean, Path(self.folder.name, "adapter.ptd"))
        self.adapter = dict(self.adapter_clean)
        self.stack = BlobCache(Path(self.folder.name, "adapter.ptd"), self.mode, base=self.base)
        self.saved = None
        self.generation = 0
        self.dirty = set()

    def teardown(self):
        if hasattr(self, "folder"):
            self.folder.cleanup()

    def wrote(self, *keys):
        self.dirty |= set(keys)

    @rule(keys=st.lists(st.sampled_from(KEYS), unique=True, max_size=4), seed=st.integers(1, 99))
    def update(self, keys, seed):
        new = {key: changed(self.model[key], seed) for key in keys}
        before = self.base.generation
        assert self.base.update(new) == before + bool(keys)
        self.model.update(new)
        self.wrote(*keys)

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4), seed=st.integers(1, 99), fail=st.booleans())
    def transaction(self, keys, seed, fail):
        new = {key: changed(self.model[key], seed) for key in keys}
        before = self.base.generation
        try:
            with self.base.transaction() as pending:
                for key, array in new.items():
                    scratch = array.copy()
                    pending[key] = scratch
                    scratch.fill(0)
                if fail:
                    raise InterruptedError
        except InterruptedError:
            assert self.base.generation == before
            return
        self.model.update(new)
        self.wrote(*new)

    @rule(seed=st.integers(1, 99))
    def update_adapter(self, seed):
        new = {"adapter": changed(self.adapter["adapter"], seed)}
        self.stack.update(new)
        self.adapter.update(new)

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=3))
    def revert(self, keys):
        self.base.revert(keys)
        self.model.update({key: self.clean[key] for key in keys})
        self.dirty -= set(keys)

    @rule()
    def revert_all(self):
        self.base.revert()
        self.model = dict(self.clean)
        self.dirty = set()

    @rule(dirty_only=st.booleans())
    def save(self, dirty_only):
        path = Path(self.folder.name, "saved.ptd")
        self.base.save(path, dirty_only=dirty_only)
        self.saved = {key: self.model[key] for key in (self.dirty if dirty_only else self.model)}
        with open_ptd(path, verify=True) as written:
            assert sorted(written) == sorted(self.saved)
            assert all(written.bytes(key) == self.saved[key].tobytes() for key in self.saved)

    @precondition(lambda self: self.saved is not None)
    @rule()
    def load(self):
        self.base.load(Path(self.folder.name, "saved.ptd"))
        self.model.update(self.saved)
        self.wrote(*self.saved)

    @rule()
    def refused(self):
        before = self.base.generation
        with pytest.raises(errors.LayoutError):
            self.base.update({"small": changed(self.model["small"], 99), "row": np.zeros(3, np.float32)})
        with pytest.raises(errors.KeyNotFoundError):
            self.base.update({"small": changed(self.model["small"], 99), "nothing": np.zeros(3, np.float32)})
        assert self.base.generation == before

    @invariant()
    def equal_to_the_model(self):
        if not hasattr(self, "base"):
            return
        for key, expected in self.model.items():
            assert self.base.bytes(key) == expected.tobytes(), key
        for key, expected in {**self.model, **self.adapter}.items():
            assert self.stack.bytes(key) == expected.tobytes(), key
        assert set(self.base.dirty) == self.dirty
        assert self.base.stats.dirty_bytes == sum(self.model[key].nbytes for key in self.dirty)
        assert self.base.generation + 0 >= self.generation
        self.generation = self.base.generation
        assert {key for key in KEYS if self.base.version(key)} >= self.dirty


class CopyMachine(CacheMachine):
    mode = "copy"


TestPrivate = CacheMachine.TestCase
TestCopy = CopyMachine.TestCase
TestPrivate.settings = TestCopy.settings = settings(max_examples=40, stateful_step_count=20)
TestPrivate.pytestmark = TestCopy.pytestmark = [pytest.mark.long]


@pytest.fixture(params=["private", "copy", "shared"])
def cache(request, foundation, tmp_path):
    if request.param == "shared":
        make_working_copy(foundation, tmp_path / "copy.ptd")
        return BlobCache(tmp_path / "copy.ptd", "shared")
    return BlobCache(foundation, request.param)


def test_update_takes_tensors_arrays_and_bytes(cache):
    """In any dense layout; each changed key gets the version of the commit (U1)."""
    clean = foundation_arrays()
    cache.update(
        {
            "row": torch.ones(2, 5),
            "large": np.asfortranarray(clean["large"] + 1),
            "opaque": bytes(100),
            "small": torch.arange(3.0),
            "long": clean["long"][::-1],
        }
    )
    assert cache.numpy("row").tolist() == [[1.0] * 5] * 2
    np.testing.assert_array_equal(cache.numpy("large"), clean["large"] + 1)
    assert cache.bytes("opaque") == bytes(100)
    np.testing.assert_array_equal(cache.numpy("long"), clean["long"][::-1])
    assert cache.torch("small").tolist() == [0, 1, 2]
    assert cache.generation == 1
    assert {key: cache.version(key) for key in cache if cache.version(key)} == dict.fromkeys(
        ("row", "large", "opaque", "small", "long"), 1
    )
    assert cache.dirty == tuple(key for key in cache if key in {"row", "large", "opaque", "small", "long"})


def test_refused_updates_change_nothing(cache):
    """One bad entry refuses the whole update, with its key in the message (B3)."""
    before = {key: bytes(data) for key, data in cache.views()}
    good = {"large": np.zeros((1024, 1024), np.float32)}
    for bad, error, match in (
        ({"no": np.zeros(3)}, errors.KeyNotFoundError, "'no'"),
        ({"row": np.zeros((2, 5))}, errors.LayoutError, r"'row' is float\[2, 5\], the new data is double\[2, 5\]"),
        ({"row": np.zeros((5, 2), np.float32)}, errors.LayoutError, r"float\[5, 2\]"),
        ({"row": bytes(39)}, errors.LayoutError, "'row' has 40 bytes, the new data has 39"),
        ({"opaque": np.zeros(25, np.float32)}, errors.LayoutError, "opaque"),
        ({"row": object()}, errors.UnsupportedDataError, r"\.ptd: 'row': cannot take bytes from .*object"),
        ({3: bytes(3)}, errors.KeyNotFoundError, "3"),
    ):
        with pytest.raises(error, match=match):
            cache.update({**good, **bad})
        with pytest.raises(error), cache.transaction() as pending:
            pending.update({**good, **bad})
    for change in (cache.update_blobs, cache.transaction().__enter__().update):
        with pytest.raises(errors.UnsupportedDataError, match=r"\.ptd: 'row': cannot take bytes"):
            change({**good, "row": None})
    assert {key: bytes(data) for key, data in cache.views()} == before
    assert cache.generation == 0 and cache.dirty == ()


def test_a_write_copies_only_its_pages(tmp_path):
    """Memory of the process grows by the changed pages and shrinks again with a revert (B4)."""
    arrays = {f"w{i}": np.full(1 << 20, i, np.float32) for i in range(8)}
    save_file(arrays, tmp_path / "w.ptd")
    cache = BlobCache(tmp_path / "w.ptd")
    assert cache.stats.private_bytes == 0
    for key in cache:
        assert cache.numpy(key).sum() >= 0
    stats = cache.stats
    assert stats.private_bytes == 0 and stats.resident_bytes >= 8 << 22
    for _ in range(3):
        cache.update({"w3": np.ones(1 << 20, np.float32)})
        assert 4 << 20 <= cache.stats.private_bytes <= (4 << 20) + 8192
    address = cache.numpy("w3").__array_interface__["data"][0]
    cache.revert()
    assert cache.stats.private_bytes == 0
    assert cache.numpy("w3").__array_interface__["data"][0] == address
    assert (cache.numpy("w3") == 3).all()
    counted = cache.stats
    assert (counted.commits, counted.reverts, counted.dirty_keys) == (3, 1, 0)


def test_views_are_live_and_outlive_the_cache(foundation):
    """A view shows commits, is read-only, and keeps the memory alive."""
    cache = BlobCache(foundation)
    row = cache.numpy("row")
    assert not row.flags.writeable
    cache.update({"row": np.full((2, 5), 7, np.float32)})
    assert (row == 7).all()
    cache.close()
    del cache
    assert (row == 7).all()


def test_closed(foundation):
    """Every use of a closed cache is an error that names it."""
    cache = BlobCache(foundation)
    cache.close()
    cache.close()
    for use in (
        lambda: cache.update({}),
        lambda: cache.update_blobs({}),
        lambda: cache.update_state_dict({}),
        lambda: cache["row"],
        lambda: list(cache),
        lambda: cache.revert(),
        lambda: cache.revert(["row"]),
        lambda: cache.numpy("row"),
        lambda: cache.version("row"),
        lambda: cache.stats,
        lambda: cache.dirty,
        lambda: cache.load(foundation),
        lambda: cache.save("x.ptd"),
        lambda: cache.verify(),
        lambda: cache.transaction().__enter__(),
        lambda: BlobCache(base=cache),
    ):
        with pytest.raises(errors.ClosedError, match=r"foundation\.ptd: the cache is closed$"):
            use()


def test_refused_loads_change_nothing(foundation, tmp_path):
    """Unknown keys, other layouts and damage are errors, and nothing changes (U3, B3, B5)."""
    cache = BlobCache(foundation)
    before = {key: bytes(data) for key, data in cache.views()}
    save_file({"row": np.ones((2, 5), np.float32), "more": np.ones(3)}, tmp_path / "unknown.ptd")
    save_file({"row": np.ones((2, 5), np.float32), "long": np.ones(777)}, tmp_path / "layout.ptd")
    save_file({"row": np.ones((2, 5), np.float32), "long": np.arange(777)}, tmp_path / "hurt.ptd")
    data = bytearray((tmp_path / "hurt.ptd").read_bytes())
    with open_ptd(tmp_path / "hurt.ptd") as good:
        data[good.byte_range("long")[0]] ^= 1
    (tmp_path / "hurt.ptd").write_bytes(data)
    with pytest.raises(errors.KeyNotFoundError, match=r"unknown\.ptd: .*'more'"):
        cache.load(tmp_path / "unknown.ptd")
    with pytest.raises(
        errors.LayoutError, match=r"layout\.ptd: .*'long' is long\[777\], the new data is double\[777\]"
    ):
        cache.load(tmp_path / "layout.ptd")
    with pytest.raises(errors.IntegrityError, match=r"hurt\.ptd: .*'long'"):
        cache.load(tmp_path / "hurt.ptd")
    with pytest.raises(errors.FileAccessError, match=r"none\.ptd: "):
        cache.load(tmp_path / "none.ptd")
    assert {key: bytes(data) for key, data in cache.views()} == before
    assert cache.generation == 0


def test_digests_are_current(cache):
    """The recorded digest is used for unchanged keys only (B5)."""

    def check(*caches):
        for one in caches:
            for key, data in one.views():
                assert one.digest(key) == (len(data), xxhash.xxh3_128_digest(data)), key

    check(cache, BlobCache(base=cache))
    new = {
        key: changed(array, 5) for key, array in foundation_arrays().items() if key in SHARED_BYTES | {"row", "long"}
    }
    cache.update(new)
    for key, array in new.items():
        assert cache.digest(key).xxh3_128 == xxhash.xxh3_128_digest(array.tobytes())
    check(cache, BlobCache(base=cache))
    if cache.mode == "shared":
        check(BlobCache(cache.paths[0]), BlobCache(cache.paths[0], "shared"))
        assert BlobCache(cache.paths[0]).verify()
        with open_ptd(cache.paths[0], verify=True) as changed_file:
            check(changed_file)
    else:
        cache.revert(["row", "tied"])
        check(cache)
        cache.revert()
        check(cache)
        assert {key: cache.digest(key) for key in cache} == dict(_digests(foundation_arrays()))


def _digests(arrays):
    return ((key, (array.nbytes, xxhash.xxh3_128_digest(array.tobytes()))) for key, array in arrays.items())


@pytest.mark.parametrize("mode", ["private", "copy"])
def test_files_are_those_that_were_opened(tmp_path, mode):
    """Keys, metadata and digests, even after commits and after the files were replaced and deleted (B5)."""
    save_file({"a": np.arange(5000.0)}, tmp_path / "a.ptd", metadata={"made": "here"})
    save_file({"b": np.ones(3)}, tmp_path / "b.ptd")
    base = BlobCache(tmp_path / "b.ptd")
    cache = BlobCache(tmp_path / "a.ptd", mode, base=base)
    expected = cache.digest("a")
    cache.update({"a": np.zeros(5000)})
    save_file({"a": np.ones(5000)}, tmp_path / "a.ptd", metadata={"made": "later"})
    os.unlink(tmp_path / "b.ptd")
    (file,) = cache.files
    assert (file.path, list(file), file.metadata) == (tmp_path / "a.ptd", ["a"], {"made": "here"})
    assert file.digest("a") == expected != cache.digest("a")
    assert [list(one) for one in base.files] == [["b"]]
    cache.close()
    with pytest.raises(errors.ClosedError):
        _ = cache.files


def test_files_that_were_overwritten(tmp_path):
    """A file with other contents than the cache is an error that names the key (B5)."""
    save_file({"a": np.arange(5000.0), "b": np.ones(5)}, tmp_path / "a.ptd")
    save_file({"a": np.arange(5000.0), "b": np.zeros(5)}, tmp_path / "other.ptd")
    cache = BlobCache(tmp_path / "a.ptd", "copy")
    with (tmp_path / "a.ptd").open("r+b") as file:
        file.write((tmp_path / "other.ptd").read_bytes())
    with pytest.raises(errors.DataChangedError, match=r"a\.ptd: the file was overwritten .*: 'b' differs"):
        _ = cache.files
    os.truncate(tmp_path / "a.ptd", 100)
    with pytest.raises(errors.FileAccessError, match=r"a\.ptd: .*truncated"):
        _ = cache.files


def test_stacks(foundation, tmp_path):
    """Caches on a common base share its memory and its commits, and own their adapters (R5, D1, D2)."""
    base = BlobCache(foundation)
    save_file({"row": np.ones((2, 5), np.float32), "adapter": np.ones(4)}, tmp_path / "a.ptd")
    save_file({"row": np.ones((2, 5), np.float32) * 2, "adapter": np.ones(4) * 2}, tmp_path / "b.ptd")
    a, b = BlobCache(tmp_path / "a.ptd", base=base), BlobCache(tmp_path / "b.ptd", base=base)
    assert set(a) == set(base) | {"adapter"}
    assert a.numpy("row")[0, 0] == 1 and b.numpy("row")[0, 0] == 2
    where = [c.numpy("large").__array_interface__["data"][0] for c in (base, a, b)]
    assert len(set(where)) == 1
    a.update({"row": np.full((2, 5), 9, np.float32)})
    assert b.numpy("row")[0, 0] == 2 and b.generation == 0 and a.generation == 1
    base.update({"large": np.zeros((1024, 1024), np.float32)})
    assert (a.generation, b.generation) == (2, 1)
    assert not b.numpy("large").any()
    with pytest.raises(
        errors.KeyNotFoundError, match=r"'large' belongs to the base .*foundation\.ptd; change it there"
    ):
        a.update({"large": np.zeros((1024, 1024), np.float32)})
    assert a.version("large") == 1 and a.version("row") == 1
    assert len({base.id, a.id, b.id}) == 3


def test_commit_while_reading_in_the_same_thread_is_an_error(cache):
    """It would wait for itself for ever."""
    with cache.reading(), cache.reading(), pytest.raises(errors.UnsupportedOperationError, match="reading"):
        cache.update({"row": np.zeros((2, 5), np.float32)})
    cache.update({"row": np.zeros((2, 5), np.float32)})


def test_records_in_a_delta_are_ignored(tmp_path, foundation):
    """Records describe the delta and are not loaded."""
    store = BlobStore()
    store.add("row", np.ones((2, 5), np.float32))
    store.add("metadata.blobstore.of-another-kind", b"record")
    store.write_ptd(tmp_path / "delta.ptd")
    cache = BlobCache(foundation)
    cache.load(tmp_path / "delta.ptd")
    assert cache.dirty == ("row",)


def test_wrong_mode(foundation, tmp_path):
    """An unknown mode, and mode "shared" with several files."""
    with pytest.raises(errors.UnsupportedOperationError, match="mode"):
        BlobCache(foundation, "other")
    shutil.copy(foundation, tmp_path / "a.ptd")
    with pytest.raises(errors.UnsupportedOperationError, match="one working copy, not 2"):
        BlobCache([foundation, tmp_path / "a.ptd"], "shared")


def test_blobs_may_be_swapped(cache):
    """New data may be views of the cache itself, because all of it is read before anything is written."""
    clean = foundation_arrays()
    other = "large"
    half = clean[other].reshape(-1)[: 64 * 64].reshape(64, 64)
    cache.update({other: clean[other] + 1})
    swapped = {"row": cache.numpy("row")[::-1], other: cache.numpy(other), "long": cache.numpy("long")}
    cache.update(swapped)
    np.testing.assert_array_equal(cache.numpy("row"), clean["row"][::-1])
    np.testing.assert_array_equal(cache.numpy(other), clean[other] + 1)
    cache.update({"pages": half, "tied": half})
    cache.update({"tied": clean["pages"], "pages": cache.numpy("tied")})
    np.testing.assert_array_equal(cache.numpy("pages"), half)
    np.testing.assert_array_equal(cache.numpy("tied"), clean["pages"])
    cache.update({"pages": cache.numpy("tied"), "tied": cache.numpy("pages")})
    np.testing.assert_array_equal(cache.numpy("pages"), clean["pages"])
    np.testing.assert_array_equal(cache.numpy("tied"), half)
    assert cache.verify()


@pytest.mark.parametrize("key", [None, 3, b"row", "\ud800"])
def test_invalid_keys(cache, key):
    """Objects that cannot be keys are unknown keys."""
    assert key not in cache
    for use in (
        lambda: cache[key],
        lambda: cache.numpy(key),
        lambda: cache.torch(key),
        lambda: cache.layout(key),
        lambda: cache.alignment(key),
        lambda: cache.version(key),
        lambda: cache.digest(key),
        lambda: cache.update({key: b""}),
        lambda: cache.revert([key]),
    ):
        with pytest.raises(errors.KeyNotFoundError, match=re.escape(repr(key))):
            use()


def test_paths_that_are_not_utf_8(foundation, tmp_path):
    """Any path of the operating system can be opened."""
    path = tmp_path / os.fsdecode(b"\xff.ptd")
    shutil.copy(foundation, path)
    cache = BlobCache(path)
    assert cache.load(path) == 1
    with pytest.raises(errors.FileAccessError, match="null character"):
        BlobCache(f"{foundation}\0.ptd")
    with pytest.raises(errors.FileAccessError, match="null character"):
        cache.load(f"{foundation}\0.ptd")
    with pytest.raises(errors.FileAccessError, match="''"):
        cache.load("")
