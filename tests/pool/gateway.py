"""A real S3 server on this machine: Ceph's object gateway over a cluster of one monitor and one store in memory."""

import datetime
import itertools
import os
import shutil
import subprocess
import urllib.request
from pathlib import Path

import obstore
from obstore.store import S3Store

from tests.helpers.ports import answers, free_ports
from tests.helpers.waiting import until

PROGRAMS = (
    *("ceph", "ceph-authtool", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin"),
    "setpriv",  # of util-linux
)
PACKAGES = "radosgw ceph-mon ceph-osd ceph-common"

_KEYS = ("access", "a secret of the owner")
_READER = ("reads", "a secret of the reader")

# No mgr: it would only collect figures. Pools are made with few groups and one copy, and proposals do not wait for others.
_CONFIGURATION = """
[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{monitor}/0]
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind ipv6 = false
run dir = {folder}
admin socket =
log file = {folder}/$type.log
keyring = {folder}/keyring
mon data = {folder}/mon
osd data = {folder}/osd
rgw data = {folder}/rgw
mon data avail crit = 0
mon data avail warn = 0
mon allow pool size one = true
paxos propose interval = 0.02
paxos min wait = 0.01
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 2
osd pool default pgp num = 2
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
osd class update on start = false
osd objectstore = memstore
memstore device bytes = 8589934592
rgw frontends = beast endpoint=127.0.0.1:{gateway} tcp_nodelay=1
rgw thread pool size = 64
"""


def missing() -> str | None:
    """Why there can be no gateway here; None if there can."""
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    return f"needs {', '.join(absent)} (apt-get install --no-install-recommends {PACKAGES})" if absent else None


class Gateway:
    """Starts the server. It ends with `close`, and with this process, however that ends.

    Args:
        folder: empty, for the cluster.

    Attributes:
        url: where the server answers.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._configuration = folder, folder / "ceph.conf"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._numbers = itertools.count()
        monitor, gateway = free_ports(2)
        self.url = f"http://127.0.0.1:{gateway}"
        fsid, store = _uuid(), _uuid()
        self._configuration.write_text(
            _CONFIGURATION.format(fsid=fsid, folder=folder, monitor=monitor, gateway=gateway)
        )
        key = self._run("ceph-authtool", "--gen-print-key")
        self._write_keys(key)
        try:
            address = f"[v2:127.0.0.1:{monitor}/0]"
            self._run("monmaptool", "--create", "--fsid", fsid, "--addv", "a", address, str(folder / "monmap"))
            self._run(
                *("ceph-mon", "--mkfs", "-i", "a"),
                *("--monmap", str(folder / "monmap"), "--keyring", str(folder / "keyring")),
            )
            self._start("ceph-mon", "-i", "a")
            self._run("ceph", "osd", "new", store)
            (folder / "osd").mkdir()
            self._run("ceph-osd", "--mkfs", "-i", "0", "--osd-uuid", store)
            self._start("ceph-osd", "-i", "0")
            self._make_users()
            self._start("radosgw", "-n", "client.admin")
            until(lambda: self._answers(gateway))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the server."""
        for process in reversed(self._processes):
            process.kill()
            process.wait()
        self._processes.clear()

    def bucket(self) -> str:
        """Make a bucket; its name."""
        name = f"bucket-{next(self._numbers)}"
        signed = obstore.sign(self.store(name), "PUT", "", datetime.timedelta(minutes=5))
        with urllib.request.urlopen(urllib.request.Request(signed, method="PUT")):  # noqa: S310 - it is on this machine
            return name

    def store(self, bucket: str, prefix: str | None = None) -> S3Store:
        """A client of a bucket that is none of the code under test."""
        options = self.options()
        del options["allow_http"]
        return S3Store(bucket, prefix=prefix, config=options, client_options={"allow_http": True})  # type: ignore[arg-type]

    def options(self, *, url: str | None = None, reader: bool = False) -> dict[str, str]:
        """What a client must know.

        Args:
            url: of something in front of this server.
            reader: for a user who may read everything, and write nothing.
        """
        key, secret = _READER if reader else _KEYS
        return {
            "aws_endpoint": url or self.url,
            "aws_access_key_id": key,
            "aws_secret_access_key": secret,
            "aws_region": "us-east-1",
            "allow_http": "true",
        }

    def _write_keys(self, key: str) -> None:
        caps = "".join(f'caps {service} = "allow *"\n' for service in ("mon", "osd", "mgr"))
        entities = ("mon.", "client.admin", "osd.0")
        (self._folder / "keyring").write_text("".join(f"[{name}]\nkey = {key}\n{caps}" for name in entities))

    def _make_users(self) -> None:
        keys = [(f"--access-key={key}", f"--secret={secret}") for key, secret in (_KEYS, _READER)]
        self._run(
            "radosgw-admin", "user", "create", "--uid=owner", "--display-name=owner", "--max-buckets=100000", *keys[0]
        )
        self._run(
            *("radosgw-admin", "subuser", "create", "--uid=owner", "--subuser=owner:reader"),
            *("--key-type=s3", "--access=read", *keys[1]),
        )

    def _run(self, program: str, *arguments: str) -> str:
        done = subprocess.run(
            [shutil.which(program) or program, *arguments],
            env={**os.environ, "CEPH_CONF": str(self._configuration)},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        if done.returncode:
            raise RuntimeError(f"{program} {' '.join(arguments)}: {done.stderr or done.stdout}")
        return done.stdout.strip()

    def _start(self, program: str, *arguments: str) -> None:
        """Start a server that the system kills if this process ends in any way."""
        tied = (shutil.which("setpriv") or "", "--pdeathsig", "KILL")
        command = [*tied, program, "-f", *arguments, "-c", str(self._configuration)]
        with (self._folder / f"{program}.out").open("wb") as output:
            self._processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output))

    def _answers(self, port: int) -> bool:
        for process in self._processes:
            if process.poll() is not None:
                outputs = [path.read_text(errors="replace")[-2000:] for path in self._folder.glob("*.out")]
                raise RuntimeError(f"the server ended: {outputs}")
        return answers(port)


def _uuid() -> str:
    return Path("/proc/sys/kernel/random/uuid").read_text(encoding="ascii").strip()
