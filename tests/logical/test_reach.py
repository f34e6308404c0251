"""A strict update changes every weight of the loaded programs, or refuses and names those out of reach (U1, B3)."""

import gc
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blobstore import save_programs
from blobstore.adapters import merge_adapter
from blobstore.core.formats.opening import open_any
from blobstore.errors import UpdateError
from blobstore.lowering.export import lower
from blobstore.runtime import BlobCache, Method, Program, make_working_copy, serving
from tests.lowering.live import close, plugin, randomize, seeded, write

TOKENS = (torch.arange(5),)


class Net(nn.Module):
    """An embedding and a normalization that no delegate takes, a linear layer, and constants that are not weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 8)
        self.linear = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.register_buffer("scale", torch.linspace(1, 2, 8), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        # a number of the code's own, as long as a bias, stays in the program whatever is external
        return self.norm(self.linear(self.embed(tokens))) * self.scale + torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8])


def external(node: Any) -> str:
    return "model"


LOWERINGS: dict[str, Callable[[], Any]] = {
    "ours": lambda: lower(METHOD, tag="model"),
    "no tag": lambda: lower(METHOD, partitioners=plugin(None), external_constants=external),
    "some tags": lambda: lower(
        METHOD,
        partitioners=plugin(lambda name: None if name == "linear.bias" else "model"),
        external_constants=external,
    ),
    "inside": lambda: lower(METHOD, partitioners=plugin()),
    "stock": lambda: lower(METHOD, external_constants=external),
    "portable": lambda: lower(METHOD, partitioners=list),
}
METHOD = {"forward": (seeded(Net), TOKENS)}


@pytest.fixture(scope="module")
def lowered(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Lowers in one of the ways, once, to a folder with `model.pte` and perhaps `model.ptd`."""
    folders: dict[str, Path] = {}

    def get(way: str) -> Path:
        if way not in folders:
            folders[way] = tmp_path_factory.mktemp("lowered")
            write(LOWERINGS[way](), folders[way])
        return folders[way]

    return get


def copy(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target)
    return target / "model.pte"


def new_weights(seed: int = 7) -> tuple[nn.Module, dict[str, Tensor]]:
    module = seeded(Net)
    return module, randomize_persistent(module, seed)


def randomize_persistent(module: nn.Module, seed: int) -> dict[str, Tensor]:
    scale = module.scale.clone()
    state = randomize(module, seed)
    module.scale.copy_(scale)
    return state


def refused(cache: BlobCache, state: dict[str, Tensor], method: Method, *words: str) -> None:
    """Check that a strict update is refused with a message that has these words, and that nothing changes."""
    generation, before = cache.generation, method(*TOKENS)
    with pytest.raises(UpdateError, match="nothing was changed") as caught:
        cache.update_state_dict(state)
    for word in words:
        assert word in str(caught.value)
    assert cache.generation == generation and cache.dirty == ()
    assert torch.equal(method(*TOKENS), before)


@pytest.mark.long
@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("no tag", ["'linear.weight', 'linear.bias' inside", "tag"]),
        ("some tags", ["has 'linear.bias' inside", "tag"]),
        ("inside", ["'embed.weight'", "'norm.weight'", "'norm.bias'", "external_constants=True"]),
        ("stock", ["2 constants that XnnpackBackend packed", "BlobStorePartitioner"]),
    ],
)
def test_weights_out_of_reach_are_named(way: str, words: list[str], lowered: Any, tmp_path: Path) -> None:
    """With the method, the program and the remedy; once the program is gone, the update succeeds (U1)."""
    pte = copy(lowered(way), tmp_path / "a")
    cache = BlobCache(sorted(pte.parent.glob("*.ptd")))
    method = Program(pte, cache).method()
    state = new_weights()[1]
    refused(cache, state, method, f"method 'forward' of {pte}", *words)
    if way != "inside":  # where the records say so, they have a refusal of their own
        del method
        gc.collect()
        cache.update_state_dict(state)  # of the programs that are loaded, none is left


@pytest.mark.long
@pytest.mark.parametrize("other", ["inside", "stock", "portable"])
def test_one_of_several_programs_is_out_of_reach(other: str, lowered: Any, tmp_path: Path) -> None:
    """Even one on a cache above, and one of which only a method is left (U1, B3)."""
    pte, second = copy(lowered("ours"), tmp_path / "a"), copy(lowered(other), tmp_path / "b")
    cache = BlobCache(pte.parent / "model.ptd")
    reached = Program(pte, cache).method()
    method = Program(second, BlobCache(sorted(second.parent.glob("*.ptd")), base=cache)).method()
    refused(cache, new_weights()[1], reached, str(second))
    close(method(*TOKENS), seeded(Net)(*TOKENS))
    module, state = new_weights()
    del method
    gc.collect()
    cache.update_state_dict(state)
    close(reached(*TOKENS), module(*TOKENS))


@pytest.mark.parametrize("named", [True, False])
def test_small_weights_that_were_kept_inside(named: bool, lowered: Any, tmp_path: Path) -> None:
    """`keep_small` leaves biases in the program; without names, keys are made of contents (U1)."""
    checkpoint = tmp_path / "checkpoint.safetensors"
    names = None
    if named:
        from safetensors.torch import save_file as save_safetensors

        save_safetensors(dict(seeded(Net).state_dict()), checkpoint)
        names = open_any(checkpoint)
    manager = lower(METHOD, partitioners=list)
    save_programs({"model": manager}, tmp_path / "out", keep_small=100 if named else 0, names=names)
    cache = BlobCache(tmp_path / "out" / "shared.ptd")
    method = Program(tmp_path / "out" / "model.pte", cache).method()
    words = ["'norm.bias'", "keep_small"] if named else ["made of their contents", "names="]
    refused(cache, new_weights()[1], method, str(tmp_path / "out" / "model.pte"), *words)


@pytest.mark.long
def test_a_merged_adapter_is_in_all_programs_or_in_none(lowered: Any, tmp_path: Path) -> None:
    """Merging is an update of the merged tensors (D2, B3)."""
    pte, second = copy(lowered("ours"), tmp_path / "a"), copy(lowered("portable"), tmp_path / "b")
    cache = BlobCache(pte.parent / "model.ptd")
    method = Program(pte, cache).method()
    adapter = {"linear.lora_a.weight": torch.ones(1, 8), "linear.lora_b.weight": torch.ones(8, 1)}
    above = Program(second, BlobCache(base=cache)).method()
    before = method(*TOKENS)
    with pytest.raises(UpdateError, match=rf"{re.escape(str(second))} has constants like 'linear.weight' inside"):
        merge_adapter(cache, adapter)
    assert torch.equal(method(*TOKENS), before)
    del above
    gc.collect()
    merge_adapter(cache, adapter)
    module = seeded(Net)
    module.linear.weight.data += 1
    close(method(*TOKENS), module(*TOKENS))


# ExecuTorch's own runtime


class Stock:
    """A method that ExecuTorch's own runtime loaded, with what it reads from and does not keep alive."""

    def __init__(self, pte: Path, data: Path, *, from_memory: bool = False) -> None:
        from executorch.runtime import Runtime, Verification

        self.source = pte.read_bytes() if from_memory else pte
        check = Verification.InternalConsistency
        self.program = Runtime.get().load_program(self.source, verification=check, data_path=data)
        self.method: Any = self.program.load_method("forward")

    def __call__(self, *inputs: Tensor) -> Tensor:
        found: Tensor = self.method.execute(list(inputs))[0].clone()
        return found


@pytest.mark.parametrize("from_memory", [False, True])
def test_on_a_working_copy_all_weights_follow(from_memory: bool, lowered: Any, tmp_path: Path) -> None:
    """Embedding, normalization and delegate change with an update, and change back with the original (U1, U3)."""
    pte = copy(lowered("ours"), tmp_path / "a")
    make_working_copy(pte.parent / "model.ptd", tmp_path / "live.ptd")
    cache = BlobCache(tmp_path / "live.ptd", "shared")
    with serving(cache):
        method = Stock(pte, tmp_path / "live.ptd", from_memory=from_memory)
    close(method(*TOKENS), seeded(Net)(*TOKENS))
    for seed in range(2):
        module, state = new_weights(seed)
        cache.update_state_dict(state)
        close(method(*TOKENS), module(*TOKENS))
    cache.load(pte.parent / "model.ptd")
    close(method(*TOKENS), seeded(Net)(*TOKENS))


@pytest.mark.long
@pytest.mark.parametrize("from_memory", [False, True])
@pytest.mark.parametrize(
    ("mode", "data"), [("private", "model"), ("copy", "model"), ("shared", "model"), ("private", "live")]
)
def test_what_does_not_follow_is_refused(from_memory: bool, mode: Any, data: str, lowered: Any, tmp_path: Path) -> None:
    """In another mode, or if ExecuTorch has another data file than the working copy (U1, B3)."""
    pte = copy(lowered("ours"), tmp_path / "a")
    files = {"model": pte.parent / "model.ptd", "live": tmp_path / "live.ptd"}
    make_working_copy(files["model"], files["live"])
    cache = BlobCache(files["live" if mode == "shared" else "model"], mode)
    ours = Program(pte, cache).method()
    with serving(cache):
        method = Stock(pte, files[data], from_memory=from_memory)
    module, state = new_weights()
    words = ["'embed.weight'", "'norm.weight'", "'norm.bias'", "make_working_copy", "data_path"]
    if not from_memory:
        words.append(f"method 'forward' of {pte}")
    refused(cache, state, ours, *words)
    close(method(*TOKENS), seeded(Net)(*TOKENS))
    delegated = {name: tensor for name, tensor in state.items() if name.startswith("linear.")}
    cache.update(delegated)
    expected = seeded(Net)
    expected.load_state_dict({**expected.state_dict(), **delegated})
    close(method(*TOKENS), expected(*TOKENS))
    del method
    gc.collect()
    cache.update_state_dict(state)
    close(ours(*TOKENS), module(*TOKENS))


@pytest.mark.long
@pytest.mark.parametrize("from_memory", [False, True])
def test_an_update_by_name_changes_something_or_is_refused(from_memory: bool, lowered: Any, tmp_path: Path) -> None:
    """What only ExecuTorch's own runtime has, in memory of its own, is never reported as changed (U1, B3)."""
    pte = copy(lowered("ours"), tmp_path / "a")
    cache = BlobCache(pte.parent / "model.ptd")
    with serving(cache):
        method = Stock(pte, pte.parent / "model.ptd", from_memory=from_memory)
    module, state = new_weights()
    outside = {name: tensor for name, tensor in state.items() if not name.startswith("linear.")}
    delegated = {name: tensor for name, tensor in state.items() if name.startswith("linear.")}
    ways: list[Callable[[], Any]] = [
        *(lambda name=name: cache.update({name: outside[name]}) for name in outside),
        lambda: cache.update(state),
        lambda: cache.update_state_dict(outside, strict=False),
    ]
    for way in ways:
        with pytest.raises(UpdateError, match=r"nothing was changed.*make_working_copy.*LoadMode::Mmap"):
            way()
    assert cache.generation == 0 and cache.dirty == ()
    cache.update(delegated)
    cache.update_state_dict(delegated, strict=False)
    expected = seeded(Net)
    expected.load_state_dict({**expected.state_dict(), **delegated})
    close(method(*TOKENS), expected(*TOKENS))
    ours = Program(pte, cache).method()
    cache.update(state)  # a program takes it from the cache now
    close(ours(*TOKENS), module(*TOKENS))
    del ours
    gc.collect()
    with pytest.raises(UpdateError, match="nothing was changed"):
        cache.update({"norm.bias": state["norm.bias"]})
    del method
    gc.collect()
    cache.update({"norm.bias": state["norm.bias"]})  # for programs that are loaded later
