"""Programs that are rewritten, and run by the stock runtime."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from blobstore.core.formats.pte.program import Movable, read_program
from blobstore.core.formats.pte.rewrite import Rewrite
from tests.core.formats.pte.oracle import check_same, write_ptd
from tests.helpers.schemas import EXECUTORCH_SCHEMA


@pytest.fixture
def slim(tmp_path: Path) -> Callable[..., tuple[Path, Path | None, Mapping[Movable, str]]]:
    """Writes a program without what `choose` accepts (everything, if it is not given) and a .ptd by ExecuTorch.

    Returns both paths (no .ptd when nothing moved) and what moved.
    """

    def rewrite(pte, choose=lambda item: True):
        path, target = tmp_path / "model.pte", tmp_path / "slim.pte"
        path.write_bytes(pte)
        program = read_program(path)
        moves = {item: item.key for item in program.movable() if choose(item)}
        rewrite = Rewrite(program, moves)
        with target.open("wb") as file:
            rewrite.write(file)
        entries = [(key, bytes(item.data), item.layout) for item, key in moves.items()]
        return target, write_ptd(tmp_path / "shared.ptd", entries) if moves else None, moves

    return rewrite


@pytest.fixture
def check_runs(stock_run):
    """Check that the stock runtime computes the same bits with a program and its data as with the one before."""

    return lambda model, target, ptd, before=None: check_same(stock_run, model, target, data=ptd, before=before)


@pytest.fixture
def check_same_outputs(slim, check_runs):
    """Make a program slim and `check_runs`; return the slim file and the moves."""

    def check(model, choose=lambda item: True):
        target, ptd, moves = slim(model.pte, choose)
        check_runs(model, target, ptd)
        return target, moves

    return check


@pytest.fixture(scope="session")
def later_executorch(tmp_path_factory) -> Path:
    """ExecuTorch's schema as it may be in a later version: new fields in every table, a new kind of value."""
    folder = tmp_path_factory.mktemp("later")
    text = EXECUTORCH_SCHEMA.read_text()
    text = re.sub(r"^(table \w+ \{[^}]*)\}", r"\1  future_text: string;\n  future_number: ulong;\n}", text, flags=re.M)
    text = text.replace("  OptionalTensorList,\n}", "  OptionalTensorList,\n  FutureValue,\n}")
    text = text.replace("union KernelTypes", "table FutureValue {\n  data_buffer_idx: uint;\n}\n\nunion KernelTypes")
    path = folder / "program.fbs"
    path.write_text(text)
    return path
