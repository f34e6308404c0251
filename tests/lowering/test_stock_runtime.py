"""ExecuTorch's own Python runtime runs these programs, on their own data file or on a cache."""

from pathlib import Path
from typing import Any

import pytest
import torch

from blobstore.runtime import BlobCache, Program, delegate_failure, delegate_stats, serving
from tests.lowering import nets
from tests.lowering.live import close, inputs, lower_through, randomize, seeded

pytestmark = pytest.mark.long


def load(path: Path, data: Path | None = None) -> Any:
    from executorch.runtime import Runtime, Verification

    program = Runtime.get().load_program(path, verification=Verification.InternalConsistency, data_path=data)
    return program, program.load_method("forward")


def test_on_its_own_data_file(tmp_path: Path) -> None:
    """Without a cache the program computes what the module does (W2)."""
    module, example = seeded(nets.ConvNorm), inputs(2, 3, 6, 6)
    path = lower_through({"forward": (module, example)}, tmp_path, external_constants=False)
    _, method = load(path, tmp_path / "model.ptd")
    close(method.execute(list(example))[0], module(*example))
    # what it packed is shared, as the bytes are the same
    names = delegate_stats().names
    _, again = load(path, tmp_path / "model.ptd")
    assert delegate_stats().names == names
    close(again.execute(list(example))[0], module(*example))


def test_two_models_with_the_same_names(tmp_path: Path) -> None:
    """Each computes with its own weights (W2)."""
    example = inputs(3, 16)
    modules = [seeded(nets.MLP, seed) for seed in (1, 2)]
    methods = []
    for i, module in enumerate(modules):
        path = lower_through({"forward": (module, example)}, tmp_path / str(i), external_constants=False)
        methods.append(load(path, tmp_path / str(i) / "model.ptd"))
    for module, (_, method) in zip(modules, methods, strict=True):
        close(method.execute(list(example))[0], module(*example))


def test_on_a_cache(tmp_path: Path) -> None:
    """Delegates follow the commits of a cache that is served (U1)."""
    module, example = seeded(nets.ConvNorm), inputs(2, 3, 6, 6)
    path = lower_through({"forward": (module, example)}, tmp_path, external_constants=False)
    cache = BlobCache(tmp_path / "model.ptd")
    with serving(cache):
        _, method = load(path, tmp_path / "model.ptd")
    ours = Program(path, cache).method()
    for seed in range(3):
        cache.update_state_dict(randomize(module, seed))
        found = method.execute(list(example))[0].clone()
        close(found, module(*example))
        assert torch.equal(found, ours(*example))
    cache.close()
    close(method.execute(list(example))[0], module(*example))  # it keeps the weights as they are


def test_without_data(tmp_path: Path) -> None:
    """A missing data file is an error; with the plain delegate it ends the process (B5)."""
    path = lower_through({"forward": (seeded(nets.MLP), inputs(3, 16))}, tmp_path, external_constants=False)
    assert delegate_failure() is None
    with pytest.raises(RuntimeError):
        load(path)
    assert "layers.0.weight@" in (delegate_failure() or "")
    assert delegate_failure() is None
