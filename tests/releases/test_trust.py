"""What a release is trusted by is compared, and what it claims is bounded (F4, S1, S2, S3)."""

import base64
import hashlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any, cast

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given
from hypothesis import strategies as st

from blobstore.errors import BlobStoreError, FileAccessError, IntegrityError, InvalidFileError, ReleaseError, TrustError
from blobstore.releases import publish, pull, push
from blobstore.releases.device.assembly import Assembly, Piece, make
from blobstore.releases.device.spool import Spool
from blobstore.releases.index.index import Object
from blobstore.releases.index.manifests import INDEX_LIMIT, parse_manifest
from blobstore.releases.index.objects import ObjectWriter
from blobstore.releases.index.parts import Part, Parts
from blobstore.releases.index.references import parse_reference
from blobstore.releases.index.ways import Way, cheapest, parse_ways
from blobstore.releases.sources.oci_layout import LayoutTarget
from blobstore.releases.sources.source import read_small
from blobstore.releases.sources.trust import check_signature, sign
from tests.releases.models import inputs, keys, published_once, read_ways, weights, write_ways
from tests.releases.server import serving
from tests.releases.test_native import lacks, take

DATA = b"an index"


@published_once
def releases(folder: Path) -> None:
    """Version 1, which is not signed."""
    publish(inputs(folder / "in", weights(layers=2)), folder / "releases", name="a", version="1")


@pytest.fixture
def layout(releases: Path, tmp_path: Path) -> Path:
    """The same in an image layout, under the tag 1."""
    push(f"oci:{tmp_path}/layout:1", releases / "a/1")
    return tmp_path / "layout"


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# Signatures


def test_a_key_on_another_curve_signs_nothing(tmp_path: Path) -> None:
    """A signature that is right, but on P-384, does not count, and none is made (F4)."""
    private, public, key = keys(tmp_path, curve=ec.SECP384R1())
    with pytest.raises(ReleaseError, match="P-256"):
        sign(DATA, private)
    signature = base64.b64encode(key.sign(DATA, ec.ECDSA(hashes.SHA256()))).decode()
    with pytest.raises(ReleaseError, match="P-256"):
        check_signature(DATA, signature, public, "it")


def test_a_signature_is_base64_and_of_these_bytes(tmp_path: Path) -> None:
    """What a lenient decoder would skip is refused; so is another signature, and none (F4)."""
    _, public, key = keys(tmp_path)
    good = base64.b64encode(key.sign(DATA, ec.ECDSA(hashes.SHA256()))).decode()
    check_signature(DATA, good, public, "it")
    check_signature(DATA, f"{good}\n", public, "it")
    other = base64.b64encode(key.sign(b"something else", ec.ECDSA(hashes.SHA256()))).decode()
    for bad in (f"!{good}", f"{good[:8]} {good[8:]}", f"{good[:8]}\n{good[8:]}", good[:-4], other, "", None):
        with pytest.raises(TrustError, match="is not signed"):
            check_signature(DATA, bad, public, "it")


def test_what_is_here_already_must_be_signed_too(releases: Path, tmp_path: Path) -> None:
    """A release was taken without a key; with one, it is refused, and the folder stays as it is (F4)."""
    private, public, _ = keys(tmp_path)
    done = pull(releases / "a/1", tmp_path / "device")
    with pytest.raises(TrustError, match="not signed"):
        pull(releases / "a/1", tmp_path / "device", key=public)
    with pytest.raises(TrustError, match="not signed"):
        pull(releases / "a/1", tmp_path / "new", key=public)
    assert not (tmp_path / "new/current").exists()
    index = (releases / "a/1/index.json").read_bytes()
    (releases / "signatures" / done.sha256).write_text(sign(index, private))  # later, as publishers may
    assert pull(releases / "a/1", tmp_path / "device", key=public).sha256 == done.sha256


# Digests


def test_an_image_layout_takes_no_other_bytes(tmp_path: Path) -> None:
    """What is pushed has the digest that the index says (S1)."""
    (tmp_path / "file").write_bytes(b"other")
    target = LayoutTarget(parse_reference(f"oci:{tmp_path}/layout:1"))
    with pytest.raises(IntegrityError, match="digest"):
        target.put(Object("a" * 64, 5), tmp_path / "file", lambda sent: None)


@pytest.mark.parametrize(
    "change",
    [
        {"digest": "sha256:../../../etc/passwd"},
        {"digest": f"sha256:{'a' * 64}/.."},
        {"digest": "a" * 64},
        {"size": INDEX_LIMIT + 1},
        {"size": 0},
        {"size": True},
        {"mediaType": "application/vnd.oci.image.config.v1+json"},
    ],
    ids=str,
)
def test_the_descriptor_of_an_index(layout: Path, change: dict[str, Any]) -> None:
    """It becomes a path and a limit (S3)."""
    [one] = json.loads((layout / "index.json").read_text())["manifests"]
    manifest = json.loads((layout / "blobs/sha256" / one["digest"].removeprefix("sha256:")).read_text())
    parse_manifest(json.dumps(manifest).encode(), "it")
    manifest["config"].update(change)
    with pytest.raises(InvalidFileError):
        parse_manifest(json.dumps(manifest).encode(), "it")


def test_an_object_gets_its_name_only_with_its_bytes(tmp_path: Path) -> None:
    """Others leave nothing (S1)."""
    with ObjectWriter(tmp_path) as writer:
        writer.write(b"other")
        with pytest.raises(IntegrityError, match="SHA-256"):
            writer.finish(Object("a" * 64, 5))
    assert not list(tmp_path.iterdir())


# Claims


@pytest.mark.parametrize("url", ["http://one.test/a/1/index.json", "http://127.0.0.1.one.test/x", "http://10.0.0.1/x"])
def test_other_machines_are_asked_by_https(url: str) -> None:
    """Only this one needs no HTTPS (F4)."""
    assert parse_reference("http://127.0.0.1:1/a/1/index.json").kind == "web"
    with pytest.raises(ReleaseError, match="HTTPS"):
        parse_reference(url)


@pytest.mark.parametrize("reference", ["https://me:secret@host/a/1/index.json", "https://me@host/a/1/index.json"])
def test_a_url_has_no_credentials(reference: str) -> None:
    """They would be printed in messages."""
    with pytest.raises(ReleaseError, match="credentials") as caught:
        parse_reference(reference)
    assert "secret" not in str(caught.value)


def test_a_chunk_is_bounded_before_it_is_read(tmp_path: Path) -> None:
    """Its length is the server's word (S3)."""
    wanted = Object("c" * 64, 1 << 40)
    spool = Spool(tmp_path, wanted)
    spool.write(0, b"\xff" * 4)
    step = Piece(Part(0, 1 << 20, "d" * 64), None, spool, Way("planes:1", 0, 0, 1 << 40))
    with pytest.raises(IntegrityError, match="a chunk of"):
        make(Assembly(Object("e" * 64, 1 << 20), None, [step]), tmp_path, cast(Any, Again(spool)))


class Again:
    """A transfer that brings the same bytes."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool

    def again(self, spool: Spool, start: int, stop: int) -> None:
        self._spool.write(0, b"\xff" * 4)


@pytest.mark.parametrize("data", [b"", b"{}", b"\x28\xb5\x2f\xfd", bytes.fromhex("28b52ffde0ffffffffffffff7f")])
def test_lists_that_are_no_frames(data: bytes) -> None:
    """How large one is, it says before it is read (S3)."""
    parts = Parts("blobstore.parts.1", ((Part(0, 60, "b" * 64),),))
    with pytest.raises(InvalidFileError, match="not a list of the ways"):
        parse_ways(data, "d" * 64, parts, "it")


@given(st.data())
def test_the_cheapest_way(data: st.DataObject) -> None:
    """For any ways, also in circles: no chain of at most eight steps is cheaper (F2)."""
    count = data.draw(st.integers(1, 5))
    way = st.builds(lambda stored, base: Way("x", 0, 0, stored, base), st.integers(0, 9), st.integers(-1, count - 1))
    listed = [[w for w in data.draw(st.lists(way, max_size=4)) if w.base != number] for number in range(count)]
    here = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))

    def least(number: int, depth: int) -> float:
        if here[number]:
            return 0
        costs = [
            w.stored + (0 if w.base < 0 else least(w.base, depth - 1)) for w in listed[number] if w.base < 0 or depth
        ]
        return min(costs, default=float("inf"))

    best = cheapest(listed, here)
    for number, route in enumerate(best):
        assert (float("inf") if route is None else route.cost) == least(number, 8)


def test_a_long_chain_of_ways(releases: Path, tmp_path: Path) -> None:
    """Thousands of bases, each a difference to the next one, are no more than they cost; circles lead nowhere (S3)."""
    release, count = releases / "a/1", 5000
    found = read_ways(release)
    first = len(found["ways"])
    found["objects"] = [*found["objects"][:1], ["9" * 64, 100, "files"]]
    listed = json.loads((releases / "files" / json.loads((release / "index.json").read_text())["parts"][0]).read_text())
    size = listed["files"][0][0][1]
    found["bases"] = [[f"{number:064x}", size] for number in range(count)]
    found["ways"][0] = [["near:u1:0", 1, 0, 1, first]]
    found["ways"] += [[["near:u1:0", 1, 0, 1, first + number + 1]] for number in range(count - 1)]
    for last in ([["planes:1", 1, 0, 9]], [["near:u1:0", 1, 0, 1, first]]):
        write_ways(release, {**found, "ways": [*found["ways"], last]})
        with pytest.raises(BlobStoreError):
            pull(release, tmp_path / "device")


def test_a_small_file_is_small(tmp_path: Path) -> None:
    """A record that grew is not read into memory (S3)."""
    (tmp_path / "it").write_bytes(bytes(11))
    assert len(read_small(tmp_path / "it", 11)) == 11
    with pytest.raises(InvalidFileError, match="more than 10 bytes"):
        read_small(tmp_path / "it", 10)


def test_a_spool_believes_its_list_as_far_as_its_file_goes(tmp_path: Path) -> None:
    """A power failure may leave a list without its bytes (F2)."""
    wanted = Object("a" * 64, 100)
    (tmp_path / wanted.sha256).write_bytes(bytes(50))
    (tmp_path / f"{wanted.sha256}.ranges").write_text("0 20\n40 60\n90 100\n-5 10\n30 25\n")
    assert Spool(tmp_path, wanted).missing(0, 100) == [(20, 100)]


@pytest.mark.parametrize("ending", ["", ".ranges"])
def test_what_is_fetched_goes_through_no_link(tmp_path: Path, ending: str) -> None:
    """Another user may have put it there (S2)."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    wanted = Object("a" * 64, 100)
    (tmp_path / f"{wanted.sha256}{ending}").symlink_to(victim)
    spool = Spool(tmp_path, wanted)
    with pytest.raises(BlobStoreError):
        spool.write(0, b"theirs") if not ending else spool.note(0, 10)
    assert victim.read_bytes() == b"mine"


# What a reference says


@pytest.mark.parametrize("source", ["folder", "index", "web", "layout"])
def test_a_release_is_the_version_that_the_reference_says(releases: Path, tmp_path: Path, source: str) -> None:
    """A signed older release under the path or the tag of a newer one is refused, also if it is installed (F4)."""
    private, public, _ = keys(tmp_path)
    publish(tmp_path / "in", releases, name="a", version="2", sign=private)
    for name in ("a/3.1", "b/2", "b/latest"):
        shutil.copytree(releases / "a/2", releases / name)
    if source == "layout":
        push(f"oci:{tmp_path}/layout:2", releases / "a/2")
        with pytest.raises(TrustError, match=r"expected 3\.1, found a 2"):
            push(f"oci:{tmp_path}/layout:3.1", releases / "a/2")
        entries = json.loads((tmp_path / "layout/index.json").read_text())
        (tmp_path / "layout/index.json").write_text(json.dumps(entries).replace('name": "2"', 'name": "3.1"'))
    with serving(releases) as server:
        references = {
            "folder": [str(releases / name) for name in ("a/3.1", "b/2", "b/latest", "a/2")],
            "index": [str(releases / name / "index.json") for name in ("a/3.1", "b/2", "b/latest", "a/2")],
            "web": [f"{server.url}/{name}/index.json" for name in ("a/3.1", "b/2", "b/latest", "a/latest")],
            "layout": [f"oci:{tmp_path}/layout:3.1"],
        }[source]
        for installed in (False, True):
            device = tmp_path / "device"
            if installed:
                pull(releases / "a/2", device, key=public)
            for wrong in references[: len(references) - (source != "layout")]:
                with pytest.raises(TrustError, match=r"expected (3\.1|a 3\.1|b 2|b), found a 2"):
                    pull(wrong, device, key=public)
                assert (device / "current").exists() == installed
        if source != "layout":
            assert pull(references[-1], device, key=public).version == "2"


def test_a_tag_that_is_no_version(releases: Path, tmp_path: Path) -> None:
    """It stands for whatever is there; and a version with a "+" has a tag without one (F1)."""
    publish(tmp_path / "in", releases, name="a", version="2.0+cpu")
    for tag in ("latest", "stable", "2.0-cpu", "v2.0_cpu"):
        push(f"oci:{tmp_path}/tags:{tag}", releases / "a/2.0+cpu")
        assert pull(f"oci:{tmp_path}/tags:{tag}", tmp_path / "device").version == "2.0+cpu"
    assert parse_reference("https://host/x/a/2.0%2Bcpu/index.json").named == ("a", "2.0+cpu")


# The newest release


def times(release: Path, published: int) -> Path:
    """An index with another time."""
    index = json.loads((release / "index.json").read_text())
    index["published"] = published
    (release / "index.json").write_text(json.dumps(index))
    if (release / "ways.json.zst").exists():
        write_ways(release, read_ways(release) | {"index": digest(release / "index.json")})
    return release


@pytest.mark.parametrize("published", [(1 << 53) - 1, 4_102_444_801])
def test_a_release_from_the_future_blocks_nobody(
    releases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, published: int
) -> None:
    """All others would be older: devices refuse it, and publishers are told how to go on (F4)."""
    for release in ("a/1", "a/latest"):
        times(releases / release, published)
    for clock in (None, 0.0):  # and on a device whose clock is not set
        if clock is not None:
            monkeypatch.setattr(time, "time", lambda: 0.0)
        for call in (pull, lacks, take):
            if call is pull or clock is None:  # C++ has the clock of the machine
                with pytest.raises(ReleaseError, match="ahead of this machine's clock"):
                    call(releases / "a/1", tmp_path / "device")
        shutil.rmtree(releases / "b", ignore_errors=True)
        monkeypatch.undo()
        publish(tmp_path / "in", releases, name="b", version="1")
        if clock is not None:
            monkeypatch.setattr(time, "time", lambda: 0.0)
        assert pull(releases / "b/1", tmp_path / f"device of {clock}").changed
    monkeypatch.undo()
    with pytest.raises(ReleaseError, match=r"remove .*latest/index\.json"):
        publish(tmp_path / "in", releases, name="a", version="2")
    (releases / "a/latest/index.json").unlink()
    with pytest.raises(ReleaseError, match="drop its version"):  # the one before would also be from the future
        publish(tmp_path / "in", releases, name="a", version="2")
    (releases / "a/1/index.json").unlink()
    publish(tmp_path / "in", releases, name="a", version="2")
    assert pull(releases / "a/latest", tmp_path / "device").version == "2"


@pytest.mark.parametrize("which", ["", ".ranges"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_a_spool_is_of_regular_files(tmp_path: Path, which: str, make: Any) -> None:
    """A pipe among what an earlier pull left is not waited for (S3)."""
    wanted = Object("0" * 64, 10)
    make(tmp_path / f"{wanted.sha256}{which}")
    spool = Spool(tmp_path, wanted)
    assert spool.present == 0
    with pytest.raises(FileAccessError):
        spool.write(0, b"0123456789")
        spool.note(0, 10)
