"""Guards in Python."""

from __future__ import annotations

from campaigns.mutants.guard import Guard

_RELEASES = "blobstore/releases"
_FILES = "blobstore/core/formats"
_CLIENT = ("tests/releases/test_client.py",)
_TRUST = ("tests/releases/test_trust.py",)
_NATIVE = "tests/releases/test_native.py"  # which compares both libraries
_ORDER = ("tests/core/test_sync_order.py",)
_JOURNAL = ("tests/core/disk/test_journal.py", "tests/core/test_planted_files.py")
_STAGING = ("tests/core/disk/test_staging.py", "tests/core/disk/test_journal.py")
_PTD = "tests/core/formats/ptd/test_bad_files.py"
_PTE = "tests/core/formats/pte/test_bad_files.py"
_POOL = "blobstore/pool"

_STAGED = """\
with Staging(force=True, follow=False) as staging:
    for path, contents in written.items():
        with staging.open(folder / path, len(contents)) as file:
            file.write(contents)"""

GUARDS = (
    Guard(
        "a pin is compared",
        f"{_RELEASES}/sources/source.py",
        "pin is not None and pin != found",
        ("tests/releases/test_pull.py::test_a_pinned_digest_is_compared",),
    ),
    Guard(
        "OCI: the index has the digest that the manifest says",
        f"{_RELEASES}/sources/oci_layout.py",
        "sha256(data) != wanted.sha256",
        ("tests/releases/test_servers.py::test_an_index_has_the_digest_of_its_manifest",),
    ),
    Guard(
        "a signature by another key",
        f"{_RELEASES}/sources/trust.py",
        'raise TrustError(f"{what}: the release is not signed by {path}") from None',
        _TRUST,
        mutant="return",
    ),
    Guard(
        "a new release is signed by the key",
        f"{_RELEASES}/device/pull.py",
        "check_trust(source, data, signature, options.key)",
        _TRUST,
        mutant="None",
    ),
    Guard(
        "an older release",
        f"{_RELEASES}/device/pull.py",
        "index.published < old.published and not allow_rollback and installed.view != sha256",
        ("tests/releases/test_pull.py::test_older_and_other_releases_are_refused",),
    ),
    Guard(
        "where `current` leads",
        f"{_RELEASES}/device/installed.py",
        'not _DIGEST.fullmatch(name) or target != f"releases/{name}"',
        ("tests/releases/test_native_trust.py::test_where_current_leads",),
    ),
    Guard(
        "an object has its digest and size",
        f"{_RELEASES}/index/objects.py",
        "expected is not None and done != expected",
        _TRUST,
    ),
    Guard(
        "a whole file has its digest",
        f"{_RELEASES}/device/assembly.py",
        "hasher.hexdigest() == wanted.sha256",
        ("tests/releases/test_faults.py::test_a_server_that_always_lies_is_refused",),
        mutant="True",
    ),
    Guard(
        "a redirect away from HTTPS",
        f"{_RELEASES}/sources/http.py",
        'url.startswith("https:") and not target.startswith("https:")',
        _CLIENT,
    ),
    Guard(
        "credentials go to their host alone",
        f"{_RELEASES}/sources/http.py",
        "trusted and (value := self._headers.get(origin(url))) is not None",
        _CLIENT,
        mutant="(value := self._headers.get(origin(url))) is not None",
    ),
    Guard(
        "an answer without end",
        f"{_RELEASES}/sources/http.py",
        "flow.received > most",
        _CLIENT,
    ),
    Guard(
        "a part: the largest chunk",
        f"{_RELEASES}/device/assembly.py",
        "0 < length <= LARGEST_CHUNK",
        _TRUST,
        mutant="True",
    ),
    Guard(
        "ways: what a frame wants",
        f"{_RELEASES}/index/ways.py",
        "not 0 <= size <= TABLE_LIMIT",
        _TRUST,
    ),
    Guard(
        "ways: ways that lead out of their object",
        f"{_RELEASES}/index/ways.py",
        "way.at + way.stored <= ways.objects[way.object].size",
        (f"{_NATIVE}::test_hostile_ways_are_refused",),
        mutant="True",
    ),
    Guard(
        "index: names that lead out of the folder",
        "blobstore/core/disk/names.py",
        'part in {".", ".."}',
        (f"{_NATIVE}::test_a_hostile_index_is_refused",),
    ),
    Guard(
        "O_NOFOLLOW: what is fetched",
        f"{_RELEASES}/device/spool.py",
        "flags | os.O_CLOEXEC | os.O_NOFOLLOW",
        _TRUST,
        mutant="flags | os.O_CLOEXEC",
    ),
    Guard(
        "what is older and was never here is refused",
        f"{_RELEASES}/device/pull.py",
        "polls.had(found.sha256) or _from_before(installed, found)",
        ("tests/releases/test_polls.py::test_an_older_index_that_was_never_here_is_an_attack",),
        mutant="True",
    ),
    # Releases that are published, swept and collected without a lock
    Guard(
        "who publishes looks again after the index is there",
        "blobstore/publishing/publish.py",
        f"{_STAGED}\nmend(self._pool, self._version)",
        ("tests/releases/test_beside_sweeps.py::test_a_sweep_beside_a_publisher",),
        mutant=_STAGED,
    ),
    Guard(
        "a fetched file is synced before it has its name",
        f"{_RELEASES}/device/assembly.py",
        "early.finish()",
        ("tests/core/test_sync_order.py",),
        mutant="None",
    ),
    Guard(
        "a form that is published gives the content with its digest",
        "blobstore/publishing/forms.py",
        "not _gives(digest, len(data), encoding, memoryview(stored), base)",
        ("tests/releases/test_sweeping.py::test_a_file_that_changes_while_it_is_published",),
    ),
    Guard(
        "copies of tables are proved before anything goes",
        "blobstore/pool/collecting.py",
        "tables.prove()",
        ("tests/pool/test_requests.py::test_damaged_copies_lose_nothing",),
        mutant="None",
    ),
    Guard(
        "files of tables are made one of proved copies",
        "blobstore/pool/tables.py",
        "_is_named(path, copy.read_bytes())",
        ("tests/pool/test_requests.py::test_damaged_copies_lose_nothing",),
        "True",
    ),
    Guard(
        "a sweep looks again after it removed something",
        "blobstore/publishing/beside.py",
        "rounds[-1].changed",
        ("tests/releases/test_beside_sweeps.py::test_a_publisher_beside_a_sweep",),
    ),
    Guard(
        "a sweep makes again what releases lack",
        "blobstore/publishing/beside.py",
        "not digests <= found",
        ("tests/releases/test_beside_sweeps.py::test_what_goes_while_a_sweep_looks_is_made_again",),
    ),
    Guard(
        "what is stored again is new for a sweep",
        "blobstore/publishing/beside.py",
        "max(noted.get(digest, int(now)), entry.stored)",
        ("tests/releases/test_beside_sweeps.py::test_what_is_stored_again_is_not_removed_meanwhile",),
        mutant="noted.get(digest, int(now))",
    ),
    Guard(
        "what a list led to until now stays for its devices",
        "blobstore/publishing/beside.py",
        "digest in self._dropped",
        ("tests/releases/test_sweeping.py::test_a_device_on_its_way_to_an_older_release",),
        mutant="False",
    ),
    Guard(
        "no release leads to a condemned pack",
        "blobstore/publishing/mending.py",
        'one.folder == "packs" and one.sha256 in self._condemned',
        ("tests/releases/test_beside_sweeps.py::test_no_release_leads_to_a_pack_that_will_go",),
    ),
    Guard(
        "gc leaves a release that a process has open",
        f"{_RELEASES}/device/installed.py",
        "if not lock.take(place):\n    return False\nshutil.rmtree(place)",
        (
            "tests/releases/test_live.py::test_gc_leaves_an_open_release",
            "tests/releases/test_pull.py::test_gc_keeps_what_is_needed",
        ),
        mutant="lock.take(place)\nshutil.rmtree(place)",
    ),
    # Files that appear complete
    Guard(
        "an object is synced before it has its name",
        f"{_RELEASES}/index/objects.py",
        "self._output.sync()",
        _ORDER,
        mutant="None",
    ),
    Guard(
        "`current` is synced",
        f"{_RELEASES}/device/installed.py",
        "sync_folder(self.folder)",
        _ORDER,
        mutant="None",
    ),
    Guard(
        "a staged file is synced before it has its name",
        "blobstore/core/disk/staging.py",
        "if staged.scratch is None:\n    with named(staged.target):\n        staged.sync()",
        _ORDER,
        mutant="pass",
    ),
    Guard(
        "a staged file with a name of its own is synced before it is closed",
        "blobstore/core/disk/staging.py",
        "staged.sync()\nstaged.close()",
        _ORDER,
        mutant="staged.close()",
    ),
    Guard(
        "the journal is on the disk before the first rename",
        "blobstore/core/disk/staging.py",
        "self._sync_folders([first])",
        _ORDER,
        mutant="None",
    ),
    Guard(
        "a sync that failed in the background",
        "blobstore/core/disk/output.py",
        "raise self._failure",
        ("tests/core/disk/test_output.py",),
        mutant="pass",
    ),
    Guard(
        "a failed group is undone",
        "blobstore/core/disk/staging.py",
        "self._undo()",
        _STAGING,
        mutant="None",
    ),
    # Journals and locks
    Guard(
        "journal: O_NOFOLLOW",
        "blobstore/core/disk/journal.py",
        'file.open(path, getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))',
        _JOURNAL,
        mutant="file.open(path)",
    ),
    Guard(
        "journal: a file that was replaced after the kill stays",
        "blobstore/core/disk/journal.py",
        "os.path.lexists(self.temporary) and identity(self.place) == self.before",
        _JOURNAL,
        mutant="os.path.lexists(self.temporary)",
    ),
    Guard(
        "journal: one that is not committed is not finished",
        "blobstore/core/disk/recovery.py",
        "os.path.lexists(journal.folders[0] / path.name)",
        _JOURNAL,
        mutant="True",
    ),
    Guard(
        "recovery: only files of this user",
        "blobstore/core/disk/recovery.py",
        "path.lstat().st_uid == os.geteuid()",
        _JOURNAL,
        mutant="True",
    ),
    Guard(
        "recovery: only files of no living process",
        "blobstore/core/disk/recovery.py",
        "lock.take(path)",
        _JOURNAL,
        mutant="True",
    ),
    # Files of any origin
    Guard(
        ".ptd: the digest of the head",
        f"{_FILES}/ptd/bounds.py",
        "digest(data[: header.segment_base]).xxh3_128 != manifest.head",
        (f"{_PTD}::test_manifests_that_contradict_the_file",),
    ),
    Guard(
        ".ptd: verify compares the blobs",
        f"{_FILES}/ptd/reader.py",
        "(found := digest(self._data[start:end]).xxh3_128) != expected",
        (f"{_PTD}::test_damage_to_a_blob_is_found_by_verify_and_names_the_key",),
        mutant="(found := digest(self._data[start:end]).xxh3_128) is None",
    ),
    Guard(
        ".pte: a reference in the file",
        f"{_FILES}/flatbuffer.py",
        "start < self.start or nbytes > self._end - start",
        (f"{_PTE}::test_header",),
    ),
    Guard(
        "a shard lies in the folder of its index",
        f"{_FILES}/sharded.py",
        'not is_plain_path(name) or not name.endswith(".safetensors")',
        ("tests/core/formats/test_sharded.py",),
    ),
    Guard(
        "store: equal digests are compared by bytes",
        "blobstore/core/memory/distinct.py",
        "same_bytes(first[0], data)",
        ("tests/core/memory/test_distinct.py", "tests/core/test_store.py"),
        mutant="True",
    ),
    # A pool
    Guard(
        "pool: a reader looks at the events first, and after that at what they need",
        f"{_POOL}/pool.py",
        "self.tables.later(PARTS, BLOBS, MARKS)",
        ("tests/pool/test_collecting.py::test_a_version_that_appears_while_a_reader_looks_is_whole",),
        mutant="None",
    ),
    Guard(
        "pool: what is given up does not appear",
        f"{_POOL}/collecting.py",
        'tables.append(EVENTS, [row], once=[f"end {identity}"])',
        ("tests/pool/test_turns.py::test_a_version_appears_when_it_is_about_to_be_given_up",),
        mutant="tables.append(EVENTS, [row])",
    ),
    Guard(
        "pool: what appears was not given up",
        f"{_POOL}/adding.py",
        "[mark, end]",
        ("tests/pool/test_turns.py::test_a_version_is_given_up_when_it_is_about_to_appear",),
        mutant="[mark]",
    ),
    Guard(
        "pool: packs that are condemned between storing and appearing",
        f"{_POOL}/adding.py",
        "before == alone",
        ("tests/pool/test_turns.py::test_a_pack_is_condemned_and_deleted_before_its_rows_come",),
        mutant="alone is not None and before[0] == alone[0]",
    ),
    Guard(
        "pool: whoever adds looks at the marks after the blobs",
        f"{_POOL}/adding.py",
        "tables.fresh(BLOBS, MARKS)",
        ("tests/pool/test_turns.py::test_rows_that_lead_nowhere_come_between_two_looks",),
        mutant="tables.fresh(MARKS, BLOBS)",
    ),
    Guard(
        "pool: a sweep sees rows that were there before a pack was condemned",
        f"{_POOL}/collecting.py",
        "tables.fresh(MARKS, BLOBS)",
        ("tests/pool/test_turns.py::test_rows_come_and_their_pack_is_condemned_while_another_is_swept",),
        mutant="tables.fresh(BLOBS, MARKS)",
    ),
    Guard(
        "pool: a copy is looked at before the rows of the old pack go",
        f"{_POOL}/collecting.py",
        "not stranded",
        ("tests/pool/test_turns.py::test_a_copy_is_condemned_and_deleted_before_its_rows_come",),
        mutant="not stranded or not _copy(objects, tables, stranded, gone)",
    ),
    Guard(
        "pool: rows go of packs that were condemned before the look",
        f"{_POOL}/collecting.py",
        "_delete_rows(tables, condemned)",
        ("tests/pool/test_turns.py::test_two_collections_and_contents_that_are_dropped_and_added_again",),
        mutant='_delete_rows(tables, tables.query("SELECT b.pack FROM blobs b JOIN marks m ON m.pack = b.pack AND m.digest IS NULL"))',
    ),
    Guard(
        "pool: rows of packs that are gone come last",
        f"{_POOL}/relations.py",
        "(row.pack not in gone, -row.length, row.pack)",
        ("tests/pool/test_turns.py::test_rows_that_lead_nowhere",),
        mutant="(-row.length, row.pack)",
    ),
    Guard(
        "pool: a store that ignores conditions changes no pool",
        f"{_POOL}/tables.py",
        "try_writing(self._objects, DESCRIPTION)",
        ("tests/pool/test_promises.py::test_a_pool_is_not_changed_through_a_store_that_ignores_conditions",),
        mutant="None",
    ),
    Guard(
        "pool: a blob has the digest by which it was asked for",
        f"{_POOL}/packs.py",
        "check and hashlib.sha256(data).digest() != blob.digest",
        ("tests/pool/test_guards.py::test_bytes_of_another_digest",),
    ),
    Guard(
        "pool: a small pack cannot claim a large blob",
        f"{_POOL}/packs.py",
        'encoding != "raw" and blob.size > _MOST * (len(stored) + 1)',
        ("tests/pool/test_guards.py::test_a_small_pack_does_not_take_much_memory",),
    ),
    Guard(
        "pool: what is stored is decoded again",
        f"{_POOL}/packs.py",
        "checked(decode(encoding, len(data), memoryview(stored), base, worker.chunk), part.check[:SEED]) != part.check",
        ("tests/pool/test_guards.py::test_what_is_stored_is_read_back",),
    ),
    Guard(
        "pool: a restored file has its digest",
        f"{_POOL}/contents.py",
        "hasher.hexdigest() != sha256",
        ("tests/pool/test_guards.py::test_a_file_of_another_digest",),
    ),
    Guard(
        "pool: a link in the place of a new file is not followed",
        "blobstore/storage/objects.py",
        'flags | getattr(os, "O_NOFOLLOW", 0)',
        ("tests/pool/test_folders.py::test_a_link_in_the_place_of_a_new_pack_is_not_written_through",),
        mutant="flags",
    ),
    Guard(
        "pool: a file of a table lies beside its others",
        f"{_POOL}/tables.py",
        "not _FILE.fullmatch(name)",
        ("tests/pool/test_hostile_rows.py::test_a_file_of_a_table_lies_beside_the_others",),
    ),
    Guard(
        "pool: no condition meets a null",
        f"{_POOL}/tables.py",
        "f'coalesce({typed}, {_IMPOSSIBLE[kind]}) AS \"{name}\"'",
        ("tests/pool/test_hostile_rows.py::test_a_row_of_nulls_does_not_hide_what_is_there",),
        mutant="f'{typed} AS \"{name}\"'",
    ),
    Guard(
        "pool: on a full disk, only rows go that nobody needs",
        f"{_POOL}/collecting.py",
        "set(condemned) & set(_query(tables, _UNNEEDED, gone))",
        ("tests/pool/test_folders.py::test_a_pack_that_cannot_be_copied_to_a_full_disk_waits",),
        mutant="set(condemned)",
    ),
)
