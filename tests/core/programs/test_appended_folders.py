"""A folder of programs that only grows: a run writes what is new, and neither reads nor writes anything else (R1, B1)."""

import json

import numpy as np
import pytest

from blobstore import open_ptd, save_file
from blobstore.errors import IntegrityError, KeyConflictError, KeyNotFoundError, OutputPathError, UnsupportedDataError
from blobstore.programs import data_files, dedup_programs, save_programs
from blobstore.runtime import Program
from tests.core.disk.outputs import damage
from tests.core.programs.test_program_folders import write
from tests.core.programs.test_programs import snapshot, with_named_data
from tests.helpers.terminal import printed


def tuned(model, path, value):
    """The program with another number in one of its weights, as a fine-tune with the same code has it."""
    data = bytearray(model.pte)
    weight = next(model.methods["forward"][0].parameters()).detach().numpy().tobytes()
    at = data.index(weight)
    data[at : at + 4] = np.float32(value).tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


@pytest.fixture
def folder(lowered, tmp_path):
    """A program in a folder, and two fine-tunes of it that were appended."""
    model = lowered.mlp()
    dedup_programs([tuned(model, tmp_path / "in" / "p0.pte", 0)], tmp_path / "out")
    for number in (1, 2):
        dedup_programs([tuned(model, tmp_path / "in" / f"p{number}.pte", number)], tmp_path / "out", append=True)
    return tmp_path / "out"


def test_each_program_computes_the_same_with_the_files_that_it_takes(lowered, folder, module_runner, stock_run):
    """The stock C++ Module takes them (B1, D1)."""
    inputs = lowered.mlp().inputs()
    for number in range(3):
        path = folder / f"p{number}.pte"
        files = data_files(path)
        assert [file.name for file in files] == sorted(
            {"shared.ptd", *([f"shared-{number + 1}.ptd"] if number else [])}
        )
        (output,) = module_runner(path, files, [one.numpy() for one in inputs])
        (expected,) = stock_run((folder.parent / "in" / path.name).read_bytes(), inputs)
        np.testing.assert_array_equal(output, expected.numpy())


@pytest.mark.long
@pytest.mark.parametrize("delegated", [False, True])
def test_a_program_without_one_of_its_files(lowered, tmp_path, delegated):
    """The error names the file beside it that has the missing keys, and no other; with both it runs (D1)."""
    for name, seed in (("a", 0), ("b", 1)):
        model = lowered.mlp(delegated=delegated, seed=seed)
        dedup_programs([write(model, tmp_path / f"{name}.pte")], tmp_path / "out", append=True)
    first, second = data_files(tmp_path / "out" / "b.pte")
    for given, other in ((first, second), (second, first)):
        with pytest.raises(KeyNotFoundError) as caught:
            Program(tmp_path / "out" / "b.pte", data=given).method()
        assert str(caught.value).endswith(f"; give the data files beside it, too: {other}")
    Program(tmp_path / "out" / "b.pte", data=[first, second]).method()
    (tmp_path / "out" / "b.pte").rename(tmp_path / "b.pte")
    with pytest.raises(KeyNotFoundError, match=r"b\.pte: (?!.*beside it)"):
        Program(tmp_path / "b.pte", data=first).method()


def test_only_new_bytes_are_written_and_no_other_program_is_read(lowered, folder):
    """Damaged programs in the folder are no obstacle, because nobody opens them; no file that is there changes."""
    (folder / "broken.pte").write_bytes(b"\0\0\0\0ET12" + bytes(100))
    before = snapshot(folder)
    weight = next(lowered.mlp().methods["forward"][0].parameters())
    result = dedup_programs([tuned(lowered.mlp(), folder.parent / "in" / "p3.pte", 3)], folder, append=True)
    after = snapshot(folder)
    assert {path: after[path] for path in before} == before
    assert {path.name for path in after.keys() - before.keys()} == {"p3.pte", "shared-4.ptd"}
    assert [path.name for path in result.data_files] == ["shared-4.ptd"]
    assert sum(len(view) for _, view in open_ptd(folder / "shared-4.ptd").views()) == weight.nbytes


def test_the_same_again_writes_no_data_file(folder):
    """All is there; the programs are the same bytes."""
    before = snapshot(folder)
    result = dedup_programs([folder.parent / "in"], folder, append=True)
    assert snapshot(folder) == before
    assert result.data_files == []
    assert [path.name for path in result.replaced] == ["p0.pte", "p1.pte", "p2.pte"]


def test_the_first_run_into_an_empty_folder_is_as_any_other(lowered, tmp_path):
    """There is nothing to append to."""
    path = write(lowered.mlp(delegated=True), tmp_path / "a.pte")
    dedup_programs([path], tmp_path / "one", append=True)
    dedup_programs([path], tmp_path / "two")
    assert [*snapshot(tmp_path / "one").values()] == [*snapshot(tmp_path / "two").values()]


def test_one_data_file_of_all_again(lowered, folder, stock_run):
    """The whole folder into another one."""
    result = dedup_programs([folder], folder.parent / "once")
    assert [path.name for path in result.data_files] == ["shared.ptd"]
    assert [one.lost_metadata for one in result.data_inputs] == [(), (), ()]
    plain = dedup_programs([folder.parent / "in"], folder.parent / "plain")
    assert dict(open_ptd(result.data_files[0]).views()) == dict(open_ptd(plain.data_files[0]).views())
    for number in range(3):
        path = folder.parent / "once" / f"p{number}.pte"
        (output,) = stock_run(path, lowered.mlp().inputs(), data_path=result.data_files[0])
        (expected,) = stock_run((folder.parent / "in" / path.name).read_bytes(), lowered.mlp().inputs())
        assert output.equal(expected)


def test_a_folder_that_was_appended_to_is_not_extended_otherwise(lowered, folder):
    """The first data file would get keys that a later one has."""
    before = snapshot(folder)
    for action in (
        lambda: dedup_programs([folder.parent / "in" / "p1.pte"], folder),
        lambda: dedup_programs([folder.parent / "in" / "p1.pte"], folder, prune=True),
        lambda: save_programs({"p1": lowered.mlp().manager}, folder),
    ):
        with pytest.raises(
            OutputPathError, match=r"shared\.ptd: the folder was appended to, so shared-2\.ptd .*--append"
        ):
            action()
    with pytest.raises(UnsupportedDataError, match="prune .* append"):
        dedup_programs([folder.parent / "in" / "p1.pte"], folder, append=True, prune=True)
    assert snapshot(folder) == before


def test_a_name_that_only_looks_like_it_does_not_belong(lowered, tmp_path):
    """A data file of other programs may be called so."""
    path = write(lowered.mlp(), tmp_path / "a.pte")
    dedup_programs([path], tmp_path / "out", data_name="shared-2.ptd")
    dedup_programs([path], tmp_path / "out")
    dedup_programs([tuned(lowered.mlp(), tmp_path / "b.pte", 1)], tmp_path / "out", append=True)
    assert {file.name for file in (tmp_path / "out").glob("*.ptd")} == {"shared.ptd", "shared-2.ptd", "shared-3.ptd"}


def test_a_delegates_key_with_other_bytes_is_a_conflict(lowered, tmp_path):
    """The delegate cannot look for another key."""
    one, other = (tmp_path / name for name in ("a.pte", "b.pte"))
    one.write_bytes(with_named_data(lowered.mlp(delegated=True).pte, "key", b"one" * 100, delegated=True))
    other.write_bytes(with_named_data(lowered.mlp(delegated=True).pte, "key", b"two" * 100, delegated=True))
    dedup_programs([one], tmp_path / "out")
    before = snapshot(tmp_path / "out")
    with pytest.raises(KeyConflictError, match=r"b\.pte: key 'key' has other bytes in .*shared\.ptd"):
        dedup_programs([other], tmp_path / "out", append=True)
    assert snapshot(tmp_path / "out") == before


def test_data_files_among_the_inputs(lowered, folder):
    """Keys that are there are joined, new ones are appended, other bytes are a conflict."""
    there = folder.parent / "there.ptd"
    there.write_bytes((folder / "shared-2.ptd").read_bytes())
    result = dedup_programs([there], folder, append=True)
    (one,) = result.data_inputs
    assert result.data_files == [] and {key.path.name for key in one.keys} == {"shared-2.ptd"}
    key = next(iter(open_ptd(there)))
    save_file({key: np.ones(3, np.float32)}, folder.parent / "other.ptd")
    with pytest.raises(KeyConflictError, match=r"other\.ptd: key .* has other bytes in .*shared-2\.ptd"):
        dedup_programs([folder.parent / "other.ptd"], folder, append=True)


def test_damaged_bytes_are_not_taken(folder):
    """Bytes of a data file that is there are compared, not only their recorded digest."""
    damage(folder / "shared.ptd", next(iter(open_ptd(folder / "shared.ptd"))))
    with pytest.raises(IntegrityError, match=r"shared\.ptd: the bytes of .* are damaged"):
        dedup_programs([folder.parent / "in"], folder, append=True)


def test_the_command(folder):
    """It says what to load each program with; a dry run writes nothing."""
    before = snapshot(folder)
    program = folder.parent / "in" / "p2.pte"
    arguments = ["dedup", program, "-o", folder, "--append"]
    assert "Nothing was written" in printed(*arguments, "--dry-run")
    assert snapshot(folder) == before
    text = " ".join(printed(*arguments).split())
    assert f"Load {folder / 'p2.pte'} with {folder / 'shared-3.ptd'}, {folder / 'shared.ptd'}." in text
    assert json.loads(printed(*arguments, "--json"))["data_files"] == []
