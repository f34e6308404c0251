"""Where the work is done, where the files are, and what is remembered."""

import multiprocessing
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import blobstore
from blobstore.errors import FileAccessError
from blobstore.reporting import Report
from blobstore.reporting.json_output import to_json
from blobstore.reporting.read import cache as cache_module
from blobstore.reporting.read import engine, fingerprint
from tests.core.formats.ptd.test_format import DATA
from tests.reporting.find.test_planted import accounted, values
from tests.reporting.planted import Payload, Tensor, found, write_ptd, write_safetensors

WASTE = {"constant", "contained", "duplicate_files", "near_duplicate", "other_dtype", "other_layout"}


@pytest.fixture
def zoo(tmp_path: Path) -> Path:
    """Some waste of most classes."""
    folder = tmp_path / "zoo"
    folder.mkdir()
    weight = values(1, 60, 50)
    tuned = weight.copy()
    tuned[3, :7] += 1
    half = values(2, 60, 50).astype("float16")
    write_ptd(folder / "a.ptd", [Tensor.of("w", weight), Tensor.of("zeros", abs(weight) * 0)])
    write_safetensors(folder / "b.safetensors", [Tensor.of("w", weight), Tensor.of("wide", half.astype("float32"))])
    write_ptd(folder / "c.ptd", [Tensor.of("t", weight.T), Tensor.of("tuned", tuned), Tensor.of("half", half)])
    Payload([b"head" + weight.tobytes()]).write(folder / "d.pte")
    return folder


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are remembered at once."""
    monkeypatch.setattr(cache_module, "_SETTLED_NS", 0)


def whole(report: Report) -> Report:
    accounted(report)
    assert not report.problems
    assert {finding.kind.value for finding in report.findings} == WASTE
    return report


@pytest.mark.long
def test_processes_find_what_threads_find(zoo: Path) -> None:
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as executor:
        assert blobstore.report([zoo], executor=executor) == whole(blobstore.report([zoo]))


@pytest.fixture(scope="module")
def cluster() -> Iterator[object]:
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0", silence_logs=50
        ) as local,
        distributed.Client(local) as client,
    ):
        yield client


@pytest.mark.long
def test_a_real_cluster_finds_what_threads_find(zoo: Path, cluster: object) -> None:
    with cluster.get_executor() as executor:  # type: ignore[attr-defined]
        on_cluster = blobstore.report([zoo], executor=executor)
    assert on_cluster == whole(blobstore.report([zoo]))


@pytest.mark.parametrize("protocol", ["memory", "file", "local"])
def test_urls(zoo: Path, protocol: str) -> None:
    fsspec = pytest.importorskip("fsspec")
    if protocol == "memory":
        system = fsspec.filesystem("memory")
        system.put(str(zoo), "/zoo", recursive=True)
        url = "memory://zoo"
    else:
        url = f"{protocol}://{zoo}"
    remote = whole(blobstore.report([url]))
    local = blobstore.report([zoo])
    assert found(remote) == found(local)
    assert [file.regions for file in remote.files] == [file.regions for file in local.files]
    assert all("://" in file.path for file in remote.files)


def test_our_own_files_and_real_programs_by_url(lowered: object, tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    folder = tmp_path / "own"
    folder.mkdir()
    blobstore.save_file({"a": values(3, 50, 60), "b": values(3, 50, 60), "c": values(4, 9, 9)}, folder / "own.ptd")
    shutil.copy(DATA / "golden.ptd", folder)
    lowered.decoder().write(folder)  # type: ignore[attr-defined]
    remote, local = blobstore.report([f"file://{folder}"]), blobstore.report([folder])
    accounted(remote)
    assert not remote.problems
    assert [[(r.kind, r.start, r.digest) for r in f.regions] for f in remote.files] == [
        [(r.kind, r.start, r.digest) for r in f.regions] for f in local.files
    ]


class Counting:
    """Counts how many blobs are read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.blobs = 0
        original = fingerprint.fingerprint

        def counted(*arguments: object) -> object:
            self.blobs += 1
            return original(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(engine, "fingerprint", counted)


def test_a_second_run_reads_no_blob(zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache.sqlite"
    first = whole(blobstore.report([zoo], cache=cache))
    reads = Counting(monkeypatch)
    monkeypatch.setattr(engine, "_prove", None)  # nor is anything compared again
    assert blobstore.report([zoo], cache=cache) == first
    assert reads.blobs == 0
    assert {finding.kind.value for finding in blobstore.report([zoo], cache=cache, exact_only=True).findings} <= WASTE
    assert reads.blobs == 0


@pytest.mark.parametrize("change", ["content", "time", "replaced", "in place"])
def test_a_file_that_changed_is_read_again(
    zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Also if it has its old time of change again: another file in its place, or as `rsync --inplace --times` leaves it."""
    cache = tmp_path / "cache.sqlite"
    blobstore.report([zoo], cache=cache)
    path = zoo / "a.ptd"
    old = path.stat()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    if change == "content":
        path.write_bytes(data)
    elif change == "time":
        path.touch()
    else:
        (zoo / "new").write_bytes(data)
        if change == "replaced":
            (zoo / "new").rename(path)
        else:
            path.write_bytes((zoo / "new").read_bytes())
            (zoo / "new").unlink()
        os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns))
        assert (path.stat().st_ino == old.st_ino) == (change == "in place")
    reads = Counting(monkeypatch)
    again = blobstore.report([zoo], cache=cache)
    assert reads.blobs == 2
    assert again == blobstore.report([zoo])


def test_a_run_that_was_interrupted_goes_on(zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache.sqlite"

    def interrupt(what: str, done: int, total: int) -> None:
        if what == "reading" and done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        blobstore.report([zoo], cache=cache, progress=interrupt)
    reads = Counting(monkeypatch)
    assert blobstore.report([zoo], cache=cache) == blobstore.report([zoo])
    assert reads.blobs < 2 * 8  # 8 blobs are there: without a cache all are read, with it those that are missing


def test_exact_fingerprints_do_not_stand_in_for_all(zoo: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache.sqlite"
    blobstore.report([zoo], cache=cache, exact_only=True)
    whole(blobstore.report([zoo], cache=cache))


def test_another_file_is_not_taken_for_a_cache(zoo: Path, tmp_path: Path) -> None:
    path = tmp_path / "cache.sqlite"
    path.write_bytes(b"precious text " * 100)
    with pytest.raises(FileAccessError, match="cache"):
        blobstore.report([zoo], cache=path)
    assert path.read_bytes() == b"precious text " * 100


def test_a_file_that_changes_while_it_is_read_is_told(zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = fingerprint.fingerprint

    def meddling(source: object, *arguments: object) -> object:
        if source.path.endswith("a.ptd"):  # type: ignore[attr-defined]
            (zoo / "a.ptd").touch()
        return original(source, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(engine, "fingerprint", meddling)
    report = blobstore.report([zoo])
    assert [(Path(p.path).name, "changed" in p.reason) for p in report.problems] == [("a.ptd", True)]
    assert len(report.files) == 3


def test_importing_the_package_does_not_import_the_report() -> None:
    code = (
        "import sys, blobstore; assert 'blobstore.reporting' not in sys.modules; blobstore.report([]);"
        "assert not {'torch', 'executorch', 'rich', 'plotly', 'fsspec'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def digests(report: Report) -> list[str]:
    return [region.digest for file in report.files for region in file.regions]


def test_a_working_copy_is_never_remembered(tmp_path: Path) -> None:
    """B4: a commit writes through a map, and not each one moves the file's times."""
    runtime = pytest.importorskip("blobstore.runtime", exc_type=ImportError)
    cache, copy = tmp_path / "cache.sqlite", tmp_path / "w.ptd"
    weight = values(1, 100, 300)
    blobstore.save_file({"w": weight}, tmp_path / "a.ptd")
    runtime.make_working_copy(tmp_path / "a.ptd", copy)
    shared = runtime.BlobCache(copy, "shared")
    seen = set()
    for number in range(4):
        shared.update({"w": weight + number})
        found = digests(blobstore.report([copy], cache=cache))
        assert found == digests(blobstore.report([copy]))
        seen.add(tuple(found))
    assert len(seen) == 4


def test_a_commit_while_a_working_copy_is_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = pytest.importorskip("blobstore.runtime", exc_type=ImportError)
    weight = values(1, 100, 300)
    blobstore.save_file({"w": weight}, tmp_path / "a.ptd")
    runtime.make_working_copy(tmp_path / "a.ptd", tmp_path / "w.ptd")
    shared = runtime.BlobCache(tmp_path / "w.ptd", "shared")
    shared.update({"w": weight + 1})
    original = fingerprint.fingerprint

    def meddling(*arguments: object) -> object:
        shared.update({"w": weight + 2})
        return original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(engine, "fingerprint", meddling)
    [problem] = blobstore.report([tmp_path / "w.ptd"]).problems
    assert "changed" in problem.reason


def damage_rows(path: Path, what: str, body: str) -> None:
    base = sqlite3.connect(path)
    base.execute(f"UPDATE known SET body = {body} WHERE key LIKE '[\"{what}\"%'")  # noqa: S608 - from this file
    assert base.total_changes
    base.commit()
    base.close()


def overwrite(path: Path, start: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(start)
        file.write(data)


def another_version(path: Path) -> None:
    base = sqlite3.connect(path)
    base.executescript("DROP TABLE known; CREATE TABLE known (something TEXT); PRAGMA user_version = 999")
    base.close()


DAMAGE: dict[str, Callable[[Path], None]] = {
    "cut": lambda path: os.truncate(path, 5000),
    "cut to its head": lambda path: os.truncate(path, 100),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)) and None,
    "a page": lambda path: overwrite(path, 4096, b"\xa5" * 4096),
    "all pages but the first": lambda path: overwrite(path, 4096, b"\x5a" * (path.stat().st_size - 4096)),
    "the first page behind its head": lambda path: overwrite(path, 100, b"\xff" * 3000),
    "a table that is missing": lambda path: sqlite3.connect(path).execute("DROP TABLE known").connection.close(),
    "no JSON": lambda path: damage_rows(path, "regions", "'no JSON'"),
    "no text": lambda path: damage_rows(path, "fingerprints", "x'ff00ff'"),
    "null": lambda path: damage_rows(path, "proof", "NULL"),
    "a digest": lambda path: damage_rows(path, "fingerprints", "replace(replace(body, 'a', 'b'), '1', '2')"),
    "a number": lambda path: damage_rows(path, "regions", "replace(body, ',0,', ',1,')"),
    "another version": another_version,
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_cache_is_made_anew(kind: str, zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B5: nothing that a damaged cache says is believed, and the next run has a sound one."""
    cache = tmp_path / "cache.sqlite"
    expected = blobstore.report([zoo], cache=cache)
    sqlite3.connect(cache).execute("PRAGMA wal_checkpoint(TRUNCATE)").connection.close()
    DAMAGE[kind](cache)
    for _ in range(2):
        assert blobstore.report([zoo], cache=cache) == expected
    reads = Counting(monkeypatch)
    assert blobstore.report([zoo], cache=cache) == expected
    assert reads.blobs == 0


def test_a_cache_that_cannot_be_used_is_a_note(zoo: Path, tmp_path: Path) -> None:
    """A folder that cannot be written."""
    expected = blobstore.report([zoo])
    (tmp_path / "file").write_text("no folder")
    for cache in (tmp_path / "file" / "cache.sqlite", tmp_path):
        found = blobstore.report([zoo], cache=cache)
        assert str(cache) in found.notes[0]
        assert (found.files, found.findings, found.problems) == (expected.files, expected.findings, expected.problems)


@pytest.mark.long
def test_a_disk_that_is_full_from_some_moment_on(zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B2: that is a note; the run after it, with space again, uses the same file without one."""
    real = sqlite3.connect
    write_ptd(zoo / "many.ptd", [Tensor.of(f"layers.{i}", values(i, 9)) for i in range(200)])
    expected = blobstore.report([zoo])
    for pages in range(1, 8):
        cache = tmp_path / f"full-{pages}.sqlite"

        def small(*arguments: object, most: int = pages, **named: object) -> sqlite3.Connection:
            base = real(*arguments, **named)  # type: ignore[call-overload]
            base.execute(f"PRAGMA max_page_count = {most}")  # as a full disk, to SQLite: "database or disk is full"
            return base

        monkeypatch.setattr(sqlite3, "connect", small)
        found = blobstore.report([zoo], cache=cache)
        monkeypatch.setattr(sqlite3, "connect", real)
        assert "full" in found.notes[0]
        assert (found.files, found.findings) == (expected.files, expected.findings)
        assert blobstore.report([zoo], cache=cache) == expected


NAMES = st.sampled_from(["a.ptd", "b.ptd", "c.ptd"])
CONTENTS = st.lists(st.integers(0, 2), min_size=1, max_size=2)
EDITS = st.one_of(
    st.tuples(st.just("write"), NAMES, CONTENTS),
    st.tuples(st.just("remove"), NAMES),
    st.tuples(st.just("rename"), NAMES, NAMES),
)


def edit(folder: Path, what: str, name: str, *more: object) -> None:
    """Add or change a file, remove it, or give it another name."""
    path = folder / name
    if what == "write":
        write_ptd(path, [Tensor.of(f"t{i}", values(seed, 9, 9)) for i, seed in enumerate(more[0])])
    elif path.exists():
        path.unlink() if what == "remove" else path.replace(folder / str(more[0]))


@settings(max_examples=25)
@given(st.lists(st.lists(EDITS, min_size=1, max_size=3), min_size=1, max_size=4))
def test_a_cached_report_is_a_fresh_one_after_any_edits(rounds: list[list[tuple[Any, ...]]]) -> None:
    """Whatever happens to the files between two runs."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "models"
        folder.mkdir()
        for edits in rounds:
            for one in edits:
                edit(folder, *one)
            known = blobstore.report([folder], cache=Path(place) / "cache.sqlite")
            assert to_json(known) == to_json(blobstore.report([folder]))
