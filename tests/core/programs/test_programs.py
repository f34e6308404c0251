"""Many programs, one data file: run by the stock runtimes, in Python and in C++, before and after."""

import os
import struct

import pytest
import torch
from executorch.exir._serialize._named_data_store import NamedDataStoreOutput
from executorch.exir._serialize._program import deserialize_pte_binary, serialize_pte_binary
from executorch.exir._serialize.data_serializer import DataEntry

import blobstore
from blobstore import BlobStore, errors, open_ptd
from blobstore.core.formats.safetensors import SafetensorsDataMap
from blobstore.programs import dedup_programs, save_programs
from tests.core.formats.pte.oracle import check_same


def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def check_all(stock_run, models, after):
    """Check that every method computes the same as before, to the bit."""
    for name, model in models.items():
        check_same(stock_run, model, after / f"{name}.pte", data=after / "shared.ptd")


def with_named_data(pte, key, data, *, delegated=False):
    """A program with an additional blob under a key, written by ExecuTorch.

    With `delegated`, the payload of its delegate names the key, behind all that XNNPACK reads of it.
    """
    file = deserialize_pte_binary(pte)
    had = file.named_data or NamedDataStoreOutput([], {}, {})
    entry = DataEntry(len(had.buffers), 16, None)
    file.named_data = NamedDataStoreOutput([*had.buffers, data], {**had.pte_data, key: entry}, {})
    if delegated:
        payload = file.program.backend_delegate_data[0]
        payload.data = bytes(payload.data) + struct.pack("<I", len(key)) + key.encode() + b"\0"
    return bytes(serialize_pte_binary(file, extract_delegate_segments=True))


@pytest.fixture
def models(lowered):
    return {
        "decoder": lowered.decoder(),
        "portable": lowered.decoder(delegated=False),
        "conv": lowered.conv(),
        "mlp": lowered.mlp(delegated=True),
        "mlp2": lowered.mlp(delegated=False),
        "channels_last": lowered.channels_last(),
        "counter": lowered.counter(),
    }


@pytest.fixture
def before(models, tmp_path):
    for name, model in models.items():
        model.write(tmp_path / "before", name)
    return tmp_path / "before"


def paths_of(folder):
    return sorted(folder.glob("*.pte"))


def snapshot(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


# The main job


def test_outputs_are_bit_identical(stock_run, models, before, tmp_path):
    """Old programs run in the stock Python and C++ runtimes with the data file, and compute the same (B1, D1)."""
    result = dedup_programs(paths_of(before), tmp_path / "after")
    check_all(stock_run, models, tmp_path / "after")
    assert result.data_files == [tmp_path / "after" / "shared.ptd"]
    assert result.bytes_before == sum(path.stat().st_size for path in before.iterdir())
    assert result.bytes_after == sum(path.stat().st_size for path in (tmp_path / "after").iterdir())
    for program in result.programs:
        assert program.bytes_before == program.source.stat().st_size
        assert program.bytes_after == program.path.stat().st_size
        assert program.moved > 0
        assert not program.missing


def test_each_distinct_content_is_there_once(before, tmp_path):
    """Equal tensors of different programs are one blob (R1, D1)."""
    dedup_programs(paths_of(before), tmp_path / "after")
    with open_ptd(tmp_path / "after" / "shared.ptd", verify=True) as data_map:
        segments = {data_map.segment_of(key): data_map.bytes(key) for key in data_map}
        assert len(set(segments.values())) == len(segments)


def test_the_order_of_the_inputs_is_that_of_the_keys_and_changes_nothing_else(before, tmp_path):
    """Another order gives the same blobs and the same programs (R2)."""
    dedup_programs(paths_of(before), tmp_path / "x")
    dedup_programs(reversed(paths_of(before)), tmp_path / "y")
    x, y = (open_ptd(tmp_path / name / "shared.ptd") for name in "xy")
    assert list(x) != list(y)
    assert dict(x.views()) == dict(y.views())
    for program in paths_of(tmp_path / "x"):
        assert program.read_bytes() == (tmp_path / "y" / program.name).read_bytes()


def test_a_second_run_moves_nothing_more(stock_run, models, before, tmp_path):
    """Slim programs stay as they are (B1)."""
    dedup_programs(paths_of(before), tmp_path / "once")
    again = dedup_programs([*paths_of(tmp_path / "once"), tmp_path / "once" / "shared.ptd"], tmp_path / "twice")
    assert all(program.moved == 0 and not program.missing for program in again.programs)
    assert (tmp_path / "twice" / "shared.ptd").read_bytes() == (tmp_path / "once" / "shared.ptd").read_bytes()
    check_all(stock_run, models, tmp_path / "twice")


def test_save_programs_writes_what_dedup_does(models, before, tmp_path):
    """From freshly lowered programs, without files in between (W2, B1)."""
    saved = save_programs({name: model.manager for name, model in models.items()}, tmp_path / "saved")
    result = dedup_programs([before / f"{name}.pte" for name in models], tmp_path / "dedup")
    assert [str(program.source) for program in saved.programs] == list(models)
    assert (saved.bytes_before, saved.bytes_after) == (result.bytes_before, result.bytes_after)
    assert sorted(os.listdir(tmp_path / "saved")) == sorted(os.listdir(tmp_path / "dedup"))
    for path in (tmp_path / "saved").iterdir():
        assert path.read_bytes() == (tmp_path / "dedup" / path.name).read_bytes()


# Data files that are there already


def test_external_data_of_the_inputs_ends_in_the_shared_file(stock_run, lowered, tmp_path):
    """Under its keys, and without the files that were given (B1, R5)."""
    model = lowered.mlp(external=True)
    program = model.write(tmp_path / "in", "mlp")
    (data,) = (tmp_path / "in").glob("*.ptd")
    lowered.mlp(delegated=False).write(tmp_path / "in", "embedded")
    result = dedup_programs([program, tmp_path / "in" / "embedded.pte", data], tmp_path / "out")
    assert not any(program.missing for program in result.programs)
    for name in ("mlp", "embedded"):
        outputs = stock_run(tmp_path / "out" / f"{name}.pte", model.inputs(), data_path=tmp_path / "out" / "shared.ptd")
        assert same(outputs, stock_run(program, model.inputs(), data_path=data))
    with open_ptd(tmp_path / "out" / "shared.ptd") as data_map:
        assert data_map.segment_of("first.weight") in {
            data_map.segment_of(key) for key in data_map if key.startswith("tensor.")
        }


def test_a_data_file_that_was_not_given_is_told(lowered, tmp_path):
    """The result lists the keys that a program still needs from elsewhere (B1)."""
    program = lowered.mlp(external=True).write(tmp_path / "in", "mlp")
    (result,) = dedup_programs([program], tmp_path / "out").programs
    assert "first.weight" in result.missing
    assert os.listdir(tmp_path / "out") == ["mlp.pte"]  # nothing was moved, so there is no data file


# Keys


def test_keep_small(stock_run, models, before, tmp_path):
    """Small tensors stay in their program (W3)."""
    result = dedup_programs(paths_of(before), tmp_path / "after", keep_small=1000)
    with open_ptd(tmp_path / "after" / "shared.ptd") as data_map:
        assert min(len(data) for _, data in data_map.views()) >= 1000
    check_all(stock_run, models, tmp_path / "after")
    everything = dedup_programs(paths_of(before), tmp_path / "all")
    assert sum(p.moved for p in result.programs) < sum(p.moved for p in everything.programs)
    nothing = dedup_programs(paths_of(before), tmp_path / "nothing", keep_small=1 << 40)
    assert nothing.data_files == []
    assert all(program.moved == 0 for program in nothing.programs)


def test_a_small_blob_that_a_data_file_has_may_not_stay(tmp_path, lowered, stock_run):
    """The stock runtime refuses a key that it finds both in the program and in the data file (R2)."""
    model = lowered.mlp(delegated=False)
    (tmp_path / "a.pte").write_bytes(with_named_data(model.pte, "small", b"s" * 10))
    store = BlobStore()
    store.add("small", b"s" * 10)
    store.write_ptd(tmp_path / "a.ptd")
    dedup_programs([tmp_path / "a.pte", tmp_path / "a.ptd"], tmp_path / "out", keep_small=1000)
    outputs = stock_run(tmp_path / "out" / "a.pte", model.inputs(), data_path=tmp_path / "out" / "shared.ptd")
    assert same(outputs, stock_run(tmp_path / "a.pte", model.inputs()))


@pytest.mark.parametrize("order", [["a", "b"], ["b", "a"]])
@pytest.mark.parametrize("keep_small", [0, 20])
def test_a_name_that_a_delegate_has_is_not_given_to_a_tensor(tmp_path, lowered, stock_run, order, keep_small):
    """Whether that delegate's blob moves or stays: a key must have one content (R2)."""
    model = lowered.mlp(delegated=False)
    (tmp_path / "a.pte").write_bytes(with_named_data(model.pte, "second.bias", b"s" * 10))
    (tmp_path / "b.pte").write_bytes(model.pte)
    module, _ = model.methods["forward"]
    blobstore.save_file({"second.bias": module.state_dict()["second.bias"]}, tmp_path / "names.ptd")
    with open_ptd(tmp_path / "names.ptd") as names:
        paths = [tmp_path / f"{name}.pte" for name in order]
        dedup_programs(paths, tmp_path / "out", keep_small=keep_small, names=names)
    for name in order:
        outputs = stock_run(tmp_path / "out" / f"{name}.pte", model.inputs(), data_path=tmp_path / "out" / "shared.ptd")
        assert same(outputs, stock_run(tmp_path / "b.pte", model.inputs()))


def test_names_of_a_checkpoint(stock_run, lowered, tmp_path):
    """Moved tensors get the names of equal tensors of the checkpoint as keys, if only one is equal (D2)."""
    from safetensors.torch import save_file

    model = lowered.mlp(delegated=False)
    model.write(tmp_path / "before", "mlp")
    module, _ = model.methods["forward"]
    tensors = {name: tensor.contiguous().clone() for name, tensor in module.state_dict().items()}
    tensors["ambiguous"] = tensors["first.bias"].clone()  # equal bytes under two names: neither is used
    tensors["transposed"] = tensors["second.weight"].reshape(32, 16).clone()  # so is this, in another shape
    save_file(tensors, tmp_path / "model.safetensors")
    with SafetensorsDataMap(tmp_path / "model.safetensors") as names:
        dedup_programs([tmp_path / "before" / "mlp.pte"], tmp_path / "after", names=names)
    with open_ptd(tmp_path / "after" / "shared.ptd") as data_map:
        named = {key for key in data_map if not key.startswith("tensor.")}
        assert "second.bias" in named
        assert not named & {"first.bias", "ambiguous", "second.weight", "transposed"}
        for key in named:
            assert data_map.bytes(key) == tensors[key].numpy().tobytes()
    check_all(stock_run, {"mlp": model}, tmp_path / "after")


def test_contents_with_one_digest_get_keys_of_their_own(monkeypatch, stock_run, models, before, tmp_path):
    """Such contents have never been seen; with all digests made equal, nothing is mixed up (R1, B5)."""
    from blobstore.core import store
    from blobstore.core.formats.ptd import writer
    from blobstore.core.formats.pte import program
    from blobstore.core.memory.digest import Digest

    def fake(data):
        return Digest(len(data), bytes(16))

    monkeypatch.setattr(store, "digest", fake)
    monkeypatch.setattr(program, "digest", fake)
    monkeypatch.setattr(writer, "_changed", lambda key, expected, found: None)
    dedup_programs(paths_of(before), tmp_path / "after")
    monkeypatch.undo()
    with open_ptd(tmp_path / "after" / "shared.ptd") as data_map:
        assert any(key.endswith(".2") for key in data_map)
    check_all(stock_run, models, tmp_path / "after")


# Bad input: an error that says what and where, and everything as it was


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".."])
def test_bad_names(before, tmp_path, name, models):
    """Names of files that would leave the folder, or wrong types, are errors (B5)."""
    with pytest.raises(errors.InvalidTagError):
        dedup_programs(paths_of(before), tmp_path / "out", data_name=name)
    with pytest.raises(errors.InvalidTagError):
        save_programs({name or "/": models["mlp"].manager}, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_damaged_inputs_leave_no_output(before, tmp_path):
    """An error that names the file, and the folder is as before (B5)."""
    (tmp_path / "cut.pte").write_bytes((before / "mlp.pte").read_bytes()[:-1])
    with pytest.raises(errors.InvalidFileError, match=r"cut\.pte: .*truncated"):
        dedup_programs([before / "mlp.pte", tmp_path / "cut.pte"], tmp_path / "out")
    (tmp_path / "text.txt").write_text("no program")
    with pytest.raises(errors.UnsupportedDataError, match=r"text\.txt: expected a \.pte or a \.ptd"):
        dedup_programs([tmp_path / "text.txt"], tmp_path / "out")
    with pytest.raises(errors.FileAccessError, match=r"gone\.pte"):
        dedup_programs([tmp_path / "gone.pte"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_progress_reaches_its_end(before, tmp_path):
    """Every phase reports its total in the end."""
    steps = {}
    dedup_programs(
        paths_of(before),
        tmp_path / "after",
        progress=lambda what, done, total: steps.setdefault(what, []).append((done, total)),
    )
    assert "reading mlp.pte" in steps
    assert "writing mlp.pte" in steps
    assert "writing shared.ptd" in steps
    for what, history in steps.items():
        assert [done for done, _ in history] == sorted(done for done, _ in history)
        assert history[-1][0] == history[-1][1], what
