"""Every misuse raises a BlobStoreError and leaves no file behind."""

import os
import resource
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

from blobstore import BlobStore, MergedDataMap, dedup_programs, errors, load_file, open_ptd, save_file, save_programs
from blobstore.core.disk.staging import Staging
from blobstore.core.tools.convert import convert
from tests.core.disk.outputs import damage


@pytest.fixture
def ptd(tmp_path):
    path = tmp_path / "in.ptd"
    save_file({"w": np.arange(100.0)}, path)
    return path


# Paths


@pytest.mark.parametrize("path", ["", ".", "/", "..", "sub/.."])
def test_a_folder_as_output(path, tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    (tmp_path / "sub" / "sub").mkdir()
    with pytest.raises(errors.FileAccessError, match="directory"):
        BlobStore().write_ptd(path)


def test_the_longest_file_name(tmp_path):
    path = tmp_path / ("n" * 255)
    BlobStore().write_ptd(path)
    assert os.listdir(tmp_path) == [path.name]


def as_nobody(code, tmp_path):
    """Run code in a process that is not root, with this temporary folder."""
    script = "import os\nos.setgid(65534)\nos.setuid(65534)\n" if os.geteuid() == 0 else ""
    # imported while it may read the packages
    script = (
        "import blobstore, blobstore.core.formats.opening, blobstore.programs, numpy\n" + script + textwrap.dedent(code)
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(tmp_path)}
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, check=False)


def test_no_permission_for_real(ptd, lowered, tmp_path):
    for parent in [tmp_path, *tmp_path.parents[:2]]:
        parent.chmod(0o755)
    (tmp_path / "a.pte").write_bytes(lowered.mlp().pte)
    (tmp_path / "secret.ptd").write_bytes(ptd.read_bytes())
    (tmp_path / "secret.ptd").chmod(0)
    (tmp_path / "shut").mkdir(mode=0o555)
    before = sorted(tmp_path.rglob("*"))
    code = f"""
        from blobstore.errors import FileAccessError
        folder = {str(tmp_path)!r}
        store = blobstore.BlobStore()
        store.add("k", b"x")
        for use in (
            lambda: blobstore.open_ptd(folder + "/secret.ptd"),
            lambda: blobstore.core.formats.opening.open_any(folder + "/secret.ptd"),
            lambda: store.add("s", blobstore.FileSlice(folder + "/secret.ptd")),
            lambda: store.write_ptd(folder + "/shut/x.ptd"),
            lambda: store.write(folder + "/shut"),
            lambda: blobstore.dedup_programs([folder + "/a.pte"], folder + "/shut"),
            lambda: blobstore.dedup_programs([folder + "/a.pte"], folder + "/shut/new/deep"),
            lambda: blobstore.save_programs({{}}, folder + "/shut"),
        ):
            try:
                use()
            except FileAccessError as error:
                assert error.errno == 13 and folder in str(error), error
            else:
                raise SystemExit("no error")
        print("all refused")
    """
    done = as_nobody(code, tmp_path)
    assert done.stdout == "all refused\n", done.stderr
    assert sorted(tmp_path.rglob("*")) == before


# Objects of the wrong kind


class Refuses(torch.Tensor):
    @classmethod
    def __torch_function__(cls, *args, **kwargs):
        raise ValueError("not with me")


def closed_views():
    import mmap

    view = memoryview(b"abc")
    view.release()
    mapped = mmap.mmap(-1, 10)
    mapped.close()
    return [view, mapped]


def odd_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(3)
    return [fake, torch.ones(2).as_subclass(Refuses), torch.nn.UninitializedParameter()]


@pytest.mark.parametrize("data", [*closed_views(), *odd_tensors(), "text", None], ids=lambda data: type(data).__name__)
def test_no_bytes_can_be_taken(data):
    store = BlobStore()
    with pytest.raises(errors.UnsupportedDataError, match="key 'the key'"):
        store.add("the key", data)
    assert len(store) == 0


def test_a_tensor_whose_memory_was_given_back():
    def add():  # a tensor that pytest never prints, because that would crash
        tensor = torch.ones(4)
        tensor.untyped_storage().resize_(0)
        BlobStore().add("k", tensor)

    with pytest.raises(errors.UnsupportedDataError, match="key 'k'"):
        add()


@pytest.mark.parametrize(
    "metadata", [{"a": 1}, {1: "a"}, {"a": None}, {"a": "\ud800"}, {"\ud800": "a"}, ["a"], "ab"], ids=ascii
)
def test_metadata_that_is_no_text(metadata, tmp_path):
    store = BlobStore()
    store.add("k", b"x")
    for use in (
        lambda: store.write_ptd(tmp_path / "x.ptd", metadata=metadata),
        lambda: store.write(tmp_path, metadata=metadata),
        lambda: save_file({"k": b"x"}, tmp_path / "x.ptd", metadata=metadata),
    ):
        with pytest.raises(errors.UnsupportedDataError, match="metadata must map str to str"):
            use()
    assert os.listdir(tmp_path) == []


def test_what_is_no_mapping_and_no_program(ptd, tmp_path):
    with pytest.raises(errors.UnsupportedDataError, match="expected tensors by name"):
        save_file([np.zeros(2)], tmp_path / "x.ptd")
    with pytest.raises(errors.UnsupportedDataError, match="expected programs by name"):
        save_programs([3], tmp_path / "out")
    with pytest.raises(errors.UnsupportedDataError, match="a: expected an ExecutorchProgramManager"):
        save_programs({"a": 3}, tmp_path / "out")
    with pytest.raises(errors.InvalidTagError):
        save_programs({3: 3}, tmp_path / "out")
    with pytest.raises(errors.UnsupportedDataError, match="names"):
        dedup_programs([ptd], tmp_path / "out", names=3)
    with pytest.raises(errors.FileAccessError, match=r"model\.safetensors"):
        dedup_programs([ptd], tmp_path / "out", names="model.safetensors")
    with pytest.raises(errors.UnsupportedDataError, match="framework"):
        load_file(ptd, framework=[])
    assert os.listdir(tmp_path) == ["in.ptd"]


# Copied bytes are checked, and old files stay


def test_every_rewrite_finds_damage(ptd, tmp_path):
    damage(ptd, "w")
    for use in (
        lambda: convert(ptd, tmp_path / "x.safetensors"),
        lambda: dedup_programs([ptd], tmp_path / "out"),
        lambda: BlobStore().merge(open_ptd(ptd)),
        lambda: BlobStore().merge(MergedDataMap([open_ptd(ptd)])),
        lambda: open_ptd(ptd, verify=True),
    ):
        with pytest.raises(errors.IntegrityError, match=r"in\.ptd: .*'w'"):
            use()
    assert os.listdir(tmp_path) == ["in.ptd"]


def test_names_are_an_input_too(lowered, tmp_path):
    (tmp_path / "a.pte").write_bytes(lowered.mlp().pte)
    (tmp_path / "out").mkdir()
    names = tmp_path / "out" / "shared.ptd"
    save_file({"w": np.zeros(3)}, names)
    before = names.read_bytes()
    for opened in (open_ptd(names), MergedDataMap([open_ptd(names)])):
        with pytest.raises(errors.OutputPathError, match=r"shared\.ptd"):
            dedup_programs([tmp_path / "a.pte"], tmp_path / "out", names=opened)
    assert names.read_bytes() == before
    assert os.listdir(tmp_path / "out") == ["shared.ptd"]


@pytest.mark.parametrize("fails", [1, 2, 3, 4])  # the first one is the journal
def test_files_that_take_their_places_together(fails, tmp_path, monkeypatch):
    """If one of the renames fails, those before it are undone."""
    (tmp_path / "a").write_bytes(b"old a")
    (tmp_path / "c").write_bytes(b"old c")
    replace, calls = os.replace, []

    def refuses(source, target):
        calls.append(target)
        if len(calls) == fails:
            raise PermissionError(1, "Operation not permitted")
        replace(source, target)

    monkeypatch.setattr(os, "replace", refuses)
    with pytest.raises(errors.FileAccessError, match="not permitted"), Staging() as staging:
        for name in "abc":
            with staging.open(tmp_path / name) as file:
                file.write(b"new")
    monkeypatch.undo()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a": b"old a", "c": b"old c"}


@pytest.mark.long
def test_padding_takes_no_memory(tmp_path):
    store = BlobStore()
    store.add("a", b"1", alignment=1 << 28)
    store.add("b", b"2", alignment=1 << 28)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    store.write_ptd(tmp_path / "x.ptd")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KB
    shutil.rmtree(tmp_path)
