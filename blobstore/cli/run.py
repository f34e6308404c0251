"""The command that runs a program: `run`."""

from __future__ import annotations

import operator
import os
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from blobstore.cli import exits
from blobstore.cli.options import AsJson, file_argument, file_option
from blobstore.cli.output import counted, plain, print_json, print_table, say
from blobstore.core.disk.kinds import Format
from blobstore.core.disk.staging import Staging, refuse_inputs
from blobstore.core.errors import FileAccessError, InputError, InvalidFileError, KeyNotFoundError
from blobstore.core.text import size

if TYPE_CHECKING:
    from blobstore.core.memory.layout import TensorLayout
    from blobstore.runtime import Method, ValueInfo

__all__ = ["app"]

app = typer.Typer()
R = TypeVar("R")
_SHOWN = 8
"""Values of an output that a person sees."""

_SHAPES = re.compile(r"(?:[0-9]{1,18}(?:x[0-9]{1,18})*)?(?:,(?:[0-9]{1,18}(?:x[0-9]{1,18})*)?)*")
_PLAIN: dict[str, Callable[[Any], Any]] = {"int": int, "float": float, "bool": bool, "str": str}


@app.command()
@exits.handled
def run(
    program: Annotated[Path, file_argument("The program, a .pte.")],
    inputs: Annotated[
        Path | None,
        file_argument(
            "A .npz with the inputs, by their names or in their order; or a .npy for the only one. By default, numbers "
            "that depend on nothing but the shape."
        ),
    ] = None,
    shapes: Annotated[
        str | None,
        typer.Option(metavar="1x16,1x8", help="The shapes of all inputs that are tensors; by default the largest."),
    ] = None,
    method: Annotated[str, typer.Option(help="The method.")] = "forward",
    data: Annotated[
        list[Path] | None,
        file_option(help="A data file, or several; by default those beside the program that it takes."),
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="How many times it runs; the time is the median.")] = 1,
    output: Annotated[
        Path | None, file_option("--output", "-o", help="A .npz for the outputs, as arr_0, arr_1 …")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a program without torch, and print its outputs, times and memory. Executorch is not needed either."""
    import numpy as np

    from blobstore.runtime import BlobCache, Program

    if inputs is not None and shapes is not None:
        raise typer.BadParameter("the inputs have their own shapes", param_hint="--shapes")
    files = data if data is not None else _beside(program)
    if output is not None:
        refuse_inputs([output], [program, *files, *([inputs] if inputs is not None else [])])
    (loaded, forward), load_ms = _timed(lambda: _load(Program, BlobCache, program, files, method))
    given = _read(inputs, forward.inputs) if inputs is not None else _made(forward.inputs, shapes)
    outputs, first_ms = _timed(lambda: forward.execute(*given))
    again = [_timed(lambda: forward.execute(*given))[1] for _ in range(repeat - 1)]
    if output is not None:
        _write(output, [np.asarray(one) for one in outputs])
    result = {
        "program": program,
        "method": forward.name,
        "data": files,
        "backends": loaded.backends(method),
        "inputs": [_about(one) for one in given],
        "outputs": [_about(one) for one in outputs],
        "milliseconds": {"load": load_ms, "first": first_ms, "run": statistics.median(again or [first_ms])},
        "memory": _memory(),
    }
    if as_json:
        print_json(result)
    else:
        _print(result)


def _load(program: Any, cache: Any, path: Path, files: Sequence[Path], method: str) -> tuple[Any, Method]:
    try:
        loaded = program(path, cache(files))
        return loaded, loaded.method(method)
    except KeyNotFoundError as error:
        others = [str(one) for one in sorted(path.parent.glob("*.ptd")) if one not in files]
        if "data files beside it" in str(error) or not others:
            raise
        raise KeyNotFoundError(f"{error}; --data takes data files; beside it there are: {', '.join(others)}") from None


def _beside(program: Path) -> list[Path]:
    from blobstore.core.programs.deployed import data_files

    return data_files(program)


def _timed(call: Callable[[], R]) -> tuple[R, float]:
    """What a call returns, and the milliseconds that it took."""
    start = time.perf_counter()
    result = call()
    return result, (time.perf_counter() - start) * 1000


def _read(path: Path, wanted: Sequence[ValueInfo]) -> list[Any]:
    """The inputs in a file, in the order of the method's."""
    arrays, names = _arrays(path), [one.name for one in wanted]
    if len(arrays) != len(wanted):
        expected = f"{counted(wanted, 'input')} ({', '.join(map(str, wanted))})"
        raise InputError(f"{path}: the method takes {expected}, found {len(arrays)}")
    values = [arrays[name] for name in names] if set(names) == set(arrays) else list(arrays.values())
    return [
        _PLAIN[one.kind](value.item()) if one.kind in _PLAIN and value.ndim == 0 else value
        for one, value in zip(wanted, values, strict=True)
    ]


def _arrays(path: Path) -> dict[str, Any]:
    import numpy as np

    try:
        found = np.load(path, allow_pickle=False)
        return dict(found) if isinstance(found, Mapping) else {"": found}
    except Exception as error:  # of the zip, of an array, or of a pickle, which is never read
        if isinstance(error, OSError) and error.errno is not None:
            raise FileAccessError(path, error) from None
        raise InvalidFileError(path, "expected a .npz or a .npy of numbers") from None


def _made(wanted: Sequence[ValueInfo], shapes: str | None) -> list[Any]:
    """Inputs for a method: of floating point normally distributed, of integers zeros, which are indices of anything."""
    layouts = [one.layout for one in wanted if one.layout is not None]
    sizes = _sizes(shapes, layouts) if shapes is not None else [layout.sizes for layout in layouts]
    others = [str(one) for one in wanted if one.layout is None and one.kind != "none"]
    if others:
        raise InputError(f"the method takes {', '.join(others)}: give the inputs in a .npz, with scalars for these")
    tensors = iter([_numbers(layout, shape) for layout, shape in zip(layouts, sizes, strict=True)])
    return [None if one.layout is None else next(tensors) for one in wanted]


def _numbers(layout: TensorLayout, shape: tuple[int, ...]) -> Any:
    import numpy as np

    from blobstore.core.memory.dtypes import numpy_dtype

    dtype = numpy_dtype(layout.scalar_type)
    whole = dtype.kind in "iub"
    return (np.zeros(shape) if whole else np.random.default_rng(0).standard_normal(shape, np.float32)).astype(dtype)


def _sizes(text: str, layouts: Sequence[TensorLayout]) -> list[tuple[int, ...]]:
    """The shapes in a text, none of which is larger than the method takes, so that memory is asked for only then."""
    if not _SHAPES.fullmatch(text):
        raise typer.BadParameter(f"expected shapes such as 1x16,1x8, not {text!r}", param_hint="--shapes")
    sizes = [tuple(map(int, shape.split("x"))) if shape else () for shape in text.split(",")]
    if len(sizes) != len(layouts):
        raise InputError(f"--shapes has {counted(sizes, 'shape')}, the method takes {counted(layouts, 'tensor')}")
    for shape, layout in zip(sizes, layouts, strict=True):
        if len(shape) != len(layout.sizes) or any(map(operator.gt, shape, layout.sizes)):
            found = "x".join(map(str, shape)) or "a scalar"
            raise InputError(f"--shapes: the method takes at most {layout}, not {found}")
    return sizes


def _write(path: Path, arrays: Sequence[Any]) -> None:
    import numpy as np

    with Staging() as staging, staging.open(path, kind=Format.NPZ) as file:
        np.savez(file, *arrays)


def _about(value: Any) -> dict[str, Any]:
    """What is printed of an input or an output."""
    if not hasattr(value, "dtype"):
        return {"dtype": type(value).__name__, "shape": None, "values": [value]}
    return {"dtype": value.dtype.name, "shape": list(value.shape), "values": value.reshape(-1)[:_SHOWN].tolist()}


def _memory() -> dict[str, int | None]:
    """Bytes of this process: all in memory, what is its own and in no file, and the most that it had; None if unknown."""
    fields = {"resident": "VmRSS", "anonymous": "RssAnon", "peak": "VmHWM"}
    try:
        lines = Path(f"/proc/{os.getpid()}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:  # not Linux
        lines = []
    found = {name: value.split()[0] for name, _, value in (line.partition(":") for line in lines) if value.split()}
    return {name: int(found[field]) * 1024 if field in found else None for name, field in fields.items()}


def _print(result: Mapping[str, Any]) -> None:
    files = ", ".join(map(str, result["data"])) or "no data file"
    say(f"{result['program']}: {result['method']}, on {', '.join(result['backends']) or 'kernels only'}, with {files}")
    rows = [
        (f"{what} {number}", one["dtype"], "x".join(map(str, one["shape"] or ())) or "scalar", _values(one["values"]))
        for what in ("input", "output")
        for number, one in enumerate(result[f"{what}s"])
    ]
    print_table("", ("", "dtype", "shape", "first values"), rows)
    spent, memory = result["milliseconds"], result["memory"]
    say(f"Loaded in {spent['load']:.1f} ms; the first run took {spent['first']:.2f} ms, a run {spent['run']:.2f} ms.")
    if memory["resident"] is not None:
        known = {name: size(value) for name, value in memory.items()}
        say(f"Memory: {known['resident']}, of which {known['anonymous']} in no file; at most {known['peak']}.")


def _values(values: Sequence[Any]) -> str:
    return " ".join(f"{one:.6g}" if isinstance(one, float) else str(plain(one)) for one in values)
