"""A checkpoint in several `.safetensors` files, its shards, and the index that says which tensor is in which of them.

The index is a JSON file beside the shards, `model.safetensors.index.json`, as Hugging Face's `save_torch_state_dict` writes
it: `{"metadata": {...}, "weight_map": {"layer.weight": "model-00001-of-00002.safetensors", ...}}`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from blobstore.core.disk.kinds import Format, by_name, detect_format
from blobstore.core.disk.names import is_plain_path
from blobstore.core.errors import InvalidFileError
from blobstore.core.formats.data_map import JoinedDataMap
from blobstore.core.formats.safetensors import CheckpointDataMap, SafetensorsDataMap, parse_json
from blobstore.core.memory.mapped_file import as_path, map_file

__all__ = ["ShardedDataMap", "open_checkpoint", "shards_of", "with_shards"]

_LARGEST = 100_000_000  # bytes of an index, as of a header


def shards_of(path: str | os.PathLike[str]) -> dict[str, str]:
    """For each tensor of an index the path of its shard, relative to the index's folder.

    Raises:
        FileAccessError: the index cannot be read.
        InvalidFileError: it is malformed, or a shard would lie outside its folder.
    """
    path = as_path(path)
    data = map_file(path)
    if len(data) > _LARGEST:
        raise InvalidFileError(path, f"the index has {len(data):,} bytes, at most {_LARGEST:,} are read")
    content = parse_json(data, path, "index")
    homes = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(homes, dict) or not all(isinstance(name, str) for name in homes.values()):
        raise InvalidFileError(path, "the index has no weight_map with the name of a file for each tensor")
    for key, name in homes.items():
        if not is_plain_path(name) or not name.endswith(".safetensors"):
            raise InvalidFileError(path, f"tensor {key!r} is in {name!r}; expected a .safetensors in the same folder")
    return homes


def with_shards(path: Path) -> list[Path]:
    """The files that a path stands for where files are kept as they are: an index and its shards, or only itself.

    Raises:
        As `shards_of`.
        InvalidFileError: a shard is missing.
    """
    files = {path: None}
    for key, name in (shards_of(path) if by_name(path) is Format.SHARDS else {}).items():
        files[_shard(path, name, key)] = None
    return list(files)


def _shard(index: Path, name: str, key: str) -> Path:
    """The path of the shard that has a tensor."""
    file = index.parent / name
    if not os.path.lexists(file):
        raise InvalidFileError(index, f"the shard {name}, which has {key!r}, is missing")
    return file


def open_checkpoint(path: str | os.PathLike[str]) -> CheckpointDataMap:
    """Open a .safetensors, or a sharded checkpoint by its index.

    Raises:
        As `SafetensorsDataMap` and `ShardedDataMap`.
    """
    return ShardedDataMap(path) if detect_format(path) is Format.SHARDS else SafetensorsDataMap(path)


class ShardedDataMap(JoinedDataMap, CheckpointDataMap):
    """The tensors of a sharded checkpoint, in the order of its index. Tensors that the index does not list do not count.

    Args:
        path: the index.

    Attributes:
        path: the index, as given.
        metadata: the text on which the headers of all shards agree.

    Raises:
        FileAccessError: the index or a shard cannot be read.
        InvalidFileError: one of them is malformed, or a shard is missing or lacks a tensor of the index.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = as_path(path)
        self.name = str(self.path)
        self.dtypes, self.shapes = {}, {}
        self._home = {}
        shards: dict[str, SafetensorsDataMap] = {}
        for key, name in shards_of(path).items():
            if name not in shards:
                shards[name] = SafetensorsDataMap(_shard(self.path, name, key))
            shard = shards[name]
            if key not in shard:
                raise InvalidFileError(self.path, f"expected tensor {key!r} in {name}, which does not have it")
            self._home[key], self.dtypes[key], self.shapes[key] = shard, shard.dtypes[key], shard.shapes[key]
        self._shards = list(shards.values())
        texts = [set(shard.metadata.items()) for shard in self._shards]
        self.metadata = dict(sorted(set.intersection(*texts))) if texts else {}

    def shard_of(self, key: str) -> Path:
        """The shard that a tensor is taken from, also if another one has its name, too."""
        self.get_tensor_layout(key)  # raises if there is no such key
        return self._home[key].sources[0]

    @property
    def sources(self) -> tuple[Path, ...]:
        return (self.path, *(shard.path for shard in self._shards))

    def _nbytes(self) -> int:
        return sum(shard.path.stat().st_size for shard in self._shards)

    def __reduce__(self) -> Any:
        """Pickled by path; where it arrives, the same files must be there."""
        self._check_open()
        return ShardedDataMap, (self.path,)

    def close(self) -> None:
        super().close()
        for shard in self._shards:
            shard.close()
