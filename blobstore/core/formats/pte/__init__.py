"""Programs (`.pte`): which weights they hold, and the same program without them::

program = read_program("model.pte")
moves = {item: item.key for item in program.movable(keep_small=1024)}
...  # put item.data under its key into a data file
write_slim(program, "slim.pte", moves)
"""

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
