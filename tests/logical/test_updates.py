"""From records that were made by hand to the tensors that they describe, and to the blobs that an update changes (U1)."""

import threading
from collections import UserDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from blobstore import errors
from blobstore.core.formats.ptd.reader import open_ptd
from blobstore.core.memory.layout import ScalarType, TensorLayout
from blobstore.core.store import BlobStore
from blobstore.logical.records import STATE, ModelTensor, Operation, Record, Records, Step, records_key
from blobstore.runtime import BlobCache, make_working_copy
from blobstore.runtime.tensors import LogicalTensors


def write(folder: Path, *parts: Record | Records, **blobs: object) -> Path:
    """A file with these records, each from a lowering of its own, and these blobs."""
    store = BlobStore()
    for part in parts:
        records = part if isinstance(part, Records) else Records("XnnpackBackend", (part,))
        data = records.pack()
        store.add(records_key(data), data, alignment=16)
        for record in records.records:
            if not record.refusal and record.key not in store and record.key not in blobs:
                store.add(record.key, bytes(record.nbytes))
    for key, blob in blobs.items():
        store.add(key, blob)
    store.write_ptd(folder / "blobs.ptd")
    return folder / "blobs.ptd"


def tensors(folder: Path, *parts: Record | Records, **blobs: object) -> LogicalTensors:
    """The logical tensors of such a file."""
    return LogicalTensors(open_ptd(write(folder, *parts, **blobs)))


def cached(folder: Path, *parts: Record | Records, **blobs: object) -> BlobCache:
    """A cache of such a file."""
    return BlobCache(write(folder, *parts, **blobs))


def source(name: str, sizes: tuple[int, ...] = (2,), *aliases: str) -> ModelTensor:
    return ModelTensor(name, ScalarType.FLOAT, sizes, aliases)


def record(key: str, name: str, sizes: tuple[int, ...] = (2,), *aliases: str) -> Record:
    return Record(key, 4 * sizes[0], (source(name, sizes, *aliases),), (Step(Operation.RESHAPE, ints=sizes),))


def folded(key: str, weight: str, variance: str) -> Record:
    """A blob that is made of two tensors."""
    step = Step(Operation.FOLD_CONV_WEIGHT, (0, 0), (1e-5,))
    return Record(key, 8, (source(weight), source(variance)), (step,))


def refusal(reason: str, *names: str, auxiliary: bool = False) -> Record:
    return Record("", 0, tuple(source(name) for name in names), refusal=reason, auxiliary=auxiliary)


# ------------------------------------------------------------------------------------------------ names and their blobs


def test_programs_that_kept_different_names_of_a_tied_tensor(tmp_path: Path) -> None:
    """An update by either name changes the blobs of both programs."""
    first, second = record("a@1", "a", (2,), "b"), record("b@2", "b", (2,), "a")
    for cache in (cached(tmp_path, first, second), cached(tmp_path, second, first)):
        for name in ("a", "b"):
            cache.update({name: torch.ones(2)})
            assert set(cache.dirty) == {"a@1", "b@2"}
            cache.revert()
        assert len(cache.tensors) == 1
        with pytest.raises(errors.UpdateError, match="another name of"):
            cache.update({"a": torch.ones(2), "b": torch.zeros(2)})
        assert cache.dirty == ()


def test_names_that_a_third_program_connects(tmp_path: Path) -> None:
    """Two tensors turn out to be one when a program has both names for it."""
    cache = cached(tmp_path, record("a@1", "a"), record("b@2", "b"), record("c@3", "c", (2,), "a", "b"))
    cache.update({"b": torch.ones(2)})
    assert set(cache.dirty) == {"a@1", "b@2", "c@3"}
    known = cache.tensors
    assert known["b"].name == "a" and set(known["c"].aliases) == {"b", "c"}


def test_one_name_for_two_shapes_is_refused(tmp_path: Path) -> None:
    """Whether records contradict each other, or a record and the tensor that is stored under the name."""
    known = tensors(tmp_path, record("a@1", "a"), record("a@2", "a", (3,)))
    with pytest.raises(errors.UpdateError, match=r"different shapes with this name, \[2\] and \[3\]|\[3\] and \[2\]"):
        known.check_names(["a"])
    known = tensors(tmp_path, record("a@1", "a"), a=torch.ones(3))
    with pytest.raises(errors.UpdateError, match=r"different shapes with this name, \[2\] and \[3\]"):
        known.check_names(["a"])


def test_records_of_one_blob_must_agree(tmp_path: Path) -> None:
    other = Record("a@1", 8, record("a@1", "a").sources, (Step(Operation.CAST, ints=(6,)),))
    with pytest.raises(errors.KeyConflictError, match="two records describe 'a@1' differently"):
        tensors(tmp_path, record("a@1", "a"), other)


def test_one_content_of_records_has_one_key(tmp_path: Path) -> None:
    """Many keys for the same records would multiply their cost; a key that is not their digest is damage (B5)."""
    data = Records("XnnpackBackend", ()).pack()
    store = BlobStore()
    store.add(records_key(data)[:-1] + "x", data)
    store.write_ptd(tmp_path / "other.ptd")
    with pytest.raises(errors.InvalidFileError, match="do not have the digest"):
        LogicalTensors(open_ptd(tmp_path / "other.ptd"))


def test_unknown_names_are_errors_with_similar_ones(tmp_path: Path) -> None:
    """Prefixes that wrappers of modules add are recognized."""
    known = tensors(tmp_path, record("layer.weight@1", "layer.weight"))
    with pytest.raises(errors.KeyNotFoundError, match="'module.layer.weight' may be 'layer.weight' here"):
        known.check_names(["module.layer.weight"])
    with pytest.raises(errors.KeyNotFoundError, match="'_orig_mod.layer.weight' may be 'layer.weight' here"):
        known.check_names(["_orig_mod.layer.weight"])
    with pytest.raises(errors.KeyNotFoundError, match="no key and no tensor 'other'"):
        known["other"]
    assert 5 not in known and "other" not in known and list(known) == ["layer.weight"]


def test_without_records(tmp_path: Path) -> None:
    """The message says that there are no names, or that keys are those of ExecuTorch's own lowering."""
    with pytest.raises(errors.KeyNotFoundError, match="no key 'b', and no records of tensors"):
        tensors(tmp_path, a=torch.ones(2)).check_names(["b"])
    with pytest.raises(errors.KeyNotFoundError, match="hashes of their contents.*BlobStorePartitioner"):
        tensors(tmp_path, **{"0" * 64: bytes(8)}).check_names(["b"])


# ----------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.way
def test_what_belongs_together_is_updated_together(tmp_path: Path) -> None:
    """A blob that is made of two tensors needs both, and `needs` says so."""
    cache = cached(tmp_path, folded("w@1", "w", "variance"))
    known = cache.tensors
    assert known["w"].needs == ("variance",) and known["variance"].keys == ("w@1",)
    with pytest.raises(errors.UpdateError, match="'w' cannot be updated without 'variance'.*in one blob, 'w@1'"):
        cache.update({"w": torch.ones(2)})
    cache.update({"w": torch.ones(2), "variance": torch.full((2,), 4 - 1e-5)})
    assert np.allclose(np.frombuffer(cache.get_data("w@1"), np.float32), 0.5)


def test_a_refusal_extends_to_what_is_stored_in_one_blob(tmp_path: Path) -> None:
    """Also over several blobs; the message has the first reason."""
    parts = folded("w@1", "w", "a"), folded("x@2", "x", "w"), record("y@3", "y"), refusal("it was changed", "a")
    known = tensors(tmp_path, *parts)
    for name in ("w", "x"):
        with pytest.raises(
            errors.UpdateError, match=f"'{name}' cannot be updated: it is stored together with .*was changed"
        ):
            known.check_names([name])
    assert known["a"].refusal == "it was changed" and known["y"].refusal == ""


def test_state_of_one_method_may_be_a_constant_of_another(tmp_path: Path) -> None:
    """Then it can be updated; state alone cannot, and no state dict must have it."""
    known = tensors(tmp_path, refusal(STATE, "cache", "table", auxiliary=True), record("table@1", "table"))
    assert known["table"].refusal == "" and not known["table"].auxiliary
    assert known["cache"].refusal == STATE and known["cache"].auxiliary
    assert known.names_for_state_dict({"table": torch.ones(2)}, strict=True) == ["table"]


class Subclass(torch.Tensor):
    """A tensor whose memory only torch may look up."""


def test_values_must_fit(tmp_path: Path) -> None:
    cache = cached(tmp_path, record("a@1", "a"))
    wrong: list[tuple[Any, type[Exception], str]] = [
        (torch.ones(3), errors.LayoutError, r"'a' has shape \[2\], the new one has \[3\]"),
        (torch.empty(2**40, 0), errors.LayoutError, r"'a' has shape \[2\], the new one has \[1099511627776, 0\]"),
        (torch.empty(2**40, 0).as_subclass(Subclass), errors.LayoutError, r"blobs\.ptd: 'a': impossible tensor layout"),
        (torch.ones(2).double(), errors.LayoutError, r"'a' is float\[2\], the new one is double"),
        ([1.0, 2.0], errors.UnsupportedDataError, "'a': expected a torch tensor or a numpy array, found list"),
        (
            None,
            errors.UnsupportedDataError,
            r"blobs\.ptd: 'a': expected a torch tensor or a numpy array, found NoneType",
        ),
        (torch.ones(2).to_sparse(), errors.UnsupportedDataError, "'a': a tensor of layout"),
        (torch.ones(2, device="meta"), errors.UnsupportedDataError, "'a'"),
        (torch._efficientzerotensor(2), errors.UnsupportedDataError, "'a'"),
        (torch.tensor([1.0, float("nan")]), errors.UpdateError, "'a' has values that are not finite"),
    ]
    for value, error, message in wrong:
        with pytest.raises(error, match=message):
            cache.update({"a": value}, finite=True)
    with pytest.raises(errors.UnsupportedDataError, match="expected tensors by name, found a list"):
        cache.update([("a", torch.ones(2))])  # type: ignore[arg-type]
    assert cache.generation == 0


COMPLEX = torch.tensor([1 + 2j, 3 - 4j]).conj()
VALUES: dict[str, Any] = {
    "as it lies": torch.tensor([1.0, 2.0]),
    "a parameter": torch.nn.Parameter(torch.tensor([1.0, 2.0])),
    "behind another": torch.arange(5.0)[2:4],
    "with gaps": torch.arange(5.0)[::3],
    "with gaps, of numpy": np.arange(5, dtype=np.float32)[::3],
    "repeated": torch.tensor([3.0]).expand(2),
    "a sign that torch keeps apart": torch._neg_view(torch.tensor([1.0, 2.0])),
    "a sign that torch keeps apart, with gaps": COMPLEX.imag,
    "a subclass": torch.tensor([1.0, 2.0]).as_subclass(Subclass),
    "read-only": np.frombuffer(np.array([1, 2], np.float32).tobytes(), np.float32),
    "of numpy, for another machine": np.array([1, 2], ">f4"),
    "of numpy, a subclass": np.array([1, 2], np.float32).view(np.memmap),
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())
def test_values_in_memory_of_every_kind(value: Any, tmp_path: Path) -> None:
    """Numbers are what torch and numpy say they are, wherever they lie (U1)."""
    expected = value.tolist()
    cache = cached(tmp_path, record("a@1", "a"), b=np.zeros(2, np.float32))
    cache.update({"a": value, "b": value})
    with cache.transaction() as changes:
        changes["a"] = value
    for key in ("a@1", "b"):
        assert np.frombuffer(cache.get_data(key), np.float32).tolist() == expected, key


SCALAR_TYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16),
    *(torch.int32, torch.uint32, torch.int64, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e5m2, torch.float8_e4m3fn),
]


@pytest.mark.parametrize("dtype", SCALAR_TYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (2, 1, 3), (0, 2)], ids=str)
def test_values_of_every_type(dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path) -> None:
    """To the bit, and no value of another type or shape (U1)."""
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    value = bits.view(dtype).reshape(shape)
    cache = cached(tmp_path, a=torch.zeros(shape).to(dtype))
    cache.update({"a": value})
    assert bytes(cache.get_data("a")) == bits.numpy().tobytes()
    assert (cache["a"].shape, cache["a"].dtype) == (shape, dtype)
    other = torch.int8 if dtype == torch.uint8 else torch.uint8
    for wrong in (torch.zeros(shape, dtype=other), torch.zeros((*shape, 2)).to(dtype)):
        with pytest.raises(errors.LayoutError, match="'a'"):
            cache.update({"a": wrong})


def test_a_wrong_name_is_said_before_a_wrong_value(tmp_path: Path) -> None:
    """Names may be of any type, and any text."""
    cache = cached(tmp_path, record("a@1", "a"))
    for name, shown in (("b", "'b'"), ("\ud800", r"'\\ud800'"), (7, "'7'"), (None, "'None'"), ("a\0", r"'a")):
        for values in ({name: torch.ones(2)}, {"a": [1.0], name: torch.ones(2)}):
            with pytest.raises(errors.KeyNotFoundError, match=shown):
                cache.update(values)  # type: ignore[arg-type]
    assert cache.generation == 0


def test_values_that_come_in_no_pairs(tmp_path: Path) -> None:
    class Odd(UserDict[str, Any]):
        def items(self) -> Any:
            return [1]

    cache = cached(tmp_path, record("a@1", "a"))
    with pytest.raises(TypeError, match="unpack"):
        cache.update(Odd(a=torch.ones(2)))
    assert cache.generation == 0


def test_a_blob_of_another_file_is_missed_by_name(tmp_path: Path) -> None:
    data = Records("XnnpackBackend", (record("a@1", "a"),)).pack()
    cache = cached(tmp_path, **{records_key(data): data})
    with pytest.raises(errors.KeyNotFoundError, match="blob 'a@1' of 'a' is in none of these data files"):
        cache.update({"a": torch.ones(2)})


# -------------------------------------------------------------------------------------------------- values, state dicts


def test_values_come_from_the_tensor_itself_or_from_a_blob_that_has_it(tmp_path: Path) -> None:
    stored = torch.tensor([1.0, 2.0])
    known = tensors(tmp_path, record("a@1", "a", (2,), "b"), a=stored)
    assert known.value("b")[0].tolist() == [1, 2]
    known = tensors(tmp_path, record("a@1", "a", (2,), "b"), **{"a@1": stored.numpy().tobytes()})
    assert known.value("b")[0].tolist() == [1, 2]
    known = tensors(tmp_path, folded("w@1", "w", "variance"))
    with pytest.raises(errors.UpdateError, match="'w' cannot be read back"):
        known.value("w")
    with pytest.raises(errors.KeyNotFoundError, match="no key and no tensor 'c'"):
        known.value("c")


def test_a_strict_state_dict_has_every_tensor(tmp_path: Path) -> None:
    """Without `strict`, one is enough; entries that no program has are passed over."""
    known = tensors(tmp_path, record("a@1", "a"), record("b@2", "b"), c=torch.ones(2))
    full = dict.fromkeys(("a", "b", "c", "unused"), torch.ones(2))
    assert known.names_for_state_dict(full, strict=True) == ["a", "b", "c"]
    with pytest.raises(errors.UpdateError, match="the state dict lacks 'b', which the program has"):
        known.names_for_state_dict({"a": torch.ones(2)}, strict=True)
    assert known.names_for_state_dict({"a": torch.ones(2)}, strict=False) == ["a"]
    for strict in (True, False):
        with pytest.raises(errors.UpdateError, match="lacks|none of the tensors given can be updated: found 'unused'"):
            known.names_for_state_dict({"unused": torch.ones(2)}, strict=strict)


def test_a_strict_state_dict_has_no_tensor_that_cannot_follow(tmp_path: Path) -> None:
    """Neither one that is refused, nor one that others were computed from, nor one that lost its name."""
    for name in ("a", "_frozen_param0"):
        known = tensors(tmp_path, record("b@2", "b"), refusal("it was changed", name))
        with pytest.raises(errors.UpdateError, match=f"'{name}' cannot be updated: it was changed"):
            known.names_for_state_dict({"b": torch.ones(2)}, strict=True)
        assert known.names_for_state_dict({"b": torch.ones(2)}, strict=False) == ["b"]
    known = tensors(tmp_path, record("b@2", "b"), _prop_tensor_constant0=torch.ones(2))
    with pytest.raises(
        errors.UpdateError, match="no program has 'factor', and '_prop_tensor_constant0' may have been computed"
    ):
        known.names_for_state_dict({"b": torch.ones(2), "factor": torch.ones(2)}, strict=True)


def test_buffers_that_are_not_persistent_may_be_missing(tmp_path: Path) -> None:
    """But a tensor outside of delegates that a state dict has must be there."""
    outside = source("weight"), source("positions")
    records = Records("XnnpackBackend", (), outside, transient=("positions",))
    known = tensors(tmp_path, records, weight=torch.ones(2), positions=torch.ones(2))
    assert known["positions"].auxiliary and not known["weight"].auxiliary
    assert known.names_for_state_dict({"weight": torch.ones(2)}, strict=True) == ["weight"]
    with pytest.raises(errors.UpdateError, match="lacks 'weight'"):
        known.names_for_state_dict({"positions": torch.ones(2)}, strict=True)


def test_a_transaction_has_values_as_they_were(tmp_path: Path) -> None:
    """They are copied: what their memory has later does not count."""
    cache = cached(tmp_path, record("a@1", "a"))
    for value in (torch.ones(2), np.ones(2, np.float32)):
        with cache.transaction() as changes:
            changes["a"] = value
            value[0] = 5
        assert np.frombuffer(cache.get_data("a@1"), np.float32).tolist() == [1, 1]


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool])
@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 0, 1)])
def test_blobs_with_a_layout_are_tensors(order: tuple[int, ...], dtype: torch.dtype, tmp_path: Path) -> None:
    """In every order of dimensions; a view if it is the usual one."""
    tensor = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    store = BlobStore()
    kind = {torch.float32: "FLOAT", torch.bfloat16: "BFLOAT16", torch.int8: "CHAR", torch.bool: "BOOL"}[dtype]
    store.add("t", bytes_of(tensor.permute(order)), layout=TensorLayout(ScalarType[kind], (2, 3, 4), order))
    store.write_ptd(tmp_path / "t.ptd")
    reader = open_ptd(tmp_path / "t.ptd")
    for blobs in (reader, BlobCache(tmp_path / "t.ptd")):
        array, found = LogicalTensors(blobs).value("t")
        assert found is ScalarType[kind] and array.shape == (2, 3, 4) and array.tobytes() == bytes_of(tensor)
        assert np.shares_memory(array, np.frombuffer(blobs.get_data("t"), np.uint8)) == (order == (0, 1, 2))
        assert not array.flags.writeable


def test_a_tensor_is_read_back_as_far_as_it_is_stored(tmp_path: Path) -> None:
    """Reshaped and cast, it is there; quantized or combined, it is not."""
    source = ModelTensor("w", ScalarType.DOUBLE, (2, 3))
    done = (Step(Operation.RESHAPE, (6, 1)), Step(Operation.CAST, (int(ScalarType.FLOAT),)))
    data = {"w@1": np.arange(6, dtype=np.float32).tobytes()}
    array, kind = tensors(tmp_path, Record("w@1", 24, (source,), done), **data).value("w")
    assert kind is ScalarType.FLOAT and array.tolist() == [[0, 1, 2], [3, 4, 5]]
    packed = Record("w@1", 24, (source,), (*done, Step(Operation.CHANNELS_LAST)))
    with pytest.raises(
        errors.UpdateError, match="'w' cannot be read back from its blob 'w@1', which was made by: channels last"
    ):
        tensors(tmp_path, packed, **data).value("w")
    with pytest.raises(errors.UpdateError, match="cannot be read back from its blob 'w@1' of 20 bytes"):
        tensors(tmp_path, Record("w@1", 24, (source,), done), **{"w@1": bytes(20)}).value("w")


def test_the_integers_of_a_quantized_tensor_are_a_value_too(tmp_path: Path) -> None:
    """Its own dtype or that which it is quantized to; no other."""
    step = Step(Operation.QUANTIZE_CHANNEL, (0, -127, 127, int(ScalarType.CHAR)), names=("scales",))
    cache = cached(tmp_path, Record("w@1", 6, (source("w", (2, 3)),), (step,)), scales=np.ones(2, np.float32))
    for value in (torch.arange(6.0).reshape(2, 3), torch.arange(6, dtype=torch.int8).reshape(2, 3)):
        cache.update({"w": value})
        assert bytes(cache.get_data("w@1")) == bytes(range(6))
        cache.revert()
    with pytest.raises(errors.LayoutError, match=r"'w' is float\[2, 3\], the new one is half"):
        cache.update({"w": torch.ones(2, 3).half()})


def test_a_cache_gives_back_what_an_update_takes(tmp_path: Path) -> None:
    """By the model's names and shapes, in which `in`, `get` and `[]` agree; of a data file without records, by its keys."""
    turned = Record("w@1", 24, (source("w", (2, 3)),), (Step(Operation.RESHAPE, (6, 1)),))
    cache = cached(
        tmp_path, Records("XnnpackBackend", (turned, refusal("state", "seen", auxiliary=True))), bias=torch.ones(2)
    )
    values = {"w": torch.arange(6.0).reshape(2, 3)}
    cache.update_state_dict(values)
    (found,) = cache.state_dict().items()
    assert found[0] == "w" and torch.equal(found[1], values["w"])
    cache.revert()
    cache.update_state_dict(dict([found]))
    for name, expected in {"w": values["w"], "bias": torch.ones(2)}.items():
        assert name in cache and torch.equal(cache[name], expected) and torch.equal(cache.get(name), expected)
    assert "v" not in cache and cache.get("v") is None
    with pytest.raises(errors.KeyNotFoundError):
        cache["v"]

    (tmp_path / "plain").mkdir()
    plain = cached(tmp_path / "plain", a=torch.ones(2), opaque=bytes(4))
    assert list(plain.state_dict()) == ["a"]
    plain.update_state_dict({"a": plain.state_dict()["a"] * 3})
    assert torch.equal(plain.state_dict()["a"], torch.full((2,), 3.0))

    step = Step(Operation.QUANTIZE_CHANNEL, (0, -127, 127, int(ScalarType.CHAR)), names=("scales",))
    (tmp_path / "whole").mkdir()
    quantized = Record("q@1", 6, (source("q", (2, 3)),), (step,))
    whole = cached(tmp_path / "whole", quantized, scales=np.ones(2, np.float32))
    assert "q" in whole
    for read in (whole.state_dict, lambda: whole["q"], lambda: whole.get("q")):
        with pytest.raises(errors.UpdateError, match="'q' cannot be read back"):
            read()


def test_the_path_of_a_delta_is_an_update(tmp_path: Path) -> None:
    cache = cached(tmp_path, a=torch.ones(2), b=torch.ones(2))
    cache.update({"a": torch.full((2,), 5.0)})
    cache.save(tmp_path / "delta.ptd", dirty_only=True)
    cache.revert()
    for path in (tmp_path / "delta.ptd", str(tmp_path / "delta.ptd")):
        assert cache.update(path) == cache.generation
        assert cache["a"].tolist() == [5, 5] and cache.dirty == ("a",)
        cache.revert()
    with pytest.raises(errors.UnsupportedDataError, match="by name, found a"):
        cache.update(tmp_path / "delta.ptd", finite=True)


@pytest.mark.parametrize("shared", [False, True])
def test_scales_that_change_meanwhile(tmp_path: Path, shared: bool) -> None:
    """Integers are never stored beside scales that they were not made with (U1, B3)."""
    rows, columns = 512, 2048
    steps = (Step(Operation.QUANTIZE_CHANNEL, (0, -127, 127, int(ScalarType.CHAR)), names=("scales",)),)
    made = Record("w@1", rows * columns, (source("w", (rows, columns)),), steps)
    path = write(tmp_path, made, scales=np.ones(rows, np.float32))
    if shared:
        make_working_copy(path, tmp_path / "live.ptd")
    cache = BlobCache(tmp_path / "live.ptd", "shared") if shared else BlobCache(path)
    cache.update({"w": (weight := np.full((rows, columns), 100, np.float32))})
    late = 0
    for number in range(80):
        scales = np.full(rows, 1 + number % 2, np.float32)
        # Where a thread takes longer to start than to update, the update is always first, unless it waits.
        thread = threading.Timer(number % 4 * 0.002, cache.update, args=({"w": weight},))
        thread.start()
        cache.update_blobs({"scales": scales})
        thread.join()
        if cache.version("w@1") > cache.version("scales"):  # so they were made after it
            late += 1
            assert np.frombuffer(cache.get_data("w@1"), np.int8).max() == 100 // scales[0]
    assert late > 0
