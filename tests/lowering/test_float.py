"""Updates of float models: after each update, the program computes what the module with these weights computes."""

import mmap
from pathlib import Path

import numpy as np
import pytest
import torch

from blobstore.core.formats.keys import KEY_PREFIX
from blobstore.runtime import delegate_stats
from tests.lowering import nets
from tests.lowering.live import Live, inputs, randomize, seeded

MODELS = {
    "mlp": (nets.MLP, (3, 16)),
    "conv_norm": (nets.ConvNorm, (2, 3, 6, 6)),
    "convolutions": (nets.Convolutions, (1, 4, 8, 8)),
    "prelu": (nets.PReLU, (1, 3, 8, 8)),
}


@pytest.fixture(params=MODELS)
def live(request: pytest.FixtureRequest, tmp_path: Path) -> Live:
    make, shape = MODELS[request.param]
    module = seeded(make)
    randomize(module, 99)
    if isinstance(module, nets.MLP):
        torch.nn.init.zeros_(module.layers[0].bias)
        torch.nn.init.zeros_(module.layers[1].bias)
    return Live.make(module, inputs(*shape), tmp_path)


@pytest.mark.way
def test_whole_models_are_updated_again_and_again(live: Live) -> None:
    """A whole state dict in one commit, for every kind of layer (U1, X1)."""
    live.check()
    for seed in range(4):
        live.cache.update_state_dict(randomize(live.module, seed))
        live.check()
    live.cache.revert()
    live.cache.update_state_dict(randomize(live.module, 3))
    live.check()


def test_each_tensor_alone_or_with_what_it_needs(live: Live) -> None:
    """Every tensor can be updated with nothing but the tensors that it names (U1)."""
    live.run()
    for name in list(live.cache.tensors):
        randomize_one(live, name)
        live.check()


def randomize_one(live: Live, name: str) -> None:
    tensor = live.cache.tensors[name]
    state = dict(live.module.named_parameters()) | dict(live.module.named_buffers())
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for one in (name, *tensor.needs):
            state[one].copy_(torch.rand(state[one].shape, generator=generator) + 0.1)
    related, waiting = {name}, [name]
    while waiting:  # a folded blob needs all its tensors, and each of those belongs to other blobs, too
        for other in live.cache.tensors[waiting.pop()].needs:
            if other not in related:
                related.add(other)
                waiting.append(other)
    live.cache.update({one: state[one] for one in related})


def test_one_readable_key_a_parameter(live: Live) -> None:
    """The keys of the data file are the names of the model, each with a digest of its layout (D2)."""
    keys = [key for key in live.cache if not key.startswith(KEY_PREFIX)]
    assert len(keys) == len(set(keys))
    for key in keys:
        name, _, layout = key.partition("@")
        known = [*live.cache.tensors, "plain_norm.bias", "plain.bias", "fc.bias"]  # folding makes biases
        assert name in known or layout == ""
        assert layout == "" or (len(layout) == 16 and int(layout, 16) >= 0)


@pytest.mark.long
def test_the_delegate_keeps_all_of_its_weights_in_the_program(tmp_path: Path) -> None:
    """What the program uses itself is known by its name in its data file all the same (U1)."""
    live = Live.make(seeded(nets.MLP), inputs(3, 16), tmp_path, tag={"shift": "model"}.get)
    assert "shift" in live.cache.tensors
    with torch.no_grad():
        live.cache.update({"shift": live.module.shift.neg_()})
    live.check()


@pytest.mark.long
def test_what_did_not_change_is_not_initialized_again(tmp_path: Path) -> None:
    """Only delegates whose blobs change are initialized (U1)."""
    live = Live.make(seeded(nets.MLP), inputs(3, 16), tmp_path)
    live.run()
    inits = delegate_stats().inits
    live.cache.update({"shift": live.module.shift})  # no delegate has it
    live.check()
    assert delegate_stats().inits == inits
    live.cache.update({"layers.0.weight": live.module.layers[0].weight})
    assert delegate_stats().inits == inits + 1  # the commit packs, and not the call
    live.check()
    assert delegate_stats().inits == inits + 1


def test_names_do_not_pile_up(tmp_path: Path) -> None:
    """Many updates leave no names and no packed weights behind (U1)."""
    live = Live.make(seeded(nets.MLP), inputs(3, 16), tmp_path)
    live.run()
    names = delegate_stats().names
    for _ in range(50):
        live.cache.update({"layers.0.weight": live.module.layers[0].weight})
        live.run()
    assert delegate_stats().names == names


def test_new_bytes_in_odd_places(tmp_path: Path) -> None:
    """Delegates pack from odd addresses, from the end of a page, and from one array for two tensors (U1)."""
    live = Live.make(seeded(nets.MLP), inputs(3, 16), tmp_path)
    live.run()
    weight = live.module.layers[1].weight
    with torch.no_grad():
        weight.normal_(generator=torch.Generator().manual_seed(7))
    raw = weight.detach().numpy().tobytes()
    (key,) = live.cache.tensors["layers.1.weight"].keys
    live.cache.update({key: memoryview(b"x" + raw)[1:]})
    live.check()
    with mmap.mmap(-1, 4096) as page, memoryview(page) as whole:
        whole[4096 - len(raw) :] = np.negative(np.frombuffer(raw, np.float32)).tobytes()
        live.cache.update({key: whole[4096 - len(raw) :]})
    with torch.no_grad():
        weight.neg_()
    live.check()
    both = torch.full((24,), 0.5)
    with torch.no_grad():
        live.module.layers[0].bias.copy_(both)
        live.module.layers[1].bias.copy_(both)
    live.cache.update({"layers.0.bias": both, "layers.1.bias": both})
    live.check()
