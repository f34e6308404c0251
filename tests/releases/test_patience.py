"""Servers that are away or busy, and fleets that wait for them (F2)."""

import datetime
import heapq
import json
import pickle
import random
import socket
import ssl
import threading
from collections import Counter
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from typer.testing import CliRunner

from blobstore.cli.app import app
from blobstore.errors import ServerBusyError, TransferError
from blobstore.releases import Patience, publish, pull
from blobstore.releases.sources.patience import Backoff, InterruptedTransferError, Notice, Pace, WrongAnswerError
from tests.helpers.ports import free_ports
from tests.releases.models import found, inputs, published_once, same, weights
from tests.releases.server import Server, begin, is_object


class Time:
    """Virtual time, which passes only where somebody waits."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waits: list[float] = []

    def pause(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds

    def patience(self, **options: Any) -> Patience:
        return Patience(pause=self.pause, clock=lambda: self.now, **options)


@published_once
def releases(folder: Path) -> None:
    publish(inputs(folder / "in", weights(layers=2, size=16)), folder / "releases", name="a", version="1")


# Fleets

OUTAGE = 1800


def fleet(starts: list[float], asked: float | None, seed: int, **options: Any) -> list[float]:
    """The moments of all requests after an outage, by devices that do what `Backoff` says, in virtual time."""
    chance = random.Random(seed)  # noqa: S311 - no secret
    now = 0.0
    patience = Patience(**{"clock": lambda: now, "chance": chance.random, **options})
    events: list[tuple[float, int, Backoff | None]] = [(start, i, None) for i, start in enumerate(starts)]
    heapq.heapify(events)
    served = []
    while events:
        now, device, backoff = heapq.heappop(events)
        if now >= OUTAGE:
            served.append(now)
            continue
        backoff = backoff or Backoff(patience)
        # a device that gives up ends the test
        heapq.heappush(events, (now + backoff.seconds(InterruptedTransferError("busy", asked)), device, backoff))
    return served


def peak(moments: list[float], width: float) -> float:
    """The requests a second in the busiest window."""
    return max(Counter(int(moment / width) for moment in moments).values()) / width


@pytest.mark.parametrize(("asked", "together"), [(None, False), *((one, True) for one in (None, 5, 20, 60, 300))])
def test_a_fleet_survives_half_an_hour_and_comes_back_in_peace(asked: float | None, together: bool) -> None:
    """Nobody gives up, and no ten seconds have more than twice the mean load until all are served."""
    chance = random.Random(2)  # noqa: S311 - no secret
    starts = [0.0 if together else chance.uniform(0, OUTAGE) for _ in range(4000)]
    served = fleet(starts, asked, seed=2)
    assert len(served) == 4000
    assert peak(served, 10) <= 2 * len(served) / (max(served) - OUTAGE)


def test_the_waits_of_one_device() -> None:
    """Up to 1, 2, 4 … seconds, then from 150 to 300; an hour in all."""
    for chance, expected in ((0.999999, [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]), (0.0, [0.0] * 9 + [150, 150])):
        time = Time()
        backoff = Backoff(time.patience(chance=lambda chance=chance: chance))
        found = [backoff.seconds(InterruptedTransferError("away")) for _ in expected]
        assert found == pytest.approx(expected, rel=1e-4)
    backoff = Backoff(Patience(seconds=10**9))
    assert all(0 < backoff.seconds(InterruptedTransferError("busy")) <= 300 for _ in range(5000))
    time = Time()
    backoff = Backoff(time.patience())
    with pytest.raises(TransferError, match=r"away; given up after 3\d\d\d seconds and \d\d attempts"):
        for _ in range(1000):
            backoff.wait(InterruptedTransferError("away"))
    assert 3300 < sum(time.waits) <= 3600


def test_a_server_that_is_wrong_is_asked_six_times() -> None:
    """Waiting for an hour would not make it right."""
    backoff = Backoff(Time().patience())
    for _ in range(5):
        backoff.wait(WrongAnswerError("nonsense"))
    with pytest.raises(TransferError, match="nonsense; given up after 6 attempts"):
        backoff.wait(WrongAnswerError("nonsense"))


# A server that sends little, again and again


def test_enough_bytes_give_another_hour() -> None:
    """As many as the slowest server would have sent since the last time, whoever got them; fewer add up."""
    time = Time()
    patience = time.patience(slowest=100, chance=lambda: 0.999999)
    pace = Pace(patience)
    backoff = Backoff(patience, pace)
    for _ in range(15):
        backoff.wait(InterruptedTransferError("away"))
    spent = sum(time.waits)
    assert spent > 2000 and time.waits[-1] == pytest.approx(300, rel=1e-4)
    pace.count(100)
    backoff.wait(InterruptedTransferError("away"), brought=100)
    assert time.waits[-1] <= 1  # soon, though it is not yet enough
    pace.count(round(100 * spent))
    for _ in range(15):
        backoff.wait(InterruptedTransferError("away"))
    assert sum(time.waits) > 3600


def dripping(server: Server, releases: Path, nbytes: int) -> None:
    """Send so many bytes of what is asked for, and close."""

    def fault(handler: BaseHTTPRequestHandler, times: int) -> bool:
        data = (releases / handler.path.lstrip("/")).read_bytes()
        if not is_object(handler.path) or len(data) <= nbytes:
            return False
        handler.wfile.write(begin(handler, data)[:nbytes])
        return True

    server.fault = fault


@pytest.mark.parametrize("options", [{"seconds": 100}, {"attempts": 5}])
def test_a_byte_at_a_time_ends(server: Server, releases: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    """Patience is for all answers together, not for each; what came is kept."""
    publish(inputs(tmp_path / "in", weights(seed=1)), releases, name="a", version="2")
    dripping(server, releases, 1)
    time = Time()
    with pytest.raises(TransferError, match=r"ended after 1 of|Connection broken.*given up|given up after"):
        pull(f"{server.url}/a/2/index.json", tmp_path / "device", patience=time.patience(**options))
    assert len(server.log) < 100 and time.now <= 100


def test_a_way_that_breaks_often_goes_on(server: Server, releases: Path, tmp_path: Path) -> None:
    """After an outage, too: a little with each connection, and soon the next one (F2)."""
    publish(inputs(tmp_path / "in", weights(seed=1)), releases, name="a", version="2")
    dripping(server, releases, 4096)
    drip, time = server.fault, Time()
    server.fault = lambda handler, times: (
        drip(handler, times) if time.now > 3000 or not is_object(handler.path) else handler.answer(503)
    )
    pull(f"{server.url}/a/2/index.json", tmp_path / "device", patience=time.patience())
    assert same(found(tmp_path / "device/current"), weights(seed=1))


# What is tried again

AGAIN = [408, 425, 429, 500, 502, 503, 504, 507, 521, 599]
NEVER = [400, 401, 403, 404, 405, 409, 410, 412, 416, 451, 501, 505]


@pytest.mark.parametrize("status", AGAIN + NEVER)
def test_statuses(server: Server, tmp_path: Path, status: int) -> None:
    """Those that pass are tried again, and the others are errors at once."""
    time = Time()
    server.fault = lambda handler, times: handler.answer(status)
    with pytest.raises(TransferError, match="answers|credentials"):
        pull(f"{server.url}/a/1/index.json", tmp_path / "device", patience=time.patience(seconds=10))
    assert (len(server.log) > 1) == (status in AGAIN)
    assert bool(time.waits) == (status in AGAIN)


def test_a_server_that_cannot_be_reached_is_tried_again(tmp_path: Path) -> None:
    """It may be starting."""
    time = Time()
    with pytest.raises(TransferError, match=r"refused.*given up after \d+ seconds and \d+ attempts"):
        pull(f"http://127.0.0.1:{free_ports(1)[0]}/a/1/index.json", tmp_path, patience=time.patience(seconds=30))
    assert len(time.waits) > 3


@pytest.mark.parametrize("number", [socket.EAI_NONAME, socket.EAI_AGAIN])
def test_a_host_that_is_not_there(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong name is an error at once; a resolver that cannot be reached is tried again."""

    def lookup(*rest: Any, **options: Any) -> Any:
        raise socket.gaierror(number, "no answer")

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    time = Time()
    with pytest.raises(TransferError, match="no answer"):
        pull("https://one.test/a/1/index.json", tmp_path, patience=time.patience(seconds=30))
    assert bool(time.waits) == (number == socket.EAI_AGAIN)


def test_a_certificate_of_nobody_is_an_error_at_once(tmp_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.timezone.utc)
    day = datetime.timedelta(days=1)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now - day).not_valid_after(now + day)
    certificate = builder.sign(key, hashes.SHA256())
    pem = certificate.public_bytes(Encoding.PEM)
    (tmp_path / "pem").write_bytes(pem + key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "pem")

    class Quiet(HTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            pass

    time = Time()
    with Quiet(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        with pytest.raises(TransferError, match="(?i)certificate"):
            pull(f"https://localhost:{server.server_address[1]}/a/1/index.json", tmp_path, patience=time.patience())
        server.shutdown()
    assert time.waits == []


# Retry-After


def in_a_while(seconds: float) -> str:
    moment = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=seconds)
    return format_datetime(moment, usegmt=True)


@pytest.mark.parametrize("form", ["seconds", "a date"])
def test_both_forms_of_retry_after(server: Server, tmp_path: Path, form: str) -> None:
    """The wait is at least what was asked for, and differs from device to device."""
    value = "200" if form == "seconds" else in_a_while(200)
    waits = []
    for device in range(8):
        time = Time()
        server.log.clear()
        server.fault = lambda handler, times: (
            len(server.log) == 1 and handler.answer(503, headers={"Retry-After": value})
        )
        pull(f"{server.url}/a/1/index.json", tmp_path / f"{device}", patience=time.patience())
        assert len(time.waits) == 1
        waits += time.waits
    assert min(waits) >= 190 and max(waits) <= 200 * 2.5
    assert len(set(waits)) == 8


def busy(asked: str, **options: Any) -> ServerBusyError:
    """The error for a server that asks for a time."""
    from blobstore.releases.sources.http import _retry_after

    backoff = Backoff(Time().patience(**options))
    with pytest.raises(ServerBusyError) as caught:
        backoff.seconds(InterruptedTransferError("busy", _retry_after(asked)))
    return caught.value


@pytest.mark.parametrize("value", ["7200", "999999999999999999", "Fri, 31 Dec 9999 23:59:59 GMT"])
def test_a_time_beyond_patience_is_a_number_to_schedule_by(value: str) -> None:
    """It is spread, and bounded: a device that is told to come back in a million years comes in a week."""
    found = {busy(value).retry_after for _ in range(8)}
    if value == "7200":
        assert len(found) > 1
        assert 7200 <= min(found) <= max(found) <= 18_000
    else:
        assert found == {7 * 86_400}
    assert pickle.loads(pickle.dumps(busy(value))).retry_after in range(7200, 7 * 86_400 + 1)  # noqa: S301 - made here


@pytest.mark.parametrize("value", ["-5", "soon", "", "1e9", "\u00b2", "Thu, 01 Jan 1970 00:00:00 GMT", "0"])
def test_a_time_that_is_none_does_not_shorten_the_wait(server: Server, tmp_path: Path, value: str) -> None:
    """Nonsense counts as nothing, and the past as now; the waits grow as ever."""
    time = Time()
    server.fault = lambda handler, times: handler.answer(503, headers={"Retry-After": value})
    with pytest.raises(TransferError):
        pull(f"{server.url}/a/1/index.json", tmp_path, patience=time.patience(seconds=100))
    assert 3 < len(time.waits) < 60
    assert max(time.waits) > 2


def test_the_command_says_when_to_come_back(server: Server, tmp_path: Path) -> None:
    """With an exit code of its own, and a number for programs."""
    server.fault = lambda handler, times: handler.answer(429, headers={"Retry-After": "500"})
    command = ["pull", f"{server.url}/a/1/index.json", str(tmp_path / "device"), "--patience", "20"]
    done = CliRunner().invoke(app, [*command, "--json"])
    assert done.exit_code == 75
    assert 500 <= json.loads(done.stdout)["retry_after"] <= 1250
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 75
    assert "asks to come back in 500 seconds: try again in" in done.stderr
    assert done.stdout == ""


def test_progress_says_what_is_waited_for(server: Server, tmp_path: Path) -> None:
    """Unless the caller hears of it already; of several threads that wait for one server, one says it."""
    server.fault = lambda handler, times: is_object(handler.path) and times < 3 and handler.answer(503)
    steps: list[tuple[str, int, int]] = []

    def progress(what: str, done: int, total: int) -> None:
        steps.append((what, done, total))

    patience = Time().patience(first=10, chance=lambda: 0.9)
    pull(f"{server.url}/a/1/index.json", tmp_path / "one", patience=patience, progress=progress)
    waiting = [one for one in steps if one[0].startswith("waiting: ")]
    assert len(waiting) == 1
    assert "answers 503" in waiting[0][0] and waiting[0][0].endswith("; trying again in 9 seconds")
    steps.clear()
    told: list[float] = []
    patience = Time().patience(first=10, chance=lambda: 0.9, notice=lambda error, seconds: told.append(seconds))
    server.fault = lambda handler, times: handler.answer(503) if len(told) < 2 else False
    pull(f"{server.url}/a/1/index.json", tmp_path / "two", patience=patience, progress=progress)
    assert len(told) == 2 and not any(what.startswith("waiting") for what, _, _ in steps)


def test_short_waits_are_not_told() -> None:
    told: list[str] = []
    notice = Notice(told.append)
    for seconds in (0.5, 1.9, 30.0, 40.0):
        notice(InterruptedTransferError("away"), seconds)
    assert told == ["away; trying again in 30 seconds"]


@pytest.mark.parametrize(
    "wrong",
    [{"seconds": -1}, {"seconds": float("inf")}, {"attempts": 0}, {"attempts": 1.5}, {"notice": 3}, {"chance": None}],
)
def test_patience_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Patience cannot have"):
        Patience(**wrong)
