"""Methods of different modules in one program share what is one parameter, not what has one name (W1, R2, U1)."""

import copy
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blobstore import save_programs
from blobstore.core.formats.keys import KEY_PREFIX
from blobstore.errors import KeyConflictError, KeyNotFoundError, UpdateError
from blobstore.lowering.export import lower, quiet
from blobstore.runtime import BlobCache, Program
from tests.lowering.live import Inputs, close, lower_through, plugin, randomize, seeded, write

pytestmark = pytest.mark.long

with quiet():
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import ExecutorchBackendConfig, to_edge_transform_and_lower
    from executorch.exir.lowered_backend_module import get_lowered_submodules

    from blobstore.lowering import BlobStorePartitioner

TOKENS = (torch.tensor([1, 2, 3]),)


class Part(nn.Module):
    """Some of its weights are in a delegate, some are outside, and two of them start equal in every instance."""

    def __init__(self, width: int = 8, embed: nn.Embedding | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8) if embed is None else embed
        self.linear = nn.Linear(8, width)
        self.norm = nn.LayerNorm(width)
        nn.init.zeros_(self.linear.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.norm(torch.relu(self.linear(self.embed(tokens))))


class Both(nn.Module):
    """Two modules whose parameters have equal names."""

    def __init__(self, width: int = 8, *, shared: bool = False) -> None:
        super().__init__()
        embed = nn.Embedding(16, 8) if shared else None
        self.encoder = Part(embed=embed)
        self.decoder = Part(width, embed)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.encoder(tokens).sum() + self.decoder(tokens)


def keys(cache: BlobCache) -> set[str]:
    return {key for key in cache if not key.startswith(KEY_PREFIX)}


def check(program: Program, modules: Mapping[str, nn.Module]) -> None:
    for name, module in modules.items():
        with torch.no_grad():
            close(program.method(name)(*TOKENS), module(*TOKENS))


def methods_of(modules: Mapping[str, nn.Module]) -> dict[str, tuple[nn.Module, Inputs]]:
    return {name: (module, TOKENS) for name, module in modules.items()}


@pytest.mark.parametrize("width", [8, 12])
def test_an_encoder_and_a_decoder(width: int, tmp_path: Path) -> None:
    """Each is updated by the names of the module that contains both, delegated or not, equal at first or not (U1)."""
    whole = seeded(lambda: Both(width))
    parts = {"encoder": whole.encoder, "decoder": whole.decoder}
    program = Program(lower_through(methods_of(parts), tmp_path), cache := BlobCache(tmp_path / "model.ptd"))
    check(program, parts)
    for seed in range(2):
        cache.update_state_dict(randomize(whole, seed))
        check(program, parts)
    with torch.no_grad():
        whole.decoder.linear.weight.mul_(-2)
        whole.encoder.embed.weight.mul_(-2)
    cache.update(
        {"decoder.linear.weight": whole.decoder.linear.weight, "encoder.embed.weight": whole.encoder.embed.weight}
    )
    check(program, parts)
    with pytest.raises(KeyNotFoundError, match=r"'linear\.weight'.*'encoder\.linear\.weight' or 'decoder\.linear"):
        cache.update({"linear.weight": whole.encoder.linear.weight})
    with pytest.raises(UpdateError, match=r"lacks .*'decoder\.linear\.weight'"):
        cache.update_state_dict(whole.encoder.state_dict())
    check(program, parts)


def test_a_partitioner_and_a_file_for_each_method(tmp_path: Path) -> None:
    """Each method has its own weights in its own file (R2, U1)."""
    whole = seeded(Both)
    parts = {"encoder": whole.encoder, "decoder": whole.decoder}
    with quiet():
        edge = to_edge_transform_and_lower(
            {name: torch.export.export(module, TOKENS) for name, module in parts.items()},
            partitioner={name: [BlobStorePartitioner(XnnpackPartitioner(), tag=name)] for name in parts},
        )
        assert pickle.dumps(_compile_specs(edge))
        path = write(edge.to_executorch(ExecutorchBackendConfig(external_constants=lambda _: "rest")), tmp_path)
    cache = BlobCache([tmp_path / f"{name}.ptd" for name in ("encoder", "decoder", "rest")])
    program = Program(path, cache)
    check(program, parts)
    cache.update_state_dict(randomize(whole, 1))
    check(program, parts)


def _compile_specs(edge: Any) -> list[Any]:
    graph_modules = [edge.exported_program(name).graph_module for name in edge.methods]
    return [lowered.compile_specs for module in graph_modules for _, lowered, _ in get_lowered_submodules(module)]


def test_what_two_modules_share_is_one_parameter(tmp_path: Path) -> None:
    """The embedding is one memory, so it is stored once, and each of its names reaches it (W1, U1)."""
    whole = seeded(lambda: Both(shared=True))
    parts = {"encoder": whole.encoder, "decoder": whole.decoder}
    program = Program(lower_through(methods_of(parts), tmp_path), cache := BlobCache(tmp_path / "model.ptd"))
    assert sum("embed" in key for key in keys(cache)) == 1
    check(program, parts)
    state = randomize(whole, 3)
    cache.update_state_dict(state)
    check(program, parts)
    for name in ("encoder.embed.weight", "decoder.embed.weight", "embed.weight"):
        with torch.no_grad():
            whole.encoder.embed.weight.mul_(-1.5)
        cache.update({name: whole.encoder.embed.weight})
        check(program, parts)
    before = bytes(cache.get_data("embed.weight"))
    with pytest.raises(UpdateError, match="another name of"):
        cache.update_state_dict({**whole.state_dict(), "decoder.embed.weight": torch.zeros(16, 8)})
    assert bytes(cache.get_data("embed.weight")) == before


@pytest.mark.long
@pytest.mark.parametrize("copied", [False, True])
def test_methods_of_one_module_share_everything(copied: bool, tmp_path: Path) -> None:
    """Even if they were exported from copies, as methods are that were quantized separately (W1)."""
    module = seeded(Part)
    alone = lower_through({"forward": (module, TOKENS)}, tmp_path / "alone")
    modules = {"prefill": module, "decode": copy.deepcopy(module) if copied else module}
    path = lower_through(methods_of(modules), tmp_path / "both")
    cache = BlobCache(tmp_path / "both" / "model.ptd")
    assert keys(cache) == keys(BlobCache(alone.with_suffix(".ptd")))
    program = Program(path, cache)
    cache.update_state_dict(randomize(module, 1))
    check(program, {"prefill": module, "decode": module})


@pytest.mark.long
def test_two_methods_of_one_module_beside_one_of_another(tmp_path: Path) -> None:
    """Two of the methods share everything, the third nothing (W1, R2)."""
    module, other = seeded(Part, 1), seeded(Part, 2)
    modules = {"prefill": module, "vision": other, "decode": module}
    program = Program(lower_through(methods_of(modules), tmp_path), cache := BlobCache(tmp_path / "model.ptd"))
    check(program, modules)
    assert sum(key.partition("@")[0].endswith("linear.weight") for key in keys(cache)) == 2
    state = randomize(module, 5)
    cache.update({f"prefill.{name}": tensor for name, tensor in state.items()})
    check(program, modules)
    state = randomize(module, 6)
    cache.update({f"decode.{name}": tensor for name, tensor in state.items()})
    check(program, modules)


@pytest.mark.long
def test_a_module_and_a_part_of_it(tmp_path: Path) -> None:
    """A parameter with different names in two methods is stored once (W1)."""
    whole = seeded(Both)
    modules = {"forward": whole, "encoder": whole.encoder, "decoder": whole.decoder}
    program = Program(lower_through(methods_of(modules), tmp_path), cache := BlobCache(tmp_path / "model.ptd"))
    check(program, modules)
    assert sum("linear.weight" in key for key in keys(cache)) == 2
    assert sum("embed.weight" in key for key in keys(cache)) == 2
    cache.update_state_dict(randomize(whole, 2))
    check(program, modules)


@pytest.mark.long
def test_a_qualified_name_that_another_method_has(tmp_path: Path) -> None:
    """Names are qualified again until they differ (R2)."""
    whole, encoder, decoder = seeded(Both, 1), seeded(Part, 2), seeded(Part, 3)
    modules = {"forward": whole, "encoder": encoder, "decoder": decoder}
    program = Program(lower_through(methods_of(modules), tmp_path), cache := BlobCache(tmp_path / "model.ptd"))
    check(program, modules)
    for part, name in (
        (whole.encoder, "forward.encoder"),
        (encoder, "encoder.encoder"),
        (whole.decoder, "forward.decoder"),
    ):
        with torch.no_grad():
            part.linear.weight.mul_(-3)
        cache.update({f"{name}.linear.weight": part.linear.weight})
        check(program, modules)


@pytest.mark.long
def test_names_do_not_depend_on_the_order_of_methods(tmp_path: Path) -> None:
    """The same methods in another order give the same keys (U3)."""
    whole = seeded(Both)
    parts = methods_of({"encoder": whole.encoder, "decoder": whole.decoder})
    lower_through(parts, tmp_path / "a")
    lower_through(dict(reversed(parts.items())), tmp_path / "b")
    assert keys(BlobCache(tmp_path / "a" / "model.ptd")) == keys(BlobCache(tmp_path / "b" / "model.ptd"))


@pytest.mark.parametrize("delegated", [["encoder"], []])
def test_methods_that_nothing_is_known_of(delegated: list[str], tmp_path: Path) -> None:
    """If no partitioner of blobstore could rename tensors, a program that would be wrong is not saved (R1)."""
    parts = {"encoder": seeded(Part, 1), "decoder": seeded(Part, 2)}

    def lowered_partly(modules: Mapping[str, nn.Module]) -> Any:
        with quiet():
            exported = {name: torch.export.export(module, TOKENS) for name, module in modules.items()}
            edge = to_edge_transform_and_lower(exported, partitioner={name: plugin()() for name in delegated})
            return edge.to_executorch(ExecutorchBackendConfig(external_constants=lambda _: "model"))

    with pytest.raises(KeyConflictError, match="model: methods 'decoder' and 'encoder' have different tensors"):
        save_programs({"model": lowered_partly(parts)}, tmp_path / "out")
    parts["decoder"].embed, parts["decoder"].norm = parts["encoder"].embed, parts["encoder"].norm
    with pytest.raises(KeyConflictError, match=r"model: .*'linear\.weight'"):
        save_programs({"model": lowered_partly(parts)}, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    one = dict.fromkeys(parts, parts["encoder"])
    save_programs({"model": lowered_partly(one)}, tmp_path / "out")
    cache = BlobCache(tmp_path / "out" / "model.ptd")
    program = Program(tmp_path / "out" / "model.pte", cache)
    cache.update_state_dict(randomize(one["encoder"], 1))
    check(program, one)


def lowered(module: nn.Module, tag: str) -> Any:
    return lower({"forward": (module, TOKENS)}, partitioners=plugin(tag), external_constants=lambda _: tag)


@pytest.mark.parametrize("equal", [False, True])
def test_programs_with_files_of_their_own(equal: bool, tmp_path: Path) -> None:
    """Two programs that never load each other's file may have equal keys in it (D2)."""
    encoder, decoder = seeded(Part, 1), seeded(Part, 1 if equal else 2)
    result = save_programs({"enc": lowered(encoder, "enc"), "dec": lowered(decoder, "dec")}, tmp_path)
    assert {path.name for path in result.data_files} == {"enc.ptd", "dec.ptd"}
    caches = {name: BlobCache(tmp_path / f"{name}.ptd") for name in ("enc", "dec")}
    methods = {name: Program(tmp_path / f"{name}.pte", cache).method() for name, cache in caches.items()}
    for name, module in (("enc", encoder), ("dec", decoder)):
        close(methods[name](*TOKENS), module(*TOKENS))
        caches[name].update_state_dict(randomize(module, 7))
    for name, module in (("enc", encoder), ("dec", decoder)):
        close(methods[name](*TOKENS), module(*TOKENS))
    if not equal:
        with pytest.raises(KeyConflictError, match=r"linear\.weight|embed\.weight"):
            BlobCache([tmp_path / "enc.ptd", tmp_path / "dec.ptd"])


def test_what_such_programs_have_inside_goes_to_the_shared_file(tmp_path: Path) -> None:
    """Constants without a tag, of all these programs (B1)."""
    encoder, decoder = seeded(Part, 1), seeded(Part, 2)
    programs = {
        name: lower({"forward": (module, TOKENS)}, partitioners=plugin(name))
        for name, module in (("enc", encoder), ("dec", decoder))
    }
    result = save_programs(programs, tmp_path, data_name="rest.ptd")
    assert {path.name for path in result.data_files} == {"enc.ptd", "dec.ptd", "rest.ptd"}
    assert all(not one.missing for one in result.programs)
    for name, module in (("enc", encoder), ("dec", decoder)):
        method = Program(tmp_path / f"{name}.pte", data=[tmp_path / f"{name}.ptd", tmp_path / "rest.ptd"]).method()
        close(method(*TOKENS), module(*TOKENS))


def test_programs_with_one_file_must_not_contradict_each_other(tmp_path: Path) -> None:
    """The error suggests different tags (R1)."""
    encoder, decoder = seeded(Part, 1), seeded(Part, 2)
    with pytest.raises(KeyConflictError, match=r"dec: both\.ptd: .*tags"):
        save_programs({"enc": lowered(encoder, "both"), "dec": lowered(decoder, "both")}, tmp_path / "out")
    assert not (tmp_path / "out").exists()
