"""Programs with any number of weights of any size, which add all their weights to the input.

Lowering 20,000 weights would take longer than all measurements together, so a program of two is lowered by ExecuTorch
and its parts are repeated.
"""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import torch

from blobstore import BlobStore
from blobstore.lowering.export import lower, quiet


class _Sum(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.ParameterList([torch.zeros(16), torch.zeros(16)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.w[0] + self.w[1]


@functools.cache
def _template() -> Any:
    manager = lower({"forward": (_Sum(), (torch.ones(16),))}, partitioners=list, external_constants=True)
    return manager.executorch_program


def write_sum(folder: Path, weights: int, width: int) -> tuple[Path, Path]:
    """Write a program with weights `w.0`, `w.1`, ... and its data file; weight i is filled with i % 7."""
    with quiet():
        from executorch.exir._serialize._program import PTEFile, serialize_pte_binary

    program = copy.deepcopy(_template())
    plan = program.execution_plan[0]
    weight, out, number = plan.values[0], plan.values[3], plan.values[4]
    source = plan.values[2]
    source.val.sizes[0] = width
    step = -(-width * 4 // 64) * 64
    values, calls = [source], []
    last = 0
    for i in range(weights):
        w, one, target = copy.deepcopy(weight), copy.deepcopy(number), copy.deepcopy(out)
        w.val.sizes[0] = target.val.sizes[0] = width
        w.val.data_buffer_idx = i
        w.val.extra_tensor_info.fully_qualified_name = f"w.{i}"
        target.val.allocation_info.memory_offset_low = step * ((i + 1) % 2)
        first = len(values)
        values += [w, one, target]
        call = copy.deepcopy(plan.chains[0].instructions[0])
        call.instr_args.args = [last, first, first + 1, first + 2, first + 2]
        calls.append(call)
        last = first + 2
    plan.values, plan.inputs, plan.outputs = values, [0], [last]
    plan.chains[0].inputs, plan.chains[0].outputs = [0], [last]
    plan.chains[0].instructions = calls
    plan.chains[0].stacktrace = None
    plan.non_const_buffer_sizes = [0, 2 * step]
    pte = folder / f"sum-{weights}x{width}.pte"
    pte.write_bytes(bytes(serialize_pte_binary(PTEFile(program=program))))
    return pte, write_weights(folder / f"sum-{weights}x{width}.ptd", weights, width)


def write_weights(path: Path, weights: int, width: int) -> Path:
    """Write only the data file. No two weights are equal, so each has its own bytes."""
    store = BlobStore()
    for i in range(weights):
        tensor = torch.full((width,), float(i % 7))
        tensor[0] = i
        store.add(f"w.{i}", tensor, alignment=16)
    store.write_ptd(path)
    return path
