"""Programs on caches, compared with eager PyTorch and ExecuTorch's own runtime (R3, W1, U1)."""

import mmap
import os
import re
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

from blobstore import BlobStore, errors, open_ptd
from blobstore.lowering import lower
from blobstore.programs import save_programs
from blobstore.runtime import BlobCache, Program
from tests.helpers import models

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def load(lowered, folder, **options):
    pte = lowered.write(folder)
    return pte, Program(pte, BlobCache(sorted(folder.glob("*.ptd"))), **options)


@pytest.fixture
def mlp(tmp_path):
    lowered = models.mlp(external=True)
    return lowered, *load(lowered, tmp_path)


@pytest.mark.slow_for("<lambda>5", "<lambda>6")
@pytest.mark.long
@pytest.mark.parametrize(
    "make",
    [
        models.mlp,
        lambda: models.mlp(external=True),
        lambda: models.mlp(delegated=True),
        lambda: models.mlp(delegated=True, external=True),
        models.conv,
        lambda: models.conv(delegated=False),
        models.channels_last,
        models.viewed,
        models.counter,
        lambda: models.counter(initial=False),
        models.decoder,
        lambda: models.decoder(external=True),
        lambda: models.decoder(delegated=False, external=True),
        models.adapters,
        lambda: models.adapters(delegated=True),
    ],
)
def test_outputs_are_those_of_stock_and_eager(make, tmp_path, module_runner):
    """Bit for bit those of ExecuTorch's own runtime, and close to eager PyTorch (W2)."""
    lowered = make()
    pte, program = load(lowered, tmp_path)
    for name in lowered.methods:
        inputs = lowered.inputs(name)
        outputs = program.method(name).execute(*inputs)
        stock = module_runner(pte, sorted(tmp_path.glob("*.ptd")), [x.numpy() for x in inputs], method=name)
        assert len(outputs) == len(stock)
        for ours, theirs in zip(outputs, stock, strict=True):
            if make is not models.channels_last:  # ExecuTorch's runner passes row-major inputs only
                np.testing.assert_array_equal(ours.numpy(), theirs)
        if not isinstance(lowered.methods[name][0], models.Counter):  # its state has changed
            for ours, eager in zip(outputs, lowered.eager(name), strict=False):
                torch.testing.assert_close(ours, eager, **CLOSE)


@pytest.mark.way
def test_deduplicated_programs_share_a_cache(tmp_path):
    """Their external constants come from programs that had no data file before (B1, D1)."""
    (tmp_path / "in").mkdir()
    a = models.mlp().write(tmp_path / "in", "a")
    b = models.conv(delegated=False).write(tmp_path / "in", "b")
    from blobstore.programs import dedup_programs

    dedup_programs([a, b], tmp_path / "out")
    cache = BlobCache(sorted((tmp_path / "out").glob("*.ptd")))
    for name, lowered in (("a", models.mlp()), ("b", models.conv(delegated=False))):
        program = Program(tmp_path / "out" / f"{name}.pte", cache)
        assert program.external_keys()
        for ours, eager in zip(program.method().execute(*lowered.inputs()), lowered.eager(), strict=True):
            torch.testing.assert_close(ours, eager, **CLOSE)


def eager_with(lowered, weights):
    module, inputs = lowered.methods["forward"]
    with torch.no_grad():
        return torch.func.functional_call(module, weights, inputs)


def test_updates_reach_all_methods_and_programs_at_once(mlp):
    """The next call of each uses the new weights, and after a revert the old ones (U1)."""
    lowered, pte, program = mlp
    x = lowered.inputs()[0]
    forward, other, second = program.method(), program.load_method(), Program(pte, program.cache).method()
    new = {"first.weight": torch.randn(32, 16), "shift": torch.zeros(16)}
    before = forward(x)
    program.cache.update(new)
    expected = eager_with(lowered, new)
    for run in (forward, other, second):
        torch.testing.assert_close(run(x), expected, **CLOSE)
    program.cache.revert()
    assert all(torch.equal(run(x), before) for run in (forward, other, second))


def test_numpy_in_numpy_out(mlp):
    """Outputs are arrays for array inputs, and tensors otherwise; they own their memory."""
    lowered, _, program = mlp
    x = lowered.inputs()[0]
    out = program.method()(x.numpy())
    assert isinstance(out, np.ndarray) and out.flags.writeable and out.flags.owndata is False
    np.testing.assert_allclose(out, lowered.eager()[0].numpy(), **CLOSE)
    again = program.method()(x)
    assert isinstance(again, torch.Tensor)
    np.testing.assert_array_equal(again.numpy(), out)
    first = out.copy()
    program.method()(np.zeros_like(x.numpy()))
    np.testing.assert_array_equal(out, first)  # a later call does not change it


class Subclass(torch.Tensor):
    """A tensor whose memory only torch may look up."""


def test_inputs_in_other_memory(mlp):
    """Read-only, transposed, strided and other inputs give the same result."""
    lowered, _, program = mlp
    x = lowered.inputs()[0]
    forward = program.method()
    expected = forward(x).numpy()
    readonly = x.numpy().copy()
    readonly.flags.writeable = False
    wide = torch.zeros(3, 32)
    wide[:, ::2] = x
    for given in (
        readonly,
        np.asfortranarray(x.numpy()),
        x.numpy()[:, ::-1][:, ::-1],
        wide[:, ::2],
        x.t().contiguous().t(),
        x.clone().requires_grad_(),
        nn.Parameter(x),
        torch._neg_view(-x),
        x.as_subclass(Subclass),
        memoryview(x.numpy()),
    ):
        np.testing.assert_array_equal(
            np.asarray(forward(given).detach() if isinstance(given, torch.Tensor) else forward(given)), expected
        )


def test_channels_last_inputs(tmp_path):
    """Inputs are put in the method's dim order."""
    lowered = models.channels_last()
    _, program = load(lowered, tmp_path)
    x = lowered.inputs()[0]
    (expected,) = lowered.eager()
    for given in (x, x.contiguous(), x.numpy(), x.contiguous().numpy()):
        out = program.method()(given)
        np.testing.assert_array_equal(np.asarray(out), expected.numpy())
    assert program.inputs()[0].layout.dim_order == (0, 2, 3, 1)


class Typed(nn.Module):
    def forward(self, x, y):
        return x + x, y


@pytest.mark.long
def test_types_that_numpy_lacks(tmp_path):
    """bfloat16 works with torch and with ml_dtypes."""
    x = torch.arange(4, dtype=torch.bfloat16)
    lowered = models._lowered({"forward": (Typed(), (x, torch.tensor([True, False])))}, partitioners=models.portable)
    pte = lowered.write(tmp_path)
    out = Program(pte).method()(x, torch.tensor([True, False]))
    assert torch.equal(out[0], x + x) and torch.equal(out[1], torch.tensor([True, False]))
    out = Program(pte).method()(np.arange(4).astype(ml_dtypes.bfloat16), np.array([True, False]))
    assert out[0].dtype == ml_dtypes.bfloat16 and out[0].astype(np.float32).tolist() == [0, 2, 4, 6]
    assert out[1].tolist() == [True, False]


class Dynamic(nn.Module):
    def forward(self, x):
        return x * 2


@pytest.mark.long
def test_dynamic_shapes(tmp_path):
    """Sizes may vary up to their largest value."""
    from blobstore.lowering.export import quiet

    with quiet():
        from executorch.exir import to_edge_transform_and_lower

        exported = torch.export.export(
            Dynamic(), (torch.ones(3, 4),), dynamic_shapes=({0: torch.export.Dim("n", min=1, max=8)},), strict=True
        )
        manager = to_edge_transform_and_lower(exported).to_executorch()
    (tmp_path / "d.pte").write_bytes(manager.buffer)
    program = Program(tmp_path / "d.pte")
    assert program.inputs()[0].layout.sizes == (8, 4)
    for n in (3, 8, 1, 5):
        assert torch.equal(program.method()(torch.ones(n, 4)), torch.full((n, 4), 2.0))
    for bad in (torch.ones(9, 4), torch.ones(3, 5), torch.ones(4)):
        with pytest.raises(errors.InputError, match=r"input 0 is float\[8, 4\], not float\["):
            program.method()(bad)
    assert torch.equal(program.method()(torch.ones(2, 4)), torch.full((2, 4), 2.0))


def test_wrong_inputs(mlp):
    """The message names the program, the method, the input, and what was expected and found."""
    lowered, pte, program = mlp
    x = lowered.inputs()[0]
    forward = program.method()
    expected = forward(x)
    where = re.escape(f"{pte}: method 'forward'")
    for bad, match in (
        ((), f"{where} takes 1 input, 0 were given"),
        ((x, x), "takes 1 input, 2 were given"),
        ((x.double(),), r"input 0 \('x'\) is float\[3, 16\], not double\[3, 16\]"),
        ((x[:2],), r"input 0 \('x'\) is float\[3, 16\], not float\[2, 16\]"),
        ((x.reshape(-1),), r"not float\[48\]"),
        ((3,), r"input 0 \('x'\) is a tensor, not an int"),
        ((None,), r"input 0 \('x'\) is a tensor, not None"),
        (([x],), rf"{where}: input 0 \('x'\) is a tensor, not a list$"),
        (("text",), rf"{where}: input 0 \('x'\) is a tensor, not a str$"),
        ((x, [x]), f"{where}: input 1: expected a tensor or an array, not a list$"),
        ((x.int().numpy(),), r"not int\[3, 16\]"),
    ):
        with pytest.raises(errors.InputError, match=match):
            forward(*bad)
        with pytest.raises(errors.InputError, match=match):
            forward.call_first(1, *bad)
    assert torch.equal(forward(x), expected)


@pytest.mark.long
def test_missing_data_is_named(tmp_path):
    """Missing tensors are named when the program is loaded, missing blobs of delegates when the method is."""
    pte = models.mlp(external=True).write(tmp_path)
    with pytest.raises(errors.KeyNotFoundError, match=r"model\.pte: the program takes 5 tensors .*'first\.weight'"):
        Program(pte)
    delegated = models.mlp(delegated=True, external=True)
    pte = models.adapters(delegated=True).write(tmp_path / "delegated")
    with pytest.raises(errors.KeyNotFoundError, match=r"method 'forward' takes '.+' from a data file"):
        Program(pte).method()
    with pytest.raises(errors.KeyNotFoundError):
        Program(pte, data=tmp_path / "delegated" / "foundation.ptd").method()
    assert delegated


def test_data_of_another_shape(tmp_path):
    """The message names the key and both shapes."""
    pte = models.mlp(external=True).write(tmp_path)
    store = BlobStore()
    with open_ptd(tmp_path / "_default_external_constant.ptd") as good:
        for key in good:
            store.add(
                key, np.zeros((16, 32) if key == "first.weight" else good.get_tensor_layout(key).sizes, np.float32)
            )
    store.write_ptd(tmp_path / "bad.ptd")
    with pytest.raises(
        errors.LayoutError, match=r"'first.weight' as float\[32, 16\], it is float\[16, 32\] in .*bad\.ptd"
    ):
        Program(pte, data=tmp_path / "bad.ptd")


def test_no_such_method(mlp):
    """The message names the methods that exist."""
    _, _, program = mlp
    for use in (program.method, program.inputs, program.external_keys, program.backends, program.load_method):
        with pytest.raises(errors.MethodNotFoundError, match="no method 'backward'; there are 'forward'"):
            use("backward")


def test_missing_backend(tmp_path):
    """The message names the backend and the method."""
    pte = models.mlp(delegated=True).write(tmp_path)
    pte.write_bytes(pte.read_bytes().replace(b"XnnpackBackend", b"NobodysBackend"))
    program = Program(pte)
    assert program.backends() == ("NobodysBackend",)
    with pytest.raises(
        errors.MissingBackendError, match=r"model\.pte: method 'forward' is delegated to .*NobodysBackend"
    ):
        program.method()


def test_missing_kernel(tmp_path):
    """The message names the operator."""
    pte = models.mlp().write(tmp_path)
    pte.write_bytes(pte.read_bytes().replace(b"aten::relu", b"aten::rule"))
    with pytest.raises(errors.ProgramError, match=r"operators without a kernel: aten::rule\.out"):
        Program(pte).method()


def test_files_that_are_not_programs(tmp_path):
    """Truncated and unrelated files are errors that name the file (B5)."""
    good = models.mlp(external=True).write(tmp_path)
    data = good.read_bytes()
    bad = tmp_path / "bad.pte"
    for contents in (b"", b"ET12", bytes(100), b"\0\0\0\0ET12" + bytes(200), data[:-100], data[: len(data) // 2]):
        bad.write_bytes(contents)
        with pytest.raises(errors.InvalidFileError, match=r"bad\.pte: "):
            Program(bad, data=tmp_path / "_default_external_constant.ptd")
    with pytest.raises(errors.FileAccessError, match=r"none\.pte: No such file"):
        Program(tmp_path / "none.pte")


@pytest.mark.long
def test_any_byte_of_a_program_changed(tmp_path):
    """The result is an error or a loaded program, never a crash (B5). It runs in a process of its own, in case of a
    crash."""
    good = models.mlp(external=True).write(tmp_path)
    script = f"""
import random
from blobstore.runtime import BlobCache, Program
from blobstore.errors import BlobStoreError
data = open({str(good)!r}, "rb").read()
cache = BlobCache({str(tmp_path / "_default_external_constant.ptd")!r})
random.seed(3)
for n in range(1500):
    hurt = bytearray(data)
    at = random.randrange(len(hurt))
    hurt[at] = random.choice([0, 1, 255, hurt[at] ^ (1 << random.randrange(8))])
    open({str(tmp_path / "hurt.pte")!r}, "wb").write(hurt)
    try:
        Program({str(tmp_path / "hurt.pte")!r}, cache)
    except BlobStoreError as error:
        assert "hurt.pte" in str(error), error
print("done")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "done" in done.stdout, done.stderr[-2000:]


def test_closing_the_cache_keeps_programs_running(mlp):
    """Loaded methods keep the weights; loading another one is an error."""
    lowered, pte, program = mlp
    x = lowered.inputs()[0]
    forward = program.method()
    before = forward(x)
    cache = program.cache
    cache.close()
    assert torch.equal(forward(x), before)
    for use in (lambda: program.load_method(), lambda: Program(pte, cache)):  # noqa: F821 - deleted below
        with pytest.raises(errors.ClosedError, match="closed"):
            use()
    del cache, program
    assert torch.equal(forward(x), before)


@pytest.mark.long
def test_metadata(tmp_path):
    """Inputs, outputs, external keys and backends of a method."""
    lowered = models.decoder(delegated=False, external=True)
    _, program = load(lowered, tmp_path)
    assert set(program.method_names) == {"prefill", "decode"}
    method = program.method("decode")
    assert method.inputs == program.inputs("decode") and method.outputs == program.outputs("decode")
    for info, tensor in zip(method.inputs, lowered.inputs("decode"), strict=True):
        assert info.kind == "tensor" and info.layout.sizes == tuple(tensor.shape)
    assert set(program.external_keys("decode")) == set(program.cache)
    assert program.backends("decode") == ()
    assert "decode" in repr(method) and "prefill" in repr(program)


def test_without_torch(tmp_path):
    """Programs run on numpy arrays alone."""
    pte = models.mlp(external=True).write(tmp_path)
    script = f"""
import sys
sys.modules["torch"] = None
import numpy as np
from blobstore.runtime import BlobCache, Program
cache = BlobCache({str(tmp_path / "_default_external_constant.ptd")!r})
out = Program({str(pte)!r}, cache).method()(np.ones((3, 16), np.float32))
assert out.shape == (3, 16)
cache.update({{"shift": np.zeros(16, np.float32)}})
"""
    subprocess.run([sys.executable, "-c", script], check=True, env={**os.environ, "PYTHONPATH": str(Path.cwd())})


def test_impossible_inputs(mlp):
    """Impossible inputs are refused before anything is copied or converted."""
    for value, error in (
        (2**70, errors.InputError),
        (np.broadcast_to(np.float32(1), (1 << 40,)), errors.InputError),  # 4 TB if it were copied
        (np.zeros((1,) * 20, np.float32), errors.InputError),
        (torch.zeros((1,) * 20), errors.InputError),
        (torch.zeros(3, 16, device="meta"), errors.UnsupportedDataError),
    ):
        with pytest.raises(error):
            mlp[2].method()(value)


class Accumulating(nn.Module):
    """Adds to an input, as a key/value cache is changed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 1024)

    def forward(self, x: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
        sums.add_(self.linear(x))
        return sums * 2


@pytest.mark.long
def test_a_changed_input_changes_for_the_caller(tmp_path):
    """Wherever its memory is: XNNPACK could read past a tensor at the end of a page, so the method works in a copy."""
    model, x = Accumulating(), torch.ones(1, 8)
    lowered = lower(model, (x, torch.zeros(1, 1024)), tag="model")
    save_programs({"model": lowered}, tmp_path)
    method = Program(tmp_path / "model.pte", BlobCache(tmp_path / "model.ptd")).method()
    size = 4 * 1024
    pages = mmap.mmap(-1, 4 * max(mmap.PAGESIZE, size))
    for end in (len(pages), len(pages) - size // 2):
        sums = torch.frombuffer(pages, dtype=torch.float32, count=1024, offset=end - size)[None]
        sums.fill_(1)
        expected = 1 + model.linear(x)
        torch.testing.assert_close(method(x, sums)[-1], expected * 2, **CLOSE)
        torch.testing.assert_close(sums, expected, **CLOSE)
        kept = sums.numpy().copy()
        kept.flags.writeable = False
        method(x.numpy(), kept)  # which Python may not change
        np.testing.assert_array_equal(kept, sums.numpy())
