"""The campaign of killed processes finds what it is for, and a short one finds nothing."""

from pathlib import Path

import pytest

from blobstore.pool import Pool
from campaigns.kills.__main__ import Campaign, WrongError, _pool
from tests.pool import places
from tests.pool.gateway import missing


@pytest.fixture
def campaign(tmp_path: Path) -> Campaign:
    return Campaign(tmp_path, places.folder(tmp_path / "pool"), 1, 3)


@pytest.mark.slow
@pytest.mark.parametrize("in_bucket", [False, True])
def test_twenty_kills(tmp_path: Path, in_bucket: bool) -> None:
    if in_bucket and (reason := missing()):
        pytest.skip(reason)
    with _pool(tmp_path, in_bucket=in_bucket) as where:
        campaign = Campaign(tmp_path, where, 1, 3)
        campaign.run(20)
    assert campaign.kills == 20
    assert campaign.done["added"] > 0


@pytest.mark.parametrize("damage", ["remove", "flip", "other files"])
def test_a_lost_version_is_found(campaign: Campaign, tmp_path: Path, damage: str) -> None:
    """Also one that the pool itself takes for whole."""
    model = tmp_path / "models" / "half"
    with Pool(tmp_path / "pool") as pool:
        pool.add(model if damage != "other files" else tmp_path / "models" / "tuned1", "half@1")
    for pack in (tmp_path / "pool" / "packs").rglob("*"):
        if pack.is_file() and damage == "remove":
            pack.unlink()
        elif pack.is_file() and damage == "flip":
            data = bytearray(pack.read_bytes())
            data[40::7] = bytes(len(data[40::7]))
            pack.write_bytes(data)
    with pytest.raises(WrongError, match="half@1"):
        campaign._check()


def test_what_is_left_is_found(campaign: Campaign, tmp_path: Path) -> None:
    with Pool(tmp_path / "pool") as pool:
        pool.add(tmp_path / "models" / "half", "half@1")
    (tmp_path / "pool" / "packs" / "ab").mkdir(parents=True)
    left = tmp_path / "pool" / "packs" / "ab" / ("ab" * 31 + "a")  # the name of no pack
    left.write_bytes(b"x")
    with pytest.raises(WrongError, match="1 packs are left"):
        campaign._empty()


def test_a_process_that_ends_is_found(campaign: Campaign, tmp_path: Path) -> None:
    for folder in (tmp_path / "models").iterdir():
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    process, log = campaign._started()
    process.join()
    with pytest.raises(WrongError, match="wrong IndexError"):
        campaign._kill(process, log)
