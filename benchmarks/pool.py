"""The pool: bytes of a series of fine-tunes against other stores, and the speed of adding and restoring."""

from __future__ import annotations

import hashlib
import itertools
import shutil
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from blake3 import blake3

from benchmarks.harness import Row, flush, show, side_by_side
from benchmarks.release_peers import COMPRESSING
from blobstore import save_file
from blobstore.core.codec import blobs, chunks
from blobstore.core.codec.blobs import CHUNK, cut, decode, encode
from blobstore.pool import Pool
from blobstore.pool.packs import Stored
from blobstore.pool.scan import sketched
from blobstore.pool.tables import BLOBS, EVENTS, PARTS
from examples.demo.models import load_encoder

TITLE = "The pool"

_VERSIONS = 30
_MODELS = 400
_TUNED = 10  # the first ones
_STEPS = 3  # of AdamW between two versions


def rows(folder: Path) -> Iterator[Row]:
    for part in (_series, _speed, _growth, _large):
        place = folder / part.__name__
        place.mkdir()
        yield from part(place)
        shutil.rmtree(place)


def checkpoints(folder: Path) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """A sentence encoder that is fine-tuned by AdamW on random tokens: its weights in float32 after each few steps.

    The loss is contrastive: a sentence of which a fifth of the tokens was exchanged should stay near to itself.
    """
    torch.manual_seed(0)
    model: Any = load_encoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    generator = torch.Generator().manual_seed(1)

    def tokens(*sizes: int) -> torch.Tensor:
        return torch.randint(1000, 30000, sizes, generator=generator)

    for number in range(_VERSIONS + 1):
        yield f"{number:02d}", {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        for _ in range(_STEPS):
            ids = tokens(8, 24)
            changed = torch.where(torch.rand(8, 24, generator=generator) < 0.2, tokens(8, 24), ids)
            mask = torch.ones_like(ids)
            one, other = model(ids, mask), model(changed, mask)
            near = torch.nn.functional.cosine_similarity(one[:, None], other[None], -1) * 20
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(near, torch.arange(8)).backward()
            optimizer.step()


def half(model: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in model.items()}


def versions_in(folder: Path) -> list[Path]:
    """A folder for each version of the series, in bfloat16."""
    versions = []
    for name, model in checkpoints(folder):
        (folder / name).mkdir()
        save_file(half(model), folder / name / "model.ptd")
        versions.append(folder / name)
    return versions


def _series(folder: Path) -> Iterator[Row]:
    versions = versions_in(folder)
    nbytes = sum((version / "model.ptd").stat().st_size for version in versions)
    near: list[float] = []
    taken: list[float] = []
    with Pool(folder / "pool", create=True) as pool:
        before = (0, 0)
        for version in versions:
            added = pool.add(version, f"encoder@{version.name}")
            taken.append(added.stored_bytes / added.bytes)
            after = _differences(pool)
            if after > before:
                near.append((after[1] - before[1]) / (after[0] - before[0]))
            before = after
        assert pool.verify() == []
    median = statistics.median(near)
    yield Row(
        f"one of {_VERSIONS} fine-tunes in bfloat16 more, against its bytes, what became a new base apart",
        f"{median:.3f} in the median, {max(near):.3f} at the most",
        "at most 0.06",
        median <= 0.06,
    )
    yield Row("  with what became a new base", f"{statistics.median(taken[1:]):.3f} in the median", "", True)
    ours = sum(path.stat().st_size for path in (folder / "pool").rglob("*") if path.is_file())
    yield Row(f"the series of {nbytes / 1e9:.2f} GB, with tables", f"{ours / nbytes:.3f} of its bytes", "", True)
    for name, store in COMPRESSING.items():
        place = folder / name
        place.mkdir()
        theirs = store(versions, place)
        shutil.rmtree(place)
        if theirs is not None:
            yield Row(f"  against {name}", f"{ours / theirs:.3f} x its bytes", "less than 1 x", ours < theirs)


def _differences(pool: Pool) -> tuple[int, int]:
    """Bytes of the contents that are stored as differences, and what they take."""
    stored = [figures[1:] for encoding, figures in pool.stats().encodings.items() if "near" in encoding]
    return sum(nbytes for nbytes, _ in stored), sum(taken for _, taken in stored)


def _five_versions(folder: Path) -> tuple[list[Path], list[Path]]:
    """The files of five fine-tunes, and the folders of their shards."""
    for number, (_, model) in zip(range(5), checkpoints(folder), strict=False):
        (folder / f"{number}").mkdir()
        save_file(_eight(half(model)), folder / f"{number}" / "model.ptd")
        (folder / f"sharded{number}").mkdir()
        for shard, one in enumerate(_rolled(half(model))):
            save_file(one, folder / f"sharded{number}" / f"model-{shard}.ptd")
    return [folder / f"{number}" / "model.ptd" for number in range(5)], [folder / f"sharded{n}" for n in range(5)]


def _speed(folder: Path) -> Iterator[Row]:
    """Processor seconds of one process, in which everything is done by one thread; and what two workers are for."""
    versions, sharded = _five_versions(folder)
    size = versions[0].stat().st_size

    def adding() -> float:
        """Processor seconds for four versions beside one that is there."""
        shutil.rmtree(folder / "pool", ignore_errors=True)
        with Pool(folder / "pool", create=True) as pool, _Here() as executor:
            pool.add(versions[0], "encoders@0", executor=executor)
            return _processor_seconds(
                lambda: [
                    pool.add(path, f"encoders@{number}", executor=executor)
                    for number, path in enumerate(versions[1:], 1)
                ]
            )

    with mock.patch.object(blobs, "_chunks", chunks):
        by_numpy = 4 * size / adding() / 1e6
    bare = _bare(folder, versions)
    rate = 4 * size / adding() / 1e6
    yield Row(
        f"adding fine-tunes of {size / 1e6:.0f} MB in bfloat16, for each processor second",
        f"{rate:.0f} MB",
        "at least 250 MB",
        rate >= 250,
    )
    yield Row("  without the native package", f"{by_numpy:.0f} MB", "", True)
    adding_alone = bare["SHA-256"] * 2 + bare["BLAKE3"] + bare["base"] + bare["encode"] + bare["decode"]
    yield Row(
        "  the bare operations: SHA-256 of the file and of its tensors, BLAKE3, a base and a difference decoded, encoded",
        f"{1 / adding_alone:.0f} MB",
        "",
        True,
    )

    def restore(executor: str) -> None:
        with Pool(folder / "pool") as pool:
            for number in range(5):
                pool.get(f"encoders@{number}", folder / "out" / str(number), executor=executor)

    def verify() -> None:
        with Pool(folder / "pool") as pool:
            pool.verify()

    def clear() -> None:
        shutil.rmtree(folder / "out", ignore_errors=True)

    seconds = []
    for _ in range(3):
        clear()
        seconds.append((_processor_seconds(lambda: restore("threads:1")), _processor_seconds(verify)))
    rate, verified = (5 * size / 1e6 / statistics.median(one) for one in zip(*seconds, strict=True))
    one, two = side_by_side(lambda: restore("threads:1"), lambda: restore("threads:2"), rounds=5, before=clear)
    clear()
    yield Row("restoring them, for each processor second", f"{rate:.0f} MB", "at least 450 MB", rate >= 450)
    yield Row("  with two threads", f"{one / two:.2f} x as fast as with one", "at least 1.8 x", one >= 1.8 * two)
    yield Row("  verifying them, for each processor second", f"{verified:.0f} MB", "at least 450 MB", verified >= 450)
    restoring_alone = bare["BLAKE3"] + bare["base"] + bare["decode"] + bare["write"]
    yield Row(
        "  the bare operations: a base and a difference decoded, BLAKE3, write",
        f"{1 / restoring_alone:.0f} MB",
        "",
        True,
    )
    yield Row("  BLAKE3 alone", f"{1 / bare['BLAKE3']:.0f} MB", "", True)

    context = get_context("spawn")

    def added(versions: Sequence[Path], workers: int) -> float:
        """Seconds for four versions beside one that is there."""
        shutil.rmtree(folder / "pool", ignore_errors=True)
        with Pool(folder / "pool", create=True) as pool, ProcessPoolExecutor(workers, mp_context=context) as executor:
            pool.add(versions[0], "encoders@0", executor=executor)
            start = time.perf_counter()
            for number, path in enumerate(versions[1:], 1):
                pool.add(path, f"encoders@{number}", executor=executor)
            return time.perf_counter() - start

    for what, paths, bar in (("in eight files each", sharded, "at least 1.8 x"), ("in one file each", versions, "")):
        alone, both = (statistics.median(added(paths, workers) for _ in range(3)) for workers in (1, 2))
        yield Row(
            f"adding them with two workers, {what}",
            f"{alone / both:.2f} x as fast as with one",
            bar,
            not bar or alone >= 1.8 * both,
        )


def _eight(model: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Eight models as one."""
    return {f"{number}.{name}": tensor for number, one in enumerate(_rolled(model)) for name, tensor in one.items()}


def _rolled(model: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Eight models, of which none is close to another one: the elements of each lie somewhere else."""
    return [
        {name: tensor.flatten().roll(104_729 * number).reshape(tensor.shape) for name, tensor in model.items()}
        for number in range(8)
    ]


class _Here(Executor):
    """Does work at once, in this thread."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*args, **named))
        return future


def _bare(folder: Path, versions: Sequence[Path]) -> dict[str, float]:
    """Processor seconds for each MB of what cannot be left out, over whole files in memory."""
    base, tuned = (memoryview(path.read_bytes()) for path in versions[:2])
    megabytes = len(base) / 1e6
    stored = memoryview(b"".join(encode(base, "planes:2")))
    near = memoryview(b"".join(encode(tuned, "near:f2:2", base)))
    room = memoryview(bytearray(CHUNK))

    def write() -> None:
        with (folder / "written").open("wb", 0) as file:
            for chunk in cut(base):
                file.write(chunk)

    works: dict[str, Callable[[], object]] = {
        "SHA-256": lambda: hashlib.sha256(base),
        "BLAKE3": lambda: blake3(base),
        "encode": lambda: deque(encode(tuned, "near:f2:2", base), 0),
        "decode": lambda: deque(decode("near:f2:2", len(base), near, base, room), 0),
        "base": lambda: deque(decode("planes:2", len(base), stored, None, room), 0),
        "write": write,
    }
    return {
        name: statistics.median(_processor_seconds(work) for _ in range(3)) / megabytes for name, work in works.items()
    }


def _processor_seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _growth(folder: Path) -> Iterator[Row]:
    """400 models in a row, each of 128 matrices of one shape that are like no others; then fine-tunes of the first ten."""
    random = np.random.default_rng(0)

    def model() -> np.ndarray[Any, np.dtype[np.uint16]]:
        values = random.standard_normal((128, 4096), np.float32) * np.float32(0.02)
        return (values.view("<u4") >> 16).astype("<u2")

    def add(pool: Pool, bits: Any, reference: str) -> tuple[float, float]:
        """Processor seconds, and the share of the bytes that is stored."""
        tensors = {f"layers.{at}.weight": torch.from_numpy(one.reshape(64, 64)) for at, one in enumerate(bits)}
        save_file({name: tensor.view(torch.bfloat16) for name, tensor in tensors.items()}, folder / "model.ptd")
        start = time.process_time()
        added = pool.add(folder / "model.ptd", reference, executor=_Here())
        return time.process_time() - start, added.stored_bytes / added.bytes

    firsts = [model() for _ in range(_TUNED)]
    tunes = [first + (random.random(first.shape) < 0.1).astype(np.uint16) for first in firsts]

    def add_tunes(pool: Pool) -> tuple[float, float]:
        """Mean processor seconds, with the tidying that falls on one of them, and the largest share."""
        seconds, shares = zip(*[add(pool, tune, f"model{at}@2") for at, tune in enumerate(tunes)], strict=True)
        return statistics.mean(seconds), max(shares)

    with Pool(folder / "alone", create=True) as pool:
        for at, first in enumerate(firsts):
            add(pool, first, f"model{at}@1")
        alone, _ = add_tunes(pool)
    with Pool(folder / "pool", create=True) as pool:
        models = itertools.chain(firsts, (model() for _ in range(_MODELS - _TUNED)))
        seconds = [add(pool, one, f"model{at}@1")[0] for at, one in enumerate(models)]
        beside, share = add_tunes(pool)
    early, late = statistics.mean(seconds[5:15]), statistics.mean(seconds[-10:])
    yield Row(
        f"{_MODELS} models of 128 tensors added in a row: the last against the 10th, processor time, mean of ten",
        f"{late / early:.2f} x ({show(late)} against {show(early)})",
        "at most 1.5 x",
        late <= 1.5 * early,
    )
    yield Row("  the slowest of all", show(max(seconds)), "", True)
    work = f"fine-tunes of the first {_TUNED} of {_MODELS} models, a tenth of whose numbers moved, against their bytes, the largest"
    yield Row(work, f"{share:.3f}", "at most 0.07", share <= 0.07)
    yield Row(
        f"  adding one, against a pool with these {_TUNED} models alone, processor time, mean of ten",
        f"{beside / alone:.2f} x ({show(beside)} against {show(alone)})",
        "at most 1.5 x",
        beside <= 1.5 * alone,
    )


def _family(number: int) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """The bits of 200 tensors in bfloat16, of 2,048 elements each."""
    values = np.random.default_rng(number).standard_normal((200, 2048), np.float32)
    return (values.view("<u4") >> 16).astype("<u2")


def _rows_of_version(
    number: int, family: Any, random: np.random.Generator
) -> tuple[list[tuple[object, ...]], list[tuple[object, ...]]]:
    """The parts of a version, and the blobs that are its own: all of the first of its family, later about half."""
    parts, blobs = [], []
    is_first = number < 100
    kind = ("bfloat16", "64,32")
    called = (f"{number:032x}", f"family{number % 100}", str(number), "model.ptd")
    for at in range(200):
        own = is_first or random.random() < 0.5
        base = hashlib.sha256(f"{number % 100} {at}".encode()).digest()
        digest = hashlib.sha256(f"{number} {at}".encode()).digest() if own else base
        parts.append((*called, at << 12, 1 << 12, f"layers.{at}.weight", *kind, "", digest, number))
        if own:
            stored = ("planes:2", None) if is_first else ("near:f2:2", base)
            sketches = (family[at, sketched(2048)].tobytes(), None) if is_first else (None, random.bytes(512))
            place = (bytes(32), at << 12, 1 << 11)
            blobs.append(Stored(digest, 1 << 12, *kind, *stored, *place, number, b"", *sketches).row())
    return parts, blobs


def _large(folder: Path) -> Iterator[Row]:
    """10,000 versions of 200 tensors in 100 families, whose rows are made here: what the index costs."""
    random = np.random.default_rng(0)
    url = folder / "pool"
    tables = Pool(url, create=True).tables
    families = [_family(number) for number in range(100)]
    for first in range(0, 10_000, 250):
        parts, blobs, events = [], [], []
        for number in range(first, first + 250):
            events.append((f"{number:032x}", "add", f"family{number % 100}", str(number), number, "[]"))
            of_version, own = _rows_of_version(number, families[number % 100], random)
            parts += of_version
            blobs += own
        tables.append(PARTS, parts)
        tables.append(BLOBS, blobs)
        tables.append(EVENTS, events)
    tables.tidy()
    small = Pool(folder / "small", create=True)
    large = Pool(url)
    numbers = iter(range(10**6))

    def tuned() -> None:
        """A fine-tune whose every tensor is close to a stored one."""
        changed = families[7] + random.integers(0, 2, families[7].shape, np.uint16)
        model = {f"layers.{at}.weight": torch.from_numpy(changed[at].reshape(64, 32)) for at in range(200)}
        save_file({name: tensor.view(torch.bfloat16) for name, tensor in model.items()}, folder / "model.ptd")
        flush()  # the tables that were made here, too, which a commit would wait for

    def add(pool: Pool) -> None:
        pool.add(folder / "model.ptd", f"new@{next(numbers)}")

    of_large, of_small = side_by_side(lambda: add(large), lambda: add(small), before=tuned)
    yield Row(
        "one version of 200 tensors into 10,000 x 200, beyond the same into an empty pool",
        f"{(of_large - of_small) * 1e3:.0f} ms ({of_large * 1e3:.0f} against {of_small * 1e3:.0f})",
        "at most 100 ms",
        of_large - of_small <= 0.1,
    )
    seconds = max(_seconds(query) for query in (large.versions, large.stats, lambda: large.open("family7@7")))
    yield Row("the slowest of versions, stats, open", f"{seconds:.2f} s", "at most 1 s", seconds <= 1)
    peak = int(next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line).split()[1])
    yield Row("  peak memory of the process, with torch", f"{peak / 1e3:.0f} MB", "", True)
