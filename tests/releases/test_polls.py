"""Asking for the newest release again and again: few bytes, and answers that are older than what is installed (F2, F4)."""

import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from blobstore.cli.app import app
from blobstore.errors import BlobStoreError, ReleaseError, TransferError, TrustError
from blobstore.releases import Pulled, gc, publish, pull
from blobstore.releases.sources.caching import cache_control
from tests.releases.models import NOW, found, inputs, keys, published_once, same, spoil, weights
from tests.releases.server import Server, serving
from tests.releases.wire import needs_nginx, nginx, wire_to

LATEST = "a/latest/index.json"


@published_once
def releases(folder: Path) -> None:
    """Versions 1 to 3, and beside them what was published last."""
    for number in (1, 2, 3):
        content = inputs(folder / "in", weights(number, layers=2, size=32))
        publish(content, folder / "releases", name="a", version=str(number))


@pytest.fixture
def server(server: Server) -> Server:
    """It gives tags."""
    server.tags = True
    return server


def offer(releases: Path, version: int) -> None:
    """Let `latest` be a version, as a server or a cache has it."""
    shutil.copy(releases / f"a/{version}/index.json", releases / LATEST)


def go(server: Server, device: Path, **options: Any) -> Pulled:
    return pull(f"{server.url}/{LATEST}", device, patience=NOW, **options)


def taken(server: Server, releases: Path, folder: Path, *versions: int) -> Path:
    """A device that took some versions when they were the latest."""
    for version in versions:
        offer(releases, version)
        go(server, folder / "device")
    return folder / "device"


# Polls


def test_a_poll_sends_the_tag_and_gets_nothing(server: Server, releases: Path, device: Path) -> None:
    """One request without a body; after a new release its index comes, and its tag is sent from then on."""
    offer(releases, 1)
    assert go(server, device).changed
    for _ in range(2):
        done = go(server, device)
        assert (done.changed, done.version, done.requests, done.fetched_bytes) == (False, "1", 1, 0)
    offer(releases, 2)
    assert go(server, device).version == "2"
    done = go(server, device)
    assert (done.changed, done.requests, done.fetched_bytes) == (False, 1, 0)
    assert gc(device).releases == 1
    assert len(list((device / "indexes").glob("*.etag"))) == 1


@pytest.mark.parametrize("damage", ["missing", "a byte less"])
@pytest.mark.parametrize("what", ["files", "indexes"])
def test_nothing_is_taken_for_unchanged_that_is_not_whole(server: Server, device: Path, what: str, damage: str) -> None:
    """The index is fetched, and what is lacking, whatever tag is kept."""
    go(server, device)
    pattern = "*.json" if what == "indexes" else "*"
    spoil(max((device / what).glob(pattern), key=lambda path: path.stat().st_size), damage)
    server.conditions.clear()
    go(server, device)
    assert {tag for tag, _ in server.conditions} == {None}
    assert same(found(device / "current"), weights(3, layers=2, size=32))


def test_a_tag_is_for_one_server(server: Server, releases: Path, tmp_path: Path) -> None:
    """Another one may use the same tags for other contents."""
    go(server, tmp_path / "device")
    with serving(releases) as other:
        other.fault = lambda handler, times: bool(handler.headers.get("If-None-Match")) and handler.answer(304)
        done = go(other, tmp_path / "device")
        assert done.fetched_bytes > 0
        assert other.conditions == [(None, None)]


def test_a_tag_has_an_end(server: Server, device: Path) -> None:
    """A server whose tags never change hides releases for 30 days at most; so does a clock that runs back."""
    go(server, device)
    (path,) = (device / "indexes").glob("*.etag")
    source, _, tag = path.read_text().split()
    for age, sent in ((29 * 86_400, True), (31 * 86_400, False), (-100, False)):
        path.write_text(f"{source} {int(time.time()) - age} {tag}\n")
        server.conditions.clear()
        go(server, device)
        assert server.conditions == [(tag if sent else None, None)]


@pytest.mark.parametrize(
    "tag", ["x", '"a', '"a b"', '"\u00e9"', f'"{"x" * 201}"', 'W/ "a"', '"a"\t"b"', "*", '"a", "b"']
)
def test_tags_that_are_none(server: Server, device: Path, tmp_path: Path, tag: str) -> None:
    """They are not sent, whether a server or the folder has them."""

    latest = (tmp_path / "releases" / LATEST).read_bytes()
    server.fault = lambda handler, times: "index" in handler.path and handler.answer(200, latest, {"ETag": tag})
    go(server, device)
    assert not list((device / "indexes").glob("*.etag"))
    (index,) = (device / "indexes").glob("*.json")
    index.with_suffix(".etag").write_text(f"{'0' * 16} {int(time.time())} {tag}\n", encoding="latin-1")
    go(server, device)
    assert {sent for sent, _ in server.conditions} == {None}


@pytest.mark.parametrize(("seconds", "kept"), [(0, False), (1, False), (2, True), (-50, False)])
def test_a_tag_of_a_file_that_may_still_change(server: Server, tmp_path: Path, seconds: int, kept: bool) -> None:
    """Servers make tags of size and time, in seconds: two indexes of one second would have one tag."""
    from email.utils import formatdate

    now, index = time.time(), (tmp_path / "releases" / LATEST).read_bytes()
    headers = {"ETag": '"a"', "Last-Modified": formatdate(now - seconds, usegmt=True)}
    server.fault = lambda handler, times: "index" in handler.path and handler.answer(200, index, headers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: now)  # both headers are of this moment
        go(server, tmp_path / "device")
    assert bool(list((tmp_path / "device/indexes").glob("*.etag"))) == kept


@pytest.mark.parametrize("wrong", ["encoded", "400", "404", "406"])
def test_a_server_that_cannot_answer_a_condition_is_asked_without(
    server: Server, releases: Path, tmp_path: Path, wrong: str
) -> None:
    """A poll has fewer headers than other requests."""

    def fault(handler: Any, times: int) -> bool:
        if not handler.headers.get("If-None-Match"):
            return False
        wrongs = (200, b"\x1f\x8b", {"Content-Encoding": "gzip"}) if wrong == "encoded" else (int(wrong),)
        return handler.answer(*wrongs)

    offer(releases, 1)
    go(server, tmp_path / "device")
    offer(releases, 2)
    server.fault = fault
    assert go(server, tmp_path / "device").version == "2"


def test_a_304_that_nobody_asked_for(server: Server, tmp_path: Path) -> None:
    """A new device cannot take it for anything."""
    server.fault = lambda handler, times: handler.answer(304)
    with pytest.raises(TransferError, match="304"):
        go(server, tmp_path / "device")


def signed(releases: Path, tmp_path: Path) -> Path:
    """Sign a version 4, and give the public key."""
    private, public, _ = keys(tmp_path)
    publish(inputs(tmp_path / "in", weights(4, 2, 32)), releases, name="a", version="4", sign=private)
    return public


def test_a_signature_is_fetched_though_nothing_changed(server: Server, releases: Path, tmp_path: Path) -> None:
    """The device begins to demand one after the release was installed."""
    device, key = tmp_path / "device", signed(releases, tmp_path)
    go(server, device)
    assert go(server, device, key=key).version == "4"
    server.log.clear()
    assert not go(server, device, key=key).changed
    assert len(server.log) == 1
    _, other, _ = keys(tmp_path, "other")
    with pytest.raises(TrustError):
        go(server, device, key=other)


@needs_nginx
def test_a_poll_costs_300_bytes(releases: Path, tmp_path: Path) -> None:
    """All that goes over the wire, both ways, with nginx as the manual configures it."""
    tmp_path.chmod(0o755)
    with nginx(releases, tmp_path / "nginx") as url, wire_to(url.removesuffix("/releases")) as wire:
        place = f"{wire.url}/releases/{LATEST}"
        assert pull(place, tmp_path / "device", patience=NOW).version == "3"
        wire.reset()
        assert not pull(place, tmp_path / "device", patience=NOW).changed
        assert 0 < wire.total <= 300
        offer(releases, 2)  # the tag is not the same for another file
        assert pull(place, tmp_path / "other", patience=NOW).version == "2"


@needs_nginx
def test_the_manual_says_what_caches_may_keep(releases: Path, tmp_path: Path) -> None:
    """Its nginx answers every path of a release folder as `cache_control` says."""
    import urllib.request

    signed(releases, tmp_path)
    tmp_path.chmod(0o755)
    seen = set()
    with nginx(releases, tmp_path / "nginx") as url:
        for path in releases.rglob("*"):
            name = path.relative_to(releases).as_posix()
            if path.is_file() and not path.name.startswith("."):
                with urllib.request.urlopen(f"{url}/{name}") as answer:  # noqa: S310 - this machine
                    assert answer.headers.get_all("Cache-Control") == [cache_control(name)], name
                seen.add(re.sub("[0-9a-f]{64}", "SHA", name))
    assert {"files/SHA", "signatures/SHA", LATEST, "a/1/index.json", "a/1/ways.json.zst"} <= seen
    assert any(name.startswith("packs/") for name in seen)


@pytest.mark.parametrize(
    ("path", "kept"),
    [
        (f"files/{'0' * 64}", True),
        (f"packs/a0/{'0' * 64}", True),
        (f"packs/{'0' * 64}", False),
        ("pool.json", False),
        ("a/1/ways.json.zst", False),
        (f"files/{'0' * 63}", False),
        (f"files/x/{'0' * 64}", False),
        (f"{'0' * 64}", False),
        (f"signatures/{'0' * 64}", False),
        ("a/1.0/index.json", True),
        ("a/v1/index.json", True),
        ("a/latest/index.json", False),
        ("a/stable/index.json", False),
        ("1/index.json", False),
        ("a/1/other.json", False),
    ],
)
def test_what_caches_may_keep(path: str, kept: bool) -> None:
    """What is named by its digest or its version for ever, everything else for a minute."""
    assert cache_control(path) == ("max-age=31536000, immutable" if kept else "max-age=60")


# Older than what is installed


def test_an_index_that_was_installed_before_is_stale(server: Server, releases: Path, tmp_path: Path) -> None:
    """The device keeps what it has, after it asked past the caches; so does the command (F4)."""
    device = taken(server, releases, tmp_path, 1, 2)
    gc(device)  # the index itself is gone
    offer(releases, 1)
    server.conditions.clear()
    done = go(server, device)
    assert (done.changed, done.version, done.stale) == (False, "2", "1")
    assert [cache for _, cache in server.conditions] == [None, "no-cache"]
    assert same(found(device / "current"), weights(2, layers=2, size=32))
    said = CliRunner().invoke(app, ["pull", f"{server.url}/{LATEST}", str(device)])
    assert said.exit_code == 0
    assert "a cache still has a 1" in said.stdout
    told = CliRunner().invoke(app, ["pull", f"{server.url}/{LATEST}", str(device), "--json"])
    assert (json.loads(told.stdout)["stale"], json.loads(told.stdout)["changed"]) == ("1", False)
    assert go(server, device, allow_rollback=True).version == "1"


@pytest.mark.parametrize("fresh", ["the same", "newer"])
def test_a_cache_that_asks_its_server(server: Server, releases: Path, tmp_path: Path, fresh: str) -> None:
    """What is there when no cache answers counts, and nobody is told of a cache."""
    device = taken(server, releases, tmp_path, 2)
    old, new = ((releases / f"a/{one}/index.json").read_bytes() for one in (1, 2 if fresh == "the same" else 3))

    server.fault = lambda handler, times: (
        "index" in handler.path and handler.answer(200, new if handler.headers["Cache-Control"] == "no-cache" else old)
    )
    done = go(server, device)
    assert (done.changed, done.version, done.stale) == (fresh == "newer", "2" if fresh == "the same" else "3", None)


def test_an_older_index_that_was_never_here_is_an_attack(server: Server, releases: Path, tmp_path: Path) -> None:
    """Unless a cache explains it."""
    device = taken(server, releases, tmp_path, 2)
    offer(releases, 1)
    for _ in range(2):  # to be refused does not make it known
        with pytest.raises(TrustError, match="version 1 is older than version 2"):
            go(server, device)
    assert same(found(device / "current"), weights(2, layers=2, size=32))


def aged(releases: Path, age: str) -> Any:
    index = (releases / LATEST).read_bytes()
    return lambda handler, times: handler.path.endswith(LATEST) and handler.answer(200, index, {"Age": age})


@pytest.mark.parametrize("age", ["1001", "99999999999", "999", "0", "-2000", "x", "", "a wrong clock"])
def test_the_age_of_an_answer(
    server: Server, releases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age: str
) -> None:
    """A cache that has an index since before the installed one was published, 1,000 seconds ago, explains it; not if the clock
    is that of a time before that."""
    device = taken(server, releases, tmp_path, 2)
    published = json.loads((releases / "a/2/index.json").read_text())["published"]
    monkeypatch.setattr(time, "time", lambda: 1000.0 if age == "a wrong clock" else published + 1000)
    offer(releases, 1)
    server.fault = aged(releases, "100000" if age == "a wrong clock" else age)
    if age in {"1001", "99999999999"}:
        assert go(server, device).stale == "1"
    else:
        with pytest.raises(TrustError, match="older"):
            go(server, device)


@pytest.mark.parametrize("what", ["its version", "its digest", "a folder"])
def test_who_asks_for_an_older_release_is_told(server: Server, releases: Path, tmp_path: Path, what: str) -> None:
    """A reference that says which release it wants is never stale, and neither is a folder, which has no cache."""
    device = taken(server, releases, tmp_path, 1, 2)
    offer(releases, 1)
    import hashlib

    digest = hashlib.sha256((releases / LATEST).read_bytes()).hexdigest()
    place = {
        "its version": f"{server.url}/a/1/index.json",
        "its digest": f"{server.url}/{LATEST}@sha256:{digest}",
        "a folder": str(releases / "a/latest"),
    }[what]
    with pytest.raises(TrustError, match="version 1 is older than version 2"):
        pull(place, device, patience=NOW)


def test_another_name_is_never_stale(server: Server, releases: Path, device: Path, tmp_path: Path) -> None:
    """However old it is, and whatever a cache says."""
    publish(inputs(tmp_path / "in", weights(layers=2, size=32)), tmp_path / "others", name="b", version="1")
    publish(inputs(tmp_path / "in", weights(layers=2, size=32)), releases, name="a", version="5")
    go(server, device)
    shutil.copy(tmp_path / "others/b/1/index.json", releases / LATEST)
    server.fault = aged(releases, "100000")
    with pytest.raises(ReleaseError, match="expected a|release of 'b'"):
        go(server, device)


def test_an_unsigned_index_is_never_stale(server: Server, releases: Path, device: Path, tmp_path: Path) -> None:
    """Where signatures are demanded, one that was here before they were is refused."""
    go(server, device)  # version 3, without a signature
    key = signed(releases, tmp_path)
    assert go(server, device, key=key).version == "4"
    offer(releases, 3)
    with pytest.raises(TrustError, match="sign"):
        go(server, device, key=key)
    assert go(server, device).stale == "3"


def test_damage_beside_a_stale_index_is_mended(server: Server, releases: Path, tmp_path: Path) -> None:
    """What is kept is what is installed, whole."""
    device = taken(server, releases, tmp_path, 1, 2)
    offer(releases, 1)
    spoil(max((device / "files").iterdir(), key=lambda path: path.stat().st_size), "missing")
    done = go(server, device)
    assert (done.version, done.stale) == ("2", "1")
    assert same(found(device / "current"), weights(2, layers=2, size=32))


def test_what_is_remembered_is_bounded_and_not_trusted(server: Server, releases: Path, tmp_path: Path) -> None:
    """A list of anything is no list of digests, and a long one is cut."""
    device = taken(server, releases, tmp_path, 1, 2)
    had = device / "indexes/had"
    had.write_text("".join(f"{number:064x}\n" for number in range(1500)))
    offer(releases, 3)
    go(server, device)
    assert len(had.read_text().splitlines()) == 1000
    for content in (b"\xff\x00" * 100, b"x" * (1 << 20)):
        had.write_bytes(content)
        try:
            go(server, device)
        except BlobStoreError as error:
            pytest.fail(str(error))
