"""The C++ library brings bytes to the disk before a rename, and names after it (B5, F3).

Its system calls are seen by the library that the campaign `crash` preloads.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

from blobstore import save_file
from blobstore.releases import publish
from campaigns.crash.__main__ import LIBRARY, _build

CALLS = """
import ctypes, os, sys
from blobstore.runtime.native import native
from blobstore.runtime import BlobCache
folder = sys.argv[1]
faults = ctypes.CDLL(None)
faults.faults_name.restype = ctypes.c_char_p
cache = BlobCache(f"{folder}/a.ptd")
faults.faults_watch(os.fsencode(f"{folder}/"))
faults.faults_arm(0, 0, 0)
WORK
count = faults.faults_disarm()
names = [faults.faults_name(i).decode() for i in range(1, count + 1)]
print(*["rename" if name.startswith("rename") else name for name in names])
"""


def calls(folder: Path, work: str) -> list[str]:
    """The system calls of some work that sync, rename or write."""
    _build()
    save_file({"a": np.ones(1000, np.float32)}, folder / "a.ptd")
    command = [sys.executable, "-W", "ignore", "-c", CALLS.replace("WORK", work), str(folder)]
    environment = {**os.environ, "LD_PRELOAD": str(LIBRARY)}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return [name for name in done.stdout.split() if name in {"fsync", "rename", "write"}]


def test_a_saved_file(tmp_path: Path) -> None:
    """Written, synced, renamed, and its folder is synced (B5)."""
    found = calls(tmp_path, 'cache.save(f"{folder}/out.ptd")')
    assert set(found[:-3]) == {"write"} and found[-3:] == ["fsync", "rename", "fsync"]


def test_a_release(tmp_path: Path) -> None:
    """A fetched file that only gets its name, the list of parts, the index, the links in two folders, `newest`, and `current` (F3)."""
    (tmp_path / "in/sub").mkdir(parents=True)
    (tmp_path / "in/sub/notes").write_text("some text")
    done = publish(tmp_path / "in", tmp_path / "releases", name="r", version="1", plain=True)
    (tmp_path / "device").mkdir()
    shutil.copytree(tmp_path / "releases/files", tmp_path / "device/incoming")
    found = calls(
        tmp_path, 'native.commit(os.fsencode(f"{folder}/releases/r/1/index.json"), os.fsencode(f"{folder}/device"))'
    )
    assert (tmp_path / "device/current/sub/notes").read_text() == "some text", done
    assert [name for name in found if name != "write"] == [
        *("fsync", "rename", "fsync"),
        *("fsync", "rename", "fsync"),
        *("fsync", "rename", "fsync"),
        *("fsync", "fsync", "rename", "fsync"),
        *("fsync", "rename", "fsync"),
        *("rename", "fsync"),
    ]
