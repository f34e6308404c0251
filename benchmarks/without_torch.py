"""Running programs without torch, beside ExecuTorch's own wheel with torch: `python -m benchmarks without_torch --page
docs/howto/run-without-torch.md`, some minutes.

The programs are those of `tests/helpers/stock_programs.py`, and one language model of ExecuTorch's exporter for each way to quantize.
"""

from __future__ import annotations

import importlib.metadata
import re
import statistics
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Row
from tests.helpers import stock_programs
from tests.helpers.stock_programs import BLOCKED, Case, run_blocked

TITLE = "Without torch"

PROCESSES = 7
MOST_MB, MOST_MS = 20, 50
OURS = "from blobstore.runtime import Program"
THEIRS = "from executorch.runtime import Runtime; Runtime.get()"
IMPORT = """
import time, sys
import numpy
start = time.process_time()
{code}
print((time.process_time() - start) * 1000)
"""
NUMPY = """
import time
start = time.process_time()
import numpy
print((time.process_time() - start) * 1000)
"""
PEAK = """
import numpy as np, re
given = [*np.load("xnnpack-forward.npz").values()]
{code}
print(int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1000)
"""
RUN_OURS = f"{OURS}\nProgram('xnnpack.pte').method().execute(*given)"
RUN_THEIRS = f"""import torch
{THEIRS}
Runtime.get().load_program("xnnpack.pte").load_method("forward").execute([torch.from_numpy(one) for one in given])"""


def rows(folder: Path) -> Iterator[Row]:
    """The rows of the table on the page."""
    ours, theirs = installed("executorch-blobstore", "executorch-blobstore-runtime"), installed("executorch", "torch")
    smaller = ours - nbytes(importlib.metadata.distribution("xxhash")) / 1e6 + downloaded("xxhash<4", folder)
    figure = f"{smaller:.1f} MB, {theirs:.0f} MB"
    yield Row("installed with `xxhash<4`, beyond numpy", figure, f"≤ {MOST_MB} MB", smaller <= MOST_MB)
    yield Row("  with the xxhash that is here", f"{ours:.1f} MB", "", True)
    cases = stock_programs.write(folder, stock_run)
    mine, other = in_turns(folder, IMPORT.format(code=OURS), IMPORT.format(code=THEIRS))
    yield Row("import, beyond numpy, CPU", f"{mine:.0f} ms, {other:.0f} ms", f"≤ {MOST_MS} ms", mine <= MOST_MS)
    yield Row(
        "&nbsp;&nbsp;of numpy itself, in the same way",
        f"{in_turns(folder, NUMPY, NUMPY + chr(10))[0]:.0f} ms",
        "",
        True,
    )
    mine, other = in_turns(folder, PEAK.format(code=RUN_OURS), PEAK.format(code=RUN_THEIRS))
    yield Row(
        "most memory of a process that runs a small program", f"{mine:.0f} MB, {other:.0f} MB", "less", mine < other
    )
    groups = {
        "methods through XNNPACK and kernels": [case for case in cases if not case.is_attention],
        "attention, which in stock ExecuTorch multiplies matrices by torch's library": [
            case for case in cases if case.is_attention
        ],
        "language models of ExecuTorch's exporter": list(language_models(folder)),
    }
    for what, some in groups.items():
        equal, apart = compared(some, run_blocked(folder, some))
        figure = f"{equal} of {len(some)} equal to the bit" + (f", others within {apart:.0e}" if apart else "")
        yield Row(what, figure, "all", equal == len(some))


def compared(cases: list[Case], found: list[list[Any]]) -> tuple[int, float]:
    """How many are equal to the bit, and the largest difference, relative to the largest number of an output."""
    equal, apart = 0, 0.0
    for case, outputs in zip(cases, found, strict=True):
        pairs = list(zip(outputs, case.outputs, strict=True))
        equal += all(np.array_equal(a, b) for a, b in pairs)
        apart = max(
            [apart, *(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs if not np.array_equal(a, b))]
        )
    return equal, apart


def in_turns(folder: Path, ours: str, theirs: str) -> tuple[float, float]:
    """The medians of what fresh processes print."""
    printed: dict[str, list[float]] = {ours: [], theirs: []}
    for _ in range(PROCESSES):
        for code, numbers in printed.items():
            before = f"{BLOCKED}\n" if code is ours else ""
            command = [sys.executable, "-W", "ignore", "-c", before + code]
            done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder)
            numbers.append(float(done.stdout.split()[-1]))
    return statistics.median(printed[ours]), statistics.median(printed[theirs])


def installed(*packages: str) -> float:
    """Megabytes of packages and all that they need, without numpy."""
    seen: set[str] = {"numpy"}
    left, total = list(packages), 0
    while left:
        name = re.sub(r"[-_.]+", "-", left.pop()).lower()
        if name in seen:
            continue
        seen.add(name)
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        total += nbytes(found)
        left += [re.match(r"[\w.-]+", one)[0] for one in found.requires or () if "extra ==" not in one]  # type: ignore[index]
    return total / 1e6


def downloaded(requirement: str, folder: Path) -> float:
    """Megabytes that the newest wheel takes when it is installed."""
    place = folder / "wheels"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--only-binary=:all:", "--dest", place, requirement], check=True)
    (wheel,) = place.iterdir()
    with zipfile.ZipFile(wheel) as files:
        return sum(file.file_size for file in files.infolist()) / 1e6


def nbytes(package: importlib.metadata.Distribution) -> int:
    """The size of a package's files; of one that is installed as a link, those of the folder."""
    files = [Path(str(package.locate_file(file))) for file in package.files or ()]
    if any(file.name.startswith("__editable__") or file.suffix == ".pth" for file in files):
        import blobstore

        files += Path(blobstore.__path__[0]).rglob("*.py")
    return sum(file.stat().st_size for file in files if file.exists() and file.suffix != ".pyc")


def stock_run(pte: Path, inputs: Any, *, method: str = "forward") -> list[Any]:
    """The outputs of ExecuTorch's own runtime."""
    from executorch.runtime import Runtime

    loaded = Runtime.get().load_program(pte).load_method(method)
    assert loaded is not None
    return list(loaded.execute(inputs))


def language_models(folder: Path) -> Iterator[Case]:
    """Prefill and a step of a tiny Llama, as ExecuTorch's exporter writes it: float, 8da4w, and with a quantized cache."""
    import torch
    from executorch.examples.models.llama.export_llama_lib import export_llama

    from blobstore.lowering.export import quiet
    from tests.llm import llama

    model = llama.Llama(vocab_size=62)
    llama.write_model(folder, model, {"a": model.checkpoint(0)})
    change: dict[str, Callable[[Any], object]] = {
        "llama": lambda config: None,
        "llama-8da4w": lambda config: None,
        "llama-quantized-cache": lambda config: setattr(config.model, "quantize_kv_cache", True),
        "llama-own-attention": lambda config: setattr(config.model, "use_sdpa_with_kv_cache", False),
    }
    for name, changed in change.items():
        config = llama.config(folder, "a", folder / f"{name}.pte", quantized="8da4w" in name)
        changed(config)
        with quiet():
            export_llama(config)
        given = torch.tensor([[5, 9, 11, 2, 30]]), torch.tensor([0])
        np.savez(folder / f"{name}-forward.npz", *(one.numpy() for one in given))
        outputs = [one.numpy().copy() for one in stock_run(folder / f"{name}.pte", given)]
        yield Case(name, "forward", outputs)
