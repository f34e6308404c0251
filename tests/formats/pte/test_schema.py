"""The tables of the reader are those of ExecuTorch."""

import importlib
import pkgutil
import re
import sys
from pathlib import Path

import flatbuffers
import pytest

from blobstore.core.formats.pte.flatbuffer import Scalar, Union
from blobstore.core.formats.pte.schema import TABLES, DataLocation, TensorDataLocation
from tests.formats.pte.oracle import SCHEMA, flatc

OURS = Path(__file__).parents[3] / "schema" / "program.fbs"


class Recorder:
    """Replaces a flatbuffers Builder and records the calls of generated code."""

    def __getattr__(self, name):
        def record(slot, value=None, default=None):
            self.call = (name, slot, default)

        return record


def _generate(fbs, folder):
    flatc("--python", "--gen-all", "-o", folder, "-I", fbs.parent, fbs)
    return next(path.parent for path in folder.rglob("ExecutionPlan.py"))


@pytest.mark.parametrize("fbs", [OURS, SCHEMA], ids=["ours", "executorch"])
def test_slots_are_those_of_generated_code(fbs, tmp_path, monkeypatch):
    folder = _generate(fbs, tmp_path)
    monkeypatch.syspath_prepend(str(folder))
    names = {module.name for module in pkgutil.iter_modules([str(folder)])}
    code = {}
    for table in TABLES:
        monkeypatch.delitem(sys.modules, table.name, raising=False)
        code[table.name] = importlib.import_module(table.name)
    try:
        for table in TABLES:
            assert table.name in names
            module = code[table.name]
            camel = {name.lower(): name for name in dir(module) if name.startswith(f"{table.name}Add")}
            assert len(camel) == len(table.fields), table.name
            for slot, (field, kind) in enumerate(table.fields.items()):
                assert table.slots[field] == slot
                recorder = Recorder()
                getattr(module, camel[f"{table.name}add{field.replace('_', '')}".lower()])(recorder, 0)
                call, found, default = recorder.call
                assert found == slot, (table.name, field)
                if isinstance(kind, Scalar):
                    number = call.removeprefix("Prepend").removesuffix("Slot") + "Flags"
                    assert getattr(flatbuffers.number_types, number).bytewidth == kind.width
                    assert default in (0, 0.0, False)
                else:
                    assert call == "PrependUOffsetTRelativeSlot"
                if isinstance(kind, Union):
                    assert slot == table.slots[kind.tag] + 1
    finally:
        for name in names:
            sys.modules.pop(name, None)


def _code(fbs, folder):
    """The code that flatc generates from a schema, without the namespaces, which are not stored."""
    folder = _generate(fbs, folder)
    scalar_type = next(path.parent for path in folder.parents[2].rglob("ScalarType.py"))
    code = {}
    for path in {*folder.glob("*.py"), *scalar_type.glob("*.py")}:
        text = re.sub(r"(blobstore\.core\._generated\.\w+|executorch_flatbuffer)\.", "", path.read_text())
        code[path.stem] = re.sub(r"# namespace:.*", "", text)
    return code


def test_our_schema_is_executorchs(tmp_path):
    ours, theirs = _code(OURS, tmp_path / "ours" / "x"), _code(SCHEMA, tmp_path / "theirs" / "x")
    for code in (ours, theirs):
        code.pop("__init__")
    lines = ours["ScalarType"].splitlines()  # also of the types that only its exporter and its runtime have
    assert set(lines) >= set(theirs.pop("ScalarType").splitlines())
    ours.pop("ScalarType")
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert ours[name] == theirs[name], name


def test_schemas_conform_both_ways():
    flatc("--conform", SCHEMA, OURS)
    flatc("--conform", OURS, SCHEMA)


@pytest.mark.parametrize("enum", [DataLocation, TensorDataLocation])
def test_enums_are_executorchs(enum):
    theirs = getattr(importlib.import_module("executorch.exir.schema"), enum.__name__)
    assert [(member.name, member.value) for member in enum] == [(m.name, m.value) for m in theirs]


@pytest.mark.parametrize(("field", "name"), [("val", "KernelTypes"), ("instr_args", "InstructionArguments")])
def test_unions_have_executorchs_members_in_its_order(field, name, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(_generate(SCHEMA, tmp_path)))
    theirs = getattr(importlib.import_module(name), name)
    sys.modules.pop(name)
    (union,) = [table.fields[field] for table in TABLES if isinstance(table.fields.get(field), Union)]
    members = {member.name: number for number, member in enumerate(union.members, 1)}
    assert {"NONE": 0, **members} == {k: v for k, v in vars(theirs).items() if not k.startswith("__")}
