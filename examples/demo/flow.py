"""The steps of the demo: lower, deduplicate, run both forms, compare, and print."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blobstore.core.disk.kinds import Format
from blobstore.core.disk.staging import Staging
from blobstore.core.distribution import install
from blobstore.core.errors import FileAccessError, InvalidFileError, MissingDependencyError, OutputPathError
from blobstore.core.text import saving
from examples.demo.live import LiveResult, print_live, run_live, table_box

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

__all__ = ["DemoResult", "ProgramComparison", "run_demo"]

PAIRS = (
    (
        "A man is playing the guitar on stage.",
        "A musician performs in front of an audience.",
    ),
    (
        "The invoice has to be paid by the end of May.",
        "Payment is due before the first of June.",
    ),
    (
        "A cat sleeps on the warm windowsill.",
        "Share prices fell sharply on Monday.",
    ),
    (  # longer than the shortest input, which truncates it
        "Phones have little memory, so a model that is shipped to them should not carry anything twice. "
        "When one network is prepared for several input lengths, each prepared program usually holds a full "
        "copy of the same weights, and an application that needs all of them stores and loads every copy.",
        "Several programs of one network repeat its weights; keeping them once saves download and storage.",
    ),
)
"""Sentences whose similarity the encoder computes: three related pairs and one unrelated (the third)."""

ROUNDS = 10  # how often each program is loaded; the median is printed

_STAMP = "complete.json"
_ENCODER = "minilm"


@dataclass(frozen=True)
class ProgramComparison:
    """One program before and after: the size of the file in bytes, and the processor time to load its methods in seconds."""

    name: str
    bytes_before: int
    bytes_after: int
    load_before: float
    load_after: float


@dataclass(frozen=True)
class DemoResult:
    """The results of the demo. All compared outputs were identical to the bit; otherwise there is no result.

    Attributes:
        programs: sizes and loading times.
        data_files: maps the names of the shared data files to their sizes in bytes.
        similarities: for each sentence pair, the cosine similarity at each input length.
        outputs: how many output tensors were compared.
        live: the results in the native runtime; None if it is not installed.
    """

    programs: list[ProgramComparison]
    data_files: dict[str, int]
    similarities: list[dict[int, float]]
    outputs: int
    live: LiveResult | None

    @property
    def bytes_before(self) -> int:
        return sum(program.bytes_before for program in self.programs)

    @property
    def bytes_after(self) -> int:
        return sum(program.bytes_after for program in self.programs) + sum(self.data_files.values())


def run_demo(directory: Path, console: Console, *, force: bool = False) -> DemoResult:
    """Run the demo in a directory, and print its steps and results.

    The lowered programs are kept in `directory/before` for later runs. The slim programs and their shared data files
    are written to `directory/after`.

    Args:
        directory: where to write; created if it does not exist.
        console: where to print.
        force: lower again, even if an earlier run left its programs.

    Raises:
        MissingDependencyError: a package of the `demo` extra or the encoder's weights are not installed.
        InvalidFileError: an output of a slim program is not identical to the bit.
        OutputPathError: the directory has files under the demo's names that the demo did not write, and `force` is not
            set.
    """
    _need("torch", "executorch", "transformers", "tokenizers")
    from examples.demo import models

    before, after = directory / "before", directory / "after"
    programs = _lower(before, console, force=force)
    data_file = _deduplicate(programs, after, console, force=force)
    runs = {length: _Both(path, after / path.name, data_file) for length, path in programs.items()}
    with console.status("Running ..."):
        similarities = _compare_sentences(runs)
        comparisons = [run.compare_loading() for run in runs.values()]

    live = None
    if find_spec("blobstore_runtime") is not None:
        with console.status("Changing weights ..."), _quiet_native():
            live = run_live(after, models.ENCODER_LENGTHS)
    result = DemoResult(
        programs=comparisons,
        data_files={data_file.name: data_file.stat().st_size},
        similarities=similarities,
        outputs=sum(run.compared for run in runs.values()),
        live=live,
    )
    _print(result, console)
    if live is not None:
        console.print()
        print_live(live, console)
    console.print()
    console.print("Next, try:")
    for command in _next_steps(directory, adapters=live is not None):
        console.print(f"  {command}", highlight=False, markup=False, soft_wrap=True)
    return result


# ------------------------------------------------------------------------------------------------- lowering


def _need(*packages: str) -> None:
    """Raise MissingDependencyError now, not after a minute of lowering."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise MissingDependencyError(f"the demo needs {', '.join(missing)}: {install('demo')}")


def _lower(directory: Path, console: Console, *, force: bool) -> dict[int, Path]:
    """The programs by input length, lowered now or by an earlier run that was complete."""
    from examples.demo import models

    models.encoder_directory()  # raises if the weights are missing
    programs = {length: directory / f"{_ENCODER}-{length}.pte" for length in models.ENCODER_LENGTHS}
    stamp = directory / _STAMP
    recipe = _recipe()
    if not force and _is_complete(stamp, recipe, programs):
        console.print(f"using the programs that an earlier run lowered, in {directory}")
        return programs

    if not force and stamp.exists() and not _is_stamp(stamp):
        raise OutputPathError(f"{stamp}: the demo did not write this file; choose another folder, or use --force")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileAccessError(directory, error) from None
    with console.status("Loading the encoder ..."):
        encoder = models.load_encoder()
    sizes = {}
    with Staging() as staging:  # so that an interrupted run leaves nothing that looks complete
        for length, path in programs.items():
            with console.status(f"Lowering {path.stem} ..."):
                start = time.perf_counter()
                manager = models.lower_encoder(encoder, length)
                with staging.open(path, kind=Format.PTE) as file:
                    manager.write_to_file(file)
                    sizes[path.name] = file.tell()
            _step(console, f"lowered {path.name}", start, sizes[path.name])
        with staging.open(stamp) as file:
            file.write(json.dumps({"recipe": recipe, "sizes": sizes}, indent=2).encode())
    return programs


def _step(console: Console, what: str, start: float, size: int) -> None:
    """Print a step with its size in bytes and its duration."""
    console.print(f"{what:<44} {size:>12,} bytes {time.perf_counter() - start:6.1f} s", highlight=False)


def _deduplicate(programs: dict[int, Path], target: Path, console: Console, *, force: bool) -> Path:
    """Write slim programs, and return their data file."""
    from blobstore.core.formats.safetensors import SafetensorsDataMap
    from blobstore.core.programs import dedup_programs
    from examples.demo import models

    # encoder tensors outside of delegates get the checkpoint's names as keys
    checkpoint = SafetensorsDataMap(models.encoder_directory() / "model.safetensors")
    start = time.perf_counter()
    with console.status("Deduplicating ..."):
        result = dedup_programs(
            list(programs.values()),
            target,
            data_name=f"{_ENCODER}.ptd",
            names=checkpoint,
            prune=True,  # weights from earlier runs with other models
            force=force,
        )
    _step(console, f"deduplicated {len(programs)} programs", start, result.bytes_after)
    [data_file] = result.data_files
    return data_file


def _recipe() -> str:
    """A digest that changes with everything that the lowered programs depend on: the models' source and the tools."""
    from examples.demo import models

    versions = [f"{name} {metadata.version(name)}" for name in ("torch", "executorch", "transformers")]
    source = Path(models.__file__).read_bytes()
    return hashlib.sha256(source + "\n".join(versions).encode()).hexdigest()


def _is_stamp(path: Path) -> bool:
    """Whether an earlier run of the demo wrote this file."""
    try:
        return set(json.loads(path.read_text())) == {"recipe", "sizes"}
    except (OSError, ValueError, TypeError):
        return False


def _is_complete(stamp: Path, recipe: str, programs: dict[int, Path]) -> bool:
    """Whether an earlier run lowered all programs, from the same recipe."""
    try:
        written = json.loads(stamp.read_text())
        sizes = {path.name: path.stat().st_size for path in programs.values()}
    except (OSError, ValueError):
        return False
    return bool(written == {"recipe": recipe, "sizes": sizes})


# -------------------------------------------------------------------------------------------------- running


@contextmanager
def _quiet_native() -> Iterator[None]:
    """Hold back the standard error of native code, such as warnings about the CPU. After a failure it is written."""
    sys.stderr.flush()
    saved = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            held.seek(0)
            os.write(saved, held.read())
            raise
        finally:
            os.dup2(saved, 2)
            os.close(saved)


class _Both:
    """One program in both forms, loaded by ExecuTorch's own runtime and run side by side."""

    def __init__(self, before: Path, after: Path, data_file: Path) -> None:
        self.before, self.after, self.data_file = before, after, data_file
        self.compared = 0
        self._loaded = (self._load(before, None), self._load(after, data_file))

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The outputs.

        Raises:
            InvalidFileError: the two forms compute different bytes.
        """
        one, two = (loaded.execute(inputs) for loaded in self._loaded)
        for i, (x, y) in enumerate(zip(one, two, strict=True)):
            if x.shape != y.shape or x.dtype != y.dtype or x.numpy().tobytes() != y.numpy().tobytes():
                raise InvalidFileError(self.after, f"output {i} is not what {self.before} computes")
            self.compared += 1
        return list(one)

    def compare_loading(self) -> ProgramComparison:
        """Sizes and loading times. The files are in the page cache already, so the disk is not measured.

        A load runs in this thread alone. Its processor time has no other load of the machine in it, which would hide a
        difference of this size.
        """
        forms: list[tuple[Path, Path | None]] = [(self.before, None), (self.after, self.data_file)]
        seconds: list[list[float]] = [[], []]
        for i in range(ROUNDS):
            # alternating, so that neither is always first
            for form in (i % 2, 1 - i % 2):
                start = time.thread_time()
                loaded = self._load(*forms[form])
                seconds[form].append(time.thread_time() - start)
                del loaded
        load_before, load_after = map(statistics.median, seconds)
        return ProgramComparison(
            self.before.stem, self.before.stat().st_size, self.after.stat().st_size, load_before, load_after
        )

    def _load(self, program: Path, data_file: Path | None) -> Any:
        from blobstore.lowering.export import quiet

        with quiet(), _quiet_native():
            from executorch.runtime import Runtime, Verification

            try:
                loaded = Runtime.get().load_program(
                    program, verification=Verification.InternalConsistency, data_path=data_file
                )
                return loaded.load_method("forward")
            except RuntimeError as error:
                raise InvalidFileError(program, f"ExecuTorch's own runtime cannot load it: {error}") from error


def _compare_sentences(runs: dict[int, _Both]) -> list[dict[int, float]]:
    """The similarity of each pair at each input length."""
    from examples.demo import models

    tokenizer = models.load_tokenizer()

    def vector(sentence: str, length: int) -> Tensor:
        return runs[length].run(models.encode(tokenizer, sentence, length))[0][0]

    return [{length: float(vector(one, length) @ vector(two, length)) for length in runs} for one, two in PAIRS]


# ------------------------------------------------------------------------------------------------- printing


def _print(result: DemoResult, console: Console) -> None:
    console.print()
    _print_similarities(result, console)
    console.print()
    _print_sizes(result, console)
    console.print(saving(result.bytes_before, result.bytes_after), highlight=False)
    before = sum(program.load_before for program in result.programs)
    after = sum(program.load_after for program in result.programs)
    console.print(
        f"Loads are processor time, the median of {ROUNDS}: {before * 1e3:.1f} ms before and {after * 1e3:.1f} ms after. "
        "Most of it is XNNPACK packing weights, which costs the same from either file.",
        highlight=False,
    )
    console.print(f"All {result.outputs} outputs are identical to the bit, before and after.")


def _next_steps(directory: Path, *, adapters: bool) -> list[str]:
    """Commands about what the demo wrote, as they can be typed."""
    before, after = directory / "before", directory / "after"
    steps: list[tuple[str, ...]] = [
        ("report", str(before)),
        ("inspect", str(after)),
        ("dedup", str(before), "-o", str(directory / "own"), "--dry-run"),
    ]
    if adapters:
        steps.append(("adapters", str(after / f"{_ENCODER}.ptd"), str(directory / "adapters")))
    return [shlex.join((*_program(), *step)) for step in steps]


def _program() -> tuple[str, ...]:
    """How to type the command in this environment, which may not be activated."""
    script = Path(sys.executable).with_name("blobstore")
    if not script.exists():
        return sys.executable, "-m", "blobstore"
    found = shutil.which("blobstore")
    if found is not None and Path(found).absolute() == script.absolute():
        return ("blobstore",)
    return (str(script.relative_to(Path.cwd()) if script.is_relative_to(Path.cwd()) else script),)


def _print_similarities(result: DemoResult, console: Console) -> None:
    from rich.table import Table

    def shortened(sentence: str) -> str:
        return sentence if len(sentence) <= 46 else sentence[:44].rstrip() + " …"

    table = Table(
        title="Similarity of sentences, by input length", title_justify="left", show_lines=True, box=table_box(console)
    )
    table.add_column("pair")
    for length in result.similarities[0]:
        table.add_column(f"{length}", justify="right")
    for (one, two), by_length in zip(PAIRS, result.similarities, strict=True):
        table.add_row(f"{shortened(one)}\n{shortened(two)}", *(f"{value:.4f}" for value in by_length.values()))
    console.print(table)


def _print_sizes(result: DemoResult, console: Console) -> None:
    from rich.table import Table

    table = Table(title="Bytes", title_justify="left", show_footer=True, box=table_box(console))
    table.add_column("file", "total")
    table.add_column("before", f"{result.bytes_before:,}", justify="right")
    table.add_column("after", f"{result.bytes_after:,}", justify="right")
    table.add_column("load before", justify="right")
    table.add_column("load after", justify="right")
    for program in result.programs:
        table.add_row(
            f"{program.name}.pte",
            f"{program.bytes_before:,}",
            f"{program.bytes_after:,}",
            f"{program.load_before * 1e3:.1f} ms",
            f"{program.load_after * 1e3:.1f} ms",
        )
    for name, size in result.data_files.items():
        table.add_row(name, "", f"{size:,}")
    console.print(table)
