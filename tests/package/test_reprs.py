"""What an object says of itself: one line in a console, a small table in a notebook (B2)."""

import dataclasses
import enum
import inspect
import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import blobstore
from blobstore import (
    BlobStore,
    Digest,
    MergedDataMap,
    NamedDataMap,
    PtdDataMap,
    PteDataMap,
    ScalarType,
    TensorLayout,
    open_ptd,
    open_pte,
    report,
    safe_open,
    save_file,
    save_programs,
)
from blobstore.adapters import AdapterTags, MergedAdapter
from blobstore.core.formats.pte.signature import signatures
from blobstore.core.tensor_file import TensorFile, TensorSlice
from blobstore.llm import Conversation, Runners, Stop
from blobstore.lowering import BlobStoreBackend, BlobStorePartitioner, LoweredProgram, lower
from blobstore.pool import Pool, PoolDataMap
from blobstore.releases import File, Release, publish, pull
from blobstore.reporting import Report
from blobstore.runtime import BlobCache, Method, PackedStore, Program, Transaction, Updated
from blobstore.runtime.tensors import LogicalTensors
from blobstore.testing import Blob, NamedDataMapContract
from blobstore.training import AdamW, MeZO, TrainingProgram
from tests.helpers import models

with models.quiet():
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

LONGEST, LONGEST_OF_FIELDS = 120, 200
HOSTILE = "\x1b[31m\u202e<script>\n<b>"
MANY = 10_000
KEYS = [f"{HOSTILE}.{number}" for number in range(MANY)]
PATHS = [Path(key) for key in KEYS]


def public_classes() -> dict[str, type]:
    """The classes that a user can name, without errors and enumerations, whose reprs are Python's own."""
    modules = [blobstore, *(getattr(blobstore, name) for name in dir(blobstore))]
    values = [
        getattr(module, name)
        for module in modules
        if inspect.ismodule(module)
        for name in getattr(module, "__all__", ())
    ]
    return {
        value.__name__: value
        for value in values
        if isinstance(value, type) and not issubclass(value, BaseException | enum.Enum)
    }


CLASSES = public_classes()
RECORDS = sorted(name for name, value in CLASSES.items() if dataclasses.is_dataclass(value))
RECORDS.remove("Report")
NEVER_MADE = {BlobStoreBackend, LoweredProgram, NamedDataMapContract}  # ExecuTorch and pytest make them
NEVER_MADE |= {AdamW, Runners}  # the repr is torch's; tests/llm/test_runners.py has language models


def filled(annotation: str, *, large: bool) -> Any:
    """A value of a field: as large and as hostile as there are any, or the least."""
    kind = annotation.split("[", maxsplit=1)[0].split(" |", maxsplit=1)[0]
    if not large and "None" in annotation:
        return None
    if "AdapterInfo" in annotation:
        return tuple(SimpleNamespace(fits=large) for _ in range(MANY))
    return {
        "bool": large,
        "bytes": 2**60 if large else 0,  # a size: `Folder.bytes`
        "int": 2**60 if large else 0,
        "float": 1e300 / 3 if large else 0.0,
        "str": HOSTILE * 1000 if large else "",
        "Path": Path(HOSTILE * 1000 if large else ""),
        "tuple": tuple(KEYS) if large else (),
        "list": PATHS if large else [],
        "dict": dict.fromkeys(KEYS, 1) if large else {},
        "Mapping": dict.fromkeys(KEYS, 1) if large else {},
        "TensorLayout": TensorLayout(ScalarType.FLOAT8E4M3FNUZ, (1,) * 15 + (2**30,), (15, *range(15))),
        "FindingKind": blobstore.reporting.FindingKind.DUPLICATE_METHODS,
        "RegionKind": blobstore.reporting.RegionKind.UNREFERENCED,
        "ScalarType": ScalarType.FLOAT,
    }.get(kind, SimpleNamespace(paths=PATHS))  # a FoundationInfo, or what nothing takes


def record(cls: type, *, large: bool) -> Any:
    """A dataclass with such fields, which its own checks might refuse."""
    made = object.__new__(cls)
    for field in dataclasses.fields(cls):
        object.__setattr__(made, field.name, filled(str(field.type), large=large))
    return made


class Planted(NamedDataMap):
    """A map as a user writes one."""

    def __init__(self) -> None:
        self.name = HOSTILE * 100

    def _key_list(self) -> list[str]:
        return KEYS

    def _view(self, key: str) -> memoryview:
        return memoryview(b"abc")

    def _layout(self, key: str) -> TensorLayout | None:
        return None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One with a long name that does things to a terminal and a page, with a large data file and a program."""
    place = tmp_path_factory.mktemp("reprs").joinpath(*[(HOSTILE.replace("/", "") + "x" * 100)] * 3)
    place.mkdir(parents=True)
    save_file({key: np.full(3, number, np.float32) for number, key in enumerate(KEYS)}, place / "weights.ptd")
    for number in range(30):
        save_file({f"{number}": np.zeros(3)}, place / f"{number}.ptd")
    program = lower(torch.nn.Linear(8, 2).eval(), (torch.ones(1, 8),), tag="model")
    save_programs({"model": program}, place)
    (place / "mlp.pte").write_bytes(models.mlp().pte)
    releases = pool_of(place).with_name("releases")  # engines of pools take no such names
    publish([place / "0.ptd"], releases, name="a", version="1")
    pull(releases / "a/1", place / "device")
    with Pool(pool_of(place), create=True) as pool:
        pool.add(place / "weights.ptd", "weights@1")
    return place


def pool_of(folder: Path) -> Path:
    return folder.parents[2] / ("long " * 40) / "pool"


def transaction_of(cache: BlobCache) -> Transaction:
    with cache.transaction() as transaction:
        pass
    for key in KEYS[:100]:
        transaction[key] = np.ones(3, np.float32)
    return transaction


def training_program(folder: Path) -> TrainingProgram:
    made = TrainingProgram.__new__(TrainingProgram)
    made.program = Program(folder / "model.pte", data=folder / "model.ptd")
    made.method, made._parameters = HOSTILE * 100, dict.fromkeys(KEYS)  # type: ignore[arg-type]
    return made


def with_inner_closed(folder: Path) -> MergedDataMap:
    inner = open_ptd(folder / "weights.ptd")
    merged = MergedDataMap([inner])
    inner.close()
    return merged


def store_of(data_map: NamedDataMap) -> BlobStore:
    store = BlobStore()
    store.merge(data_map)
    return store


MAKERS: dict[type, list[Callable[[Path], Any]]] = {
    AdapterTags: [lambda at: AdapterTags("\u202e<b>" * 30, "adapter")],
    Blob: [lambda at: Blob(b"abc", None)],
    BlobCache: [
        lambda at: BlobCache(at / "weights.ptd"),
        lambda at: BlobCache([at / f"{number}.ptd" for number in range(30)], base=BlobCache(at / "weights.ptd")),
        lambda at: BlobCache(),
    ],
    BlobStore: [lambda at: store_of(open_ptd(at / "weights.ptd")), lambda at: BlobStore()],
    BlobStorePartitioner: [lambda at: BlobStorePartitioner(XnnpackPartitioner(), tag=lambda name: "model")],
    Digest: [lambda at: open_ptd(at / "weights.ptd").digest(KEYS[0])],
    File: [
        lambda at: File("a\u202e" * 300, "program", "0" * 64, 2**60, tuple(f"{number}.ptd" for number in range(30)))
    ],
    LogicalTensors: [lambda at: BlobCache(at / "model.ptd").tensors, lambda at: BlobCache(at / "weights.ptd").tensors],
    MergedAdapter: [
        lambda at: MergedAdapter(
            BlobCache(at / "weights.ptd"), SimpleNamespace(weights=KEYS, generation=3, undone=True)
        )
    ],
    MergedDataMap: [
        lambda at: MergedDataMap([open_ptd(at / f"{number}.ptd") for number in range(30)]),
        lambda at: MergedDataMap([]),
        with_inner_closed,
    ],
    Method: [lambda at: Program(at / "model.pte", data=at / "model.ptd").method()],
    NamedDataMap: [lambda at: Planted()],
    Conversation: [lambda at: Conversation()],
    PackedStore: [lambda at: PackedStore(at / "packed", limit=2**60)],
    Pool: [lambda at: Pool(pool_of(at))],
    PoolDataMap: [lambda at: Pool(pool_of(at)).open("weights@1")],
    Program: [lambda at: Program(at / "model.pte", data=at / "model.ptd"), lambda at: Program(at / "mlp.pte")],
    PtdDataMap: [lambda at: open_ptd(at / "weights.ptd")],
    PteDataMap: [lambda at: open_pte(at / "model.pte"), lambda at: open_pte(at / "mlp.pte")],
    Release: [lambda at: Release.open(at / "device")],
    Stop: [lambda at: Stop()],
    Report: [lambda at: report([at]), lambda at: report([])],
    TensorFile: [lambda at: safe_open(at / "weights.ptd")],
    TensorSlice: [lambda at: safe_open(at / "weights.ptd").get_slice(KEYS[0])],
    MeZO: [lambda at: MeZO(BlobCache(at / "weights.ptd"))],
    TrainingProgram: [training_program],
    Updated: [lambda at: Updated.of((3, [("w", "w@1", 4, 1, 2)]))],
    Transaction: [lambda at: transaction_of(BlobCache(at / "weights.ptd"))],
}
CASES = [(cls, number) for cls, makers in MAKERS.items() for number in range(len(makers))]
each = pytest.mark.parametrize(("cls", "number"), CASES, ids=lambda value: getattr(value, "__name__", value))


def check_line(text: str, longest: int) -> None:
    assert text.isprintable() and "\n" not in text and 0 < len(text) <= longest, (len(text), text)


def test_every_public_class_is_here() -> None:
    assert {cls.__name__ for cls in MAKERS} | set(RECORDS) >= set(CLASSES) - {cls.__name__ for cls in NEVER_MADE}


@each
def test_an_object_shows_one_line_and_a_small_table(cls: type, number: int, folder: Path) -> None:
    """However many keys there are, and whatever files and keys are called; also of what is closed. A table in a notebook
    has no scripts, links and colors of its own."""
    made = MAKERS[cls][number](folder)
    assert isinstance(made, cls) and hasattr(made, "_repr_html_") is (cls in SHOWN)
    for closed in (False, True) if hasattr(made, "close") else (False,):
        if closed:
            made.close()
        check_line(repr(made), LONGEST)
        assert cls.__name__ in repr(made) or issubclass(cls, NamedDataMap)
        assert not closed or "closed" in repr(made)
        if cls in SHOWN:
            page = made._repr_html_()
            assert page.startswith("<div") and page.endswith("</div>") and len(page) < 20_000
            assert page.isprintable() and not re.search("<script|<style|<b>|http|color:(?!#)", page)
            assert all(len(rows(table)) <= 21 for table in re.findall("<table.*?</table>", page))  # with its head
            assert not closed or ("closed" in page and "<table" not in page)


@pytest.mark.parametrize("large", [True, False])
@pytest.mark.parametrize("name", RECORDS)
def test_a_record_says_the_sizes_of_its_fields(name: str, large: bool) -> None:
    text = repr(record(CLASSES[name], large=large))
    check_line(text, LONGEST_OF_FIELDS)
    assert text.startswith((name, f"<{name}"))


def test_records_with_what_nothing_takes_have_a_repr() -> None:
    """A repr is what a debugger shows of it."""
    released = memoryview(b"abc")
    released.release()
    for value in (released, np.array(3), object(), len, ...):
        check_line(repr(blobstore.FileSlice(value)), LONGEST_OF_FIELDS)  # type: ignore[arg-type]


def test_a_repr_says_what_a_user_asks_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_file({"w": np.zeros((250, 1000), np.float32)}, "w.ptd")
    cache = BlobCache("w.ptd")
    assert repr(cache) == "<BlobCache w.ptd: 1 key, 1.00 MB, private, generation 0>"
    cache.update({"w": np.ones((250, 1000), np.float32)})
    above = BlobCache(base=cache)
    assert repr(cache).endswith("1 key, 1.00 MB, private, generation 1>")
    assert repr(above).startswith("<BlobCache over w.ptd: ") and "1 key" in repr(above)
    cache.close()
    assert repr(cache) == "<BlobCache w.ptd: closed>"
    save_file({"v": b"x", "u": b"x"}, "v.ptd")
    data, more, opened, fresh = open_ptd("w.ptd"), open_ptd("v.ptd"), safe_open("w.ptd"), BlobCache("w.ptd")
    with fresh.transaction() as transaction:
        transaction["w"] = np.ones((250, 1000), np.float32)
        for shown, expected in (
            (data, "<PtdDataMap w.ptd: 1 key, 1.00 MB>"),
            (MergedDataMap([data]), "<MergedDataMap w.ptd: 1 key, 1.00 MB>"),
            (MergedDataMap([data, *[more] * 29]), "<MergedDataMap w.ptd + 29 others: 3 keys, 1.00 MB>"),
            (store_of(more), "<BlobStore: 2 keys, 1 blob, 1 B>"),
            (data.get_tensor_layout("w"), "TensorLayout(FLOAT, (250, 1000))"),
            (TensorLayout(ScalarType.CHAR, (2, 3), (1, 0)), "TensorLayout(CHAR, (2, 3), (1, 0))"),
            (data.digest("w"), f"<Digest {data.digest('w')}>"),
            (opened, "<TensorFile w.ptd: 1 key, 1.00 MB, 'pt', device 'cpu'>"),
            (opened.get_slice("w"), "<TensorSlice 'w' of w.ptd: F32 [250, 1000], 1.00 MB>"),
            (fresh.tensors, "<LogicalTensors of w.ptd: 0 tensors, 0 of them fixed>"),
            (transaction, "<Transaction on w.ptd: 1 change>"),
        ):
            assert repr(shown) == expected
    program = lower(torch.nn.Linear(8, 2).eval(), (torch.ones(1, 8),), tag="model")
    saved = save_programs({"model": program}, ".")
    assert re.fullmatch(r"<PteDataMap model\.pte: [\d.]+ KB, 1 method \(forward\)>", repr(open_pte("model.pte")))
    assert re.fullmatch(r"<DedupResult: 1 program, [\d.]+ KB to [\d.]+ KB, data in model\.ptd>", repr(saved))
    loaded = Program("model.pte", data="model.ptd")
    assert repr(loaded).startswith("<Program model.pte: 1 method (forward), on model.ptd>")
    assert repr(loaded.method()).endswith("of model.pte: (input: float[1, 8]) -> float[1, 2]>")
    stats = repr(BlobCache("w.ptd").stats)  # all of it, if counts are all
    assert stats.startswith("CacheStats(keys=1, mapped_bytes=") and stats.endswith("commits=0, reverts=0)")


# -------------------------------------------------------------------------------------------------- notebooks

SHOWN = {BlobCache, LogicalTensors, MergedDataMap, Method, NamedDataMap, PoolDataMap, Program, PtdDataMap, PteDataMap}
SHOWN |= {Report}


def rows(page: str) -> list[list[str]]:
    """The cells of all rows of all tables."""
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", page)]


def test_a_notebook_shows_the_keys_of_a_file(tmp_path: Path) -> None:
    image = torch.zeros(1, 3, 4, 5).to(memory_format=torch.channels_last)
    tensors = {"scale": torch.tensor(1.0), "image": image.half(), "raw": b"abc"}
    save_file({**tensors, **{f"layers.{number}": torch.zeros(250) for number in range(30)}}, tmp_path / "w.ptd")
    page = open_ptd(tmp_path / "w.ptd")._repr_html_()
    assert rows(page)[:5] == [
        ["key", "dtype", "shape", "size"],
        ["scale", "float", "scalar", "4 B"],
        ["image", "half", "1 x 3 x 4 x 5, dim order 0 2 3 1", "120 B"],
        ["raw", "opaque", "", "3 B"],
        ["layers.0", "float", "250", "1.00 KB"],
    ]
    assert len(rows(page)) == 21 and "and 13 more" in page


def test_a_notebook_shows_which_keys_of_a_cache_changed(tmp_path: Path) -> None:
    """They come first, with their versions."""
    save_file({f"{number}": np.zeros(3, np.float32) for number in range(30)}, tmp_path / "w.ptd")
    cache = BlobCache(tmp_path / "w.ptd")
    cache.update({"28": np.ones(3, np.float32)})
    cache.update({"29": np.ones(3, np.float32)})
    page = cache._repr_html_()
    assert rows(page)[:4] == [
        ["key", "dtype", "shape", "size", "version", ""],
        ["28", "float", "3", "12 B", "1", "changed"],
        ["29", "float", "3", "12 B", "2", "changed"],
        ["0", "float", "3", "12 B", "0", ""],
    ]
    assert len(rows(page)) == 21 and "and 10 more" in page and "generation 2" in page


class Several(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, times: int, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(x) * times * mask, mask


@cache
def several() -> Any:
    inputs = torch.ones(1, 8), 3, torch.ones(1, 2)
    model = Several().eval()
    return lower({"forward": (model, inputs), "other": (model, inputs)}, tag="model")


@pytest.mark.long
def test_a_notebook_shows_the_methods_of_a_program(tmp_path: Path) -> None:
    """A file and a loaded program show the same."""
    save_programs({"model": several()}, tmp_path)
    program = Program(tmp_path / "model.pte", data=tmp_path / "model.ptd")
    expected = [["method", "inputs", "outputs", "delegated to"]] + [
        [name, "x: float[1, 8], int, mask: float[1, 2]", "float[1, 2], float[1, 2]", "BlobStoreBackend"]
        for name in ("forward", "other")
    ]
    assert rows(program._repr_html_()) == expected
    assert rows(open_pte(tmp_path / "model.pte")._repr_html_())[:3] == expected
    assert rows(program.method()._repr_html_()) == [
        ["", "name", "dtype", "shape"],
        ["input 0", "x", "float", "1 x 8"],
        ["input 1", "", "int", ""],
        ["input 2", "mask", "float", "1 x 2"],
        ["output 0", "", "float", "1 x 2"],
        ["output 1", "", "float", "1 x 2"],
    ]


def test_a_notebook_shows_the_weights_in_a_program(tmp_path: Path) -> None:
    """Without reading all of them for their content keys."""
    (tmp_path / "mlp.pte").write_bytes(models.mlp().pte)
    data = open_pte(tmp_path / "mlp.pte")
    shown = rows(data._repr_html_())
    assert ["weight", "kind", "dtype", "shape", "size"] in shown
    assert {row[3] for row in shown if row[1] == "constant"} >= {"32 x 16", "16 x 32", "16"}
    assert "_items" not in vars(data)


@pytest.mark.parametrize("make", [models.mlp, models.counter, models.viewed, several], ids=lambda make: make.__name__)
def test_signatures_are_those_of_the_runtime(make: Callable[[], Any], tmp_path: Path) -> None:
    made = make()
    save_programs({"model": getattr(made, "manager", made)}, tmp_path)
    program = Program(tmp_path / "model.pte", data=sorted(tmp_path.glob("*.ptd")))
    for one in signatures(open_pte(tmp_path / "model.pte").program):
        assert (tuple(one.inputs), tuple(one.outputs), tuple(one.backends)) == (
            program.inputs(one.name),
            program.outputs(one.name),
            program.backends(one.name),
        )


def test_a_file_that_was_truncated_is_still_shown(tmp_path: Path) -> None:
    save_file({"w": np.zeros(100_000)}, tmp_path / "w.ptd")
    data = open_ptd(tmp_path / "w.ptd")
    merged = MergedDataMap([data])
    os.truncate(tmp_path / "w.ptd", 10)
    for one in (data, merged):
        check_line(repr(one), LONGEST)
        assert "w.ptd" in one._repr_html_()
