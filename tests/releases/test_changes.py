"""A device with an earlier release fetches what changed in a long list of parts, and not the list (F2)."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from blobstore import save_file
from blobstore.errors import InvalidFileError
from blobstore.pool import Pool
from blobstore.publishing.sweep import sweep
from blobstore.releases import publish, pull
from blobstore.releases.index.changes import changed_list, changes_between
from blobstore.releases.index.index import Object, encode_json
from blobstore.releases.index.parts import Part, Parts
from tests.releases.models import NOW, Weights, found, published_once, same
from tests.releases.server import serving

_contents = st.tuples(st.integers(0, 16), st.integers(1, 9), st.sampled_from([f"{i:064x}" for i in range(9)]))


def _list(contents: list[list[tuple[int, int, str]]]) -> Parts:
    def parts(listed: list[tuple[int, int, str]]) -> Iterator[Part]:
        end = 0
        for between, size, digest in listed:
            yield Part(end + between, size, digest)
            end += between + size

    return Parts("blobstore.parts.1", tuple(tuple(parts(listed)) for listed in contents))


@given(st.lists(st.lists(_contents, max_size=9), max_size=4), st.lists(st.lists(_contents, max_size=9), max_size=4))
def test_changes_give_the_list(
    earlier: list[list[tuple[int, int, str]]], later: list[list[tuple[int, int, str]]]
) -> None:
    """To the byte, whatever was added, removed, or moved."""
    stored = encode_json(_list(later))
    changes = changes_between(_list(earlier), stored)
    assert changed_list(changes, _list(earlier), Object("0" * 64, len(stored)), "changes") == stored


@pytest.mark.parametrize("text", ["[0,1,1]", "[0,1,-1]", "[0,1,999999999999999999]", "[0,1,0]" * 9])
def test_changes_that_do_not_fit(text: str) -> None:
    """Places that the earlier list does not have, and more parts than the index says."""
    with pytest.raises(InvalidFileError, match=r"changes: .*does not fit to the earlier list"):
        changed_list(text.encode(), _list([[(0, 1, "0" * 64)]]), Object("0" * 64, 100), "changes")


def _tensors(version: int) -> Weights:
    """1,200 small contents; with each version every tenth changes, one goes and one is new."""
    tensors = {f"{i:04}": np.full(64, i, np.float32) for i in range(version, 1200 + version)}
    for changed in range(version):
        tensors |= {key: -tensors[key] - changed for key in list(tensors)[changed::10]}
    return tensors


@published_once
def releases(folder: Path) -> None:
    (folder / "in").mkdir()
    for version in range(4):
        save_file(_tensors(version), folder / "in/model.ptd")
        publish(folder / "in", folder / "releases", name="a", version=str(version))


def _list_of(releases: Path, version: int) -> str:
    digest: str = json.loads((releases / f"a/{version}/index.json").read_bytes())["parts"][0]
    return digest


def _since(releases: Path, version: int) -> Path:
    """What changed in the last release since a version."""
    return releases / f"a/3/since-{_list_of(releases, version)}.json.zst"


@pytest.mark.parametrize("before", [0, 2])
def test_a_device_with_a_release_before_does_not_fetch_the_list(releases: Path, tmp_path: Path, before: int) -> None:
    """One or three releases behind."""
    with serving(releases) as server:
        pull(f"{server.url}/a/{before}/index.json", tmp_path / "device")
        assert _list_of(releases, before) in str(server.log)  # it had nothing
        server.log.clear()
        done = pull(f"{server.url}/a/3/index.json", tmp_path / "device")
        assert _list_of(releases, 3) not in str(server.log)
        assert same(found(tmp_path / "device/current"), _tensors(3))
        assert done.fetched_bytes < (releases / "files" / _list_of(releases, 3)).stat().st_size


def test_publishing_predicts_what_changed(releases: Path, tmp_path: Path) -> None:
    pull(releases / "a/3", tmp_path / "device")
    save_file(_tensors(4), tmp_path / "in/model.ptd")
    published = publish(tmp_path / "in", releases, name="a", version="4")
    assert pull(releases / "a/4", tmp_path / "device").fetched_bytes == published.update_bytes


@pytest.mark.parametrize(
    "changes",
    [b"", b"{", zstandard.compress(b"")[:-1], zstandard.compress(b"[0,1,-1]"), zstandard.compress(b"\xff"), None],
)
def test_changes_that_are_damaged_or_missing(releases: Path, tmp_path: Path, changes: bytes | None) -> None:
    """The list is fetched; the changes are not signed, and nothing depends on them."""
    place = _since(releases, 2)
    if changes is None:
        place.unlink()
    else:
        place.write_bytes(changes)
    pull(releases / "a/2", tmp_path / "device")
    with serving(releases) as server:
        pull(f"{server.url}/a/3/index.json", tmp_path / "device", patience=NOW)
        assert _list_of(releases, 3) in str(server.log)
    assert same(found(tmp_path / "device/current"), _tensors(3))


def test_who_decodes_nothing_fetches_the_list(releases: Path, tmp_path: Path) -> None:
    for version in (4, 5):
        save_file(_tensors(version), tmp_path / "in/model.ptd")
        publish(tmp_path / "in", releases, name="a", version=str(version), plain=True)
    with serving(releases) as server:
        for version in (4, 5):
            pull(f"{server.url}/a/{version}/index.json", tmp_path / "device", plain=True)
        assert _list_of(releases, 5) in str(server.log) and "since-" not in str(server.log)


@pytest.mark.parametrize("what", ["list of the device", "changes"])
def test_a_list_of_another_release_is_no_list(releases: Path, tmp_path: Path, what: str) -> None:
    """Neither where changes begin, nor what they give."""
    pull(releases / "a/2", tmp_path / "device")
    if what == "changes":
        shutil.copy(releases / f"a/2/since-{_list_of(releases, 1)}.json.zst", _since(releases, 2))
    else:
        shutil.copy(releases / "files" / _list_of(releases, 1), tmp_path / "device/files" / _list_of(releases, 2))
    with serving(releases) as server:
        pull(f"{server.url}/a/3/index.json", tmp_path / "device", patience=NOW)
        assert _list_of(releases, 3) in str(server.log)
    assert same(found(tmp_path / "device/current"), _tensors(3))


def test_changes_go_with_their_release(releases: Path) -> None:
    assert any((releases / "a/3").glob("since-*"))
    with Pool(releases) as pool:
        pool.drop("a@3")
    sweep(releases)
    assert not any((releases / "a/3").iterdir())
