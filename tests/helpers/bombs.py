"""Files below 1 MB in which many references lead to one object, so that they describe gigabytes; and what reading one costs."""

import json
import resource
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import xxhash

from blobstore.core.formats.flatbuffer import I32, U8, U64
from blobstore.core.formats.payload import CONSTANT, FILE_IDENTIFIER, MAGIC, PAYLOAD
from blobstore.core.formats.pte.schema import PROGRAM
from blobstore.core.formats.table_builder import TableBuilder
from tests.helpers.collisions import colliding_texts
from tests.helpers.schemas import tables_below

COUNT = 60_000
LONG = "x" * 600_000
SECONDS, BYTES = 2.0, 300e6  # what a file below 1 MB may cost: of the processor, and of memory

_KINDS = tables_below(PROGRAM)


class Program(TableBuilder):
    """Writes tables of ExecuTorch's program; no serializer refers to one of them so often."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.ForceDefaults(True)
        self.text = self.CreateString

    def make(self, kind: str, **fields: Any) -> int:
        return self.table(_KINDS[kind], **fields)

    def plan(self, name: str = "forward", **fields: int) -> int:
        return self.make("ExecutionPlan", name=self.text(name), **fields)

    def tensor(self, rank: int = 1, memory: int | None = None, **fields: int) -> int:
        """A value: float[1] of any rank, planned into a memory, or with further fields of a Tensor."""
        if memory is not None:
            place = {"memory_id": memory, "memory_offset_low": 64, "memory_offset_high": 0}
            fields["allocation_info"] = self.make("AllocationDetails", **place)
        if "sizes" not in fields:
            fields |= self.layout([1] * rank)
        return self.make("EValue", val_type=5, val=self.make("Tensor", scalar_type=6, **fields))

    def layout(self, sizes: Sequence[int]) -> dict[str, int]:
        """Those fields of a Tensor."""
        return {"sizes": self.numbers(I32, sizes), "dim_order": self.numbers(U8, range(len(sizes)))}

    def external(self, name: int) -> int:
        """What a Tensor has in `extra_tensor_info`, if its bytes are in a data file."""
        return self.make("ExtraTensorInfo", fully_qualified_name=name, location=1)

    def whole(self, plans: list[int], segment: bytes = b"", offsets: Sequence[int] = (), **fields: int) -> bytes:
        """The program with these methods. A segment, in which constants lie at `offsets`, is behind an extended header."""
        listed = [self.make("DataSegment", offset=0, size=len(segment))] if segment else []
        constants = self.make("SubsegmentOffsets", segment_index=0, offsets=self.numbers(U64, offsets))
        lists = {"execution_plan": self.references(plans), "segments": self.references(listed)}
        flat = self.finish(self.make("Program", version=0, constant_segment=constants, **lists, **fields), b"ET12")
        if not segment:
            return flat
        size = len(flat) + 32
        base = -(-size // 128) * 128
        header = struct.pack("<4sIQQQ", b"eh00", 32, size, base, len(segment))
        root = struct.pack("<I", struct.unpack_from("<I", flat)[0] + 32)
        return (root + flat[4:8] + header + flat[8:]).ljust(base, b"\0") + segment


def operators(p: Program) -> bytes:
    """One operator with a long name, many times."""
    name = p.text(LONG)
    return p.whole([p.plan(operators=p.references([p.make("Operator", name=name, overload=name)] * COUNT))])


def operators_apart(p: Program) -> bytes:
    """Many operators that share one long name."""
    name = p.text(LONG)
    return p.whole([p.plan(operators=p.references([p.make("Operator", name=name) for _ in range(COUNT // 4)]))])


def operators_colliding(p: Program) -> bytes:
    """As many operators as fit, with names of one hash value."""
    names = [p.text(name) for name in colliding_texts(25_000)]
    return p.whole([p.plan(operators=p.references([p.make("Operator", name=name) for name in names]))])


def memories_colliding(p: Program) -> bytes:
    """Many memories, with multiples of libstdc++'s number of buckets as numbers."""
    return p.whole([p.plan(values=p.references([p.tensor(memory=20_753 * n) for n in range(1, 12_000)]))])


def delegates(p: Program) -> bytes:
    """One delegate with a long name, many times."""
    return p.whole([p.plan(delegates=p.references([p.make("BackendDelegate", id=p.text(LONG))] * COUNT))])


def uses(p: Program) -> bytes:
    """One tensor with a long key, many times."""
    tensor = p.tensor(extra_tensor_info=p.external(p.text(LONG)))
    return p.whole([p.plan(values=p.references([tensor] * COUNT))])


def uses_apart(p: Program) -> bytes:
    """Many tensors that share one long key."""
    extra = p.external(p.text(LONG))
    return p.whole([p.plan(values=p.references([p.tensor(extra_tensor_info=extra) for _ in range(COUNT // 16)]))])


def wide(p: Program) -> bytes:
    """One tensor with many dimensions, many times."""
    tensor = p.tensor(64, extra_tensor_info=p.external(p.text("key")))
    return p.whole([p.plan(values=p.references([tensor] * 200_000))])


def inputs(p: Program) -> bytes:
    """Many inputs, each of which may overlap any of many planned tensors."""
    values = [p.tensor(memory=1)] + [p.tensor(memory=2)] * COUNT
    return p.whole([p.plan(values=p.references(values), inputs=p.numbers(I32, [0] * COUNT))])


def plans(p: Program) -> bytes:
    """One method, many times."""
    return p.whole([p.plan(LONG)] * COUNT)


def plans_apart(p: Program) -> bytes:
    """Many methods that share one list of tensors, one with a long key."""
    values = p.references([p.tensor(extra_tensor_info=p.external(p.text(LONG)))] * 5_000)
    return p.whole([p.plan(str(number), values=values) for number in range(3_000)])


def payload_bomb(count: int) -> bytes:
    """A payload that refers to one constant with `count` places `count` times: a few kilobytes that stand for gigabytes."""
    builder, inner = TableBuilder(1024), b"k@0123456789abcdef"
    key, places = builder.CreateString(inner.decode()), builder.numbers(U64, [len(inner) - 16] * count)
    constants = builder.references([builder.table(CONSTANT, key=key, places=places)] * count)
    name, digest = builder.CreateString("ToyBackend"), builder.CreateByteVector(xxhash.xxh3_128_digest(inner))
    fields = {"version": 1, "inner": name, "size": len(inner), "constants": constants, "digest": digest}
    body = builder.finish(builder.table(PAYLOAD, **fields), FILE_IDENTIFIER)
    return inner + body + struct.pack("<Q", len(body)) + MAGIC


BOMBS: dict[str, Callable[[Program], bytes]] = {
    make.__name__: make
    for make in (
        *(operators, operators_apart, operators_colliding, memories_colliding, delegates),
        *(uses, uses_apart, wide, inputs, plans, plans_apart),
    )
}


def write(name: str, folder: Path) -> Path:
    """A program of `BOMBS`."""
    path = folder / "bomb.pte"
    path.write_bytes(BOMBS[name](Program()))
    assert path.stat().st_size < 1 << 20
    return path


_MEASURE = """
import json, time
from tests.helpers.bombs import peak
from blobstore import BlobStoreError
{prepare}
before, start, outcome = peak(), time.process_time(), "taken"
try:
    {read}
except BlobStoreError as error:
    outcome = f"{{type(error).__name__}} {{error}}"[:300]
except SystemExit as left:
    outcome = left.code or 0
print()
print(json.dumps([outcome, time.process_time() - start, peak() - before]))
"""


def peak() -> int:
    """The peak memory of this process in bytes, as Linux tells it; getrusage would include that of its parent."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def check_cost(path: Path, prepare: str, read: str) -> Any:
    """Read a file at `path` in a process of its own. It must take little time and memory, and raise only BlobStoreErrors.

    Args:
        path: a name that both texts know.
        prepare, read: Python; the cost of the first does not count.

    Returns:
        The error, "taken", or the code with which it left.
    """
    code = _MEASURE.format(prepare=f"path = {str(path)!r}\n{prepare}", read="\n    ".join(read.splitlines()))
    limits = ((resource.RLIMIT_AS, 4 << 30), (resource.RLIMIT_CPU, 60))  # so that a failing test ends soon
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        check=False,
        preexec_fn=lambda: [resource.setrlimit(what, (most, most)) for what, most in limits],
    )
    assert done.returncode == 0, done.stderr
    outcome, seconds, nbytes = json.loads(done.stdout.splitlines()[-1])
    assert seconds < SECONDS and nbytes < BYTES, (path, seconds, nbytes, outcome)
    return outcome
