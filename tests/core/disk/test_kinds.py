"""Formats by the first bytes, and files that are not replaced by one of another format (B5)."""

import os
import stat

import numpy as np
import pytest
import safetensors.torch
import torch

import blobstore
from blobstore import BlobStore
from blobstore.core.disk.kinds import Format, by_name, check_replaceable, detect_format
from blobstore.core.tools.convert import convert
from blobstore.errors import FileAccessError, InvalidFileError, OutputPathError
from blobstore.programs import dedup_programs, save_programs
from tests.core.disk.outputs import files, save


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (b"\x10\0\0\0FT01", Format.PTD),
        (b"\x10\0\0\0ET12", Format.PTE),
        (b"\x10\0\0\0ET99", Format.PTE),  # a later program is one, too
        (b"\x02\0\0\0\0\0\0\0{}", Format.SAFETENSORS),
        (b" \n<!DOCTYPE HTML><title>x</title>", Format.HTML),
        (b"<html>", Format.HTML),
        (b"plain text", Format.UNKNOWN),
        (b"FT01", Format.UNKNOWN),
    ],
)
def test_a_format_is_recognized_by_the_first_bytes(head, expected, tmp_path):
    """The name decides only where the bytes do not."""
    for name in ("x", "x.pte", "x.ptd", "x.safetensors"):
        (tmp_path / name).write_bytes(head)
        assert detect_format(tmp_path / name) is (by_name(name) if expected is Format.UNKNOWN else expected)


def test_an_empty_file_has_no_format(tmp_path):
    """It is malformed in every format."""
    (tmp_path / "x.ptd").touch()
    with pytest.raises(InvalidFileError, match="empty"):
        detect_format(tmp_path / "x.ptd")


def test_what_may_be_replaced(tmp_path):
    """A missing file, an empty one, one of the same format, and any file with force."""
    path = tmp_path / "x"
    check_replaceable(path, Format.PTD)
    path.touch()
    check_replaceable(path, Format.PTD)
    path.write_bytes(b"\x10\0\0\0FT01")
    check_replaceable(path, Format.PTD)
    with pytest.raises(OutputPathError, match=r"x: this is a \.ptd data file and would be replaced by a \.pte program"):
        check_replaceable(path, Format.PTE)
    check_replaceable(path, Format.PTE, force=True)


@pytest.fixture
def each_kind(tmp_path, lowered):
    """A file of each format, and one of an unknown format."""
    (tmp_path / "kinds").mkdir()
    made = {kind: tmp_path / "kinds" / kind for kind in ("pte", "ptd", "safetensors", "html", "text")}
    made["pte"].write_bytes(lowered.mlp().pte)
    save(made["ptd"])
    safetensors.torch.save_file({"w": torch.zeros(2)}, made["safetensors"])
    made["html"].write_text("\n<!DOCTYPE html><title>x</title>")
    made["text"].write_text("a letter of some length, which must not be lost")
    return made


def writers(source, lowered):
    """Functions that write a file, each with the format that it writes."""
    store = BlobStore()
    store.add("k", b"1")
    (source / "st.safetensors").write_bytes((source / "safetensors").read_bytes())
    return [
        ("ptd", save),
        ("ptd", store.write_ptd),
        ("ptd", lambda path: convert(source / "st.safetensors", path)),
        ("safetensors", lambda path: convert(source / "ptd", path)),
        ("ptd", lambda path: dedup_programs([source / "pte"], path.parent, data_name=path.name)),
        ("pte", lambda path: save_programs({path.name: lowered.mlp().manager}, path.parent)),
    ]


def test_a_file_of_another_format_is_not_replaced(each_kind, tmp_path, lowered):
    """Its contents decide, not its name."""
    out = tmp_path / "out"
    for number, (kind, write) in enumerate(writers(tmp_path / "kinds", lowered)):
        for other, path in each_kind.items():
            out.mkdir()
            ending = ".pte" if number == 5 else f".{kind}" if number == 4 else ""
            target = out / f"target{ending}"
            target.write_bytes(path.read_bytes())
            if other == kind and number != 4:
                write(target)
            else:
                with pytest.raises(OutputPathError, match=r"out/target.*: this"):
                    write(target)
                assert files(out) == {target.name: path.read_bytes()}
            for file in out.iterdir():
                file.unlink()
            out.rmdir()


def test_a_pipe_is_never_replaced(tmp_path):
    """Not even with force."""
    os.mkfifo(tmp_path / "pipe")
    for force in (False, True):
        with pytest.raises(FileAccessError, match="not a regular file"):
            BlobStore().write_ptd(tmp_path / "pipe", force=force)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_a_pointer_of_git_lfs_is_named(tmp_path):
    """By every reader that looks for a format, whatever the file should be. It is not replaced: it is somebody's file."""
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 90000000\n")
    with pytest.raises(InvalidFileError, match=r"model\.safetensors: a pointer of Git LFS .*git lfs pull"):
        blobstore.load_file(path)
    (problem,) = blobstore.report([tmp_path]).problems
    assert "a pointer of Git LFS" in problem.reason
    for kind in (Format.PTD, Format.SAFETENSORS, Format.HTML, Format.NPZ):
        with pytest.raises(OutputPathError, match="this is a pointer of Git LFS and would be replaced"):
            check_replaceable(path, kind)


def test_a_npz_is_replaced_only_by_one(tmp_path):
    np.savez(tmp_path / "a.npz", np.zeros(3))
    check_replaceable(tmp_path / "a.npz", Format.NPZ)
    with pytest.raises(OutputPathError, match="this is a .npz of arrays"):
        check_replaceable(tmp_path / "a.npz", Format.PTD)


def test_the_name_of_a_checkpoint_of_torch_is_that_of_no_other_file(tmp_path):
    """`convert x.safetensors out.bin` would write a data file under it."""
    for name in ("out.bin", "out.pt", "out.pth"):
        with pytest.raises(OutputPathError, match="the name of a checkpoint of torch"):
            check_replaceable(tmp_path / name, Format.PTD)
