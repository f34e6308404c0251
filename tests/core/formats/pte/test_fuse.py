"""Several programs as one: the stock runtime computes the same bits from one file, which has each blob once (L4)."""

import copy
import io
import struct
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blobstore import dedup_programs, errors, open_ptd
from blobstore.core.disk.kinds import Format, detect_format
from blobstore.core.formats.pte.description import describe
from blobstore.core.formats.pte.fuse import FusedBlob, FusedProgram, Fusion, _Contents
from blobstore.core.formats.pte.program import ProgramFile, read_program
from blobstore.core.memory.layout import ScalarType, TensorLayout
from blobstore.core.programs.fuse import fuse_programs
from tests.core.formats.pte import oracle, programs
from tests.core.formats.pte.oracle import check_same
from tests.helpers import models

CASES = {name: make for name, make in programs.everything().items() if name != "already external"}


def method_lines(program: ProgramFile, name: str) -> list[tuple[str, list[str]]]:
    """A method's description, without its name."""
    start = f"method {name}: "
    return [(part.removeprefix(start), lines) for part, lines in describe(program).items() if part.startswith(start)]


def fused_in_memory(parts: list[FusedProgram]) -> ProgramFile:
    file = io.BytesIO()
    fusion = Fusion(parts)
    fusion.write(file)
    assert file.tell() == fusion.nbytes
    return ProgramFile("one.pte", memoryview(file.getvalue()))


def check_again(path: Path) -> None:
    """What `fuse` wrote comes out of it to the byte."""
    again = path.with_suffix(".again.pte")
    fuse_programs(path, again)
    assert again.read_bytes() == path.read_bytes()


def blobs_of(program: ProgramFile) -> list[tuple[str, bytes]]:
    """All constants, states, and blobs of delegates, each place once."""
    spans = {(item.kind, item.span) for item in program.tensors}
    spans |= {("delegate", one.span) for one in (*program.named_data, *program.delegates)}
    return [(kind, bytes(program.data[span.start : span.stop])) for kind, span in spans if span.size]


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_one_program(tmp_path: Path, stock_run: Any, name: str) -> None:
    """It says the same as before, and has each blob once; ExecuTorch's own reader takes it; it stays as it is."""
    model = CASES[name]()
    path = model.write(tmp_path)
    result = fuse_programs(path, tmp_path / "one.pte")
    check_same(stock_run, model, tmp_path / "one.pte")
    before, after = read_program(path), read_program(tmp_path / "one.pte")
    # the runtime cannot reach an unused segment
    assert describe(before) | {"unused segments": []} == describe(after)
    assert {one.key: bytes(before.data[slice(*one.span)]) for one in before.named_data} == {
        one.key: bytes(after.data[slice(*one.span)]) for one in after.named_data
    }
    blobs = blobs_of(after)
    assert len(set(blobs)) == len(blobs)
    oracle.deserialize((tmp_path / "one.pte").read_bytes())
    assert [one.name for one in result.methods] == before.methods
    assert result.bytes_after == (tmp_path / "one.pte").stat().st_size
    check_again(tmp_path / "one.pte")


@pytest.mark.long
def test_all_programs(tmp_path: Path, stock_run: Any) -> None:
    """Portable and delegated, with states, conditions and several methods, in one file."""
    paths, methods, lowered = [], {}, {}
    for number, (name, make) in enumerate(CASES.items()):
        lowered[f"m{number}"] = make()
        paths.append(make().write(tmp_path / name, f"m{number}"))
        methods |= {f"m{number}:{method}": f"{method}_{number}" for method in make().methods}
    result = fuse_programs(paths, tmp_path / "one.pte", methods=methods)
    for number, model in enumerate(lowered.values()):
        check_same(stock_run, model, tmp_path / "one.pte", {name: f"{name}_{number}" for name in model.methods})
    program = read_program(tmp_path / "one.pte")
    for path in paths:
        for method in read_program(path).methods:
            new = methods[f"{path.stem}:{method}"]
            assert method_lines(read_program(path), method) == method_lines(program, new)
    blobs = blobs_of(program)
    assert len(set(blobs)) == len(blobs)
    assert result.shared > 0
    assert result.bytes_after < result.bytes_before
    check_again(tmp_path / "one.pte")
    file = oracle.deserialize((tmp_path / "one.pte").read_bytes())
    assert sorted(plan.name for plan in file.program.execution_plan) == sorted(methods.values())


def test_equal_digests_of_different_blobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collision merges nothing, and neither does a common beginning and end (B5)."""
    monkeypatch.setattr("blobstore.core.formats.pte.fuse.digest", lambda data: "the same for all")
    contents = _Contents()
    blobs = [bytes(1000), bytes(500) + b"x" + bytes(499), bytes(999) + b"x", bytes(400) + b"x" + bytes(599), b"", b"y"]
    indices = [contents.add(FusedBlob(memoryview(blob), None, 16)) for blob in (*blobs, *blobs)]
    assert indices == [*range(6), *range(6)]
    assert contents.shared == sum(map(len, blobs))


@pytest.mark.long
@pytest.mark.parametrize("name", ["portable", "delegated", "two delegated methods", "many dtypes", "initial state"])
def test_weights_in_data_files_come_back(tmp_path: Path, stock_run: Any, name: str) -> None:
    """Deduplicated programs and their data become one file again, which needs no other."""
    model = CASES[name]()
    path = model.write(tmp_path / "before", "a")
    dedup_programs(path, tmp_path / "slim")
    inputs = [tmp_path / "slim/a.pte", tmp_path / "slim/shared.ptd"]
    fuse_programs(inputs, tmp_path / "one.pte")
    check_same(stock_run, model, tmp_path / "one.pte")
    program = read_program(tmp_path / "one.pte")
    assert not program.externals
    assert sorted(blobs_of(program)) == sorted(set(blobs_of(read_program(path))))
    check_again(tmp_path / "one.pte")


@pytest.mark.slow_for("True-decoder", "False-decoder")
@pytest.mark.long
@pytest.mark.parametrize("make", [models.mlp, models.decoder, models.adapters], ids=["mlp", "decoder", "adapters"])
@pytest.mark.parametrize("delegated", [False, True])
def test_data_files_of_executorch(tmp_path: Path, stock_run: Any, make: Any, delegated: bool) -> None:
    """Its external constants have room for an index; adapters lie in two data files."""
    options = {} if make is models.adapters else {"external": True}
    model = make(delegated=delegated, **options)
    model.write(tmp_path)
    files = [tmp_path / "model.pte", *sorted(tmp_path.glob("*.ptd"))]
    assert len(files) > 1
    fuse_programs(files, tmp_path / "one.pte")
    for method in model.methods:
        for left, right in zip(
            stock_run(tmp_path / "one.pte", model.inputs(method), method=method), model.eager(method), strict=True
        ):
            torch.testing.assert_close(left, right)
    assert not read_program(tmp_path / "one.pte").externals
    with pytest.raises(errors.KeyNotFoundError, match=r"model\.pte: .*must come from a data file.*--keep-external"):
        fuse_programs(files[0], tmp_path / "two.pte")
    result = fuse_programs(files[0], tmp_path / "two.pte", keep_external=True)
    assert set(result.missing) == {key for file in files[1:] for key in open_ptd(file)}
    assert fuse_programs(tmp_path / "one.pte", tmp_path / "three.pte").missing == ()
    check_again(tmp_path / "one.pte")
    if not delegated:
        assert set(result.missing) == {one.key for one in read_program(files[0]).externals}
        assert read_program(tmp_path / "two.pte").externals


def test_collisions_are_refused_or_renamed(tmp_path: Path, stock_run: Any) -> None:
    """Equal methods are one; different ones need a name each."""
    one, other = models.mlp(seed=0), models.mlp(seed=1)
    a, b = one.write(tmp_path / "x", "a"), other.write(tmp_path / "y", "b")
    output = tmp_path / "one.pte"
    with pytest.raises(
        errors.UnsupportedProgramError, match=r"b\.pte: .*a\.pte has a method 'forward', too.*--method b:forward=NAME"
    ):
        fuse_programs([a, b], output)
    assert not output.exists()
    same = one.write(tmp_path / "z", "same")
    result = fuse_programs([a, same], output)
    assert [method.name for method in result.methods] == ["forward"]
    assert [(method.program, method.method) for method in result.left_out] == [(same, "forward")]
    for what in ("b", "b.pte", str(b), "b:forward", f"{b}:forward"):
        fuse_programs([a, b], output, methods={what: "short"})
        check_same(stock_run, one, output)
        check_same(stock_run, other, output, {"forward": "short"})
    fuse_programs([a, b], output, methods={"a": ""})
    check_same(stock_run, other, output)
    assert blobs_of(read_program(output)) != []
    assert sorted(blobs_of(read_program(output))) == sorted(blobs_of(read_program(b)))


@pytest.mark.parametrize(
    ("methods", "error", "message"),
    [
        ({"c": "x"}, errors.MethodNotFoundError, "'c' names none of the programs"),
        (
            {"b:backward": "x"},
            errors.MethodNotFoundError,
            r"has no method 'backward', but 'forward' \(--method b:forward=NAME\)",
        ),
        ({"b": "a\0b"}, errors.InvalidKeyError, r"b\.pte: .*NUL"),
        ({"b": "\ud800"}, errors.InvalidKeyError, "not valid Unicode"),
        ({"a": "", "b": ""}, errors.UnsupportedDataError, "all methods are left out"),
        ({"a": "same", "b": "same"}, errors.UnsupportedProgramError, "has a method 'same', too"),
    ],
)
def test_names_that_are_not_possible(tmp_path: Path, methods: Any, error: Any, message: str) -> None:
    a, b = models.mlp(seed=0).write(tmp_path, "a"), models.mlp(seed=1).write(tmp_path, "b")
    with pytest.raises(error, match=message):
        fuse_programs([a, b], tmp_path / "one.pte", methods=methods)
    assert not (tmp_path / "one.pte").exists()


def test_one_name_for_two_programs_is_ambiguous(tmp_path: Path) -> None:
    a, b = models.mlp(seed=0).write(tmp_path / "x", "a"), models.mlp(seed=1).write(tmp_path / "y", "a")
    with pytest.raises(errors.MethodNotFoundError, match="several programs; call them by their paths"):
        fuse_programs([a, b], tmp_path / "one.pte", methods={"a": "x"})
    fuse_programs([a, b], tmp_path / "one.pte", methods={str(b): "x"})


def test_methods_of_training_are_renamed_together(tmp_path: Path) -> None:
    """ExecuTorch finds them by the name of the method that they belong to."""
    model = models.mlp()
    file = oracle.deserialize(model.pte)
    for kind in ("gradients_index", "parameters_index", "fqn"):
        plan = copy.deepcopy(file.program.execution_plan[0])
        plan.name = f"__et_training_{kind}_forward"
        file.program.execution_plan.append(plan)
    path = tmp_path / "a.pte"
    path.write_bytes(bytes(oracle._program.serialize_pte_binary(file, extract_delegate_segments=True)))
    fuse_programs(path, tmp_path / "one.pte", methods={"a:forward": "train"})
    names = read_program(tmp_path / "one.pte").methods
    assert names == [
        "train",
        *(f"__et_training_{kind}_train" for kind in ("gradients_index", "parameters_index", "fqn")),
    ]
    fuse_programs(path, tmp_path / "one.pte", methods={"a:forward": "", "a:__et_training_fqn_forward": "kept"})
    assert read_program(tmp_path / "one.pte").methods == ["kept"]


@pytest.mark.long
@pytest.mark.parametrize("backend", [b"XnnpackBackend", b"UnknownBackend"])
def test_one_key_for_different_weights_is_refused(tmp_path: Path, backend: bytes) -> None:
    """Delegates look keys up by text, so a key cannot be renamed. Which keys other backends take is unknown."""
    one, other = models.decoder(), models.decoder()
    a, b = one.write(tmp_path, "a"), other.write(tmp_path, "b")
    a.write_bytes(a.read_bytes().replace(b"XnnpackBackend", backend))
    data = bytearray(a.read_bytes())
    blob = read_program(b).named_data[0]
    b.write_bytes(data)
    result = fuse_programs([a, b], tmp_path / "one.pte")
    assert {method.method for method in result.left_out} == {"prefill", "decode"}
    data[blob.span.start] ^= 1
    b.write_bytes(data)
    with pytest.raises(
        errors.KeyConflictError, match=rf"b\.pte: the key '{blob.key}' has other bytes than in \S*a\.pte"
    ):
        fuse_programs([a, b], tmp_path / "two.pte", methods={"b:prefill": "p", "b:decode": "d"})
    with pytest.raises(
        errors.KeyConflictError, match=rf"b\.pte: the key '{blob.key}' has other bytes than for \S*a\.pte"
    ):
        fuse_programs([a, b], tmp_path / "two.pte")
    assert not (tmp_path / "two.pte").exists()


@pytest.mark.long
def test_payloads_that_cannot_be_read(tmp_path: Path) -> None:
    """Of an unknown backend, or damaged: what their delegates look up is not missed, and nothing else is refused."""
    path = models.adapters(delegated=True).write(tmp_path)
    externals = {one.key for one in read_program(path).externals}
    whole = path.read_bytes()
    for old, new in ((b"XnnpackBackend", b"UnknownBackend"), (b"XH00", b"XH99")):
        path.write_bytes(whole.replace(old, new))
        assert set(fuse_programs(path, tmp_path / "one.pte", keep_external=True).missing) == externals


def test_inputs_and_outputs_that_are_refused(tmp_path: Path) -> None:
    a = models.mlp().write(tmp_path, "a")
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    with pytest.raises(errors.UnsupportedDataError, match="programs and their data files can be fused"):
        fuse_programs([a, tmp_path / "x.safetensors"], tmp_path / "one.pte")
    with pytest.raises(errors.OutputPathError):
        fuse_programs(a, a)
    (tmp_path / "one.pte").write_text("something else")
    with pytest.raises(errors.OutputPathError):
        fuse_programs(a, tmp_path / "one.pte")
    fuse_programs(a, tmp_path / "one.pte", force=True, dry_run=True)
    assert (tmp_path / "one.pte").read_text() == "something else"
    fuse_programs(a, tmp_path / "one.pte", force=True)
    assert detect_format(tmp_path / "one.pte") is Format.PTE
    model = models.mlp(external=True)
    model.write(tmp_path / "e")
    (ptd,) = (tmp_path / "e").glob("*.ptd")
    with pytest.raises(errors.UnsupportedDataError, match="there is no program"):
        fuse_programs(ptd, tmp_path / "two.pte")
    external = read_program(tmp_path / "e/model.pte").externals[0]
    with pytest.raises(errors.LayoutError, match="the program expects"):
        wrong = FusedBlob(memoryview(bytes(4)), TensorLayout(ScalarType.FLOAT, (1,)), 16)
        program = read_program(tmp_path / "e/model.pte")
        Fusion([FusedProgram(program, {"forward": "forward"}, tensors={external.key: wrong})])


@pytest.mark.long
@pytest.mark.parametrize("name", ["portable", "channels-last", "two layouts of one buffer", "control flow"])
def test_old_programs(tmp_path: Path, stock_run: Any, name: str) -> None:
    """Constants and payloads inside the flatbuffer move to segments, so that ExecuTorch 1.5 loads them."""
    model = CASES[name]()
    path = tmp_path / "old.pte"
    path.write_bytes(oracle.with_inline_data(model.pte))
    fuse_programs(path, tmp_path / "one.pte")
    check_same(stock_run, model, tmp_path / "one.pte")
    assert (tmp_path / "one.pte").stat().st_size < 1.1 * path.stat().st_size + 2000
    check_again(tmp_path / "one.pte")


def test_payloads_inside_the_flatbuffer(tmp_path: Path, stock_run: Any) -> None:
    """They move to segments, and equal ones of two programs become one."""
    model = models.mlp(delegated=True)
    file = oracle.deserialize(model.pte)
    for name in ("a", "b"):
        data = bytes(oracle._program.serialize_pte_binary(file, extract_delegate_segments=False))
        (tmp_path / f"{name}.pte").write_bytes(data)
    assert [one.segment for one in read_program(tmp_path / "a.pte").delegates] == [None]
    fuse_programs([tmp_path / "a.pte", tmp_path / "b.pte"], tmp_path / "one.pte", methods={"b": "second"})
    for name in ("forward", "second"):
        check_same(stock_run, model, tmp_path / "one.pte", {"forward": name})
    assert len({one.segment for one in read_program(tmp_path / "one.pte").delegates}) == 1


def test_fields_of_a_later_executorch_are_refused(later_executorch: Path) -> None:
    """They may count segments or constants."""
    flatbuffer, segments = oracle.split(models.mlp().pte)
    program = oracle.to_json(flatbuffer)
    program["execution_plan"][0]["future_number"] = 3
    data = oracle.join(oracle.from_json(program, later_executorch), segments)
    later = ProgramFile("later.pte", memoryview(data))
    with pytest.raises(errors.UnsupportedProgramError, match="unknown fields of ExecutionPlan"):
        Fusion([FusedProgram(later, {"forward": "forward"})])


def _fuse_hostile(data: bytes) -> None:
    """A damaged program beside a good one: an error of the library, or a program that is well-formed."""
    good = ProgramFile("good.pte", memoryview(models.mlp().pte))
    try:
        bad = ProgramFile("bad.pte", memoryview(data))
        names = {method: f"bad_{number}" for number, method in enumerate(bad.methods)}
        file = io.BytesIO()
        fusion = Fusion([FusedProgram(good, {"forward": "forward"}), FusedProgram(bad, names)])
        fusion.write(file)
    except errors.BlobStoreError as error:
        assert "bad.pte" in str(error)
        return
    assert len(file.getvalue()) <= 10 * len(data) + 2 * len(good.data) + 10_000
    assert ProgramFile("one.pte", memoryview(file.getvalue())).methods == ["forward", *names.values()]


@pytest.mark.long
@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=200)
@given(data=st.data())
def test_damaged_programs(data: st.DataObject) -> None:
    """Any change of a byte leads to an error or to a well-formed program (B5)."""
    changed = bytearray(oracle.one_of_everything())
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    _fuse_hostile(bytes(changed))


def weights_of(model: models.Lowered, methods: Collection[str]) -> set[bytes]:
    """All that a model has of these methods, but numbers that are too few to be found by their bytes."""
    modules = [model.methods[method][0] for method in methods]
    tensors = [tensor for module in modules for tensor in module.state_dict().values()]
    return {tensor.numpy().tobytes() for tensor in tensors if tensor.nbytes >= 32 and tensor.unique().numel() > 4}


@pytest.mark.long
@pytest.mark.parametrize("delegated", [False, True], ids=["portable", "delegated"])
@pytest.mark.parametrize("inline", [False, True], ids=["in segments", "in the flatbuffer"])
def test_methods_that_are_left_out(tmp_path: Path, stock_run: Any, delegated: bool, inline: bool) -> None:
    """Nothing of them is in the file: neither weights nor names, keys nor descriptions."""
    kept, gone = models.mlp(delegated=delegated, seed=0), models.mlp(delegated=delegated, seed=1)
    for name, model in (("kept", kept), ("gone", gone)):
        data = model.pte
        if inline:
            file = oracle.deserialize(data)
            data = bytes(oracle._program.serialize_pte_binary(file, extract_delegate_segments=False))
            data = data if delegated else oracle.with_inline_data(data)
        (tmp_path / f"{name}.pte").write_bytes(data)
    paths = [tmp_path / "gone.pte", tmp_path / "kept.pte"]
    both, alone, left = tmp_path / "both.pte", tmp_path / "alone.pte", tmp_path / "left.pte"
    fuse_programs(paths, both, methods={"gone": "another"})
    fuse_programs(tmp_path / "kept.pte", alone)
    fuse_programs(both, left, methods={"both:another": ""})
    check_same(stock_run, kept, left)
    check_again(left)
    data = left.read_bytes()
    weights = weights_of(gone, ["forward"]) - weights_of(kept, ["forward"])
    assert len(weights) == 4
    for blob in (*weights, b"another", *(one.key.encode() for one in read_program(tmp_path / "gone.pte").named_data)):
        assert blob in both.read_bytes()
        assert blob not in data
    assert sorted(blobs_of(read_program(left))) == sorted(blobs_of(read_program(alone)))
    assert len(data) <= len(both.read_bytes()) - sum(map(len, weights))


def test_keys_of_methods_that_are_left_out() -> None:
    """A blob stays if a method that is taken may look it up, and otherwise only if no method can."""
    first, second, other = b"first blob" * 20, b"second blob" * 20, b"other blob" * 20
    program = ProgramFile(
        "a.pte", memoryview(oracle.serialize([], [], named={"first": first, "second": second, "other": other}))
    )
    names = {method: method for method in program.methods}
    fused = fused_in_memory([FusedProgram(program, names, unneeded={"second"})])
    assert [one.key for one in fused.named_data] == ["first", "other"]
    assert second not in bytes(fused.data)


@pytest.mark.parametrize("kind", ["constant", "state"])
def test_tensors_of_several_sizes_at_one_place(kind: str) -> None:
    """A method that needs the beginning of some bytes does not keep those behind it."""
    whole = bytes(range(1, 129))
    state = kind == "state"
    tensors = [oracle.tensor(1, [8], state=state), oracle.tensor(1, [32], state=state)]
    two = oracle.deserialize(oracle.serialize(tensors, [whole], [whole]))
    small, large = two.program.execution_plan[0], copy.deepcopy(two.program.execution_plan[0])
    large.name = "large"
    del small.values[1]
    two.program.execution_plan.append(large)
    data = oracle._program.serialize_pte_binary(two, extract_delegate_segments=True)
    program = ProgramFile("a.pte", memoryview(bytes(data)))
    for names, nbytes in ((["forward", "large"], 128), (["large"], 128), (["forward"], 32)):
        fused = fused_in_memory([FusedProgram(program, {name: name for name in names})])
        assert [item.span.size for item in fused.tensors if item.kind == kind] == [nbytes]
        assert (whole[32:48] in bytes(fused.data)) == ("large" in names)


@pytest.mark.parametrize("alignments", [(16, 4096, 64, 16), (4096, 128, 16, 1024)])
def test_blobs_with_alignments(tmp_path: Path, alignments: tuple[int, ...]) -> None:
    """They lie where they are aligned, and the file stays as it is."""
    program = read_program(models.mlp(external=True).write(tmp_path))
    (data_file,) = tmp_path.glob("*.ptd")
    with open_ptd(data_file) as data_map:
        tensors = {
            one.key: FusedBlob(data_map.get_data(one.key), one.layout, alignment)
            for one, alignment in zip(program.externals, alignments, strict=False)
        }
        named = {
            str(number): FusedBlob(memoryview(bytes([number]) * 1000), None, alignment)
            for number, alignment in enumerate(alignments, 1)
        }
        fused = fused_in_memory([FusedProgram(program, {"forward": "forward"}, tensors=tensors, named_data=named)])
    for blob, alignment in zip(fused.named_data, alignments, strict=True):
        assert blob.span.start % alignment == 0
    again = fused_in_memory([FusedProgram(fused, {"forward": "forward"})])
    assert again.data == fused.data


@pytest.mark.long
def test_methods_that_share_their_weights(tmp_path: Path, stock_run: Any) -> None:
    """What both methods use stays with the one that is taken."""
    model = models.decoder()
    path, left = model.write(tmp_path), tmp_path / "left.pte"
    fuse_programs(path, left, methods={"model:prefill": ""})
    for before, after in zip(
        stock_run(model.pte, model.inputs("decode"), method="decode"),
        stock_run(left, model.inputs("decode"), method="decode"),
        strict=True,
    ):
        assert torch.equal(before, after)
    check_again(left)
