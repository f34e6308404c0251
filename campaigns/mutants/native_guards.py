"""Guards in C++."""

from campaigns.mutants.guard import guards

_RELEASES = "runtime_bindings/src/releases"
_CODEC = "runtime_bindings/src/codec"
_FORMAT = "runtime_bindings/src/format"
_CACHE = "runtime_bindings/src/cache"
_PACKED_SOURCES = "runtime_bindings/src/packed"
_OS = "runtime_bindings/src/os"
_NATIVE = "tests/releases/test_native.py"
_HOSTILE = (f"{_NATIVE}::test_a_hostile_index_is_refused",)
_WAYS = (f"{_NATIVE}::test_hostile_ways_are_refused",)
_DECODED = (f"{_NATIVE}::test_both_decode_the_same_bytes", "codec_test")
_NAMES = (f"{_NATIVE}::test_names_lead_into_the_folder", *_HOSTILE)
_WRONG = (f"{_NATIVE}::test_nothing_wrong_is_committed", "tests/releases/test_native_trust.py")
_ORDER = ("tests/runtime/test_native_order.py",)
_PTD = (
    *(
        f"tests/runtime/test_bad_files.py::{test}"
        for test in (
            "test_impossible_contents",
            "test_impossible_headers",
            "test_manifests_that_flatc_made",
            "test_manifests_that_contradict_the_file",
            "test_manifests_that_are_not_where_they_should_be",
            "test_truncated_at_any_byte",
        )
    ),
    "tests/runtime/test_both_readers.py::test_any_word_changed_and_sealed_again",
    "tests/runtime/test_both_readers.py::test_the_same_reason_for_a_list_of_opaque_keys",
)
_SAFETENSORS = ("tests/runtime/test_load_state_dict.py",)
_SHARED = tuple(
    f"tests/runtime/test_shared.py::{test}"
    for test in (
        "test_a_hostile_journal_is_refused",
        "test_a_journal_that_names_keys_that_are_not_there",
        "test_a_journal_that_its_file_does_not_hold",
        "test_a_file_of_commits_that_contradicts_the_copy",
        "test_replaced_working_copy",
        "test_copied_working_copy",
        "test_a_link_instead_of_the_file_of_commits_is_not_followed",
        "test_a_damaged_journal_is_an_error",
        "test_the_commits_of_a_dead_working_copy_do_not_count",
        "test_a_copy_of_a_copy_in_the_middle_of_a_commit",
        "test_commits_that_others_may_write_are_refused",
    )
)
_PACKED = ("tests/runtime/test_packed_damage.py",)
_SAVE = ("tests/runtime/test_save.py",)

GUARDS = guards(
    {
        f"{_RELEASES}/releases.cpp": [
            (
                "C++: an older release",
                "index_.published < old->published && !accept_older",
                (f"{_NATIVE}::test_ranges_and_folders_are_equal", f"{_NATIVE}::test_what_is_refused"),
            ),
            (
                "C++: a list of parts has the digest that the index says",
                "sha256(bytes.data(), bytes.size()) != list.sha256",
                ("tests/releases/test_native_trust.py",),
            ),
        ],
        f"{_RELEASES}/assembly.cpp": [
            ("C++: a content has its digest", "reason.empty() && digest == wanted.sha256", _WRONG, "reason.empty()")
        ],
        f"{_RELEASES}/device.cpp": [
            (
                "C++: where `current` leads",
                "target.substr(0, kReleases.size()) != kReleases || !is_sha256(target.substr(kReleases.size()))",
                ("tests/releases/test_native.py", "tests/releases/test_native_trust.py"),
            )
        ],
        f"{_RELEASES}/index.cpp": [
            ("C++: index: names that lead out of the folder", "!leads_inside(file.name)", _NAMES)
        ],
        f"{_RELEASES}/ways.cpp": [("C++: ways: bytes that are not there", "!is_sound(one, content, ways)", _WAYS)],
        f"{_CODEC}/decoder.cpp": [
            ("C++: a chunk has its bytes", "length > stored - at || length > kMostStored", _DECODED)
        ],
        f"{_OS}/output_file.cpp": [
            ("C++: a file is synced before it has its name", "sync_descriptor(file_.descriptor()) != 0", _ORDER)
        ],
        f"{_OS}/temporary_files.cpp": [
            (
                "C++: only files of this user are removed",
                "S_ISREG(status.st_mode) && status.st_uid == geteuid()",
                ("tests/runtime/test_native_planted.py",),
                "true",
            ),
            (
                "C++: only temporary files of no living process are removed",
                "lock_file(file.descriptor(), /*shared=*/false) == Locked::Yes",
                _SAVE,
                "true",
            ),
        ],
        f"{_CACHE}/working_copy.cpp": [
            (
                "C++: commits of another life of the path",
                "std::memcmp(there->id, id_.data(), id_.size()) != 0",
                _SHARED,
            ),
            ("C++: commits that another user wrote", "!gate.is_as_safe_as(file_)", _SHARED),
            (
                "C++: the digest of a journal",
                "std::memcmp(digest(journal.data(), size).data(), journal.data() + size, sizeof(Digest)) != 0",
                _SHARED,
            ),
            (
                "C++: a journal that writes behind its file",
                "length > left || offset > header()->size || length > header()->size - offset",
                _SHARED,
            ),
        ],
        f"{_PACKED_SOURCES}/packed_copy.cpp": [
            (
                "C++: packed weights are said to be made of what was read",
                "blobstore::internal::digest(blob.data, blob.size)",
                ("packed_test",),
                "*cache_.digest_now(blob)",
            )
        ],
        f"{_FORMAT}/ptd_bounds.cpp": [
            ("C++: .ptd: the segments lie in the file", "base > size || data_size > size - base", _PTD),
            (
                "C++: .ptd: a segment lies within the segments",
                "offset > bounds.segment_data_size || size > bounds.segment_data_size - offset",
                _PTD,
            ),
        ],
        f"{_FORMAT}/ptd_reader.cpp": [
            ("C++: .ptd: the digest of the head", "digest(data, bounds.segment_base) != head", _PTD)
        ],
        f"{_FORMAT}/flatbuffer.h": [
            (
                "C++: flatbuffer: a table that is referred to again and again",
                "cost > budget_",
                ("tests/runtime/test_bombs.py",),
            )
        ],
        f"{_FORMAT}/safetensors.cpp": [
            (
                "C++: .safetensors: a tensor has the bytes of its shape",
                "nbytes != entry.end - entry.start",
                _SAFETENSORS,
            )
        ],
        f"{_PACKED_SOURCES}/packed_file.cpp": [("C++: packed: the digest of an entry", "found != recorded", _PACKED)],
        "runtime_bindings/src/delegate/delegate_payload.cpp": [
            (
                "C++: payload: the inner one lies in it",
                "payload.size > size - kTail - length",
                ("tests/lowering/test_any_backend.py",),
            )
        ],
    }
)
