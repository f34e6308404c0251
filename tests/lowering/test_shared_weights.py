"""One weight in several operators, methods and programs, each of which packs it in its own way (X3).

What is computed is compared with the modules that were lowered, for quantized ones the converted modules, and with ExecuTorch's
own lowering in its own runtime. After an update these modules have the new weights; channels get new scales, whole tensors keep theirs.
"""

import copy
import operator
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from blobstore import dedup_programs
from blobstore.errors import KeyConflictError
from blobstore.lowering import lower, quiet
from blobstore.programs import save_programs
from blobstore.runtime import BlobCache, PackedStore, Program, make_working_copy
from tests.lowering.live import Inputs, close, plugin, seeded, write
from tests.lowering.test_quantized import pt2e, quantizer_of

pytestmark = pytest.mark.long

with quiet():
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import ExecutorchBackendConfig, to_edge_transform_and_lower
    from executorch.runtime import Runtime
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
    from torchao.quantization.granularity import PerGroup

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(32, 32, bias=False),
    "conv": lambda: nn.Conv2d(4, 4, 3, padding=1, bias=False),
    "depthwise": lambda: nn.Conv2d(4, 4, 3, padding=1, groups=4, bias=False),
    "pointwise": lambda: nn.Conv2d(4, 4, 1, bias=False),
    "transposed": lambda: nn.ConvTranspose2d(4, 4, 2, 2, bias=False),
}


class Layers(nn.Module):
    """One layer of each kind, of which linear ones take `x` and the others `image`."""

    def __init__(self, *kinds: str) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({kind: LAYERS[kind]() for kind in kinds})

    def forward(self, x: Tensor, image: Tensor) -> tuple[Tensor, ...]:
        return tuple(layer(x if kind == "linear" else image) for kind, layer in self.layers.items())


class Twice(Layers):
    def forward(self, x: Tensor, image: Tensor, x2: Tensor, image2: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return super().forward(x, image) + super().forward(x2, image2)


class Unrolled(Layers):
    def forward(self, x: Tensor, image: Tensor) -> tuple[Tensor, ...]:
        results = []
        for kind, layer in self.layers.items():
            state = x if kind == "linear" else image
            for _ in range(3):
                state = layer(state)
            results.append(state)
        return tuple(results)


class Variants(nn.Module):
    """Operators of several kinds, strides, paddings and groups."""

    def __init__(self) -> None:
        super().__init__()
        self.square = nn.Parameter(torch.randn(4, 4, 3, 3))
        self.transposed = nn.Parameter(torch.randn(4, 4, 3, 3))
        self.grouped = nn.Parameter(torch.randn(8, 1, 3, 3))
        self.point = nn.Parameter(torch.randn(6, 4, 1, 1))

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        eight = torch.cat([image, image * 3], 1)
        return (
            functional.conv2d(image, self.square),
            functional.conv2d(image * 5, self.square, stride=2, padding=1),
            functional.conv_transpose2d(image, self.transposed, stride=2),
            functional.conv_transpose2d(image * 5, self.transposed, stride=3),
            functional.conv2d(image, self.point),
            functional.conv2d(image * 5, self.point, stride=2),
            functional.conv2d(eight, self.grouped, groups=8),
            functional.conv2d(image[:, :1], self.grouped),
        )


@dataclass
class Quantization:
    """How modules are quantized, and how far what is computed may be from the converted module."""

    kinds: tuple[str, ...]
    config: dict[str, bool] | None
    tolerance: float

    def convert(self, module: nn.Module, example: Inputs) -> nn.Module:
        return module if self.config is None else pt2e(module, example, **self.config)

    def change(self, converted: nn.Module, first: dict[str, Tensor], state: dict[str, Tensor]) -> None:
        """Put other weights into a converted module, in place of those that were quantized, wherever they are."""
        if self.config is None:
            converted.load_state_dict(state)
            return
        assert isinstance(converted, torch.fx.GraphModule)
        for node in converted.graph.nodes:
            held = operator.attrgetter(node.target)(converted) if node.op == "get_attr" else None
            for name in (name for name, value in first.items() if held is not None and held.shape == value.shape):
                if held.dtype != torch.int8:  # one use of several can be left as it is
                    is_weight, new = torch.equal(held, first[name]), state[name]
                elif is_weight := torch.equal(held, quantizer_of(converted, node)(first[name])):
                    new = quantizer_of(converted, node, state[name])(state[name])
                if is_weight:
                    held.copy_(new)
                    break


class FourBits(Quantization):
    def convert(self, module: nn.Module, example: Inputs) -> nn.Module:
        config = Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32))
        with quiet():
            quantize_(module, config)
        return module

    def change(self, converted: nn.Module, first: dict[str, Tensor], state: dict[str, Tensor]) -> None:
        converted.load_state_dict(state, assign=True)


ALL = tuple(LAYERS)
QUANTIZATIONS = {
    "float": Quantization(ALL, None, 1e-5),
    "static": Quantization(ALL, {"is_per_channel": True}, 0.03),
    "static per tensor": Quantization(ALL, {"is_per_channel": False}, 0.03),
    # without larger kernels: ExecuTorch's own lowering of these is far from the converted module
    "dynamic": Quantization(("linear", "depthwise", "pointwise"), {"is_per_channel": True, "is_dynamic": True}, 0.03),
    "4 bits": FourBits(("linear",), None, 0.03),
}


@dataclass
class Call:
    """A method of a program, what it is called with, and what it returns before and after the update."""

    program: str
    method: str
    example: Inputs
    before: list[Tensor]
    after: list[Tensor]
    stock: list[Tensor]


@dataclass
class Case:
    folder: Path
    calls: list[Call]
    state: dict[str, Tensor]
    tolerance: float

    @property
    def data(self) -> Path:
        return self.folder / "ours" / "model.ptd"

    def check(self, run: dict[tuple[str, str], Callable[..., Any]], *, updated: bool = False) -> None:
        """Compare all methods; those of ExecuTorch's lowering are equal to the bit, until there is an update."""
        for call in self.calls:
            found = list(run[call.program, call.method](*call.example))
            for one, expected in zip(found, call.after if updated else call.before, strict=True):
                close(one, expected, self.tolerance)
            if not updated:
                assert all(map(torch.equal, found, call.stock))

    def open(self, cache: BlobCache, where: str = "ours", **options: Any) -> dict[tuple[str, str], Callable[..., Any]]:
        """All methods, loaded one after the other before any runs."""
        names = dict.fromkeys(call.program for call in self.calls)
        programs = {name: Program(self.folder / where / f"{name}.pte", cache, **options) for name in names}
        methods = {(call.program, call.method): programs[call.program].method(call.method) for call in self.calls}
        return {name: method.execute for name, method in methods.items()}


def examples(variants: bool) -> tuple[Inputs, Inputs]:
    generator = torch.Generator().manual_seed(5)
    x, image = torch.randn(2, 32, generator=generator), torch.randn(1, 4, 8, 8, generator=generator)
    return ((image,), (image,)) if variants else ((x, image), (5 * x.flip(0) + 3, 5 * image.flip(3) + 3))


def modules(situation: str, kinds: tuple[str, ...]) -> dict[tuple[str, str], tuple[nn.Module, Inputs]]:
    """The modules of all methods, which share their weights."""
    first, second = examples(situation == "variants")
    one_graph = {
        "twice": (lambda: Twice(*kinds), (*first, *second)),
        "unrolled": (lambda: Unrolled(*kinds), first),
        "variants": (Variants, first),
    }
    if situation in one_graph:
        make, example = one_graph[situation]
        return {("model", "forward"): (seeded(make), example)}
    module = seeded(lambda: Layers(*kinds))
    names = [("model", "a"), ("model", "b")] if situation == "methods" else [("a", "forward"), ("b", "forward")]
    return dict(zip(names, ((module, first), (module, second)), strict=True))


def lower_all(exported: dict[tuple[str, str], Any], folder: Path, partitioners: Callable[[], list[Any]]) -> None:
    """One program for each name, all with one data file if blobstore lowers them."""
    managers = {}
    for name in dict.fromkeys(program for program, _ in exported):
        methods = {method: graph for (program, method), graph in exported.items() if program == name}
        edge = to_edge_transform_and_lower(methods, partitioner={method: partitioners() for method in methods})
        config = ExecutorchBackendConfig(external_constants=lambda node: "model")
        managers[name] = edge.to_executorch(config if partitioners is OURS else ExecutorchBackendConfig())
    if partitioners is OURS:
        save_programs(managers, folder)
    else:
        for name, manager in managers.items():
            write(manager, folder, name)


OURS = plugin()


def new_state(module: nn.Module, quantization: Quantization, example: Inputs) -> dict[str, Tensor]:
    """Other weights, which the scales of the first ones reach."""
    changed = copy.deepcopy(module)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.mul_(torch.rand(parameter.shape, generator=generator) * 1.9 - 0.95)
    if isinstance(quantization, FourBits):
        changed = quantization.convert(changed, example)
    return {name: value.detach().clone() for name, value in changed.state_dict().items()}


def lowered(folder: Path, situation: str, name: str) -> Case:
    quantization = QUANTIZATIONS[name]
    made = modules(situation, quantization.kinds)
    module, example = next(iter(made.values()))
    state = new_state(module, quantization, example)
    calls, exported = [], {}
    with quiet(), torch.no_grad():
        converted = {key: quantization.convert(copy.deepcopy(part), inputs) for key, (part, inputs) in made.items()}
        for key, (_, inputs) in made.items():
            exported[key] = torch.export.export(converted[key], inputs, strict=True)
        lower_all(exported, folder / "ours", OURS)
        lower_all(exported, folder / "stock", lambda: [XnnpackPartitioner()])
        for key, (_, inputs) in made.items():
            before = [one.clone() for one in converted[key](*inputs)]
            quantization.change(converted[key], dict(module.named_parameters()), state)
            after = [one.clone() for one in converted[key](*inputs)]
            program = Runtime.get().load_program(str(folder / "stock" / f"{key[0]}.pte"))
            stock = [one.clone() for one in program.load_method(key[1]).execute(list(inputs))]
            calls.append(Call(*key, inputs, before, after, stock))
            for one, expected in zip(stock, before, strict=True):
                close(one, expected, quantization.tolerance)
    return Case(folder, calls, state, quantization.tolerance)


SITUATIONS = ("twice", "unrolled", "methods", "programs", "variants")
DAY = {
    *((situation, "float") for situation in SITUATIONS),
    *(("twice", name) for name in QUANTIZATIONS if not name.startswith("static")),
    ("methods", "4 bits"),
}
"""Each situation, and each quantization that takes less than ten seconds; the night tries all pairs."""
TABLE = [
    pytest.param(
        (situation, name), id=f"{situation} {name}", marks=[] if (situation, name) in DAY else pytest.mark.long
    )
    for situation in SITUATIONS
    for name in QUANTIZATIONS
    if situation != "variants" or name in {"float", "static"}
]


@pytest.fixture(params=TABLE, scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return lowered(tmp_path_factory.mktemp("shared"), *request.param)


def test_on_a_cache(case: Case) -> None:
    """Without a packed store; an update by name reaches all uses, and so does going back (X3, U1)."""
    cache = BlobCache(case.data)
    methods = case.open(cache)
    case.check(methods)
    cache.update_state_dict(case.state)
    case.check(methods, updated=True)
    case.check(case.open(cache), updated=True)
    cache.revert()
    case.check(methods)


def test_with_a_packed_store(case: Case, tmp_path: Path) -> None:
    """As it is built, and at the second start; entries that change in place do so for all uses (X3, K4)."""
    store = PackedStore(tmp_path)
    case.check(case.open(BlobCache(case.data, packed=store)))
    cache = BlobCache(case.data, packed=store)
    methods = case.open(cache)
    case.check(methods)
    assert store.stats.builds >= 1
    cache.update_state_dict(case.state)
    case.check(methods, updated=True)
    case.check(case.open(cache), updated=True)
    case.check(case.open(BlobCache(case.data, packed=store)))
    cache.revert()
    case.check(methods)


def test_on_a_shared_working_copy(case: Case, tmp_path: Path) -> None:
    """What one cache commits, the other computes with (X3, K3)."""
    make_working_copy(case.data, tmp_path / "live.ptd")
    one, other = (BlobCache(tmp_path / "live.ptd", "shared", packed=tmp_path / "packed") for _ in range(2))
    first, second = case.open(one), case.open(other)
    case.check(first)
    case.check(second)
    one.update_state_dict(case.state)
    case.check(second, updated=True)
    case.check(first, updated=True)
    case.check(case.open(other), updated=True)


def test_an_adapter_above_a_base(case: Case, tmp_path: Path) -> None:
    """Two caches on one base: the weights of one do not reach the other (X3)."""
    base = BlobCache(case.data, packed=tmp_path)
    plain = case.open(base)
    changed = BlobCache(case.data)
    changed.update_state_dict(case.state)
    changed.save(tmp_path / "delta.ptd")
    above = case.open(BlobCache(tmp_path / "delta.ptd", base=base))
    case.check(above, updated=True)
    case.check(plain)


def test_in_executorchs_own_runtime(case: Case) -> None:
    """Our delegate without a cache (X3)."""
    for call in case.calls:
        program = Runtime.get().load_program(
            str(case.folder / "ours" / f"{call.program}.pte"), data_path=str(case.data)
        )
        found = program.load_method(call.method).execute(list(call.example))
        assert all(map(torch.equal, found, call.stock))


def test_the_stock_partitioner_with_a_packed_store(case: Case, tmp_path: Path) -> None:
    """As lowered, and deduplicated; names that do not tell operators apart are packed in memory (X3)."""
    store = PackedStore(tmp_path / "packed")
    for _ in range(2):
        case.check(case.open(BlobCache(), "stock", packed=store))
    dedup_programs(case.folder / "stock", tmp_path / "slim")
    for _ in range(2):
        cache = BlobCache(tmp_path / "slim" / "shared.ptd", packed=store)
        case.check(case.open(cache, os.path.relpath(tmp_path / "slim", case.folder)))


class TiedKernel(nn.Module):
    """One kernel in two convolutions."""

    def __init__(self, first: Callable[..., Tensor], second: Callable[..., Tensor]) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(4, 4, 3, 3))
        self.first, self.second = first, second

    def forward(self, image: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(image, self.kernel)), self.kernel)


def in_two_groups(image: Tensor, kernel: Tensor) -> Tensor:
    return functional.conv_transpose2d(image, kernel, groups=2)


@pytest.mark.parametrize("first", [functional.conv2d, in_two_groups])
def test_one_weight_in_two_layouts(first: Callable[..., Tensor]) -> None:
    """ExecuTorch would store it for one operator, and the other one would compute wrong numbers (X3)."""
    image = torch.randn(1, 4, 8, 8)
    with pytest.raises(KeyConflictError, match="share the weight 'kernel' and need it in different layouts"):
        lower(TiedKernel(functional.conv_transpose2d, first), (image,), tag="model")


def test_one_bias_in_two_scales() -> None:
    """A bias of integers has the scale of its first operator's input; others would compute wrong numbers (X3)."""
    module, example = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval(), (torch.randn(2, 8),)
    module[2].bias = module[0].bias
    lower(module, example, tag="model")  # floats fit any operator
    with pytest.raises(KeyConflictError, match=r"share the bias '0\.bias' and need it in different scales"):
        lower(pt2e(module, example, is_per_channel=True), example, tag="model")
