"""Small programs in which many references lead to one object, so that they describe gigabytes."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import flatbuffers

from tests.helpers.collisions import colliding_texts

COUNT = 60_000
LONG = "x" * 600_000
SECONDS, BYTES = 2.0, 300e6  # what a program below 1 MB may cost: of the processor, and of memory


class Program:
    """Writes objects of ExecuTorch's program, each with the given fields, by number."""

    def __init__(self) -> None:
        self.builder = flatbuffers.Builder(1 << 20)
        self.builder.ForceDefaults(True)
        self.text = self.builder.CreateString

    def table(self, **fields: tuple[str, int]) -> int:
        slots = {int(name[1:]): value for name, value in fields.items()}
        self.builder.StartObject(max(slots, default=-1) + 1)
        for slot, (kind, value) in slots.items():
            if kind == "object":
                self.builder.PrependUOffsetTRelativeSlot(slot, value, 0)
            elif kind == "byte":
                self.builder.PrependUint8Slot(slot, value, 0)
            else:
                self.builder.PrependUint32Slot(slot, value, 0)
        return self.builder.EndObject()

    def tables(self, objects: list[int]) -> tuple[str, int]:
        self.builder.StartVector(4, len(objects), 4)
        for each in reversed(objects):
            self.builder.PrependUOffsetTRelative(each)
        return "object", self.builder.EndVector()

    def numbers(self, values: list[int], width: int = 4) -> tuple[str, int]:
        self.builder.StartVector(width, len(values), width)
        put = self.builder.PrependInt32 if width == 4 else self.builder.PrependUint8
        for value in reversed(values):
            put(value)
        return "object", self.builder.EndVector()

    def tensor(self, extra: int | None = None, memory: int | None = None, rank: int = 1) -> int:
        """A value: float[1] of any rank; by its name in a data file, or planned into a memory."""
        more = {"_9": ("object", extra)} if extra is not None else {}
        if memory is not None:
            more["_6"] = ("object", self.table(_0=("number", memory), _1=("number", 64), _2=("number", 0)))
        sizes, order = self.numbers([1] * rank), self.numbers(list(range(rank)), 1)
        tensor = self.table(_0=("byte", 6), _2=sizes, _3=order, **more)
        return self.table(_0=("byte", 5), _1=("object", tensor))

    def external(self, name: int) -> int:
        return self.table(_1=("object", name), _2=("byte", 1))

    def finish(self, plans: list[int]) -> bytes:
        constants = self.table(_0=("number", 0), _1=self.numbers([]))
        fields = {"_0": ("number", 0), "_1": self.tables(plans), "_4": self.tables([])}
        self.builder.Finish(self.table(**fields, _5=("object", constants)), file_identifier=b"ET12")
        return bytes(self.builder.Output())

    def plan(self, name: str = "forward", **fields: tuple[str, int]) -> int:
        return self.table(_0=("object", self.text(name)), **fields)


def operators(p: Program) -> bytes:
    """One operator with a long name, many times."""
    name = p.text(LONG)
    return p.finish([p.plan(_6=p.tables([p.table(_0=("object", name), _1=("object", name))] * COUNT))])


def operators_apart(p: Program) -> bytes:
    """Many operators that share one long name."""
    name = p.text(LONG)
    return p.finish([p.plan(_6=p.tables([p.table(_0=("object", name)) for _ in range(COUNT // 4)]))])


def delegates(p: Program) -> bytes:
    """One delegate with a long name, many times."""
    return p.finish([p.plan(_7=p.tables([p.table(_0=("object", p.text(LONG)))] * COUNT))])


def uses(p: Program) -> bytes:
    """One tensor with a long key, many times."""
    return p.finish([p.plan(_2=p.tables([p.tensor(p.external(p.text(LONG)))] * COUNT))])


def uses_apart(p: Program) -> bytes:
    """Many tensors that share one long key."""
    extra = p.external(p.text(LONG))
    return p.finish([p.plan(_2=p.tables([p.tensor(extra) for _ in range(COUNT // 16)]))])


def wide(p: Program) -> bytes:
    """One tensor with many dimensions, many times."""
    return p.finish([p.plan(_2=p.tables([p.tensor(p.external(p.text("key")), rank=64)] * 200_000))])


def inputs(p: Program) -> bytes:
    """Many inputs, each of which may overlap any of many planned tensors."""
    values = [p.tensor(memory=1)] + [p.tensor(memory=2)] * COUNT
    return p.finish([p.plan(_2=p.tables(values), _3=p.numbers([0] * COUNT))])


def plans(p: Program) -> bytes:
    """One method, many times."""
    return p.finish([p.plan(LONG)] * COUNT)


def plans_apart(p: Program) -> bytes:
    """Many methods that share one list of tensors, one with a long key."""
    extra = p.external(p.text(LONG))
    values = p.tables([p.tensor(extra)] * 5_000)
    return p.finish([p.plan(str(number), _2=values) for number in range(3_000)])


def operators_colliding(p: Program) -> bytes:
    """As many operators as fit, with names of one hash value."""
    names = [p.text(name) for name in colliding_texts(25_000)]
    return p.finish([p.plan(_6=p.tables([p.table(_0=("object", name)) for name in names]))])


def memories_colliding(p: Program) -> bytes:
    """Many memories, with multiples of libstdc++'s number of buckets as numbers."""
    return p.finish([p.plan(_2=p.tables([p.tensor(memory=20_753 * n) for n in range(1, 12_000)]))])


BOMBS: dict[str, Callable[[Program], bytes]] = {
    make.__name__: make
    for make in (
        operators,
        operators_apart,
        operators_colliding,
        memories_colliding,
        delegates,
        uses,
        uses_apart,
        wide,
        inputs,
        plans,
        plans_apart,
    )
}

_MEASURE = """
import resource, sys, time
from tests.core.formats.pte.bombs import peak
from blobstore import BlobStoreError
{prepare}
before, start = peak(), time.process_time()
try:
    {read}
except BlobStoreError as error:
    print(type(error).__name__, str(error)[:300])
else:
    print("taken")
print(time.process_time() - start, peak() - before)
"""


def peak() -> int:
    """The peak memory of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def check_cost(name: str, folder: Path, prepare: str, read: str) -> str:
    """Read a bomb at `path` in a process of its own. It must take little time and memory, and raise only BlobStoreErrors.

    Returns:
        The error, or "taken".
    """
    path = folder / "bomb.pte"
    path.write_bytes(BOMBS[name](Program()))
    assert path.stat().st_size < 1 << 20
    code = _MEASURE.format(prepare=f"path = {str(path)!r}\n{prepare}", read=read)
    limit = 4 << 30  # so that a failing test ends soon
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[4],
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    assert done.returncode == 0, done.stderr
    outcome, cost = done.stdout.strip().splitlines()
    seconds, nbytes = map(float, cost.split())
    assert seconds < SECONDS, (name, seconds)
    assert nbytes < BYTES, (name, nbytes)
    return outcome
