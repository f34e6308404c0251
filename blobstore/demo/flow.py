"""What the demo does, step by step: lower, deduplicate, run both forms, compare, and tell."""

from __future__ import annotations

import hashlib
import json
import os
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

from blobstore.demo.live import LiveResult, print_live, run_live
from blobstore.disk.kinds import Format
from blobstore.disk.staging import Staging
from blobstore.errors import FileAccessError, InvalidFileError, MissingDependencyError, OutputPathError

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
    (  # longer than the shortest input, which has to cut it
        "Phones have little memory, so a model that is shipped to them should not carry anything twice. "
        "When one network is prepared for several input lengths, each prepared program usually holds a full "
        "copy of the same weights, and an application that needs all of them stores and loads every copy.",
        "Several programs of one network repeat its weights; keeping them once saves download and storage.",
    ),
)
"""Sentences whose similarity the encoder computes: three related pairs and one unrelated (the third)."""

PROMPT = "Weights are stored once, and "
NEW_TOKENS = 8
ROUNDS = 6  # loads of each program, of which the median is shown

_STAMP = "complete.json"
_ENCODER, _DECODER = "minilm", "decoder"


@dataclass(frozen=True)
class ProgramComparison:
    """One program before and after: bytes of the file, and seconds until all its methods are loaded."""

    name: str
    bytes_before: int
    bytes_after: int
    load_before: float
    load_after: float


@dataclass(frozen=True)
class DemoResult:
    """What the demo found. That it exists says that all outputs were identical to the bit.

    Attributes:
        similarities: for each sentence pair, the cosine similarity at each input length.
        tokens: what the decoder said.
        outputs: how many output tensors were compared.
        live: what the native runtime showed; None where it is not installed.
    """

    programs: list[ProgramComparison]
    data_files: dict[str, int]
    similarities: list[dict[int, float]]
    tokens: list[int]
    outputs: int
    live: LiveResult | None

    @property
    def bytes_before(self) -> int:
        return sum(program.bytes_before for program in self.programs)

    @property
    def bytes_after(self) -> int:
        return sum(program.bytes_after for program in self.programs) + sum(self.data_files.values())


def run_demo(directory: Path, console: Console, *, force: bool = False) -> DemoResult:
    """Run the demo in a directory, and print what it does.

    The lowered programs are kept in `directory/before` and used again next time; the slim programs and their
    shared data files are in `directory/after`.

    Args:
        directory: where to write; made when it does not exist.
        console: where to print.
        force: lower again what an earlier run left.

    Raises:
        MissingDependencyError: a package of the `demo` extra, or the encoder's weights, are not installed.
        InvalidFileError: an output after is not identical to the one before, to the bit.
        OutputPathError: the directory has files under the demo's names that the demo did not write, and `force` is
            not set.
    """
    _need("torch", "executorch", "transformers", "tokenizers")
    from blobstore.demo import models
    from blobstore.formats.safetensors import SafetensorsDataMap
    from blobstore.programs import dedup_programs

    before, after = directory / "before", directory / "after"
    programs = _lower(before, console, force=force)

    data_files: dict[str, Path] = {}
    # tensors of the encoder that no delegate took get the names of the checkpoint as keys
    checkpoint = SafetensorsDataMap(models.encoder_directory() / "model.safetensors")
    for group, tensor_names in ((_ENCODER, checkpoint), (_DECODER, None)):
        # each model gets a file of its own: programs share what they have in common, and nothing else
        names = [name for name in programs if name.startswith(group)]
        with console.status(f"Deduplicating {group} ..."):
            start = time.perf_counter()
            deduplicated = dedup_programs(
                [programs[name] for name in names],
                after,
                data_name=f"{group}.ptd",
                names=tensor_names,
                prune=True,  # of a run with other models
                force=force,
            )
        [data_file] = deduplicated.data_files
        data_files.update(dict.fromkeys(names, data_file))
        _step(console, f"deduplicated {group}, programs: {len(names)}", start, deduplicated.bytes_after)

    runs = {
        name: _Both(path, after / path.name, data_files[name], ["prefill", "decode"] if name == _DECODER else None)
        for name, path in programs.items()
    }
    with console.status("Running ..."):
        similarities = _compare_sentences({length: runs[f"{_ENCODER}-{length}"] for length in models.ENCODER_LENGTHS})
        tokens = _generate(runs[_DECODER])
        comparisons = [run.compare_loading(name) for name, run in runs.items()]

    live = None
    if find_spec("blobstore_runtime") is not None:
        with console.status("Changing weights ..."), _quiet_native():
            live = run_live(after, models.ENCODER_LENGTHS)
    result = DemoResult(
        programs=comparisons,
        data_files={path.name: path.stat().st_size for path in sorted(set(data_files.values()))},
        similarities=similarities,
        tokens=tokens,
        outputs=sum(run.compared for run in runs.values()),
        live=live,
    )
    _print(result, console)
    if live is not None:
        console.print()
        print_live(live, console)
    return result


# ------------------------------------------------------------------------------------------------- lowering


def _need(*packages: str) -> None:
    """Say now, not after a minute of lowering, what is missing."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise MissingDependencyError(f'the demo needs {", ".join(missing)}: pip install "blobstore[demo]"')


def _lower(directory: Path, console: Console, *, force: bool) -> dict[str, Path]:
    """The programs by name, lowered now or by an earlier run that got to its end."""
    from blobstore.demo import models

    models.encoder_directory()  # raises when the weights are missing
    names = [f"{_ENCODER}-{length}" for length in models.ENCODER_LENGTHS] + [_DECODER]
    programs = {name: directory / f"{name}.pte" for name in names}
    stamp = directory / _STAMP
    recipe = _recipe()
    if not force and _is_complete(stamp, recipe, programs):
        console.print(f"using the programs in {directory}, which an earlier run lowered")
        return programs

    if not force and stamp.exists() and not _is_stamp(stamp):
        raise OutputPathError(f"{stamp}: this file is not the demo's; choose another folder, or use --force")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileAccessError(directory, error) from None
    encoder: list[models.SentenceEncoder] = []  # loaded when it is first needed

    def make(name: str) -> Any:
        if name == _DECODER:
            return models.lower_decoder(models.Decoder())
        if not encoder:
            encoder.append(models.load_encoder())
        return models.lower_encoder(encoder[0], int(name.rpartition("-")[2]))

    sizes = {}
    with Staging() as staging:  # interrupted, it leaves nothing that looks complete
        for name, path in programs.items():
            with console.status(f"Lowering {name} ..."):
                start = time.perf_counter()
                manager = make(name)
                with staging.open(path, kind=Format.PTE) as file:
                    manager.write_to_file(file)
                    sizes[name] = file.tell()
            _step(console, f"lowered {path.name}", start, sizes[name])
        with staging.open(stamp) as file:
            file.write(json.dumps({"recipe": recipe, "sizes": sizes}, indent=2).encode())
    return programs


def _step(console: Console, what: str, start: float, size: int) -> None:
    console.print(f"{what:<44} {size:>12,} bytes {time.perf_counter() - start:6.1f} s", highlight=False)


def _recipe() -> str:
    """Changes whenever lowering could give other programs: with the models' source, and with its tools."""
    from blobstore.demo import models

    versions = [f"{name} {metadata.version(name)}" for name in ("torch", "executorch", "transformers")]
    source = Path(models.__file__).read_bytes()
    return hashlib.sha256(source + "\n".join(versions).encode()).hexdigest()


def _is_stamp(path: Path) -> bool:
    """Whether an earlier run of the demo wrote this file."""
    try:
        return set(json.loads(path.read_text())) == {"recipe", "sizes"}
    except (OSError, ValueError, TypeError):
        return False


def _is_complete(stamp: Path, recipe: str, programs: dict[str, Path]) -> bool:
    try:
        written = json.loads(stamp.read_text())
        sizes = {name: path.stat().st_size for name, path in programs.items()}
    except (OSError, ValueError):
        return False
    return bool(written == {"recipe": recipe, "sizes": sizes})


# -------------------------------------------------------------------------------------------------- running


@contextmanager
def _quiet_native() -> Iterator[None]:
    """Hold back what native code writes to standard error (guesses at the CPU); show it after a failure."""
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
    """One program in both forms, loaded by the stock runtime, and run side by side."""

    def __init__(self, before: Path, after: Path, data_file: Path, methods: Sequence[str] | None = None) -> None:
        self.before, self.after, self.data_file = before, after, data_file
        self.methods = list(methods or ["forward"])
        self.compared = 0
        self._loaded = (self._load(before, None), self._load(after, data_file))

    def run(self, method: str, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Outputs of a method, which are the same bytes in both forms, or it raises."""
        one, two = (loaded[method].execute(inputs) for loaded in self._loaded)
        for i, (x, y) in enumerate(zip(one, two, strict=True)):
            if x.shape != y.shape or x.dtype != y.dtype or x.numpy().tobytes() != y.numpy().tobytes():
                raise InvalidFileError(
                    self.after, f"output {i} of method {method!r} is not what {self.before} computes"
                )
            self.compared += 1
        return list(one)

    def compare_loading(self, name: str) -> ProgramComparison:
        """Sizes, and times to load; the files have been read before, so no disk is measured."""

        forms: list[tuple[Path, Path | None]] = [(self.before, None), (self.after, self.data_file)]
        seconds: list[list[float]] = [[], []]
        for i in range(ROUNDS):
            # in turns, so that whatever else the machine does meets both; and neither always goes first
            for form in (i % 2, 1 - i % 2):
                start = time.perf_counter()
                self._load(*forms[form])
                seconds[form].append(time.perf_counter() - start)
        load_before, load_after = map(statistics.median, seconds)
        return ProgramComparison(name, self.before.stat().st_size, self.after.stat().st_size, load_before, load_after)

    def _load(self, program: Path, data_file: Path | None) -> dict[str, Any]:
        from blobstore.lowering.export import quiet

        with quiet(), _quiet_native():
            from executorch.runtime import Runtime, Verification

            try:
                loaded = Runtime.get().load_program(
                    program, verification=Verification.InternalConsistency, data_path=data_file
                )
                return {method: loaded.load_method(method) for method in self.methods}
            except RuntimeError as error:
                raise InvalidFileError(program, f"the stock runtime does not load it: {error}") from error


def _compare_sentences(runs: dict[int, _Both]) -> list[dict[int, float]]:
    """Similarity of each pair at each input length."""
    from blobstore.demo import models

    tokenizer = models.load_tokenizer()

    def vector(sentence: str, length: int) -> Tensor:
        return runs[length].run("forward", models.encode(tokenizer, sentence, length))[0][0]

    return [{length: float(vector(one, length) @ vector(two, length)) for length in runs} for one, two in PAIRS]


def _generate(run: _Both) -> list[int]:
    """Feed the prompt, then let the decoder continue; its tokens are bytes as far as the prompt goes."""
    import torch

    from blobstore.demo import models

    config = models.DecoderConfig()
    prompt = list(PROMPT.encode())
    padded = prompt + [0] * (config.prompt - len(prompt))
    # what the padding leaves in the cache is overwritten before anything can look at it
    cache = torch.zeros(config.cache_shape)
    inputs = (torch.tensor(padded), torch.arange(config.prompt), cache, cache.clone())
    logits, keys, values = run.run("prefill", inputs)
    tokens = [int(logits[len(prompt) - 1].argmax())]
    for position in range(len(prompt), len(prompt) + NEW_TOKENS - 1):
        step = (torch.tensor(tokens[-1:]), torch.tensor([position]), keys, values)
        logits, keys, values = run.run("decode", step)
        tokens.append(int(logits[0].argmax()))
    return tokens


# ------------------------------------------------------------------------------------------------- printing


def _print(result: DemoResult, console: Console) -> None:
    from rich.table import Table

    def text(sentence: str) -> str:
        return sentence if len(sentence) <= 46 else sentence[:44].rstrip() + " …"

    sentences = Table(title="Similarity of sentences, by input length", title_justify="left", show_lines=True)
    sentences.add_column("pair")
    for length in result.similarities[0]:
        sentences.add_column(f"{length}", justify="right")
    for (one, two), by_length in zip(PAIRS, result.similarities, strict=True):
        sentences.add_row(f"{text(one)}\n{text(two)}", *(f"{value:.4f}" for value in by_length.values()))
    console.print()
    console.print(sentences)
    console.print(f"The decoder (random weights) continues with {' '.join(map(str, result.tokens))}")
    console.print()

    sizes = Table(title="Bytes", title_justify="left", show_footer=True)
    sizes.add_column("file", "total")
    sizes.add_column("before", f"{result.bytes_before:,}", justify="right")
    sizes.add_column("after", f"{result.bytes_after:,}", justify="right")
    sizes.add_column("load before", justify="right")
    sizes.add_column("load after", justify="right")
    for program in result.programs:
        sizes.add_row(
            f"{program.name}.pte",
            f"{program.bytes_before:,}",
            f"{program.bytes_after:,}",
            f"{program.load_before * 1e3:.1f} ms",
            f"{program.load_after * 1e3:.1f} ms",
        )
    for name, size in result.data_files.items():
        sizes.add_row(name, "", f"{size:,}")
    console.print(sizes)
    saved = result.bytes_before - result.bytes_after
    console.print(f"Saved {saved:,} bytes, {saved / result.bytes_before:.1%} of what there was.")
    console.print(f"All {result.outputs} outputs are identical to the bit, before and after.")
