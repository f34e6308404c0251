"""Telling files apart by their first bytes, and refusing outputs whose names say something else."""

from __future__ import annotations

import enum
import os
import re
import stat
from pathlib import Path

from blobstore.core.errors import FileAccessError, InvalidFileError, OutputPathError
from blobstore.core.memory.mapped_file import as_path, map_file

__all__ = [
    "TORCH_SUFFIXES",
    "Format",
    "by_content",
    "by_name",
    "check_folder_name",
    "check_replaceable",
    "detect_format",
    "is_pointer",
    "pointer_error",
    "whole_name",
]

_INDEX = re.compile(r"(.+)\.safetensors\.index(\..+)?\.json", re.DOTALL)
"""That of a variant has its name before the ending, as in `model.safetensors.index.fp16.json`."""

TORCH_SUFFIXES = (".pt", ".pth", ".bin")
"""What files of `torch.save` are called; other programs use these endings, too."""

_OF_TORCH = re.compile(rb"[^/]+/(?:data\.pkl|data/0)")
_OF_NUMPY = re.compile(rb"[^/]+\.npy")
"""First members of zips."""

_BY_TORCH = b"PK\3\4\0\0\x08\x08"
"""A zip of torch's own writer: one that needs no version, with sizes after its members. The name of the first member begins
with that of the file, so it may be longer than what is read."""


class Format(enum.Enum):
    """The format of a file; the value is its name in messages."""

    PTE = "a .pte program"
    PTD = "a .ptd data file"
    SAFETENSORS = "a .safetensors file"
    PTN = "a .ptn package"
    TORCH = "a checkpoint of torch.save"
    NPZ = "a .npz of arrays"
    POINTER = "a pointer of Git LFS"
    SHARDS = "an index of .safetensors shards"
    HTML = "an HTML page"
    UNKNOWN = "a file of an unknown format"


def detect_format(path: str | os.PathLike[str]) -> Format:
    """The format that a file claims to have, by its first bytes or else by its name; a reader checks the rest.

    Raises:
        FileAccessError: the file cannot be read.
        InvalidFileError: it is empty, or a pointer of Git LFS.
    """
    kind = by_content(path)
    if kind is Format.POINTER:
        raise pointer_error(path)
    return by_name(path) if kind is Format.UNKNOWN else kind


def by_name(path: str | os.PathLike[str]) -> Format:
    """The format that the ending of a file name stands for."""
    formats = {
        ".pte": Format.PTE,
        ".ptd": Format.PTD,
        ".safetensors": Format.SAFETENSORS,
        ".ptn": Format.PTN,
        **dict.fromkeys(TORCH_SUFFIXES, Format.TORCH),
        ".npz": Format.NPZ,
        ".html": Format.HTML,
    }
    path = as_path(path)
    return Format.SHARDS if _INDEX.fullmatch(path.name) else formats.get(path.suffix, Format.UNKNOWN)


def is_pointer(head: bytes) -> bool:
    """Whether a file that begins with `head` is what Git LFS leaves in a clone in place of a file."""
    return head.startswith(b"version https://git-lfs")


def pointer_error(path: str | os.PathLike[str]) -> InvalidFileError:
    """The error for a pointer of Git LFS that is read."""
    return InvalidFileError(path, "a pointer of Git LFS in place of the file: fetch it with git lfs pull")


def whole_name(name: str) -> str:
    """What a checkpoint is called if it is one file, by the name of its index; any other name is itself."""
    index = _INDEX.fullmatch(name)
    return name if index is None else f"{index[1]}{index[2] or ''}.safetensors"


def check_folder_name(path: Path) -> None:
    """Refuse to make a folder under the name of a file.

    Raises:
        OutputPathError: the ending of `path` is that of a format, and no such folder is there.
    """
    name = by_name(path)
    if name is not Format.UNKNOWN and not path.is_dir():
        raise OutputPathError(f"{path}: this is the name of {name.value}; expected that of a folder")


def check_replaceable(path: Path, kind: Format, *, force: bool = False) -> None:
    """Raise OutputPathError for a file of another format at a path, unless `force` is set, and if nothing is there and the
    ending is that of another format. An empty file may always be replaced."""
    try:
        status = path.stat()
    except FileNotFoundError:
        name = by_name(path)
        if kind is not Format.UNKNOWN and name not in {Format.UNKNOWN, kind}:
            raise OutputPathError(
                f"{path}: this is the name of {name.value}, and {kind.value} would be written"
            ) from None
        return
    except OSError as error:
        raise FileAccessError(path, error) from None
    if force and stat.S_ISREG(status.st_mode):
        return
    try:
        old = by_content(path)
    except InvalidFileError:
        return
    if old is not kind:
        raise OutputPathError(
            f"{path}: this is {old.value} and would be replaced by {kind.value}; remove it, or use force (--force)"
        )


def by_content(path: str | os.PathLike[str], head: bytes | None = None) -> Format:
    """The format of a file, or one at a URL, by its first 64 bytes, and of a zip also by its name."""
    head = bytes(map_file(path)[:64]) if head is None else head
    if is_pointer(head):
        return Format.POINTER
    if head[4:8] == b"FT01":
        return Format.PTD
    if head[4:6] == b"ET":
        return Format.PTE
    # A .safetensors has no magic. It starts with the length of a JSON object and the brace of that object.
    if head[8:9] == b"{" and head[6:8] == b"\0\0":
        return Format.SAFETENSORS
    if head[:4] == b"PK\3\4":
        return _of_zip(os.fspath(path), head)
    if head.lstrip().lower().startswith((b"<!doctype html", b"<html")):
        return Format.HTML
    return Format.UNKNOWN


def _of_zip(path: str, head: bytes) -> Format:
    if path.endswith(".ptn"):  # other zips are something else
        return Format.PTN
    if _OF_TORCH.match(head[30:]) or path.endswith(TORCH_SUFFIXES):
        return Format.TORCH
    if head.startswith(_BY_TORCH) and b"/" not in head[30 : 1 - len("/data.pkl")]:
        return Format.TORCH
    return Format.NPZ if _OF_NUMPY.match(head[30:]) else Format.UNKNOWN
