"""Programs (`.pte`): which weights they hold, and the same program without them::

program = read_program("model.pte")
moves = {item: item.key for item in program.movable(keep_small=1024)}
...  # put item.data under its key into a data file
write_slim(program, "slim.pte", moves)
"""

from typing import TYPE_CHECKING

from blobstore.core.lazy import lazily

if TYPE_CHECKING:
    from blobstore.core.formats.pte.data_map import PteDataMap, open_pte
    from blobstore.core.formats.pte.program import Movable, ProgramFile, content_key, read_program
    from blobstore.core.formats.pte.rewrite import Rewrite, write_slim

__all__ = [
    "Movable",
    "ProgramFile",
    "PteDataMap",
    "Rewrite",
    "content_key",
    "open_pte",
    "read_program",
    "write_slim",
]

_HOME = {
    "Movable": "program",
    "ProgramFile": "program",
    "PteDataMap": "data_map",
    "Rewrite": "rewrite",
    "content_key": "program",
    "open_pte": "data_map",
    "read_program": "program",
    "write_slim": "rewrite",
}

if not TYPE_CHECKING:  # to a type checker, a name that is not there is an error

    def __getattr__(name: str) -> object:
        return lazily(__name__, _HOME, name)
