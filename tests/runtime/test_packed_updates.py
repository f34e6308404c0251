"""Updates that are written into packed weights in place: outputs are those without a store, to the bit (K1, K3)."""

import itertools
import random
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from blobstore.adapters import load_adapter, save_adapter
from blobstore.errors import ProgramError
from blobstore.runtime import BlobCache, PackedStore, Program, delegate_stats
from tests.adapters import nets as lora_nets
from tests.helpers.beside import run_script
from tests.lowering import nets
from tests.lowering.live import inputs, lower_through, randomize, seeded
from tests.runtime import packed_files
from tests.runtime.packed_files import Running, ones
from tests.runtime.test_packed import KINDS

INPUT = ones(2, 16)
WEIGHT, BIAS = "layers.0.weight", "layers.0.bias"


def _half(folder: Path) -> Any:
    module, example = seeded(nets.MLP).half(), (inputs(2, 16)[0].half(),)
    lower_through({"forward": (module, example)}, folder)
    return module, example


ALL = {**KINDS, "float16": _half}
IN_PLACE = ("linear", "batch norms", "float16", "dynamic int8")  # not those with a ConvTranspose2d
FLOAT = ("linear", "batch norms", "convolutions", "float16", "not packed")


class Both:
    """A program on two caches of one data file, of which one has a store. Their outputs are equal, always."""

    def __init__(self, folder: Path, packed: PackedStore, example: tuple[Any, ...] = INPUT, **options: Any) -> None:
        self.plain = Running.open(folder, example, **options)
        self.packed = Running.open(folder, example, packed, **options)
        self.store = packed
        self.original = self.check()

    def check(self) -> list[bytes]:
        found = self.packed()
        assert found == self.plain()
        return found

    def update(self, tensors: dict[str, Tensor]) -> list[bytes]:
        """Of both; nothing is packed for the one with a store."""
        self.plain.cache.update(tensors)
        inits, repacked = delegate_stats().inits, self.store.stats.repacked
        self.packed.cache.update(tensors)
        assert (delegate_stats().inits, self.store.stats.repacked) == (inits, repacked)
        return self.check()

    def revert(self, *names: str) -> list[bytes]:
        for running in (self.plain, self.packed):
            tensors = running.cache.tensors
            if names:
                running.cache.revert([key for name in names for key in tensors[name].keys])
            else:
                running.cache.revert()
        return self.check()


@pytest.fixture
def store(mlp: Path, tmp_path: Path) -> PackedStore:
    """A store that has the file of the small program."""
    Running.open(mlp, INPUT, PackedStore(tmp_path / "packed"))
    return PackedStore(tmp_path / "packed")


def weights(seed: int) -> dict[str, Tensor]:
    """New weights of the small program."""
    return {name: tensor for name, tensor in randomize(seeded(nets.MLP), seed).items() if name != "shift"}


@pytest.mark.slow_for("static int8", "not packed", "convolutions", "int8 per tensor")
@pytest.mark.long
@pytest.mark.parametrize("kind", ALL)
def test_every_weight_of_every_kind_of_layer(kind: str, tmp_path: Path) -> None:
    """Outputs are those without a store, and those of a program lowered anew. What can be, is written in place (K3)."""
    module, example = ALL[kind](tmp_path / "model")
    store = PackedStore(tmp_path / "packed")
    builds = Running.open(tmp_path / "model", example, store)
    plain, packed = (Running.open(tmp_path / "model", example, one) for one in (None, store))
    path = packed_files.only(store.folder)
    content = packed_files.read(path).data
    original = plain()
    assert builds() == packed() == original
    assert (store.stats.builds, store.stats.fallbacks) == (1, 0)
    for seed in (7, 8):
        values = randomize(module, seed)
        tensors = {name: value for name, value in values.items() if name in plain.cache.tensors}
        plain.cache.update(tensors)
        before, inits = store.stats, delegate_stats().inits
        packed.cache.update(tensors)
        after = store.stats
        changed = plain()
        assert packed() == changed != original
        if kind in IN_PLACE:
            # biases of integers may be what scales must not be, so XNNPACK is asked once, and packs nothing
            assert delegate_stats().inits - inits <= int(kind == "dynamic int8")
            assert (after.written > before.written, after.repacked) == (True, 0)
        else:
            assert after.repacked > before.repacked
        if kind in FLOAT:
            lower_through({"forward": (module, example)}, tmp_path / str(seed))
            assert Running.open(tmp_path / str(seed), example)() == changed
    [file] = store.list()
    assert (file.mapped == file.entries) == (kind in {*IN_PLACE, "not packed", "convolutions"}), file
    for running in (plain, packed):
        running.cache.revert()
    assert plain() == packed() == builds() == original
    assert path.read_bytes() == content  # no update reached the disk
    later = PackedStore(tmp_path / "packed")
    assert Running.open(tmp_path / "model", example, later)() == original
    assert (later.stats.builds, later.stats.fallbacks) == (0, 0)


@pytest.mark.parametrize("mode", ["private", "copy"])
def test_the_tensors_of_a_group_in_turn_and_together(mlp: Path, store: PackedStore, mode: str) -> None:
    """A weight and its bias are packed together: one after the other, both, and one of them reverted (K3)."""
    both = Both(mlp, store, mode=mode)
    first, second = weights(1), weights(2)
    outputs = [both.original]
    for tensors in (
        {WEIGHT: first[WEIGHT]},
        {BIAS: first[BIAS]},
        {WEIGHT: second[WEIGHT], BIAS: second[BIAS]},
        {BIAS: first[BIAS], "layers.2.weight": first["layers.2.weight"]},
    ):
        outputs.append(both.update(tensors))
    outputs.append(both.revert(WEIGHT))
    outputs.append(both.update({WEIGHT: second[WEIGHT]}))
    outputs.append(both.revert(BIAS))
    assert all(one != other for one, other in itertools.pairwise(outputs))
    both.revert(WEIGHT)
    assert both.revert("layers.2.weight") == both.original
    assert both.update(second) not in outputs
    assert both.revert() == both.original
    assert store.stats.written == 11  # where all of an entry is reverted, its pages are given back


@pytest.mark.long
def test_a_follower_that_refuses_changes_nothing(tmp_path: Path) -> None:
    """A program is prepared to write in place, another one on the same cache cannot take the weights (B3, K3)."""
    _, example = KINDS["static int8"](tmp_path / "int8")
    lower_through({"forward": (seeded(nets.MLP), (torch.ones(2, 16),))}, tmp_path / "float")
    store = PackedStore(tmp_path / "packed")

    def start(packed: PackedStore | None) -> tuple[BlobCache, Running, Running]:
        cache = BlobCache([tmp_path / name / "model.ptd" for name in ("float", "int8")], packed=packed)
        loaded = []
        for name, values in (("float", INPUT), ("int8", example)):
            program = Program(tmp_path / name / "model.pte", cache)
            loaded.append(Running(cache, program, program.method(), values))
        return cache, loaded[0], loaded[1]

    start(store)
    cache, floats, integers = start(store)
    _, plain, _ = start(None)
    before = floats(), integers()
    scale = {name: tensor for name, tensor in cache.tensors.items() if name == "first.weight.scale"}
    assert scale
    with pytest.raises(ProgramError, match="nothing was changed"):
        cache.update({**weights(1), "first.weight.scale": -torch.ones(6)})
    assert (floats(), integers()) == before
    assert (store.stats.written, cache.generation, len(cache.dirty)) == (0, 0, 0)
    cache.update(weights(2))
    plain.cache.update(weights(2))
    assert floats() == plain() != before[0]
    assert integers() == before[1]
    assert store.stats.written == 3


@pytest.mark.slow_for("-1.0", "inf", "nan")
@pytest.mark.long
@pytest.mark.parametrize("scale", [-1.0, 0.0, float("nan"), float("inf")])
def test_scales_that_cannot_be_packed_are_refused(scale: float, tmp_path: Path) -> None:
    """As without a store, although nothing would be packed (B3, K3)."""
    _, example = KINDS["dynamic int8"](tmp_path / "model")
    both = Both(tmp_path / "model", PackedStore(tmp_path / "packed"), example)
    for running in (both.plain, both.packed):
        with pytest.raises(ProgramError, match=r"nothing was changed.*cannot be initialized"):
            running.cache.update({"first.weight.scale": torch.full((6,), scale)})
        assert not running.cache.dirty
    assert both.check() == both.original


@pytest.mark.parametrize("manifest", [True, False])
def test_a_program_that_is_loaded_when_the_cache_has_changed(manifest: bool, mlp: Path, tmp_path: Path) -> None:
    """It uses the file, with what has changed written in place; a revert gives the file's weights back (K3)."""
    if manifest:
        tensors = BlobCache(mlp / "model.ptd")
        tensors.save(tmp_path / "model.ptd")
    else:
        (tmp_path / "model.ptd").write_bytes((mlp / "model.ptd").read_bytes())
    (tmp_path / "model.pte").write_bytes((mlp / "model.pte").read_bytes())
    store = PackedStore(tmp_path / "packed")
    plain = Running.open(tmp_path, INPUT)
    original = plain()
    assert Running.open(tmp_path, INPUT, store)() == original
    cache = BlobCache(tmp_path / "model.ptd", packed=store)
    for running in (plain.cache, cache):
        running.update(weights(1))
    program = Program(tmp_path / "model.pte", cache)
    late = Running(cache, program, program.method(), INPUT)
    changed = plain()
    assert late() == changed != original
    again = Program(tmp_path / "model.pte", cache)
    assert Running(cache, again, again.method(), INPUT)() == changed
    for running in (plain.cache, cache):
        running.revert()
    assert late() == plain() == original
    for running in (plain.cache, cache):
        running.update(weights(2))
    assert late() == plain() != original
    assert store.stats.fallbacks == 0 if manifest else store.stats.fallbacks <= 2


@pytest.mark.long
def test_adapters_above_a_base_that_is_updated(tmp_path: Path) -> None:
    """Adapters use the file of their foundation, which is written in place for all; their own weights are in no file (K1, K3)."""
    folder, example = tmp_path / "lora", inputs(3, 16)
    module = lora_nets.make(lora_nets.LoraNet)
    lora_nets.lower_lora(module, example, folder, delegated=True)
    for seed in (1, 2):
        tensors, foundation = lora_nets.adapter_of(seed), folder / "foundation.ptd"
        save_adapter(tmp_path / f"{seed}.ptd", tensors, foundation=foundation, scale=lora_nets.SCALE)
    store = PackedStore(tmp_path / "packed")

    def start(packed: PackedStore | None) -> list[Running]:
        base = BlobCache(folder / "foundation.ptd", packed=packed)
        found = []
        for seed in (1, 2):
            cache = BlobCache(folder / "adapter.ptd", base=base)
            load_adapter(cache, tmp_path / f"{seed}.ptd")
            program = Program(folder / "model.pte", cache)
            found.append(Running(cache, program, program.method(), example))
        return found

    def run(all_of: list[Running]) -> list[list[bytes]]:
        return [one() for one in all_of]

    start(store)
    assert (store.stats.builds, store.stats.fallbacks) == (1, 0)
    names = packed_files.read(packed_files.only(store.folder)).names
    assert names and not any("lora" in name for name in names)
    packed, plain = start(store), start(None)
    outputs = [run(plain)]
    assert run(packed) == outputs[0] and outputs[0][0] != outputs[0][1]
    bases = [one[0].cache.base for one in (packed, plain)]
    for name in ("l.0.base.weight", "l.1.base.bias", "l.0.base.bias"):
        for base in bases:
            assert base is not None
            base.update(
                {name: torch.linspace(-1, 1, module.get_parameter(name).numel()).view_as(module.get_parameter(name))}
            )
        outputs.append(run(plain))
        assert run(packed) == outputs[-1] != outputs[-2]
    assert (store.stats.written, store.stats.repacked) == (3, 0)
    for base in bases:
        assert base is not None
        base.revert()
    assert run(packed) == run(plain)
    for one in (packed, plain):  # which fits the base again
        load_adapter(one[0].cache, tmp_path / "2.ptd")
    outputs.append(run(plain))
    assert run(packed) == outputs[-1] != outputs[0]


class Tied(nn.Module):
    """One weight in two layers, and another layer with equal numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.second = nn.Linear(12, 12, bias=False)
        self.second.weight = self.first.weight
        self.equal = nn.Linear(12, 12)
        with torch.no_grad():
            self.equal.weight.copy_(self.first.weight)
            self.equal.bias.copy_(self.first.bias)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.equal(torch.relu(self.second(torch.relu(self.first(x)))))
        return result


@pytest.mark.long
def test_equal_and_tied_weights(tmp_path: Path) -> None:
    """A write reaches all layers of a tied weight, and none that has equal numbers only (K3)."""
    module, example = seeded(Tied), inputs(2, 12)
    lower_through({"forward": (module, example)}, tmp_path / "model")
    store = PackedStore(tmp_path / "packed")
    Running.open(tmp_path / "model", example, store)
    plain, packed = (Running.open(tmp_path / "model", example, one) for one in (None, store))
    outputs = [plain()]
    assert packed() == outputs[0]
    for i, name in enumerate(("first.weight", "equal.weight", "equal.bias", "first.bias", "first.weight")):
        with torch.no_grad():
            module.get_parameter(name).mul_(-1.5)
        for running in (plain, packed):
            running.cache.update({name: module.get_parameter(name)})
        lower_through({"forward": (module, example)}, tmp_path / str(i))
        outputs.append(plain())
        assert packed() == outputs[-1] == Running.open(tmp_path / str(i), example)() != outputs[-2]
    assert (store.stats.written > 0, store.stats.repacked) == (True, 0)
    for name in ("first.bias", "equal.weight", "first.weight", "equal.bias"):
        for running in (plain, packed):
            running.cache.revert(running.cache.tensors[name].keys)
        assert packed() == plain()
    assert packed() == outputs[0]


def after_changes(folder: Path, name: str, store: PackedStore) -> Iterator[tuple[int, Any]]:
    """The outputs on a data file as it is and after each of three changes, without the store, which packs the file."""
    plain = Running.open(folder, INPUT, data=name)
    Running.open(folder, INPUT, store, data=name)
    for change in range(4):
        plain.cache.revert()
        if change:
            plain.cache.update(weights(change))
        yield change, plain()


@pytest.mark.parametrize("seed", range(4))
def test_closing_in_any_order(seed: int, mlp: Path, tmp_path: Path) -> None:
    """Programs and caches, changed or not, of two models, go and come in any order (K3)."""
    chance = random.Random(seed)  # noqa: S311
    Running.open(mlp, INPUT).cache.save(tmp_path / "model.ptd")  # has a manifest
    other = BlobCache(mlp / "model.ptd")
    other.update(weights(9))
    other.save(tmp_path / "other.ptd")
    (tmp_path / "model.pte").write_bytes((mlp / "model.pte").read_bytes())
    store = PackedStore(tmp_path / "packed")
    names = ("model.ptd", "other.ptd")
    expected = {(name, change): outputs for name in names for change, outputs in after_changes(tmp_path, name, store)}
    caches: list[list[Any]] = []  # cache, name, change
    programs: list[tuple[Any, list[Any]]] = []
    for _ in range(120):
        step = chance.randrange(6)
        if step == 0 or not caches:
            name = chance.choice(names)
            caches.append([BlobCache(tmp_path / name, packed=store), name, 0])
        elif step == 1:
            owner = chance.choice(caches)
            program = Program(tmp_path / "model.pte", owner[0])
            programs.append((program.method(), owner))
        elif step == 2:
            caches.pop(chance.randrange(len(caches)))  # its programs may go on
        elif step == 3 and programs:
            programs.pop(chance.randrange(len(programs)))
        else:
            owner = chance.choice(caches)
            owner[2] = chance.randrange(4)
            owner[0].revert()
            if owner[2]:
                owner[0].update(weights(owner[2]))
        for method, owner in programs:
            assert np.asarray(method(*INPUT)).tobytes() == expected[owner[1], owner[2]][0]
    assert (store.stats.builds, store.stats.fallbacks, store.stats.repacked) == (2, 0, 0)
    assert store.stats.written > 0


BEGIN = """
import os, sys, threading
from pathlib import Path
import numpy as np
from blobstore.runtime import BlobCache, PackedStore, Program, delegate_stats
from tests.runtime.packed_files import Running, anonymous, ones
from tests.helpers.beside import in_child
from tests.helpers.waiting import until, until_blocked

folder, packed = Path(sys.argv[1]), PackedStore(sys.argv[2])
"""
ON_MLP = """
running = Running.open(folder, ones(2, 16), packed)
plain = Running.open(folder, ones(2, 16))
original = plain()
new = {number: {"layers.0.weight": np.full((24, 16), number / 8, np.float32)} for number in (1, 2, 3)}
expected = {}
for number, tensors in new.items():
    plain.cache.update(tensors)
    expected[number] = plain()

"""


def test_parent_and_child_change_their_own(mlp: Path, store: PackedStore) -> None:
    """What one of them writes after the fork, before or after its first call, the other does not see (K3, B4)."""
    run_script(
        BEGIN
        + ON_MLP
        + textwrap.dedent("""
        assert running() == original
        for before in (None, 1):
            if before:
                running.cache.update(new[1])
            start = expected.get(before, original)
            done, go = os.pipe(), os.pipe()
            def work():
                running.cache.update(new[2])
                assert running() == expected[2]
                os.write(done[1], b".")
                os.read(go[0], 1)  # the parent has changed
                assert running() == expected[2]
                again = Program(folder / "model.pte", running.cache)
                assert Running(running.cache, again, again.method(), ones(2, 16))() == expected[2]
                running.cache.revert()
                assert running() == original
            wait = in_child(work)
            os.read(done[0], 1)  # the child has changed
            assert running() == start
            running.cache.update(new[3])
            os.write(go[1], b".")
            assert wait() == 0
            assert running() == expected[3]
            running.cache.revert()
            assert running() == original
        assert packed.stats.repacked == 0
        """),
        mlp,
        store.folder,
    )


@pytest.mark.parametrize("commit", ["revert", "update"])
def test_a_fork_while_a_commit_waits(commit: str, mlp: Path, store: PackedStore) -> None:
    """What was prepared in the parent is not used in the child, which commits something else (B3, B4, K3)."""
    run_script(
        BEGIN
        + ON_MLP
        + f"commit = {commit!r}\n"
        + textwrap.dedent("""
        running.cache.update(new[1])
        assert running() == expected[1]
        change = running.cache.revert if commit == "revert" else lambda: running.cache.update(new[2])
        with running.cache.reading():
            thread = threading.Thread(target=change)
            thread.start()
            until_blocked(thread)  # it waits for this reader
            pid = os.fork()
        if pid == 0:
            running.cache.update(new[3])
            assert running() == expected[3]
            running.cache.revert()
            assert running() == original
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        thread.join()
        assert running() == (original if commit == "revert" else expected[2])
        """),
        mlp,
        store.folder,
    )


@pytest.mark.long
def test_memory_of_an_update(large: Path, tmp_path: Path) -> None:
    """Blobs and packed weights of what is changed become memory of the process; a revert gives it back (K3, N4)."""
    store = PackedStore(tmp_path / "packed")
    Running.open(large, ones(1, 1024), store)  # in this process, as what builds a file leaves a larger heap
    run_script(
        BEGIN
        + textwrap.dedent("""
        running = Running.open(folder, ones(1, 1024), packed)
        original, layer = running(), 4 << 20
        value = np.ones((1024, 1024), np.float32)  # one for all, so that the heap does not change
        before = anonymous()
        for _ in range(3):  # another update takes no more
            value += 1.5
            running.cache.update({"layers.2.weight": value})
            assert running() != original
            grown = anonymous() - before
            assert 2 * layer <= grown < 2.5 * layer, grown
        running.cache.revert()
        assert running() == original
        assert anonymous() - before < 0.5 * layer, anonymous() - before
        running.cache.update({f"layers.{i}.weight": value for i in range(4)})
        assert running() != original and anonymous() - before > 4 * layer
        running.cache.revert()
        assert running() == original and anonymous() - before < 2 * layer
        assert (packed.stats.written, packed.stats.repacked) == (7, 0)
        """),
        large,
        store.folder,
    )


def test_a_large_layer(large: Path, tmp_path: Path) -> None:
    """Pages that are moved instead of copied: updates, reverts and both caches in turn (K3)."""
    both = Both(large, PackedStore(tmp_path / "packed"), ones(1, 1024))
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        for name in ("layers.0.weight", "layers.3.bias", "layers.3.weight", "layers.0.weight"):
            value = torch.randn(1024 if "bias" in name else (1024, 1024), generator=generator)
            assert both.update({name: value}) != both.original
        both.revert("layers.3.weight")
        both.revert("layers.0.weight")
        assert both.revert() == both.original
    assert both.store.stats.written == 2 * 5
