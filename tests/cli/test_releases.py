"""The commands on releases print what they did, and end with the codes of the other commands (F1, F2, F4)."""

import json
from pathlib import Path

import pytest

from blobstore.core.text import size
from blobstore.releases import pull
from tests.helpers.terminal import printed as run
from tests.releases.models import found, inputs, same, weights
from tests.releases.server import serving


@pytest.mark.long
def test_from_files_to_a_device(tmp_path: Path) -> None:
    """publish, push, pull and gc, with --json and without."""
    releases, device = tmp_path / "releases", tmp_path / "device"
    tensors = weights()
    run("publish", inputs(tmp_path / "in", tensors), "-o", releases, "--name", "a", "--version", "1")
    run("push", f"oci:{tmp_path}/layout:1", releases / "a/1")
    assert "is now a 1" in run("pull", f"oci:{tmp_path}/layout:1", device)
    assert "was already a 1" in run("pull", f"oci:{tmp_path}/layout:1", device)
    tensors["layer0.weight"] = -tensors["layer0.weight"]
    more = ("-o", releases, "--name", "a", "--json")
    done = json.loads(run("publish", inputs(tmp_path / "in", tensors), *more, "--version", "2"))
    assert (done["version"], done["new_bytes"] < done["release_bytes"] / 3) == ("2", True)
    pulled = json.loads(run("pull", releases / "a/2", device, "--json"))
    assert pulled["fetched_bytes"] < pulled["release_bytes"] / 2
    assert same(found(device / "current"), tensors)
    assert json.loads(run("gc", device, "--json"))["releases"] == 1
    run("pull", releases / "a/1", device, code=3)
    run("pull", releases / "a/1", device, "--allow-rollback")
    assert "Removed " in run("gc", releases)
    assert json.loads(run("gc", releases, "--json"))["withdrawn"] == 0


def test_what_devices_fetch(tmp_path: Path) -> None:
    """Without a base it is what a new device fetches, from a server."""
    releases = tmp_path / "releases"
    publish = ("publish", inputs(tmp_path / "in", weights()), "-o", releases, "--name", "a", "--version")
    said = run(*publish, "1")
    with serving(releases) as server:
        fetched = pull(f"{server.url}/a/1/index.json", tmp_path / "device").fetched_bytes
    assert f"A new device fetches {size(fetched)}.\n" in said and "base" not in said
    assert "A device with the release before fetches " in run(*publish, "2")


def test_one_is_singular(tmp_path: Path) -> None:
    """Numbers and nouns agree."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in/one").write_text("1")
    for version in "12":
        said = run("publish", tmp_path / "in", "-o", tmp_path / "r", "--name", "a", "--version", version)
        assert ": 1 file with 1 B" in said
        run("pull", tmp_path / "r/a" / version, tmp_path / "device")
        (tmp_path / "in/one").write_text("2")
    assert "Removed 1 release and 3 files with " in run("gc", tmp_path / "device")
