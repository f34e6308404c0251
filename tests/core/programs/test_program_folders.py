"""A folder of programs on its data files, over several runs: no program loses weights (B1, W1, D1)."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch

import blobstore
from blobstore import BlobStore, open_ptd, save_file
from blobstore.core.tools.convert import convert
from blobstore.errors import InvalidFileError, KeyConflictError, OutputPathError, UnsupportedDataError
from blobstore.programs import dedup_programs, save_programs
from tests.core.programs.test_programs import check_all, snapshot, with_named_data


@pytest.fixture
def check(stock_run):
    """Check that the slim programs of a folder compute what their old files compute."""
    return lambda folder, models: check_all(stock_run, models, folder)


def write(model, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.pte)
    return path


def keys(path):
    with open_ptd(path, verify=True) as data_map:
        return set(data_map)


@pytest.mark.long
@pytest.mark.parametrize("delegated", [False, True])
@pytest.mark.parametrize("save", [False, True])
def test_a_second_run_leaves_the_programs_of_the_first_their_weights(lowered, check, tmp_path, delegated, save):
    """Every program of the folder still runs (B1, D1)."""
    models = {"a": lowered.mlp(delegated=delegated, seed=1), "b": lowered.mlp(delegated=delegated, seed=2)}
    models["c"] = lowered.decoder()
    for name, model in models.items():
        if save:
            result = save_programs({name: model.manager}, tmp_path / "out")
        else:
            result = dedup_programs([write(model, tmp_path / f"{name}.pte")], tmp_path / "out")
    assert [path.name for path in result.kept] == ["a.pte", "b.pte"]
    assert (result.replaced, result.replaced_keys, result.unused_keys, result.pruned_keys) == ([], [], [], [])
    check(tmp_path / "out", models)
    together = dedup_programs([write(m, tmp_path / "in" / f"{n}.pte") for n, m in models.items()], tmp_path / "once")
    assert keys(together.data_files[0]) == keys(tmp_path / "out" / "shared.ptd")


@pytest.mark.long
def test_a_run_done_again_changes_no_byte(lowered, tmp_path):
    """The same inputs give the same files (B1)."""
    a, b = write(lowered.mlp(delegated=True), tmp_path / "a.pte"), write(lowered.decoder(), tmp_path / "b.pte")
    first = dedup_programs([a], tmp_path / "out")
    before = snapshot(tmp_path / "out")
    again = dedup_programs([a], tmp_path / "out")
    assert snapshot(tmp_path / "out") == before
    assert again.replaced == [tmp_path / "out" / "a.pte"] and again.data_files == first.data_files
    dedup_programs([b], tmp_path / "out")
    both = snapshot(tmp_path / "out")
    for path in (a, b, a):
        dedup_programs([path], tmp_path / "out", prune=True)
        assert snapshot(tmp_path / "out") == both


@pytest.mark.long
def test_what_a_replaced_program_took_stays_until_it_is_pruned(lowered, check, tmp_path):
    """`prune` drops keys that no program takes (D1)."""
    old, new = lowered.mlp(delegated=True, seed=1), lowered.mlp(delegated=True, seed=2)
    other = lowered.decoder()
    dedup_programs([write(old, tmp_path / "a.pte"), write(other, tmp_path / "other.pte")], tmp_path / "out")
    of_both = keys(tmp_path / "out" / "shared.ptd")
    result = dedup_programs([write(new, tmp_path / "a.pte")], tmp_path / "out")
    assert result.replaced == [tmp_path / "out" / "a.pte"] and result.kept == [tmp_path / "out" / "other.pte"]
    assert set(result.unused_keys) < of_both < keys(tmp_path / "out" / "shared.ptd")
    pruned = dedup_programs([tmp_path / "a.pte"], tmp_path / "out", prune=True)
    assert sorted(pruned.pruned_keys) == sorted(result.unused_keys) and pruned.unused_keys == []
    check(tmp_path / "out", {"a": new, "other": other})
    fresh = dedup_programs([tmp_path / "a.pte", tmp_path / "other.pte"], tmp_path / "fresh")
    assert keys(fresh.data_files[0]) == keys(tmp_path / "out" / "shared.ptd")


@pytest.mark.parametrize("save", [False, True])
def test_a_name_that_another_program_still_takes_is_a_conflict(lowered, tmp_path, save):
    """The other program would get the new bytes without notice (R1)."""
    old, new = lowered.mlp(external=True, seed=1), lowered.mlp(external=True, seed=2)
    save_programs({"a": old.manager}, tmp_path / "out", data_name="_default_external_constant")
    before = snapshot(tmp_path / "out")
    program = new.write(tmp_path / "in", "b")
    (data,) = (tmp_path / "in").glob("*.ptd")
    with pytest.raises(KeyConflictError, match=r"b\.pte.*'first\.\w+'.*out/a\.pte"):
        if save:
            save_programs({"b": new.manager}, tmp_path / "out", data_name="_default_external_constant")
        else:
            dedup_programs([program, data], tmp_path / "out", data_name="_default_external_constant")
    assert snapshot(tmp_path / "out") == before


@pytest.mark.long
def test_a_delegates_key_that_another_program_still_takes_is_a_conflict(lowered, tmp_path):
    """Only the payload of the old program's delegate shows that it takes the key (R1)."""
    model = lowered.mlp(delegated=True)
    dedup_programs([write(model, tmp_path / "a.pte")], tmp_path / "out")
    key = next(key for key in keys(tmp_path / "out" / "shared.ptd") if not key.startswith("tensor."))
    (tmp_path / "b.pte").write_bytes(
        with_named_data(lowered.mlp(delegated=True, seed=1).pte, key, b"others", delegated=True)
    )
    before = snapshot(tmp_path / "out")
    with pytest.raises(KeyConflictError, match=r"b\.pte.*delegate.*out/a\.pte"):
        dedup_programs([tmp_path / "b.pte"], tmp_path / "out")
    assert snapshot(tmp_path / "out") == before


def test_a_blob_that_an_old_program_has_in_itself_enters_no_data_file(lowered, stock_run, tmp_path):
    """The stock runtime refuses a key that it finds in two places (R2)."""
    model = lowered.mlp(delegated=True)
    for name in ("a", "b"):
        (tmp_path / f"{name}.pte").write_bytes(with_named_data(model.pte, "small", b"s" * 10, delegated=True))
    dedup_programs([tmp_path / "a.pte"], tmp_path / "out", keep_small=20)
    dedup_programs([tmp_path / "b.pte"], tmp_path / "out")
    assert "small" not in keys(tmp_path / "out" / "shared.ptd")
    for name in ("a", "b"):
        stock_run(tmp_path / "out" / f"{name}.pte", model.inputs(), data_path=tmp_path / "out" / "shared.ptd")
    blobstore.save_file({"small": b"s" * 10}, tmp_path / "small.ptd")
    with pytest.raises(KeyConflictError, match=r"small\.ptd: .*a\.pte has key 'small' in itself"):
        dedup_programs([tmp_path / "b.pte", tmp_path / "small.ptd"], tmp_path / "out")


def test_a_blob_that_stays_in_the_program_leaves_the_data_file(lowered, stock_run, tmp_path):
    """Then the key is in one place (R2)."""
    model = lowered.mlp(delegated=True)
    (tmp_path / "a.pte").write_bytes(with_named_data(model.pte, "small", b"s" * 10, delegated=True))
    dedup_programs([tmp_path / "a.pte"], tmp_path / "out")
    assert "small" in keys(tmp_path / "out" / "shared.ptd")
    result = dedup_programs([tmp_path / "a.pte"], tmp_path / "out", keep_small=20)
    assert result.replaced_keys == ["small"]
    outputs = stock_run(tmp_path / "out" / "a.pte", model.inputs(), data_path=tmp_path / "out" / "shared.ptd")
    assert torch.equal(outputs[0], stock_run(tmp_path / "a.pte", model.inputs())[0])


@pytest.mark.long
@pytest.mark.parametrize("delegated", [False, True])
def test_several_data_files_are_extended(lowered, module_runner, tmp_path, delegated):
    """One for each tag. The stock C++ Module refuses a key that two files share; programs of both runs load with all (R5)."""
    models = {"tuned": lowered.adapters(delegated=delegated, seed=1), "other": lowered.mlp(delegated=delegated)}
    for name in ("tuned", "other"):
        save_programs({name: models[name].manager}, tmp_path / "out")
    result = save_programs({"tuned": models["tuned"].manager}, tmp_path / "out", prune=True)
    assert sorted(path.name for path in result.data_files) == ["adapter.ptd", "foundation.ptd", "shared.ptd"]
    for name, model in models.items():
        inputs = [tensor.numpy() for tensor in model.inputs()]
        outputs = module_runner(tmp_path / "out" / f"{name}.pte", result.data_files, inputs)
        torch.testing.assert_close([torch.tensor(x) for x in outputs], model.eager())


def with_tag(tag, seed):
    """A layer whose constants have the same names and shapes in each data file, which the tag names."""
    from tests.helpers.models import _lowered, portable

    module = torch.nn.Linear(4, 4)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=torch.Generator().manual_seed(seed)))
    methods = {"forward": (module, (torch.ones(1, 4),))}
    return _lowered(methods, partitioners=portable, external_constants=lambda node: tag)


@pytest.mark.long
@pytest.mark.parametrize("together", [True, False])
def test_equal_names_in_other_data_files_are_no_conflict(stock_run, tmp_path, together):
    """A program does not take a key from another program's data file that has the same key (D1)."""
    models = {"enc": with_tag("enc", 1), "dec": with_tag("dec", 2)}
    if together:
        save_programs({name: model.manager for name, model in models.items()}, tmp_path)
    else:
        for name, model in models.items():
            save_programs({name: model.manager}, tmp_path)
    models["enc"] = with_tag("enc", 3)
    result = save_programs({"enc": models["enc"].manager}, tmp_path)
    assert sorted(result.replaced_keys) == ["bias", "weight"] and result.kept == []
    again = snapshot(tmp_path)
    save_programs({"enc": models["enc"].manager}, tmp_path)
    assert snapshot(tmp_path) == again
    for name, model in models.items():
        found = stock_run(tmp_path / f"{name}.pte", model.inputs(), data_path=tmp_path / f"{name}.ptd")
        torch.testing.assert_close(found, model.eager())


@pytest.mark.long
def test_equal_names_do_not_hide_who_takes_a_data_file(stock_run, tmp_path):
    """A program on the same data file keeps its weights, although a third file also has all its keys (D1)."""
    models = {"enc": with_tag("enc", 1), "fast": with_tag("enc", 1), "dec": with_tag("dec", 2)}
    save_programs({name: model.manager for name, model in models.items()}, tmp_path)
    before = snapshot(tmp_path)
    with pytest.raises(KeyConflictError, match=r"fast\.pte"):
        save_programs({"enc": with_tag("enc", 3).manager}, tmp_path)
    (tmp_path / "fast.pte").rename(tmp_path / "renamed.pte")
    with pytest.raises(KeyConflictError, match=r"renamed\.pte"):
        save_programs({"enc": with_tag("enc", 3).manager}, tmp_path)
    (tmp_path / "renamed.pte").rename(tmp_path / "fast.pte")
    assert snapshot(tmp_path) == before
    changed = {"enc": with_tag("enc", 3), "fast": with_tag("enc", 3)}
    save_programs({name: model.manager for name, model in changed.items()}, tmp_path)
    for name, model in {**models, **changed}.items():
        data = tmp_path / ("dec.ptd" if name == "dec" else "enc.ptd")
        found = stock_run(tmp_path / f"{name}.pte", model.inputs(), data_path=data)
        torch.testing.assert_close(found, model.eager())


@pytest.mark.long
def test_names_that_are_taken_otherwise_are_not_used(lowered, check, tmp_path):
    """If an old program takes other bytes by the name, the new tensor gets a key made of its content (R1)."""
    models = {name: lowered.mlp(seed=seed) for name, seed in (("a", 1), ("b", 2))}
    for name, model in models.items():
        module, _ = model.methods["forward"]
        blobstore.save_file({"second.bias": module.state_dict()["second.bias"]}, tmp_path / f"{name}.ptd")
        with open_ptd(tmp_path / f"{name}.ptd") as names:
            dedup_programs([write(model, tmp_path / f"{name}.pte")], tmp_path / "out", names=names)
    check(tmp_path / "out", models)


@pytest.mark.long
def test_records_stay_with_the_blobs_that_they_describe(lowered, tmp_path):
    """Updates by name need the records that lowering wrote, which no program looks up (U1)."""
    from tests.lowering.live import lower_through

    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    path = lower_through({"forward": (module, (torch.ones(2, 4),))}, tmp_path / "in")
    dedup_programs(tmp_path / "in", tmp_path / "out")
    before = keys(tmp_path / "out" / "shared.ptd")
    assert any(key.startswith("metadata.blobstore.") for key in before)
    other = write(lowered.mlp(), tmp_path / "other.pte")
    result = dedup_programs([other], tmp_path / "out", prune=True)
    assert result.pruned_keys == [] and before < keys(tmp_path / "out" / "shared.ptd")
    (tmp_path / "out" / path.name).unlink()
    result = dedup_programs([other], tmp_path / "out", prune=True)
    assert set(result.pruned_keys) == before


def test_data_files_of_unknown_origin(lowered, tmp_path):
    """They are extended only with `force` (B5)."""
    program = write(lowered.mlp(), tmp_path / "a.pte")
    (tmp_path / "out").mkdir()
    stock = lowered.mlp(external=True).write(tmp_path / "stock", "x").parent / "_default_external_constant.ptd"
    for make in (
        lambda path: blobstore.save_file({"checkpoint": b"mine"}, path),
        lambda path: path.write_bytes(stock.read_bytes()),
        lambda path: path.write_bytes(program.read_bytes()),
        lambda path: path.write_text("a letter"),
    ):
        make(tmp_path / "out" / "shared.ptd")
        before = snapshot(tmp_path / "out")
        with pytest.raises(OutputPathError, match=r"out/shared\.ptd: this"):
            dedup_programs([program], tmp_path / "out")
        assert snapshot(tmp_path / "out") == before
    blobstore.save_file({"checkpoint": b"mine"}, tmp_path / "out" / "shared.ptd", {"by": "me"}, force=True)
    dedup_programs([program], tmp_path / "out", force=True)
    with open_ptd(tmp_path / "out" / "shared.ptd") as data_map:
        assert data_map.bytes("checkpoint") == b"mine" and data_map.metadata["by"] == "me"
    dedup_programs([program], tmp_path / "out")  # it is known now


def test_a_program_that_cannot_be_read_is_told(lowered, tmp_path):
    """An error names it, because the keys that it takes are unknown; one that is replaced does not matter (B5)."""
    program = write(lowered.mlp(), tmp_path / "a.pte")
    dedup_programs([program], tmp_path / "out")
    slim = (tmp_path / "out" / "a.pte").read_bytes()
    (tmp_path / "out" / "cut.pte").write_bytes(slim[:-1])
    with pytest.raises(InvalidFileError, match=r"out/cut\.pte"):
        dedup_programs([program], tmp_path / "out")
    (tmp_path / "out" / "cut.pte").write_text("version https://git-lfs.github.com/spec/v1")  # nothing of ours
    (tmp_path / "out" / "cut.pte").rename(tmp_path / "out" / "lfs.txt")
    (tmp_path / "out" / "a.pte").write_bytes(slim[:-1])  # it is replaced, so what it took does not matter
    dedup_programs([program], tmp_path / "out")
    assert (tmp_path / "out" / "a.pte").read_bytes() == slim


@pytest.mark.long
def test_two_processes_at_once(lowered, check, tmp_path):
    """Each adds its program; neither works on files that the other is replacing (B5)."""
    models = {f"m{seed}": lowered.mlp(seed=seed) for seed in range(1, 5)}
    code = "import sys; from blobstore.programs import dedup_programs; dedup_programs(sys.argv[1], sys.argv[2])"
    processes = [
        subprocess.Popen([sys.executable, "-c", code, write(model, tmp_path / f"{name}.pte"), tmp_path / "out"])
        for name, model in models.items()
    ]
    assert [process.wait() for process in processes] == [0] * len(models)
    check(tmp_path / "out", models)


# Inputs


@pytest.mark.long
def test_folders_keep_their_structure(lowered, check, tmp_path):
    """A program keeps its place below the folder that was given (B1)."""
    models = {"v1/model": lowered.mlp(seed=1), "v2/model": lowered.mlp(seed=2), "top": lowered.mlp(seed=3)}
    for name, model in models.items():
        write(model, tmp_path / "models" / f"{name}.pte")
    blobstore.save_file({"more": b"data"}, tmp_path / "models" / "v1" / "more.ptd")
    (tmp_path / "models" / "v1" / "notes.txt").write_text("no model")
    (tmp_path / "models" / ".hidden").mkdir()
    (tmp_path / "models" / ".hidden" / "x.pte").write_text("none")
    for output in (tmp_path / "out", tmp_path / "models" / "out"):
        for _ in range(2):  # an output folder between the inputs is not an input
            result = dedup_programs(tmp_path / "models", output)
            assert sorted(p.path for p in result.programs) == sorted(output / f"{name}.pte" for name in models)
            assert result.data_files == [output / "shared.ptd"] and "more" in keys(output / "shared.ptd")
            check(output, models)


def test_equal_names_keep_as_many_folders_as_tell_them_apart(lowered, tmp_path, monkeypatch):
    """Programs with one file name keep different parent folders (B1)."""
    monkeypatch.chdir(tmp_path)
    pte = lowered.mlp().pte
    for path in ("v1/model.pte", "v2/model.pte", "x/v1/model.pte", "other.pte"):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(pte)

    def outputs(*inputs):
        result = dedup_programs(inputs, "out" + str(len(os.listdir())))
        return [str(Path(*program.path.parts[1:])) for program in result.programs]

    assert outputs("v1/model.pte", "other.pte") == ["model.pte", "other.pte"]
    assert outputs("v1/model.pte", "v2/model.pte", "other.pte") == ["v1/model.pte", "v2/model.pte", "other.pte"]
    assert outputs("v1/model.pte", "x/v1/model.pte") == [f"{tmp_path.name}/v1/model.pte", "x/v1/model.pte"]
    assert outputs("v1", "v2") == ["v1/model.pte", "v2/model.pte"]
    assert outputs("v1", "v1/model.pte", "./v1/../v1/model.pte") == ["model.pte"]  # one file, named thrice


def test_a_folder_without_models(tmp_path):
    """An error that names the folder (B5)."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(blobstore.errors.FileAccessError, match="neither a .pte nor a .ptd"):
        dedup_programs(tmp_path / "empty", tmp_path / "out")
    (tmp_path / "empty" / "x.pte").write_text("a letter, not a program")
    with pytest.raises((UnsupportedDataError, InvalidFileError), match=r"x\.pte"):
        dedup_programs(tmp_path / "empty", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_inputs_are_replaced_if_that_is_wanted(lowered, check, tmp_path):
    """With `force`, a folder can be deduplicated in place (B1)."""
    models = {"a": lowered.mlp(seed=1), "b": lowered.decoder()}
    embedded = {name: write(model, tmp_path / "in" / f"{name}.pte").read_bytes() for name, model in models.items()}
    before = snapshot(tmp_path / "in")
    with pytest.raises(OutputPathError, match="one of the inputs"):
        dedup_programs(tmp_path / "in", tmp_path / "in")
    assert snapshot(tmp_path / "in") == before
    dedup_programs(tmp_path / "in", tmp_path / "in", force=True)
    assert all((tmp_path / "in" / f"{name}.pte").stat().st_size < len(old) for name, old in embedded.items())
    check(tmp_path / "in", models)
    again = snapshot(tmp_path / "in")
    dedup_programs(tmp_path / "in", tmp_path / "in", force=True)
    assert snapshot(tmp_path / "in") == again


def test_an_empty_store_is_a_data_file_too(lowered, tmp_path):
    """A data file without keys is an input like any other."""
    BlobStore().write_ptd(tmp_path / "none.ptd")
    dedup_programs([tmp_path / "none.ptd", write(lowered.mlp(), tmp_path / "a.pte")], tmp_path / "out")
    assert sorted(os.listdir(tmp_path / "out")) == ["a.pte", "shared.ptd"]


@pytest.mark.parametrize("writer", ["save_file", "convert", "store", "stores"])
def test_the_data_file_of_programs_is_not_replaced_by_another_one(lowered, tmp_path, writer):
    """W1, B5: the programs in the folder would not load any more. With `force` it is what was asked for."""
    lowered.mlp().write(tmp_path / "in", "a")
    dedup_programs(tmp_path / "in", tmp_path / "out")
    target = tmp_path / "out" / "shared.ptd"
    before = target.read_bytes()
    tensors = {"w": np.ones(4, np.float32)}
    store = BlobStore()
    store.add("w", tensors["w"], tag="shared")
    safetensors.numpy.save_file(tensors, tmp_path / "w.safetensors")
    writers = {
        "save_file": lambda **options: save_file(tensors, target, **options),
        "convert": lambda **options: convert(tmp_path / "w.safetensors", target, **options),
        "store": lambda **options: store.write_ptd(target, **options),
        "stores": lambda **options: store.write(tmp_path / "out", **options),
    }
    with pytest.raises(OutputPathError, match="written together with programs"):
        writers[writer]()
    assert target.read_bytes() == before
    writers[writer](force=True)
    with open_ptd(target) as data_map:
        assert list(data_map) == ["w"]


@pytest.mark.parametrize("place", ["table", "blob", "manifest", "end"])
def test_a_damaged_data_file_of_programs_is_replaced_unless_programs_still_load_with_it(lowered, tmp_path, place):
    """B5: no program loads with a file whose table or manifest is damaged, so nothing is lost with it."""
    lowered.mlp().write(tmp_path / "in", "a")
    dedup_programs(tmp_path / "in", tmp_path / "out")
    target = tmp_path / "out" / "shared.ptd"
    with open_ptd(target) as data_map:
        at = {
            "table": data_map.head_size - 8,
            "blob": data_map.extents[0][0],
            "manifest": data_map.manifest_extent[0] + 8,
            "end": target.stat().st_size - 1,
        }[place]
    damaged = bytearray(target.read_bytes())
    damaged[at] ^= 1
    target.write_bytes(damaged)
    if place == "blob":
        with pytest.raises(OutputPathError, match="written together with programs"):
            save_file({"w": np.ones(4, np.float32)}, target)
        assert target.read_bytes() == damaged
    else:
        save_file({"w": np.ones(4, np.float32)}, target)
        with open_ptd(target) as data_map:
            assert list(data_map) == ["w"]


def test_the_same_run_saves_as_much_a_second_time(lowered, tmp_path):
    """What the first run left is not counted as if it could be saved again."""
    for name in ("a", "b"):
        lowered.mlp().write(tmp_path / "in", name)
    first, second = (dedup_programs(tmp_path / "in", tmp_path / "out") for _ in range(2))
    assert (first.bytes_before, first.bytes_after) == (second.bytes_before, second.bytes_after)
