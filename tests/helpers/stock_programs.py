"""Programs of stock ExecuTorch, of each kind of model that the project makes, with inputs and what ExecuTorch computes."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from blobstore.lowering.export import lower, quiet
from tests.helpers import models

__all__ = ["BLOCKED", "Case", "run_blocked", "write"]


@dataclass(frozen=True)
class Case:
    """A program that was run once.

    Attributes:
        name: of the file, without its ending.
        method: that was run.
        outputs: what stock ExecuTorch computed.
    """

    name: str
    method: str
    outputs: list[Any]

    @property
    def is_attention(self) -> bool:
        """Whether stock ExecuTorch multiplies its matrices by torch's library."""
        return self.name.startswith("attention")


class Attention(nn.Module):
    """What ExecuTorch's exporter makes of attention with a key/value cache: grouped heads, a causal mask or a given one."""

    def __init__(self, kind: str, positions: int = 600, start: int = 3) -> None:
        super().__init__()
        self.kind, self.start = kind, start
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, positions, 2, 16))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        ops, start = torch.ops.llama, self.start
        if self.kind == "whole":
            return ops.sdpa_with_kv_cache(q, k, v, self.keys, self.values, start, q.size(1), None, 0.0, True, None)
        if self.kind == "indices":
            indices = torch.arange(q.size(1)).reshape(1, -1) + start
            ops.update_cache_with_indices(k, self.keys, start, indices)
            ops.update_cache_with_indices(v, self.values, start, indices)
            return ops.custom_sdpa(q, self.keys, self.values, start, mask, 0.0, False, 0.3)
        ops.update_cache(k, self.keys, start)
        ops.update_cache(v, self.values, start)
        return ops.custom_sdpa(q, self.keys, self.values, start, None, 0.0, True, None)

    def eager(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """The same by PyTorch's own attention."""
        size, start = q.size(1), self.start
        keys, values = torch.zeros(1, 600, 2, 16), torch.zeros(1, 600, 2, 16)
        keys[:, start : start + size], values[:, start : start + size] = k, v
        if self.kind != "indices":
            mask = torch.ones(size, 600).tril(start).log()
        heads = [x.transpose(1, 2) for x in (q, keys.repeat_interleave(2, 2), values.repeat_interleave(2, 2))]
        scale = 0.3 if self.kind == "indices" else None
        return nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask, scale=scale).transpose(1, 2)


class Embedded(nn.Module):
    """An embedding that torchao quantizes, and no delegate takes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(32, 64), nn.Linear(64, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.linear(self.embedding(tokens))


def attention_inputs(size: int) -> tuple[Tensor, ...]:
    chance = torch.Generator().manual_seed(size)
    q, k, v = (torch.randn(1, size, heads, 16, generator=chance) for heads in (4, 2, 2))
    return q, k, v, torch.randn(size, 600, generator=chance)


def _made() -> Iterator[tuple[str, Any, str, Sequence[Any]]]:
    """Name, program, method and inputs."""
    from executorch.runtime import Runtime

    Runtime.get()  # if the library of attention were loaded first, the other kernels would find torch's library, too
    import executorch.kernels.quantized  # noqa: F401
    from executorch.extension.llm.custom_ops import custom_ops  # noqa: F401
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
    from torchao.quantization.granularity import PerGroup

    from tests.lowering import nets
    from tests.lowering.live import inputs, seeded
    from tests.lowering.test_quantized import pt2e

    zoo = {
        "portable": models.mlp(),
        "xnnpack": models.mlp(delegated=True),
        "convolutions": models.conv(),
        "decoder": models.decoder(),
        "state": models.counter(),
        "views": models.viewed(),
    }
    for name, lowered in zoo.items():
        for method in lowered.methods:
            yield name, lowered.pte, method, lowered.inputs(method)
    example = inputs(2, 3, 8, 8)
    for name, config in {"static": {}, "dynamic": {"is_dynamic": True}}.items():
        quantized = pt2e(seeded(nets.Small), example, names=False, is_per_channel=True, **config)
        yield f"int8-{name}", lower(quantized, example), "forward", example
        yield f"int8-{name}-leftovers", lower(quantized, example, partitioners=list), "forward", example
    module, tokens = seeded(Embedded), (torch.arange(6),)
    weights = Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32))
    with quiet():
        quantize_(module, weights)
    yield "8da4w", lower(module, tokens), "forward", tokens
    for kind in ("apart", "whole", "indices"):
        for size in (1, 40, 520):
            given = attention_inputs(size)
            yield f"attention-{kind}-{size}", lower(Attention(kind), given), "forward", given


def write(folder: Path, run: Any) -> list[Case]:
    """Write NAME.pte and NAME-METHOD.npz, the inputs, for each program.

    Args:
        folder: gets the files.
        run: the fixture `stock_run`.
    """
    cases = []
    for name, program, method, given in _made():
        (folder / f"{name}.pte").write_bytes(program if isinstance(program, bytes) else bytes(program.buffer))
        np.savez(folder / f"{name}-{method}.npz", *(one.detach().numpy() for one in given))
        outputs = [one.numpy().copy() for one in run(folder / f"{name}.pte", given, method=method)]
        cases.append(Case(name, method, outputs))
    return cases


BLOCKED = "import sys; sys.modules.update(torch=None, executorch=None)"
"""A process that begins with this has neither torch nor executorch."""

_ALL = """
import json
import numpy as np
from blobstore.runtime import Program
for name, method in json.load(sys.stdin):
    given = np.load(f"{name}-{method}.npz")
    np.savez(f"{name}-{method}-ours.npz", *Program(f"{name}.pte").method(method).execute(*given.values()))
assert sys.modules["torch"] is sys.modules["executorch"] is None
"""


def run_blocked(folder: Path, cases: Sequence[Case]) -> list[list[Any]]:
    """The outputs of each in a process without torch and executorch."""
    import subprocess
    import sys

    command = [sys.executable, "-W", "error", "-c", f"{BLOCKED}\n{_ALL}"]
    names = json.dumps([(case.name, case.method) for case in cases])
    done = subprocess.run(command, input=names, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    return [list(np.load(folder / f"{case.name}-{case.method}-ours.npz").values()) for case in cases]
