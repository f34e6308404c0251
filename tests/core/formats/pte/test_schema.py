"""The types of tables that are read and written are those of the schemas, and ET12 is ExecuTorch's."""

import importlib
import pkgutil
import re
import sys

import flatbuffers
import pytest

from blobstore.core.formats.flatbuffer import Scalar, Struct, Union
from blobstore.core.formats.payload import CONSTANT, PAYLOAD
from blobstore.core.formats.ptd.manifest import MANIFEST, PAIR
from blobstore.core.formats.pte.schema import PROGRAM, DataLocation, TensorDataLocation
from blobstore.logical.records import RECORD, RECORDS, SOURCE, STEP
from tests.helpers.schemas import EXECUTORCH_SCHEMA, SCHEMA, flatc, tables_below

OURS = SCHEMA / "program.fbs"
TABLES = list(tables_below(PROGRAM).values())


class Recorder:
    """Replaces a flatbuffers Builder and records the calls of generated code."""

    def __getattr__(self, name):
        def record(slot, value=None, default=None):
            self.call = (name, slot, default)

        return record


def _generate(fbs, folder, table="ExecutionPlan"):
    flatc("--python", "--gen-all", "-o", folder, "-I", fbs.parent, fbs)
    return next(path.parent for path in folder.rglob(f"{table}.py"))


SCHEMAS = [
    (OURS, TABLES),
    (EXECUTORCH_SCHEMA, TABLES),
    (SCHEMA / "manifest.fbs", [PAIR, MANIFEST]),
    (SCHEMA / "payload.fbs", [CONSTANT, PAYLOAD]),
    (SCHEMA / "record.fbs", [SOURCE, STEP, RECORD, RECORDS]),
]


@pytest.mark.parametrize(("fbs", "tables"), SCHEMAS, ids=["program", "executorch", "manifest", "payload", "record"])
def test_slots_are_those_of_generated_code(fbs, tables, tmp_path, monkeypatch):
    folder = _generate(fbs, tmp_path, tables[0].name)
    monkeypatch.syspath_prepend(str(folder))
    names = {module.name for module in pkgutil.iter_modules([str(folder)])}
    code = {}
    for table in tables:
        monkeypatch.delitem(sys.modules, table.name, raising=False)
        code[table.name] = importlib.import_module(table.name)
    try:
        for table in tables:
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
                elif isinstance(kind, Struct):
                    assert call == "PrependStructSlot"
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
        text = re.sub(r"(blobstore_schema\.\w+|executorch_flatbuffer)\.", "", path.read_text())
        code[path.stem] = re.sub(r"# namespace:.*", "", text)
    return code


def test_our_schema_is_executorchs(tmp_path):
    ours, theirs = _code(OURS, tmp_path / "ours" / "x"), _code(EXECUTORCH_SCHEMA, tmp_path / "theirs" / "x")
    for code in (ours, theirs):
        code.pop("__init__")
    lines = ours["ScalarType"].splitlines()  # also of the types that only its exporter and its runtime have
    assert set(lines) >= set(theirs.pop("ScalarType").splitlines())
    ours.pop("ScalarType")
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert ours[name] == theirs[name], name


@pytest.mark.parametrize("enum", [DataLocation, TensorDataLocation])
def test_enums_are_executorchs(enum):
    theirs = getattr(importlib.import_module("executorch.exir.schema"), enum.__name__)
    assert [(member.name, member.value) for member in enum] == [(m.name, m.value) for m in theirs]


@pytest.mark.parametrize(("field", "name"), [("val", "KernelTypes"), ("instr_args", "InstructionArguments")])
def test_unions_have_executorchs_members_in_its_order(field, name, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(_generate(EXECUTORCH_SCHEMA, tmp_path)))
    theirs = getattr(importlib.import_module(name), name)
    sys.modules.pop(name)
    (union,) = [table.fields[field] for table in TABLES if isinstance(table.fields.get(field), Union)]
    members = {member.name: number for number, member in enumerate(union.members, 1)}
    assert {"NONE": 0, **members} == {k: v for k, v in vars(theirs).items() if not k.startswith("__")}
