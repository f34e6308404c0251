"""Packed weights are shared where they are the same, and never where they are not."""

import gc
from pathlib import Path

import pytest
import torch
from torch import nn

from blobstore.core.formats import payload
from blobstore.core.formats.pte.program import read_program
from blobstore.errors import InvalidFileError
from blobstore.lowering.export import lower, quiet
from blobstore.programs import save_programs
from blobstore.runtime import BlobCache, Program, delegate_stats
from examples.decoder import Decoder, DecoderConfig
from tests.lowering import nets
from tests.lowering.live import Live, close, inputs, lower_through, plugin, randomize, seeded, write

TINY = DecoderConfig(vocabulary=64, width=32, hidden=48, layers=2, heads=4, kv_heads=2, context=16, prompt=4)


def check_decoder(module: Decoder, program: Program, method: str, tokens: int) -> None:
    example = module.example(tokens)
    with torch.no_grad():
        for found, expected in zip(program.method(method)(*example), module(*example), strict=True):
            close(found, expected)


@pytest.mark.long
def test_prefill_and_decode_with_tied_embeddings(tmp_path: Path) -> None:
    """One blob in the file, one packed copy, one update for both methods (W1, U1)."""
    module = Decoder(TINY)
    methods = {"prefill": (module, module.example(4)), "decode": (module, module.example(1))}
    path = lower_through(methods, tmp_path)
    cache = BlobCache(tmp_path / "model.ptd")
    program = Program(path, cache)
    check_decoder(module, program, "prefill", 4)
    names = delegate_stats().names
    check_decoder(module, program, "decode", 1)
    assert delegate_stats().names == names  # the second method has no blob of its own
    # each linear layer once, not once a method
    assert sum(key.startswith("blocks.0.w1.weight") for key in cache) == 1
    for seed in range(3):
        with torch.no_grad():
            for i, parameter in enumerate(module.parameters()):
                parameter.mul_(1 + 0.1 * ((seed + i) % 3 - 1))
        cache.update_state_dict(module.state_dict(), strict=False)
        check_decoder(module, program, "decode", 1)
        check_decoder(module, program, "prefill", 4)
    with torch.no_grad():
        module.embedding.weight.neg_()  # looked up by a kernel and multiplied by the delegate
    cache.update({"embedding.weight": module.embedding.weight})
    check_decoder(module, program, "prefill", 4)
    check_decoder(module, program, "decode", 1)


@pytest.mark.long
def test_programs_of_one_cache_share(tmp_path: Path) -> None:
    """Two input lengths of one model as two programs, merged with save_programs (W1, D1)."""
    module = seeded(nets.MLP)
    save_programs({str(n): lower(module, inputs(n, 16), tag="model") for n in (2, 5)}, tmp_path)
    files = sorted(tmp_path.glob("*.ptd"))
    cache = BlobCache(files)
    short, long = (Program(tmp_path / f"{n}.pte", cache) for n in (2, 5))
    close(short.method()(*inputs(2, 16)), module(*inputs(2, 16)))
    names = delegate_stats().names
    close(long.method()(*inputs(5, 16)), module(*inputs(5, 16)))
    assert delegate_stats().names == names
    cache.update_state_dict(randomize(module, 3))
    close(long.method()(*inputs(5, 16)), module(*inputs(5, 16)))
    close(short.method()(*inputs(2, 16)), module(*inputs(2, 16)))


class Adapted(nn.Module):
    """A foundation and an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(16, 16)
        self.lora_a = nn.Linear(16, 2, bias=False)
        self.lora_b = nn.Linear(2, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.base(x)) + self.lora_b(self.lora_a(x))


@pytest.mark.long
def test_stacked_caches_share_what_they_do_not_override(tmp_path: Path) -> None:
    """Adapters have packed weights of their own, the foundation has one copy (D2)."""

    def tag(name: str) -> str:
        return "adapter" if "lora_" in name else "foundation"

    module = seeded(Adapted)
    example = inputs(3, 16)
    path = lower_through({"forward": (module, example)}, tmp_path, tag=tag)
    foundation = BlobCache(tmp_path / "foundation.ptd")
    adapters = [BlobCache(tmp_path / "adapter.ptd", base=foundation) for _ in range(2)]
    modules = [seeded(Adapted), seeded(Adapted)]
    first = Program(path, adapters[0]).method()
    close(first(*example), modules[0](*example))
    names = delegate_stats().names
    second = Program(path, adapters[1]).method()
    close(second(*example), modules[1](*example))
    assert delegate_stats().names == names + 2  # its own adapter's weights; the foundation's are there
    for seed, (cache, mine) in enumerate(zip(adapters, modules, strict=True)):
        with torch.no_grad():
            mine.lora_a.weight.mul_(seed + 2)
        cache.update({"lora_a.weight": mine.lora_a.weight})
    close(first(*example), modules[0](*example))
    close(second(*example), modules[1](*example))
    with torch.no_grad():
        for mine in modules:
            mine.base.weight.fill_(0.1)
    foundation.update({"base.weight": modules[0].base.weight})
    close(first(*example), modules[0](*example))
    close(second(*example), modules[1](*example))


@pytest.mark.long
def test_the_payload_is_stock_compatible(tmp_path: Path) -> None:
    """Under its own name, XNNPACK runs the inner payload (W2)."""
    module, example = seeded(nets.ConvNorm), inputs(2, 3, 6, 6)
    with quiet():
        from executorch.exir import to_edge_transform_and_lower
        from executorch.exir.lowered_backend_module import get_lowered_submodules

        edge = to_edge_transform_and_lower(torch.export.export(module, example, strict=True), partitioner=plugin()())
    for _, lowered, _ in get_lowered_submodules(edge.exported_program().graph_module):
        lowered._backend_id = "XnnpackBackend"
    with quiet():
        path = write(edge.to_executorch(), tmp_path)
    method = Program(path, data=tmp_path / "model.ptd").method()
    assert Program(path, data=tmp_path / "model.ptd").backends() == ("XnnpackBackend",)
    close(method(*example), module(*example))


def test_payload_round_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    """A payload is split as it was wrapped; another version is refused (B5)."""
    inner = b"xx\x14\0\0\0first@0123456789abcde\0yy"
    places = payload.find_places(inner, "first@0123456789abcde"[:20])
    assert places == ()
    key = "k@0123456789abcdef"
    inner = b"xx\x12\0\0\0" + key.encode() + b"\0yy"
    (place,) = payload.find_places(inner, key)
    assert inner[place : place + 16] == b"0123456789abcdef"
    constants = [payload.Constant(key, 7, 3, (place,)), payload.Constant(key, 7, 3, (place,), packed=True)]
    assert payload.split(payload.wrap(inner, "Some", constants)) == (inner, "Some", constants)
    monkeypatch.setattr(payload, "VERSION", 0)
    old = payload.wrap(inner, "Some", constants)
    monkeypatch.undo()
    with pytest.raises(InvalidFileError, match="its version is 0, not 1"):
        payload.split(old)


@pytest.mark.long
def test_embedded_weights(tmp_path: Path) -> None:
    """Without a tag the weights stay in the program; a data file with their keys overrides them (D3)."""
    module, example = seeded(nets.ConvNorm), inputs(2, 3, 6, 6)
    path = lower_through({"forward": (module, example)}, tmp_path / "a", tag=None)
    close(Program(path).method()(*example), module(*example))
    randomize(module, 4)
    lower_through({"forward": (module, example)}, tmp_path / "b")
    cache = BlobCache(tmp_path / "b" / "model.ptd")
    method = Program(path, cache).method()
    close(method(*example), module(*example))
    cache.update_state_dict(randomize(module, 5))
    close(method(*example), module(*example))


def test_packed_weights_go_with_the_program(tmp_path: Path) -> None:
    """At once, not when the garbage collector runs (D1)."""
    live = Live.make(seeded(nets.MLP), inputs(3, 16), tmp_path)
    before = delegate_stats()
    gc.disable()
    try:
        program = Program(live.program.path, BlobCache(tmp_path / "model.ptd"))
        program.method()(*live.inputs)
        assert delegate_stats().handles == before.handles + 1
        assert delegate_stats().names > before.names
        del program
        assert delegate_stats().handles == before.handles
        assert delegate_stats().names == before.names
        method = Program(live.program.path, live.cache).method()  # a method holds what it needs
        close(method(*live.inputs), live.module(*live.inputs))
        del method
        assert delegate_stats().handles == before.handles
    finally:
        gc.enable()


@pytest.mark.long
def test_what_the_payload_says_is_packed(tmp_path: Path) -> None:
    """XNNPACK copies weights and biases, and reads slopes in place (U1)."""
    path = lower_through({"forward": (seeded(nets.PReLU), inputs(1, 3, 8, 8))}, tmp_path)
    whole, delegate = path.read_bytes(), read_program(path).delegates[0]
    _, _, constants = payload.split(whole[delegate.span.start : whole.rindex(payload.MAGIC) + len(payload.MAGIC)])
    packed = {constant.key.split("@")[0]: constant.packed for constant in constants}
    assert {name for name, it_is in packed.items() if not it_is} == {"slope.weight"}
    assert packed.keys() >= {"conv.weight", "conv.bias"}
