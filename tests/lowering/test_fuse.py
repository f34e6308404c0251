"""Programs that were lowered through the plug-in, as one: whose weights a method gets (L4).

Their keys are readable names, so two models of one architecture have equal payloads and equal keys for different weights.
"""

from pathlib import Path

import pytest
import torch

from blobstore import BlobStore, fuse_programs, open_ptd
from blobstore.core.formats.keys import KEY_PREFIX
from blobstore.core.formats.pte.program import read_program
from blobstore.core.memory.layout import ScalarType, TensorLayout
from blobstore.errors import KeyConflictError, KeyNotFoundError
from blobstore.runtime import BlobCache, Program
from tests.helpers import models
from tests.lowering import nets
from tests.lowering.live import inputs, lower_through, seeded

pytestmark = pytest.mark.long

X = inputs(3, 16)


def lowered(folder: Path, name: str, seed: int) -> tuple[Path, Path]:
    """A program and its data file, which has what its delegate looks up and nothing else."""
    home = folder / name
    program = lower_through({"forward": (seeded(nets.MLP, seed), X)}, home, external_constants=False)
    return program.rename(home / f"{name}.pte"), (home / "model.ptd").rename(home / f"{name}.ptd")


def whole(folder: Path, name: str, seed: int) -> Path:
    """A program with its weights inside."""
    fuse_programs(lowered(folder, name, seed), folder / f"{name}.pte")
    return folder / f"{name}.pte"


def output(path: Path, method: str = "forward") -> torch.Tensor:
    found: torch.Tensor = Program(path).method(method)(*X)
    return found


def test_equal_methods_with_other_weights(tmp_path: Path) -> None:
    """Such a method is not left out, with or without a third program."""
    m0, same, m5 = (whole(tmp_path, name, seed) for name, seed in (("m0", 0), ("same", 0), ("m5", 5)))
    assert not torch.equal(output(m0), output(m5))
    one = tmp_path / "one.pte"
    conflict = r"{}\.pte: the key 'layers\.0\.\S+' has other bytes than for \S*{}\.pte"
    for programs, names in (([m0, m5], "m5 m0"), ([m5, m0], "m0 m5"), ([m0, same, m5], "m5 m0")):
        with pytest.raises(KeyConflictError, match=conflict.format(*names.split())):
            fuse_programs(programs, one, keep_external=True)
    with pytest.raises(KeyConflictError):
        fuse_programs([m0, same, m5], one, methods={"m5": "tuned"})
    assert not one.exists()
    result = fuse_programs([m0, same], one)
    assert [method.program for method in result.left_out] == [same]
    assert torch.equal(output(one), output(m0))
    result = fuse_programs([m0, m5], one, methods={"m0": ""})
    assert not result.left_out
    assert torch.equal(output(one), output(m5))


def test_an_equal_method_without_the_other_weights(tmp_path: Path) -> None:
    """It is left out, although an unwanted method has other weights under equal keys."""
    portable = models.mlp().write(tmp_path, "portable")
    paths = []
    for name, seed in (("m0", 0), ("m5", 5)):
        paths.append(tmp_path / f"{name}-both.pte")
        fuse_programs([whole(tmp_path, name, seed), portable], paths[-1], methods={"portable": "other"})
    one = tmp_path / "one.pte"
    result = fuse_programs(paths, one, methods={"m5-both:forward": ""})
    assert [method.method for method in result.left_out] == ["other"]
    assert torch.equal(output(one), output(tmp_path / "m0.pte"))
    with pytest.raises(KeyConflictError):
        fuse_programs(paths, one, methods={"m5-both:forward": "tuned"}, force=True)
    fuse_programs(paths, one, methods={"m5-both:forward": "", "m5-both:other": "second"}, force=True)
    assert torch.equal(output(one), output(tmp_path / "m0.pte"))
    assert torch.equal(output(one, "second"), output(one, "other"))


@pytest.mark.long
def test_weights_of_one_program_in_a_data_file(tmp_path: Path) -> None:
    """They are compared with those inside the other one; if they are not given, the other's are not taken."""
    m0 = whole(tmp_path, "m0", 0)
    same, same_data = lowered(tmp_path, "same", 0)
    m5, m5_data = lowered(tmp_path, "m5", 5)
    one = tmp_path / "one.pte"
    for inputs_ in ([m0, m5, m5_data], [m5, m0, m5_data], [m5_data, m0, m5]):
        with pytest.raises(KeyConflictError, match="the key 'layers"):
            fuse_programs(inputs_, one)
        with pytest.raises(KeyConflictError, match=r"m0\.pte: the key 'layers\S+' has other bytes in a data file"):
            fuse_programs(inputs_, one, methods={"m5": "tuned"})
    for programs in ([m0, m5], [m5, m0]):
        for methods in ({}, {"m5": "tuned"}):
            with pytest.raises(KeyNotFoundError, match=r"m5\.pte: '\S+' and \d+ more keys must come from a data file"):
                fuse_programs(programs, one, methods=methods)
            with pytest.raises(
                KeyConflictError, match=r"m5\.pte: the key 'layers\S+' must come .*m0\.pte has bytes under"
            ):
                fuse_programs(programs, one, methods=methods, keep_external=True)
    assert not one.exists()
    result = fuse_programs([m0, same, same_data], one)
    assert [method.program for method in result.left_out] == [same]
    assert torch.equal(output(one), output(m0))


def test_data_files_with_other_layouts(tmp_path: Path) -> None:
    """A key has one layout in all data files."""
    path, data_file = lowered(tmp_path, "m0", 0)
    with open_ptd(data_file) as data_map:
        key = next(key for key in data_map if "@" in key and not key.startswith(KEY_PREFIX))
        store = BlobStore()
        store.add(key, data_map.bytes(key), layout=TensorLayout(ScalarType.BYTE, (len(data_map.get_data(key)),)))
    store.write_ptd(tmp_path / "other.ptd")
    with pytest.raises(KeyConflictError, match=r"other\.ptd: the key 'layers\S+' has other bytes or another layout"):
        fuse_programs([path, data_file, tmp_path / "other.ptd"], tmp_path / "one.pte")


def test_a_data_file_that_was_forgotten(tmp_path: Path) -> None:
    """The keys of delegates are missing, too; with the data file the written program computes what it did before."""
    path, data_file = lowered(tmp_path, "m0", 0)
    one = tmp_path / "one.pte"
    with pytest.raises(KeyNotFoundError, match=r"m0\.pte: '\S+' and \d+ more keys must come .*--keep-external"):
        fuse_programs(path, one)
    assert not one.exists()
    result = fuse_programs(path, one, keep_external=True)
    assert set(result.missing) == {key for key in open_ptd(data_file) if not key.startswith(KEY_PREFIX)}
    cache = BlobCache(data_file)
    assert torch.equal(Program(one, cache).method()(*X), Program(path, cache).method()(*X))
    fuse_programs([path, data_file], one)
    assert {blob.key for blob in read_program(one).named_data} == set(result.missing)
    assert fuse_programs(one, tmp_path / "again.pte").missing == ()  # nothing is missing: the keys are in the program
    assert torch.equal(output(tmp_path / "again.pte"), Program(path, cache).method()(*X))
