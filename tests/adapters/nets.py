"""Models with LoRA branches, the same models without them, and their files."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from blobstore.adapters import AdapterTags
from blobstore.lowering.export import lower, quiet
from tests.lowering.live import lower_through, plugin, write

SCALE = 1.5
RANK = 3


class LoraLinear(nn.Module):
    def __init__(self, inputs: int, outputs: int, rank: int = RANK) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs)
        self.lora_a = nn.Linear(inputs, rank, bias=False)
        self.lora_b = nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + SCALE * self.lora_b(self.lora_a(x))


class LoraNet(nn.Module):
    """Two adapted layers, and a parameter that no delegate packs."""

    def __init__(self, rank: int = RANK) -> None:
        super().__init__()
        self.l = nn.ModuleList([LoraLinear(16, 24, rank), LoraLinear(24, 8, rank)])
        self.shift = nn.Parameter(torch.linspace(-1, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.l[1](torch.relu(self.l[0](x))) + self.shift


class PlainNet(nn.Module):
    """The same net without adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.ModuleList([nn.Linear(16, 24), nn.Linear(24, 8)])
        self.shift = nn.Parameter(torch.linspace(-1, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.l[1](torch.relu(self.l[0](x))) + self.shift


def make(kind: type[nn.Module], seed: int = 0, **options: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return kind(**options).eval()


def plain_of(module: LoraNet) -> PlainNet:
    """A net without adapters, with the base weights of one that has them."""
    plain = make(PlainNet)
    plain.load_state_dict(
        {name.replace(".base.", "."): t for name, t in module.state_dict().items() if "lora" not in name}
    )
    return plain


def adapter_of(seed: int, *, rank: int = RANK) -> dict[str, Tensor]:
    """Random tensors of an adapter."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {"l.0": (16, 24), "l.1": (24, 8)}
    tensors = {}
    for module, (inputs, outputs) in sizes.items():
        tensors[f"{module}.lora_a.weight"] = torch.randn(rank, inputs, generator=generator) * 0.3
        tensors[f"{module}.lora_b.weight"] = torch.randn(outputs, rank, generator=generator) * 0.3
    return tensors


def with_adapter(module: Any, tensors: dict[str, Tensor]) -> Any:
    """The module, after loading the tensors of an adapter into its branches."""
    module.load_state_dict({**module.state_dict(), **tensors})
    return module


def lower_lora(module: nn.Module, example: Any, directory: Path, *, delegated: bool) -> Path:
    """`model.pte`, `foundation.ptd` and `adapter.ptd`."""
    tags = AdapterTags()
    partitioners = plugin(tags) if delegated else list
    manager = lower({"forward": (module, example)}, partitioners=partitioners, external_constants=tags)
    return write(manager, directory)


def lower_plain(module: nn.Module, example: Any, directory: Path, *, delegated: bool) -> Path:
    """`model.pte` and `model.ptd`."""
    if delegated:
        return lower_through({"forward": (module, example)}, directory)
    manager = lower({"forward": (module, example)}, partitioners=list, external_constants=lambda node: "model")
    return write(manager, directory)


def lower_stock(module: nn.Module, example: Any, directory: Path) -> Path:
    """What `export_llm` does with XNNPACK: `model.pte`, and `foundation.ptd` and `lora.ptd` with digests as keys."""
    with quiet():
        from executorch.exir.passes.external_constants_pass import delegate_external_constants_pass_unlifted

        def tag(node: Any) -> str:
            return "lora" if "lora" in node.name else "foundation"

        lifted = torch.export.export(module, example, strict=False).module()
        delegate_external_constants_pass_unlifted(lifted, gen_tag_fn=tag)
        return write(lower({"forward": (lifted, example)}, external_constants=tag), directory)


def write_peft(directory: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    """An adapter as PEFT saves it; of `adapter_of`, if the configuration has no more fields."""
    directory.mkdir(parents=True, exist_ok=True)
    rank = next(iter(tensors.values())).shape[0] if tensors else 1
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": SCALE * rank, **config}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    letters = {"lora_a": "lora_A", "lora_b": "lora_B"}
    renamed = {re.sub("lora_[ab]", lambda found: letters[found[0]], name): tensor for name, tensor in tensors.items()}
    names = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in renamed.items()}
    save_file(names, directory / "adapter_model.safetensors")
    return directory
