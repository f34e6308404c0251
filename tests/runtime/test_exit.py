"""A process ends cleanly while daemon threads are anywhere in the runtime."""

import textwrap
from pathlib import Path

import pytest

from blobstore.runtime import make_working_copy
from tests.helpers.beside import run_script
from tests.lowering import nets
from tests.lowering.live import inputs, lower_through, seeded

pytestmark = pytest.mark.long

BEGIN = """
import contextlib, sys, threading
import numpy as np
from blobstore.errors import LayoutError
from blobstore.runtime import BlobCache, Program
from tests.helpers.waiting import until_blocked

pte, ptd, mode = sys.argv[1:]
cache = BlobCache(ptd, mode)
program = Program(pte, cache)
method = program.method()
x = np.ones((2, 16), np.float32)
turned = np.ones((16, 2), np.float32).T  # Python code copies it
key, weight = "layers.0.weight", np.ones((24, 16), np.float32)
deep = threading.Event()


def read():
    with cache.reading():
        cache.bytes(next(iter(cache)))


def repeat(work):
    while True:
        work()
        deep.set()


def refused():
    with contextlib.suppress(LayoutError):
        cache.update({key: x})


def start(*works):
    for work in works:
        threading.Thread(target=repeat, args=(work,), daemon=True).start()
    deep.wait()
"""
WORKS = {
    "running": "start(lambda: method(x), lambda: method(turned))",
    "running a delegate beside another": "start(lambda: method(x), lambda m=program.load_method(): m(x))",
    "committing": "start(lambda: cache.update({key: weight}), lambda: method(x))",
    "being refused": "start(refused, refused, lambda: method(x))",
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


# Python code that the native module calls, as code that never returns: the interpreter ends while a thread is in it.
CALLS_BACK = """
import sys, threading
import numpy as np
from blobstore import open_ptd
from blobstore.runtime import native
from blobstore.runtime import BlobCache, Program

pte, ptd = sys.argv[1:]
inside = threading.Event()


def endless(*arguments):
    inside.set()
    while True:
        pass


def helpers(place):
    found = [native._argument_bytes, native.to_numpy, native.to_torch, native._make_error]
    found += [native._other_shape, native._list_map, native._read_map]
    found[place] = endless
    native.native.set_helpers(*found)


class Shaped:
    shape = property(endless)
    dtype = np.dtype(np.float32)


class Map:
    name = "a map"

    def __init__(self, inner, **endless):
        self.inner = inner
        vars(self).update(endless)

    def __iter__(self):
        yield from self.inner
        vars(self).get("more", tuple)()

    def __getattr__(self, name):
        return getattr(self.inner, name)


def tensors(**endless):
    native.native.Tensors(Map(open_ptd(ptd), **endless))
"""
CALLED = {
    "an error is translated": "helpers(3); work = lambda: BlobCache(ptd)._native.layout('none')",
    "an argument is converted": "helpers(0); work = lambda: Program(pte, BlobCache(ptd)).method()(x.T)",
    "an argument says its shape": "work = lambda: Program(pte, BlobCache(ptd)).method()(Shaped())",
    "a data map is listed": "work = lambda: tensors(more=endless)",
    "a data map is read": "work = lambda: tensors(get_data=endless)",
    "a data map says layouts": "work = lambda: tensors(get_tensor_layout=endless)",
}


END = "\nsys.exit(7)\n"


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
    for _ in range(2):
        run_script(BEGIN + textwrap.dedent(WORKS[work]) + END, *files, mode, status=7)


@pytest.mark.parametrize("where", CALLED)
def test_the_interpreter_ends_while_a_daemon_thread_is_in_python_code_below_native_code(
    where: str, files: tuple[Path, Path]
) -> None:
    """Ending the thread unwinds its stack, and native frames must neither forbid that nor take it for an exception."""
    thread = "threading.Thread(target=work, daemon=True).start(); inside.wait()"
    script = "\n".join([CALLS_BACK, "x = np.ones((16, 2), np.float32)", CALLED[where], thread])
    run_script(script + END, *files, status=7)
