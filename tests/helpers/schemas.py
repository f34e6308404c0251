"""What flatc makes of the schemas: readers and writers that share nothing with the code under test.

`from tests.helpers.schemas.manifest import Pair` imports what it makes of `schema/manifest.fbs`.
"""

import hashlib
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import executorch

from blobstore.core.formats.flatbuffer import Kind, TableType, Union, Vector

SCHEMA = Path(__file__).parents[2] / "schema"
EXECUTORCH_SCHEMA = Path(next(iter(executorch.__path__)), "schema", "program.fbs")

_NAMESPACE = "blobstore_schema"  # in the schemas
_FLATC = Path(next(iter(executorch.__path__)), "data", "bin", "flatc")


def flatc(*arguments: Any) -> None:
    """Run the schema compiler of the executorch wheel."""
    subprocess.run([str(_FLATC), *map(str, arguments)], check=True, capture_output=True)


def tables_below(kind: Kind, found: dict[str, TableType] | None = None) -> dict[str, TableType]:
    """All types of tables that a type refers to, by name, itself among them."""
    found = {} if found is None else found
    if isinstance(kind, TableType) and kind.name not in found:
        found[kind.name] = kind
        for field in kind.fields.values():
            tables_below(field, found)
    for inner in [kind.of] if isinstance(kind, Vector) else kind.members if isinstance(kind, Union) else []:
        tables_below(inner, found)
    return found


def _generated() -> Path:
    """The folder with the code, which is made again when a schema changes."""
    sources = sorted(SCHEMA.glob("*.fbs"))
    contents = hashlib.sha256(
        b"".join([__name__.encode(), *(source.read_bytes() for source in (*sources, _FLATC))])
    ).hexdigest()
    made = SCHEMA.parent / "build" / f"schemas-{contents[:16]}"
    if not made.exists():
        made.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=made.parent) as folder:
            flatc("--python", "-o", folder, "-I", SCHEMA, *sources)
            code = Path(folder, _NAMESPACE)
            for module in code.rglob("*.py"):
                module.write_text(module.read_text().replace(f"{_NAMESPACE}.", f"{__name__}."))
            try:
                code.rename(made)
            except OSError:  # another process was first
                if not made.exists():
                    raise
    return made


__path__ = [str(_generated())]
