"""Guards in Python."""

from campaigns.mutants.guard import guards

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

GUARDS = guards(
    {
        f"{_RELEASES}/sources/source.py": [
            (
                "a pin is compared",
                "pin is not None and pin != found",
                ("tests/releases/test_pull.py::test_a_pinned_digest_is_compared",),
            )
        ],
        f"{_RELEASES}/sources/oci_layout.py": [
            (
                "OCI: the index has the digest that the manifest says",
                "sha256(data) != wanted.sha256",
                ("tests/releases/test_servers.py::test_an_index_has_the_digest_of_its_manifest",),
            )
        ],
        f"{_RELEASES}/sources/trust.py": [
            (
                "a signature by another key",
                'raise TrustError(f"{what}: the release is not signed by {path}") from None',
                _TRUST,
                "return",
            )
        ],
        f"{_RELEASES}/device/pull.py": [
            ("a new release is signed by the key", "check_trust(source, data, signature, options.key)", _TRUST, "None"),
            (
                "an older release",
                "index.published < old.published and not allow_rollback and installed.view != sha256",
                ("tests/releases/test_pull.py::test_older_and_other_releases_are_refused",),
            ),
            (
                "what is older and was never here is refused",
                "polls.had(found.sha256) or _from_before(installed, found)",
                ("tests/releases/test_polls.py::test_an_older_index_that_was_never_here_is_an_attack",),
                "True",
            ),
        ],
        f"{_RELEASES}/device/installed.py": [
            (
                "where `current` leads",
                'not _DIGEST.fullmatch(name) or target != f"releases/{name}"',
                ("tests/releases/test_native_trust.py::test_where_current_leads",),
            ),
            (
                "gc leaves a release that a process has open",
                "if not lock.take(place):\n    return False\nshutil.rmtree(place)",
                (
                    "tests/releases/test_live.py::test_gc_leaves_an_open_release",
                    "tests/releases/test_pull.py::test_gc_keeps_what_is_needed",
                ),
                "lock.take(place)\nshutil.rmtree(place)",
            ),
            ("`current` is synced", "sync_folder(self.folder)", _ORDER, "None"),
        ],
        f"{_RELEASES}/index/objects.py": [
            ("an object has its digest and size", "expected is not None and done != expected", _TRUST),
            ("an object is synced before it has its name", "self._output.sync()", _ORDER, "None"),
        ],
        f"{_RELEASES}/device/assembly.py": [
            (
                "a whole file has its digest",
                "hasher.hexdigest() == wanted.sha256",
                ("tests/releases/test_faults.py::test_a_server_that_always_lies_is_refused",),
                "True",
            ),
            ("a part: the largest chunk", "0 < length <= LARGEST_CHUNK", _TRUST, "True"),
            (
                "a fetched file is synced before it has its name",
                "early.finish()",
                ("tests/core/test_sync_order.py",),
                "None",
            ),
        ],
        f"{_RELEASES}/sources/http.py": [
            ("a redirect away from HTTPS", 'url.startswith("https:") and not target.startswith("https:")', _CLIENT),
            (
                "credentials go to their host alone",
                "trusted and (value := self._headers.get(origin(url))) is not None",
                _CLIENT,
                "(value := self._headers.get(origin(url))) is not None",
            ),
            ("an answer without end", "flow.received > most", _CLIENT),
        ],
        f"{_RELEASES}/index/ways.py": [
            ("ways: what a frame wants", "not 0 <= size <= TABLE_LIMIT", _TRUST),
            (
                "ways: ways that lead out of their object",
                "way.at + way.stored <= ways.objects[way.object].size",
                (f"{_NATIVE}::test_hostile_ways_are_refused",),
                "True",
            ),
        ],
        "blobstore/core/disk/names.py": [
            (
                "index: names that lead out of the folder",
                'part in {".", ".."}',
                (f"{_NATIVE}::test_a_hostile_index_is_refused",),
            )
        ],
        f"{_RELEASES}/device/spool.py": [
            ("O_NOFOLLOW: what is fetched", "flags | os.O_CLOEXEC | os.O_NOFOLLOW", _TRUST, "flags | os.O_CLOEXEC")
        ],
        "blobstore/publishing/publish.py": [
            (
                "who publishes looks again after the index is there",
                f"{_STAGED}\nmend(self._pool, self._version)",
                ("tests/releases/test_beside_sweeps.py::test_a_sweep_beside_a_publisher",),
                _STAGED,
            )
        ],
        "blobstore/publishing/forms.py": [
            (
                "a form that is published gives the content with its digest",
                "not _gives(digest, len(data), encoding, memoryview(stored), base)",
                ("tests/releases/test_sweeping.py::test_a_file_that_changes_while_it_is_published",),
            )
        ],
        f"{_POOL}/collecting.py": [
            (
                "copies of tables are proved before anything goes",
                "tables.prove()",
                ("tests/pool/test_requests.py::test_damaged_copies_lose_nothing",),
                "None",
            ),
            (
                "pool: what is given up does not appear",
                'tables.append(EVENTS, [row], once=[f"end {identity}"])',
                ("tests/pool/test_turns.py::test_a_version_appears_when_it_is_about_to_be_given_up",),
                "tables.append(EVENTS, [row])",
            ),
            (
                "pool: a sweep sees rows that were there before a pack was condemned",
                "tables.fresh(MARKS, BLOBS)",
                ("tests/pool/test_turns.py::test_rows_come_and_their_pack_is_condemned_while_another_is_swept",),
                "tables.fresh(BLOBS, MARKS)",
            ),
            (
                "pool: a copy is looked at before the rows of the old pack go",
                "not stranded",
                ("tests/pool/test_turns.py::test_a_copy_is_condemned_and_deleted_before_its_rows_come",),
                "not stranded or not _copy(objects, tables, stranded, gone)",
            ),
            (
                "pool: rows go of packs that were condemned before the look",
                "_delete_rows(tables, condemned)",
                ("tests/pool/test_turns.py::test_two_collections_and_contents_that_are_dropped_and_added_again",),
                '_delete_rows(tables, tables.query("SELECT b.pack FROM blobs b JOIN marks m ON m.pack = b.pack AND m.digest IS NULL"))',
            ),
            (
                "pool: on a full disk, only rows go that nobody needs",
                "set(condemned) & set(_query(tables, _UNNEEDED, gone))",
                ("tests/pool/test_folders.py::test_a_pack_that_cannot_be_copied_to_a_full_disk_waits",),
                "set(condemned)",
            ),
        ],
        f"{_POOL}/tables.py": [
            (
                "files of tables are made one of proved copies",
                "_is_named(path, copy.read_bytes())",
                ("tests/pool/test_requests.py::test_damaged_copies_lose_nothing",),
                "True",
            ),
            (
                "pool: a store that ignores conditions changes no pool",
                "try_writing(self._objects, DESCRIPTION)",
                ("tests/pool/test_promises.py::test_a_pool_is_not_changed_through_a_store_that_ignores_conditions",),
                "None",
            ),
            (
                "pool: a file of a table lies beside its others",
                "not _FILE.fullmatch(name)",
                ("tests/pool/test_hostile_rows.py::test_a_file_of_a_table_lies_beside_the_others",),
            ),
            (
                "pool: no condition meets a null",
                "f'coalesce({typed}, {_IMPOSSIBLE[kind]}) AS \"{name}\"'",
                ("tests/pool/test_hostile_rows.py::test_a_row_of_nulls_does_not_hide_what_is_there",),
                "f'{typed} AS \"{name}\"'",
            ),
        ],
        "blobstore/publishing/beside.py": [
            (
                "a sweep looks again after it removed something",
                "rounds[-1].changed",
                ("tests/releases/test_beside_sweeps.py::test_a_publisher_beside_a_sweep",),
            ),
            (
                "a sweep makes again what releases lack",
                "not digests <= found",
                ("tests/releases/test_beside_sweeps.py::test_what_goes_while_a_sweep_looks_is_made_again",),
            ),
            (
                "what is stored again is new for a sweep",
                "max(noted.get(digest, int(now)), entry.stored)",
                ("tests/releases/test_beside_sweeps.py::test_what_is_stored_again_is_not_removed_meanwhile",),
                "noted.get(digest, int(now))",
            ),
            (
                "what a list led to until now stays for its devices",
                "digest in self._dropped",
                ("tests/releases/test_sweeping.py::test_a_device_on_its_way_to_an_older_release",),
                "False",
            ),
        ],
        "blobstore/publishing/mending.py": [
            (
                "no release leads to a condemned pack",
                'one.folder == "packs" and one.sha256 in self._condemned',
                ("tests/releases/test_beside_sweeps.py::test_no_release_leads_to_a_pack_that_will_go",),
            )
        ],
        "blobstore/core/disk/staging.py": [
            (
                "a staged file is synced before it has its name",
                "if staged.scratch is None:\n    with named(staged.target):\n        staged.sync()",
                _ORDER,
                "pass",
            ),
            (
                "a staged file with a name of its own is synced before it is closed",
                "staged.sync()\nstaged.close()",
                _ORDER,
                "staged.close()",
            ),
            ("the journal is on the disk before the first rename", "self._sync_folders([first])", _ORDER, "None"),
            ("a failed group is undone", "self._undo()", _STAGING, "None"),
        ],
        "blobstore/core/disk/output.py": [
            ("a sync that failed in the background", "raise self._failure", ("tests/core/disk/test_output.py",), "pass")
        ],
        "blobstore/core/disk/journal.py": [
            (
                "journal: O_NOFOLLOW",
                'file.open(path, getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))',
                _JOURNAL,
                "file.open(path)",
            ),
            (
                "journal: a file that was replaced after the kill stays",
                "os.path.lexists(self.temporary) and identity(self.place) == self.before",
                _JOURNAL,
                "os.path.lexists(self.temporary)",
            ),
        ],
        "blobstore/core/disk/recovery.py": [
            (
                "journal: one that is not committed is not finished",
                "os.path.lexists(journal.folders[0] / path.name)",
                _JOURNAL,
                "True",
            ),
            ("recovery: only files of this user", "path.lstat().st_uid == os.geteuid()", _JOURNAL, "True"),
            ("recovery: only files of no living process", "lock.take(path)", _JOURNAL, "True"),
        ],
        f"{_FILES}/ptd/bounds.py": [
            (
                ".ptd: the digest of the head",
                "digest(data[: header.segment_base]).xxh3_128 != manifest.head",
                (f"{_PTD}::test_manifests_that_contradict_the_file",),
            )
        ],
        f"{_FILES}/ptd/reader.py": [
            (
                ".ptd: verify compares the blobs",
                "(found := digest(self._data[start:end]).xxh3_128) != expected",
                (f"{_PTD}::test_damage_to_a_blob_is_found_by_verify_and_names_the_key",),
                "(found := digest(self._data[start:end]).xxh3_128) is None",
            )
        ],
        f"{_FILES}/flatbuffer.py": [
            (
                ".pte: a reference in the file",
                "start < self.start or nbytes > self._end - start",
                (f"{_PTE}::test_header",),
            )
        ],
        f"{_FILES}/sharded.py": [
            (
                "a shard lies in the folder of its index",
                'not is_plain_path(name) or not name.endswith(".safetensors")',
                ("tests/core/formats/test_sharded.py",),
            )
        ],
        "blobstore/core/memory/distinct.py": [
            (
                "store: equal digests are compared by bytes",
                "same_bytes(first[0], data)",
                ("tests/core/memory/test_distinct.py", "tests/core/test_store.py"),
                "True",
            )
        ],
        f"{_POOL}/pool.py": [
            (
                "pool: a reader looks at the events first, and after that at what they need",
                "self.tables.later(PARTS, BLOBS, MARKS)",
                ("tests/pool/test_collecting.py::test_a_version_that_appears_while_a_reader_looks_is_whole",),
                "None",
            )
        ],
        f"{_POOL}/adding.py": [
            (
                "pool: what appears was not given up",
                "[mark, end]",
                ("tests/pool/test_turns.py::test_a_version_is_given_up_when_it_is_about_to_appear",),
                "[mark]",
            ),
            (
                "pool: packs that are condemned between storing and appearing",
                "before == alone",
                ("tests/pool/test_turns.py::test_a_pack_is_condemned_and_deleted_before_its_rows_come",),
                "alone is not None and before[0] == alone[0]",
            ),
            (
                "pool: whoever adds looks at the marks after the blobs",
                "tables.fresh(BLOBS, MARKS)",
                ("tests/pool/test_turns.py::test_rows_that_lead_nowhere_come_between_two_looks",),
                "tables.fresh(MARKS, BLOBS)",
            ),
        ],
        f"{_POOL}/relations.py": [
            (
                "pool: rows of packs that are gone come last",
                "(row.pack not in gone, -row.length, row.pack)",
                ("tests/pool/test_turns.py::test_rows_that_lead_nowhere",),
                "(-row.length, row.pack)",
            )
        ],
        f"{_POOL}/packs.py": [
            (
                "pool: a blob has the digest by which it was asked for",
                "check and hashlib.sha256(data).digest() != blob.digest",
                ("tests/pool/test_guards.py::test_bytes_of_another_digest",),
            ),
            (
                "pool: a small pack cannot claim a large blob",
                'encoding != "raw" and blob.size > _MOST * (len(stored) + 1)',
                ("tests/pool/test_guards.py::test_a_small_pack_does_not_take_much_memory",),
            ),
            (
                "pool: what is stored is decoded again",
                "checked(decode(encoding, len(data), memoryview(stored), base, worker.chunk), part.check[:SEED]) != part.check",
                ("tests/pool/test_guards.py::test_what_is_stored_is_read_back",),
            ),
        ],
        f"{_POOL}/contents.py": [
            (
                "pool: a restored file has its digest",
                "(found := hasher.hexdigest()) != file.blake3",
                ("tests/pool/test_guards.py::test_a_file_of_another_digest",),
            )
        ],
        "blobstore/storage/objects.py": [
            (
                "pool: a link in the place of a new file is not followed",
                'flags | getattr(os, "O_NOFOLLOW", 0)',
                ("tests/pool/test_folders.py::test_a_link_in_the_place_of_a_new_pack_is_not_written_through",),
                "flags",
            )
        ],
    }
)
