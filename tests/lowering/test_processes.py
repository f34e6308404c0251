"""Delegates in several processes, after a fork. A process that hangs is killed."""

import textwrap
from pathlib import Path

import numpy as np
import pytest

from blobstore.runtime import make_working_copy
from tests.helpers.beside import run_script
from tests.lowering import nets
from tests.lowering.live import Live, inputs, seeded

pytestmark = pytest.mark.long

BEGIN = """
import sys
import numpy as np
from blobstore.runtime import BlobCache, Program
from tests.helpers.beside import in_child, running

pte, ptd, mode, inputs = sys.argv[1:]
x = np.load(inputs)
cache = BlobCache(ptd, mode)
program = Program(pte, cache)
method = program.method()
"""


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Live:
    """Weights that are packed, and slopes that are read in place."""
    return Live.make(seeded(nets.PReLU), inputs(1, 3, 8, 8), tmp_path_factory.mktemp("live"))


@pytest.mark.parametrize("mode", ["private", "shared"])
def test_forked_children_run_and_update(live: Live, mode: str, tmp_path: Path) -> None:
    """Children of a process whose threads run delegates and commit can do both, too; nothing hangs (B4)."""
    make_working_copy(live.cache.paths, data := tmp_path / "w.ptd")
    script = """
    methods = [program.load_method() for _ in range(2)]
    key = next(key for key in cache if key.startswith("slope.weight@"))
    old = cache.numpy(key).view(np.float32).copy()
    before = method(x)

    def child():
        assert mode == "shared" or np.array_equal(method(x), before)
        cache.update({key: (old + np.float32(n + 1)).tobytes()})
        after = method(x)
        again = Program(pte, cache).method()(x)  # shares what is packed
        assert mode == "shared" or np.array_equal(after, again)
        assert mode == "shared" or not np.array_equal(after, before)

    children = []
    with running(*(lambda mine=mine: mine(x) for mine in methods)):
        for n in range(8):
            children.append(in_child(child))  # while the others are running the delegate
            cache.update({key: old.tobytes()})
        codes = [wait() for wait in children]
    cache.update({key: old.tobytes()})
    assert codes == [0] * 8, codes
    assert np.array_equal(method(x), before)
    """
    np.save(tmp_path / "inputs.npy", live.inputs[0].numpy())
    run_script(BEGIN + textwrap.dedent(script), live.program.path, data, mode, tmp_path / "inputs.npy")
