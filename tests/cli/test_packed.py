"""`blobstore packed`: what it lists, checks and removes, and how it ends (K2)."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from blobstore.core.text import size
from tests.cli.test_exit_codes import at, quiet, run

pytestmark = pytest.mark.long

pytest.importorskip("blobstore_runtime")


@pytest.fixture(scope="module")
def made(tmp_path_factory: Any) -> Path:
    """A folder with one file of packed weights."""
    import torch

    from tests.lowering import nets
    from tests.lowering.live import lower_through, seeded
    from tests.runtime.packed_files import Running, ones

    folder: Path = tmp_path_factory.mktemp("made")
    lower_through({"forward": (seeded(nets.MLP), (torch.ones(2, 16),))}, folder)
    Running.open(folder, ones(2, 16), folder / "packed")
    return folder / "packed"


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Path:
    """A copy of it, with a damaged file beside the good one."""
    folder = tmp_path / "store"
    folder.mkdir()
    [good] = made.glob("*.packed")
    content = good.read_bytes()
    (folder / good.name).write_bytes(content)
    (folder / f"{'0' * 32}-{'1' * 16}-{'2' * 16}.packed").write_bytes(content[:-1])
    (folder / "notes.txt").write_text("mine")
    return folder


def test_list(store: Path) -> None:
    """JSON has all fields; a pipe gets a row for each file, and a good file has no problem."""
    done = run("packed", "list", store, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    rows = json.loads(done.stdout)
    assert {Path(row["path"]).parent for row in rows} == {store}
    assert sorted(row["entries"] for row in rows) == [0, 3]
    for row in rows:
        assert row["nbytes"] == Path(row["path"]).stat().st_size
        assert row["used"] == int(Path(row["path"]).stat().st_mtime)
        assert not row["in_use"] and bool(row["problem"]) == (row["entries"] == 0)
    done = run("packed", "list", store)
    assert done.returncode == 0
    cells = [line.split("\t") for line in done.stdout.splitlines()]
    assert {line[0] for line in cells} == {row["path"] for row in rows}
    assert sorted(int(line[1]) for line in cells) == sorted(row["nbytes"] for row in rows)


def test_verify(store: Path) -> None:
    """1 if a file is damaged; nothing is removed."""
    before = sorted(os.listdir(store))
    done = run("packed", "verify", store)
    assert done.returncode == 1
    assert sorted(line.split(": ")[1] for line in done.stdout.splitlines()) == ["NOT OK", "ok"]
    assert sorted(os.listdir(store)) == before
    [path] = [path for path in store.glob("*.packed") if path.name.startswith("0" * 32)]
    path.unlink()
    assert run("packed", "verify", store).returncode == 0
    [path] = store.glob("*.packed")
    content = bytearray(path.read_bytes())
    content[16] ^= 1
    path.write_bytes(content)
    done = run("packed", "verify", store, "--json")
    assert done.returncode == 1
    assert "digest" in json.loads(done.stdout)[0]["problem"]
    assert run("packed", "list", store).returncode == 0


def test_gc(store: Path) -> None:
    """Damaged files go, then those above the limit; other files stay."""
    done = run("packed", "gc", store, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert [Path(row["path"]).name[:32] for row in json.loads(done.stdout)] == ["0" * 32]
    assert run("packed", "gc", store, "--limit", "1GB", "--json").stdout == "[]\n"
    done = run("packed", "gc", store, "--limit", "1kB")
    row, removed = done.stdout.splitlines()
    assert done.returncode == 0 and f"Removed 1 file with {size(int(row.split()[1]))}." == removed
    assert sorted(path.name for path in store.iterdir()) == ["building.lock", "notes.txt"]


@pytest.mark.parametrize("command", ["list", "verify", "gc"])
def test_wrong_moves(command: str, tmp_path: Path) -> None:
    """A folder that is missing, a file, a name that is too long: 3 and one line, and nothing is made."""
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "missing", tmp_path / "file", tmp_path / ("x" * 300), tmp_path / "file" / "below"):
        done = run("packed", command, path)
        assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (3, "", 1), done
        assert quiet(done)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert run("packed", command).returncode == 2
    assert run("packed").returncode == 2
    (tmp_path / "empty").mkdir()
    done = run("packed", command, tmp_path / "empty")
    assert (done.returncode, done.stdout) == (3 if command == "verify" else 0, "")
    assert done.stderr == f"blobstore: {tmp_path}/empty: there are no packed weights in this folder\n"


def test_a_wrong_limit(tmp_path: Path) -> None:
    """It is a mistake in the command line."""
    done = run("packed", "gc", tmp_path, "--limit", "much")
    assert done.returncode == 2 and "'much' is not a number of bytes" in done.stderr.replace("\n", " ")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, which can become another user")
def test_a_folder_that_may_not_be_read(tmp_path: Path) -> None:
    """3, and the system's reason."""
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o700)
    tmp_path.chmod(0o755)
    for command in ("list", "verify"):
        setup = at(f"blobstore.runtime.packed:PackedStore.{command}", "os.seteuid(65534)")
        done = run("packed", command, folder, setup=setup)
        assert done.returncode == 3 and "Permission denied" in done.stderr, done
