"""Ranges that lie apart: few bytes by few requests, from servers that send several at once and from others (F2, F4)."""

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blobstore import save_file
from blobstore.errors import BlobStoreError
from blobstore.releases import Patience, publish, pull
from blobstore.releases.device.spool import Spool
from blobstore.releases.device.transfer import Transfer
from blobstore.releases.index.index import Object
from blobstore.releases.sources.multipart import OVERHEAD, boundary_of, parts_of
from blobstore.releases.sources.patience import WrongAnswerError
from tests.releases.models import NOW, found, same
from tests.releases.server import Server, serving
from tests.releases.server import parts_of as encoded
from tests.releases.wire import needs_nginx, nginx, wire_to

# What an answer says


DATA = random.Random(0).randbytes(500)  # noqa: S311 - no secret


@st.composite
def separate(draw: st.DrawFn, size: int = len(DATA)) -> list[tuple[int, int]]:
    """Ranges in order that do not touch, not empty."""
    borders = sorted(draw(st.sets(st.integers(0, size), min_size=2, max_size=20)))
    return [(borders[i], borders[i + 1]) for i in range(0, len(borders) - 1, 2)]


def cut(data: bytes, sizes: list[int]) -> Iterator[bytes]:
    at = 0
    for size in itertools.cycle(sizes):
        if at >= len(data):
            return
        yield data[at : at + size]
        at += size


def read(body: bytes, start: int = 0, stop: int = len(DATA), sizes: tuple[int, ...] = (7,)) -> list[tuple[int, bytes]]:
    parts = parts_of("one", cut(body, list(sizes)), "between", start, stop, len(DATA))
    return [(part.start, b"".join(part.pieces)) for part in parts]


def header(ranges: list[tuple[int, int]]) -> str:
    return "bytes=" + ",".join(f"{start}-{stop - 1}" for start, stop in ranges)


@given(separate(), st.lists(st.integers(1, 300), min_size=1, max_size=5))
def test_parts_come_as_they_were_sent(ranges: list[tuple[int, int]], sizes: list[int]) -> None:
    """However the network cuts them."""
    expected = [(start, DATA[start:stop]) for start, stop in ranges]
    assert read(encoded(DATA, header(ranges)), sizes=tuple(sizes)) == expected


@given(separate(), st.data())
def test_an_answer_that_is_damaged_is_an_error_or_has_ranges(
    ranges: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Cut, or with a byte changed: no other error, and nothing outside of what was asked for."""
    body = bytearray(encoded(DATA, header(ranges)))
    at = data.draw(st.integers(0, len(body) - 1))
    body[at] = data.draw(st.integers(0, 255))
    del body[data.draw(st.integers(at, len(body))) :]
    try:
        for start, content in read(bytes(body)):
            assert start >= 0 and start + len(content) <= len(DATA)
    except WrongAnswerError:
        pass


SOUND = encoded(DATA, "bytes=10-19,30-39")
WRONG = {
    "nothing": b"",
    "no part": b"--other\r\n",
    "no end": SOUND.removesuffix(b"--between--\r\n"),
    "no range": SOUND.replace(b"Content-Range", b"X-Range"),
    "a range before": SOUND.replace(b"bytes 10-19", b"bytes 9-18"),
    "a range behind": SOUND.replace(b"bytes 30-39", b"bytes 31-40"),
    "a range backwards": SOUND.replace(b"bytes 30-39", b"bytes 39-30"),
    "another size": SOUND.replace(b"/500", b"/501"),
    "another unit": SOUND.replace(b"bytes 10", b"words 10"),
    "digits of another script": SOUND.replace(b"bytes 10", "bytes 1\u0660".encode()),
    "more bytes than it says": SOUND.replace(b"bytes 10-19", b"bytes 10-18"),
    "fewer bytes than it says": SOUND.replace(b"bytes 10-19", b"bytes 10-20"),
    "lines without end": b"\r\n" * OVERHEAD,
    "a line without end": b"x" * 4 * OVERHEAD,
    "a head without end": b"--between\r\n" + b"X: y\r\n" * OVERHEAD,
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_answers_that_are_none(wrong: bytes) -> None:
    assert wrong != SOUND
    with pytest.raises(WrongAnswerError):
        read(wrong, 10, 40)
    assert read(SOUND, 10, 40) == [(10, DATA[10:20]), (30, DATA[30:40])]


def test_lines_without_end_are_not_read_to_their_end() -> None:
    """A server could send them for ever (F2)."""
    read = 0

    def lines() -> Iterator[bytes]:
        nonlocal read
        while read < 100 * OVERHEAD:
            read += 2
            yield b"\r\n"

    with pytest.raises(WrongAnswerError, match="between two ranges"):
        next(parts_of("one", lines(), "between", 0, 1, 1))
    assert read <= 2 * OVERHEAD


@pytest.mark.parametrize(
    ("content_type", "boundary"),
    [
        ("multipart/byteranges; boundary=a", "a"),
        ('Multipart/ByteRanges;charset=x; boundary="a b"', "a b"),
        ("multipart/byteranges", None),
        ("multipart/byteranges; boundary=", None),
        ("multipart/mixed; boundary=a", None),
        (f"multipart/byteranges; boundary={'a' * 71}", None),
        ("application/octet-stream", None),
        ("", None),
    ],
)
def test_what_separates_parts(content_type: str, boundary: str | None) -> None:
    assert boundary_of(content_type) == boundary


# What is asked for


class Ranged:
    """A source on a way with a certain price of a request, which sends so many ranges at a time."""

    name, patience, remote = "one", NOW, True

    def __init__(self, gap: int, most: int) -> None:
        self._gap, self.most_ranges = gap, most

    def gap(self, requests: int) -> int:
        return self._gap


@given(separate(20_000), st.integers(0, 3000))
def test_gaps_are_chosen_by_their_cost(ranges: list[tuple[int, int]], cost: int) -> None:
    """No other choice of gaps has fewer bytes, where each request counts as `cost` bytes."""
    transfer = Transfer(Ranged(cost, 1), 4, None)  # type: ignore[arg-type]
    transfer.ask(Spool(Path("/nowhere"), Object("0" * 64, 20_000)), ranges)
    price = sum(stop - start + cost for _, start, stop in transfer.requests)
    gaps = [after - stop for (_, stop), (after, _) in itertools.pairwise(ranges)]
    needed = sum(stop - start for start, stop in ranges)
    least = min(
        needed + cost + sum(gap if taken else cost for gap, taken in zip(gaps, choice, strict=True))
        for choice in itertools.product((False, True), repeat=len(gaps))
    )
    assert price == least


# Servers

BLOBS, SIZE = 2000, 1024


@pytest.fixture(scope="module")
def scattered(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """Two versions of blobs of 1 KiB, of which a tenth changed, here and there. Each is in a folder of its own, so that the new
    blobs lie between others.
    """
    folder = tmp_path_factory.mktemp("scattered")
    for one in (folder, folder.parent):
        one.chmod(0o755)
    rng = np.random.default_rng(0)
    tensors = {f"k{i:05}": rng.integers(0, 256, SIZE, np.uint8) for i in range(BLOBS)}
    for version in ("1", "2"):
        (folder / "in").mkdir(exist_ok=True)
        save_file(tensors, folder / "in" / "model.ptd")
        publish(folder / "in", folder / f"releases{version}", name="a", version=version)
        if version == "1":
            for i in rng.choice(BLOBS, BLOBS // 10, replace=False):
                tensors[f"k{i:05}"] = rng.integers(0, 256, SIZE, np.uint8)
    return folder, tensors


def update(server: Server, device: Path, tensors: dict[str, np.ndarray]) -> tuple[int, list[str]]:
    """Pull both versions; the bytes of the second one, and the ranges of each of its requests for them."""
    pull(f"{server.url}/{FIRST}", device, patience=NOW)
    server.log.clear()
    done = pull(f"{server.url}/{SECOND}", device, patience=NOW)
    assert same(found(device / "current"), tensors)
    return done.fetched_bytes, [asked for _, _, asked, _ in server.log if asked]


def lists(folder: Path) -> int:
    """Bytes of the index and of the lists that travel with it."""
    files = [*(folder / "releases2/files").iterdir(), *(folder / "releases2/a/2").iterdir()]
    return sum(path.stat().st_size for path in files)


NEW = BLOBS // 10 * SIZE
FIRST, SECOND = "releases1/a/1/index.json", "releases2/a/2/index.json"


def test_small_blobs_travel_alone(scattered: tuple[Path, Any], tmp_path: Path) -> None:
    """With a hundred ranges in a request, their number and that of bytes are both near the least."""
    releases, tensors = scattered
    with serving(releases) as server:
        nbytes, asked = update(server, tmp_path / "device", tensors)
    assert nbytes < 1.3 * NEW + lists(releases)
    assert 1 <= len(asked) <= NEW / SIZE / 50
    assert max(one.count("-") for one in asked) <= 100


@needs_nginx
def test_nginx_sends_several_ranges(scattered: tuple[Path, Any], tmp_path: Path) -> None:
    releases, tensors = scattered
    with nginx(releases, tmp_path / "nginx") as url, wire_to(url.removesuffix(f"/{releases.name}")) as wire:
        place = url.replace(url.removesuffix(f"/{releases.name}"), wire.url)
        pull(f"{place}/{FIRST}", tmp_path / "device", patience=NOW)
        wire.reset()
        done = pull(f"{place}/{SECOND}", tmp_path / "device", patience=NOW)
        assert same(found(tmp_path / "device/current"), tensors)
    assert wire.total < 1.35 * NEW + lists(releases)
    assert done.requests < 20


def answering(server: Server, releases: Path, answer: Any) -> list[str]:
    """Let requests for several ranges have another answer; the ranges of each."""
    several: list[str] = []

    def fault(handler: Any, times: int) -> bool:
        asked = handler.headers.get("Range", "")
        if "," not in asked:
            return False
        several.append(asked)
        return answer(handler, (releases / handler.path[1:]).read_bytes(), asked) is not False

    server.fault = fault
    return several


def status(number: int) -> Any:
    """Answer with this status; with 200 as for any file."""
    return lambda handler, data, asked: False if number == 200 else handler.answer(number)


def multipart(body: bytes) -> Any:
    """Answer with this body."""
    return lambda handler, data, asked: handler.answer(
        206, body, {"Content-Type": "multipart/byteranges; boundary=between"}
    )


def single(first: int, last: int) -> Any:
    """Answer with one range, from the beginning of one to the end of another one."""

    def answer(handler: Any, data: bytes, asked: str) -> None:
        start, stop = ranges_of(asked)[first][0], ranges_of(asked)[last][1]
        handler.answer(206, data[start:stop], {"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"})

    return answer


def ranges_of(asked: str) -> list[tuple[int, int]]:
    pairs = (map(int, one.split("-")) for one in asked.removeprefix("bytes=").split(","))
    return [(start, last + 1) for start, last in pairs]


def chosen(choose: Callable[[list[tuple[int, int]]], list[tuple[int, int]]]) -> Any:
    """Answer with some of the ranges, or in another order."""
    return lambda handler, data, asked: multipart(encoded(data, header(choose(ranges_of(asked)))))(handler, data, asked)


def closing(handler: Any, data: bytes, asked: str) -> None:
    """Close the connection."""
    handler.close_connection = True


def halfway(handler: Any, data: bytes, asked: str) -> None:
    """Close it in the middle of the answer."""
    body = encoded(data, asked)
    handler.send_response(206)
    handler.send_header("Content-Type", "multipart/byteranges; boundary=between")
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body[: len(body) // 2])
    handler.close_connection = True


@pytest.mark.long
@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("refusal", [200, 400, 416, 431])
def test_a_server_without_several_ranges(
    scattered: tuple[Path, Any], tmp_path: Path, ranges: bool, refusal: int
) -> None:
    """It is asked for one at a time, or for all bytes; each of the threads may find that out for itself, once."""
    releases, tensors = scattered
    with serving(releases) as server:
        server.parts, server.ranges = False, ranges
        refused = answering(server, releases, status(refusal))
        update(server, tmp_path / "device", tensors)
        assert 1 <= len(refused) <= 6


LIES = {
    "the first range alone": single(0, 0),
    "one range of all": single(0, -1),
    "some of the ranges": chosen(lambda ranges: ranges[: len(ranges) // 2]),
    "the ranges backwards": chosen(lambda ranges: ranges[::-1]),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_servers_that_send_other_ranges(scattered: tuple[Path, Any], tmp_path: Path, lie: Any) -> None:
    """As RFC 9110 allows it; what is lacking is asked for again."""
    releases, tensors = scattered
    with serving(releases) as server:
        answering(server, releases, lie)
        update(server, tmp_path / "device", tensors)


FAILURES = {
    "closes": closing,
    "closes halfway": halfway,
    **{str(number): status(number) for number in (403, 500, 501, 503)},
    "an empty answer": multipart(b""),
    "noise": multipart(b"x" * 100_000),
    "ranges of another object": multipart(SOUND),
}


@pytest.mark.long
@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
def test_a_server_that_fails_at_several_ranges_is_asked_for_single_ones(
    scattered: tuple[Path, Any], tmp_path: Path, failure: Any
) -> None:
    """After one failure, however it fails; none waits for long."""
    releases, tensors = scattered
    waits: list[float] = []
    with serving(releases) as server:
        several = answering(server, releases, failure)
        pull(f"{server.url}/{FIRST}", tmp_path / "device", patience=NOW)
        pull(f"{server.url}/{SECOND}", tmp_path / "device", patience=Patience(pause=waits.append))
        assert same(found(tmp_path / "device/current"), tensors)
    assert 1 <= len(several) == len(set(several)) <= 6
    assert len(waits) <= len(several) and max(waits, default=0) <= 1


def test_a_server_that_fails_at_everything_is_given_up(scattered: tuple[Path, Any], tmp_path: Path) -> None:
    """After a few attempts, and the old release stays."""
    releases, _ = scattered
    with serving(releases) as server:
        pull(f"{server.url}/{FIRST}", tmp_path / "device", patience=NOW)
        server.body = lambda path, times, data: b"x" * len(data) if "/packs/" in path else data
        with pytest.raises(BlobStoreError):
            pull(f"{server.url}/{SECOND}", tmp_path / "device", patience=NOW)
        assert len(server.log) < 100
        assert pull(f"{server.url}/{FIRST}", tmp_path / "device", patience=NOW).changed is False
