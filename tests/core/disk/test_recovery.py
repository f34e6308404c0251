"""After a kill at any point, the next process finishes or removes what was left (B5, D1, W1)."""

import json
import subprocess
import sys

import pytest

from blobstore.core.disk.recovery import ScratchFolder
from tests.core.disk.outputs import leftovers, save


def job(name, folder, *how):
    """The output of a job of tests/helpers/interruptions.py."""
    process = subprocess.run(
        [sys.executable, "-m", "tests.helpers.interruptions", name, str(folder), *how],
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(process.stdout)


@pytest.mark.long
@pytest.mark.parametrize("how", [["group"], ["group_elsewhere"], ["group", "many"]], ids="-".join)
def test_a_killed_group_is_finished_by_the_next_one(how, tmp_path):
    """From any of its folders; nothing is left behind."""
    seen = job(how[0], tmp_path, *how[1:])
    assert {before for before, *_ in seen} == {"old", "mixed", "new"}, "the kills do not reach the renames"
    for before, after, end, left in seen:
        assert after in (("old", "new") if before == "old" else ("new",))
        assert (end, left) == (after, [])


@pytest.mark.long
@pytest.mark.parametrize("how", [[], ["many"]], ids=str)
def test_a_group_that_is_killed_while_an_error_undoes_it(how, tmp_path):
    """It ends all old or all new."""
    seen = job("group_undone", tmp_path, *how)
    assert ["mixed", "old", "old", []] in seen and ["mixed", "new", "new", []] in seen
    assert all(after == end in ("old", "new") and left == [] for _, after, end, left in seen)


@pytest.mark.long
@pytest.mark.parametrize("how", [[], ["many"]], ids=str)
def test_a_recovery_that_is_killed_is_done_again(how, tmp_path):
    """However often; in the end the group is new."""
    found = job("recovery", tmp_path, *how)
    assert len(found) > 5
    assert all(kills > 1 and (state, left) == ("new", []) for kills, state, left in found)


def test_what_a_killed_process_left_is_removed_by_the_next_one(tmp_path):
    """Files that another process is writing stay."""
    code = (
        "import sys, os, pathlib; from blobstore.core.disk.staging import Staging; from blobstore.core.disk.recovery import ScratchFolder\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "(folder / 'a').write_bytes(b'old')\n"
        "with Staging() as staging, staging.open(folder / 'a') as file, ScratchFolder(folder) as scratch:\n"
        "    (scratch / 'x').write_bytes(b'x'); file.write(b'half'); print('ready', flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, stdin=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"ready\n"
        left = leftovers(tmp_path)
        assert len(left) == 2
        save(tmp_path / "other.ptd")
        assert sorted(leftovers(tmp_path)) == sorted(left)
        process.kill()
    save(tmp_path / "other.ptd")
    assert leftovers(tmp_path) == []
    assert (tmp_path / "a").read_bytes() == b"old"


def test_only_temporary_files_of_the_library_are_removed(tmp_path):
    """Similar names and links stay."""
    for name in (".blobstore-notes.tmp", "x.tmp", ".blobstore-0123456789abcdef01234567.tmp.bak"):
        (tmp_path / name).write_text("a user's")
    (tmp_path / "precious").write_text("precious")
    (tmp_path / ".blobstore-0123456789abcdef01234567.tmp").symlink_to(tmp_path / "precious")
    save(tmp_path / "w.ptd")
    assert len(list(tmp_path.iterdir())) == 6
    assert (tmp_path / "precious").read_text() == "precious"


def test_a_scratch_folder_is_removed_after_an_error(tmp_path):
    """With everything in it."""
    with pytest.raises(KeyError), ScratchFolder(tmp_path) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "file").write_bytes(b"x")
        raise KeyError
    assert list(tmp_path.iterdir()) == []
