"""A process ends cleanly while daemon threads are anywhere in the runtime."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from blobstore.runtime import make_working_copy
from tests.lowering import nets
from tests.lowering.live import inputs, lower_through, seeded

BEGIN = """
import sys, threading
import numpy as np
from blobstore import errors
from blobstore.runtime import BlobCache, Program
from tests.waiting import until_blocked

pte, ptd, mode = sys.argv[1:]
cache = BlobCache(ptd, mode)
program = Program(pte, cache)
method = program.method()
x = np.ones((2, 16), np.float32)
turned = np.ones((16, 2), np.float32).T  # Python code copies it
key, weight = "layers.0.weight", np.ones((24, 16), np.float32)
deep = threading.Event()


def refused():
    try:
        cache.update({key: weight[:1]})
    except errors.LayoutError:
        pass


def read():
    with cache.reading():
        bytes(cache[next(iter(cache))])


def repeat(work):
    while True:
        work()
        deep.set()


def start(*works):
    for work in works:
        threading.Thread(target=repeat, args=(work,), daemon=True).start()
    deep.wait()
"""
WORKS = {
    "running": "start(lambda: method(x), lambda: method(turned))",
    "running a delegate beside another": "start(lambda: method(x), lambda m=program.load_method(): m(x))",
    "committing": "start(lambda: cache.update({key: weight}), lambda: method(x))",
    "being refused": "start(refused)",
    "reading": "start(read, lambda: cache.stats)",
    "loading": "start(program.load_method, lambda: Program(pte, cache).method()(x), lambda: BlobCache(ptd, mode))",
    "saving": "start(lambda: cache.save(ptd + '.saved'), cache.verify)",
    "waiting for a lock": """
held = cache.reading()
held.__enter__()
waits = threading.Thread(target=lambda: cache.update({key: weight}), daemon=True)
waits.start()
until_blocked(waits)  # it waits for a reader that never leaves
""",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("exit")
    pte = lower_through({"forward": (seeded(nets.MLP), inputs(2, 16))}, folder)
    make_working_copy(folder / "model.ptd", folder / "w.ptd")
    return pte, folder / "w.ptd"


@pytest.mark.parametrize(
    ("work", "mode"), [*((work, "private") for work in WORKS), ("committing", "shared"), ("reading", "shared")]
)
def test_the_interpreter_ends_while_daemon_threads_work(
    work: str, mode: str, files: tuple[Path, Path], tmp_path: Path
) -> None:
    """The exit status is the script's own, and nothing aborts. Two runs, as the threads are in different places."""
    pte, ptd = files
    script = BEGIN + textwrap.dedent(WORKS[work]) + "\nsys.exit(7)\n"
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script, pte, ptd, mode],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=Path(__file__).parents[2],
            check=False,
        )
        assert done.returncode == 7, done.stderr
