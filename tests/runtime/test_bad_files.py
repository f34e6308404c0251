"""The native reader refuses and accepts the same files as the Python reader: the same tests run on the cache (B5)."""

import pytest

import tests.core.formats.ptd.test_bad_files as python_reader
from blobstore.runtime import BlobCache
from tests.core.formats.ptd.test_bad_files import (  # noqa: F401 - collected again here
    foreign,
    good,
    test_a_blob_that_is_itself_a_file_with_a_manifest,
    test_a_vtable_that_ends_with_the_flatbuffer,
    test_any_bit_flipped,
    test_any_bit_flipped_without_a_manifest,
    test_appended_bytes,
    test_impossible_contents,
    test_impossible_headers,
    test_invalid_utf_8,
    test_longer_header_of_a_later_version,
    test_manifests_that_are_not_where_they_should_be,
    test_manifests_that_contradict_the_file,
    test_manifests_that_flatc_made,
    test_not_a_file,
    test_the_builder_builds_good_files,
    test_truncated_at_any_byte,
    test_wrong_identifier,
)
from tests.core.formats.ptd.test_format import DATA, golden_store

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True, params=["private", "copy"])
def native(request, monkeypatch):
    def open_native(path, verify=False):
        cache = BlobCache(path, request.param)
        if verify:
            cache.verify()
        return cache

    monkeypatch.setattr(python_reader, "open_ptd", open_native)


def test_the_golden_file():
    """Its contents are those that it was written with."""
    cache = BlobCache(DATA / "golden.ptd")
    store = golden_store()
    assert list(cache) == list(store)
    assert {key: bytes(data) for key, data in cache.views()} == {e.key: bytes(e.data) for e in store.entries()}
    assert {key: cache.layout(key) for key in cache} == {e.key: e.layout for e in store.entries()}
    assert {key: cache.alignment(key) for key in cache} == {e.key: e.alignment for e in store.entries()}
    assert cache.verify()
