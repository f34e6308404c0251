"""What users do by mistake, and what an index may not do with it (F3, F4)."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from blobstore import open_ptd, save_file
from blobstore.errors import BlobStoreError, IntegrityError, ReleaseError, TransferError, TrustError
from blobstore.releases import Release, gc, publish, pull, push, sweep
from blobstore.releases.device.pull import PullOptions
from blobstore.runtime.native import native
from tests.releases.models import found, inputs, published_once, read_ways, same, weights
from tests.releases.recording import recorded_pull, would_ask


@published_once
def releases(folder: Path) -> None:
    """A release and a delta."""
    root, tensors = folder / "releases", weights()
    publish(inputs(folder / "in", tensors), root, name="a", version="1")
    tensors["layer2.weight"] = tensors["layer2.weight"] + np.float32(1)
    publish(inputs(folder / "in", tensors), root, name="a", version="2")


def test_a_release_folder_is_no_device(releases: Path, tmp_path: Path) -> None:
    """gc would remove what is published there; and the other way round."""
    before = sorted(path.relative_to(releases) for path in releases.rglob("*"))
    with pytest.raises(ReleaseError, match="releases are published in this folder"):
        pull(releases / "a/1", releases)
    with pytest.raises(ReleaseError, match="releases are published in this folder"):
        native.missing(os.fsencode(releases / "a/1/index.json"), os.fsencode(releases))
    assert sorted(path.relative_to(releases) for path in releases.rglob("*")) == before
    pull(releases / "a/1", tmp_path / "device")
    with pytest.raises(ReleaseError, match="releases are pulled into this folder"):
        publish(tmp_path / "in", tmp_path / "device", name="a", version="9")


def test_a_copy_for_devices_is_not_published_into(releases: Path, tmp_path: Path) -> None:
    """It lacks what the pool knows, so a version could be published twice, with other contents (F1)."""
    (releases / "pool.json").unlink()
    before = sorted(releases.rglob("*"))
    for call in (lambda: publish(tmp_path / "in", releases, name="a", version="1"), lambda: sweep(releases)):
        with pytest.raises(ReleaseError, match=r"there are releases here, and no pool\.json"):
            call()
    assert sorted(releases.rglob("*")) == before


@pytest.mark.parametrize("given", ["", "files", "a/1/index.json", "../link", "new/folder"])
def test_a_release_is_not_published_as_its_own_files(releases: Path, tmp_path: Path, given: str) -> None:
    """The release folder, what is in it, and a link to it are refused before anything is made (F1)."""
    (tmp_path / "link").symlink_to(releases)
    before = sorted(releases.rglob("*"))
    with pytest.raises(ReleaseError, match=r"this is in the release folder .*releases; publish files of another"):
        publish([tmp_path / "in", releases / given], releases, name="b", version="1")
    assert sorted(releases.rglob("*")) == before
    with pytest.raises(ReleaseError, match="this is in the release folder"):
        publish(tmp_path / "in", tmp_path / "in", name="b", version="1")
    assert not (tmp_path / "in/files").exists()


def test_a_release_folder_below_the_input_is_left_out(tmp_path: Path) -> None:
    """Also the second time, when it has files; and so are names that begin with a dot (F1)."""
    folder = inputs(tmp_path / "in", weights())
    (folder / ".hidden").write_text("1")
    counts = [publish(folder, folder / "out", name="a", version=str(version)).files for version in (1, 2)]
    assert counts == [4, 4]


def test_a_link_to_a_folder_is_not_left_out(tmp_path: Path) -> None:
    """A release without its files would be worse than an error (F1)."""
    inputs(tmp_path / "in", weights())
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/file").write_text("1")
    (tmp_path / "in/linked").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ReleaseError, match="links to folders"):
        publish(tmp_path / "in", tmp_path / "releases", name="a", version="1")


@pytest.mark.parametrize(
    "link",
    ["in/linked.txt", "out/files", "out/a", "out/a/latest", "out/a/1", "out/signatures", "out/packs", "out/tables"],
)
def test_links_out_of_a_folder_are_not_followed(tmp_path: Path, link: str) -> None:
    """They lead neither to files that were not meant to be published, nor to folders that were not to be written (S2)."""
    inputs(tmp_path / "in", weights(layers=1))
    (tmp_path / "in/inside.txt").symlink_to("tokenizer/0.json")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/secret").write_text("of another user")
    place = tmp_path / link
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(tmp_path / ("elsewhere/secret" if link.startswith("in") else "elsewhere"))
    with pytest.raises(ReleaseError, match="leads out of"):
        publish(tmp_path / "in", tmp_path / "out", name="a", version="1")
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["secret"]
    place.unlink()
    publish(tmp_path / "in", tmp_path / "out", name="a", version="1")  # a link that stays inside is a file
    assert "inside.txt" in (tmp_path / "out/a/1/index.json").read_text()


def test_a_version_that_exists_is_refused_before_any_work(releases: Path, tmp_path: Path) -> None:
    """Nothing is stored (F1)."""
    before = sorted((releases / "files").iterdir())
    inputs(tmp_path / "in", weights(seed=3))
    with pytest.raises(ReleaseError, match="published already"):
        publish(tmp_path / "in", releases, name="a", version="2")
    assert sorted((releases / "files").iterdir()) == before


def test_an_impossible_executorch_is_refused_before_any_work(tmp_path: Path) -> None:
    inputs(tmp_path / "in", weights())
    with pytest.raises(ReleaseError, match="not a version"):
        publish(tmp_path / "in", tmp_path / "releases", name="a", version="1", executorch="new")
    assert not (tmp_path / "releases/a").exists()


@pytest.mark.parametrize("needed", ["1.5", "1.5.1", "2"])
def test_programs_need_their_executorch(releases: Path, tmp_path: Path, needed: str) -> None:
    """An older one is refused, by name or as it is installed; data alone runs anywhere."""
    shutil.copy(Path(__file__).parents[1] / "data/0.1/model.pte", tmp_path / "in")
    publish(tmp_path / "in", releases, name="a", version="3", executorch=needed)
    release, device = releases / "a/3", tmp_path / "device"
    for has in ("1.4", "1", "0.9.9"):
        with pytest.raises(ReleaseError, match=rf"need ExecuTorch {needed}, this device has {has}"):
            pull(release, device, executorch=has)
    assert not (device / "current").exists()
    for has in (needed, "2.0.0", "10"):
        pull(release, tmp_path / has, executorch=has)
    if needed == "2":  # above what is installed
        with pytest.raises(ReleaseError, match="need ExecuTorch 2, this device has 1"):
            pull(release, device)
        with pytest.raises(ReleaseError, match="need ExecuTorch 2, this device has 1"):
            Release.open(tmp_path / "10")
    else:
        pull(release, device)
    pull(releases / "a/1", tmp_path / "data", executorch="0.1")


def test_commands_that_run_twice(releases: Path, device: Path) -> None:
    """A second run changes nothing (F3)."""
    pull(releases / "a/1", device)
    first = sorted((path, path.lstat().st_mtime_ns) for path in device.rglob("*") if path.is_file())
    assert not pull(releases / "a/1", device).changed
    assert gc(device).files == gc(device).files == 0
    assert sorted((path, path.lstat().st_mtime_ns) for path in device.rglob("*") if path.is_file()) == first


def test_an_error_names_what_is_missing(releases: Path, tmp_path: Path) -> None:
    """A source that lost a file leaves the device as it was (F3)."""
    pull(releases / "a/1", tmp_path / "device")
    ways = read_ways(releases / "a/2")
    paths = {sha256: next(releases.rglob(sha256)) for sha256, *_ in ways["objects"]}
    for path in paths.values():
        path.unlink()
    with pytest.raises(BlobStoreError, match="|".join(paths)) as caught:
        pull(releases / "a/2", tmp_path / "device")
    assert not isinstance(caught.value, TransferError)
    assert same(found(tmp_path / "device/current"), weights())


def test_relative_paths(releases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every function takes them, as users write them (F1)."""
    monkeypatch.chdir(tmp_path)
    tensors = weights(seed=1)
    inputs(Path("in"), tensors)
    publish("in", "releases", name="a", version="3")
    publish("in", "releases", name="a", version="4")
    pushed = push("oci:layout:4", "releases/a/4")
    assert push("oci:layout:4", Path("releases/a/4/index.json")).sent_bytes == 0 < pushed.sent_bytes
    pull(f"oci:layout@sha256:{pushed.sha256}", "device")
    assert same(found(Path("device/current")), tensors)
    pull("releases/a/3", "other")
    pull("releases/a/4", "other")
    gc("other")
    assert same(found(Path("other/current")), tensors)
    with Release.open("device") as release:
        assert set(release.cache) == set(tensors)


@pytest.mark.parametrize("kind", ["data", "adapter"])
def test_metadata_that_changes_alone(tmp_path: Path, kind: str) -> None:
    """The scale of an adapter, and the programs of a data file, are nowhere else (F1)."""
    root, tensors = tmp_path / "releases", weights()
    adapter = {"blobstore.adapter.foundation": "0" * 32} if kind == "adapter" else {}
    for version, scale in (("1", "2"), ("2", "16")):
        save_file(tensors, tmp_path / "m.ptd", metadata={"scale": scale, **adapter})
        published = publish(tmp_path / "m.ptd", root, name="a", version=version)
        pull(root / "a" / version, tmp_path / "device")
        with open_ptd(tmp_path / "device/current/m.ptd") as newest:
            assert newest.metadata["scale"] == scale
        index = json.loads((root / "a" / version / "index.json").read_text())
        assert [file["kind"] for file in index["files"]] == [kind]
    assert published.new_bytes < 10_000


@pytest.mark.slow
@pytest.mark.long
def test_one_of_many_small_files_changes(tmp_path: Path) -> None:
    """It does not make each of 1,000 a request of its own (F2)."""
    root, folder = tmp_path / "releases", tmp_path / "in"
    folder.mkdir()
    for i in range(1010):
        (folder / f"{i}.txt").write_text(f"{i:040}")
    publish(folder, root, name="a", version="1")
    for version in range(2, 5):
        for i in range(version * version * version * 10):
            (folder / f"{i}.txt").write_text(f"{i:020}{version:020}")
        publish(folder, root, name="a", version=str(version))
        release = root / f"a/{version}"
        done, asked = recorded_pull(release, tmp_path / f"device{version}", PullOptions())
        assert len(asked) <= 6 and done.fetched_bytes <= 3 * done.release_bytes
        pull(release, tmp_path / "device")
        for device in (tmp_path / "device", tmp_path / f"device{version}"):
            for file in folder.iterdir():
                assert (device / "current" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.long
def test_files_that_come_one_by_one(tmp_path: Path) -> None:
    """A new device fetches from few objects, however many releases there were before (F2)."""
    root, folder = tmp_path / "releases", tmp_path / "in"
    folder.mkdir()
    for i in range(24):
        (folder / f"{i}.txt").write_text(f"{i:040}")
        publish(folder, root, name="a", version=str(i))
        assert len({sha256 for sha256, _, _ in would_ask(root / f"a/{i}", tmp_path / "device")}) <= 16
    pull(root / "a/23", tmp_path / "device")
    assert len(list((tmp_path / "device/current").iterdir())) == 24


def test_names_of_folders_that_are_taken(releases: Path, tmp_path: Path) -> None:
    """A release with such a name would make the folder look like that of a device, where gc removes files (F4)."""
    for name in ("indexes", "files", "signatures", "packs", "tables"):
        with pytest.raises(ReleaseError, match="taken"):
            publish(tmp_path / "in", releases, name=name, version="1")
        assert not (releases / name / "1").exists()
    publish(tmp_path / "in", releases, name="a", version="3")


def spoilt(path: Path, how: str) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-9] if how == "cut" else data.replace(b"tokenizer/0.json", b"tokenizer/9.json"))


@pytest.mark.parametrize("how", ["cut", "changed"])
@pytest.mark.parametrize("kind", ["layout", "folder"])
def test_a_damaged_index_of_a_device(releases: Path, tmp_path: Path, how: str, kind: str) -> None:
    """It is never believed, pulling the same release mends it, and a newer one is not taken for an older one (F4)."""
    device, layout = tmp_path / "device", f"oci:{tmp_path}/layout:"
    pins = {version: push(layout + version, releases / "a" / version).sha256 for version in "12"}

    def release(version: str) -> str | Path:
        return f"{layout}{version}@sha256:{pins[version]}" if kind == "layout" else releases / "a" / version

    pull(release("1"), device)
    (index,) = (device / "indexes").glob("*.json")
    whole = index.read_bytes()
    spoilt(index, how)
    with pytest.raises(TrustError, match="index is damaged"):
        pull(release("2"), device)
    with pytest.raises(TrustError, match="index is damaged"):
        native.missing(os.fsencode(releases / "a/2/index.json"), os.fsencode(device))
    with pytest.raises(IntegrityError):
        gc(device)
    pull(release("1"), device)
    assert index.read_bytes() == whole
    names = {path.relative_to(device / "current").as_posix() for path in (device / "current").rglob("*.json")}
    assert names == {f"tokenizer/{i}.json" for i in range(3)}
    spoilt(index, how)
    native.commit(os.fsencode(releases / "a/1/index.json"), os.fsencode(device))
    assert index.read_bytes() == whole
    spoilt(index, how)
    pull(release("2"), device, allow_rollback=True)
    assert {*found(device / "current")} == {*weights()}


def test_damaged_parts_on_a_device(releases: Path, device: Path) -> None:
    """What they would say is fetched; a server is not blamed for them (F4)."""
    pull(releases / "a/1", device)
    index = json.loads((releases / "a/1/index.json").read_text())
    listed = device / "files" / index["parts"][0]
    listed.write_bytes(listed.read_bytes()[:-9])
    pull(releases / "a/2", device)
    tensors = weights()
    tensors["layer2.weight"] = tensors["layer2.weight"] + np.float32(1)
    assert same(found(device / "current"), tensors)


def test_other_fields_of_an_image_layout_stay(releases: Path, tmp_path: Path) -> None:
    """Tools that share the layout may have written them (F3)."""
    layout = tmp_path / "layout"
    push(f"oci:{layout}:1", releases / "a/1")
    index = json.loads((layout / "index.json").read_text())
    own = {"mediaType": "application/vnd.oci.image.index.v1+json", "annotations": {"a": "b"}}
    (layout / "index.json").write_text(json.dumps({**index, **own}))
    push(f"oci:{layout}:2", releases / "a/2")
    now = json.loads((layout / "index.json").read_text())
    assert {key: now[key] for key in own} == own and now["schemaVersion"] == 2 and len(now["manifests"]) == 2


@pytest.mark.parametrize("host", ["[::::]", "[1:2]", "localhost:99999", "[::1]:65536"])
def test_hosts_that_are_none(tmp_path: Path, host: str) -> None:
    for call in (lambda: pull(f"{host}/foo:1", tmp_path / "device"), lambda: push(f"{host}/foo:1", tmp_path)):
        with pytest.raises(ReleaseError, match="not a host"):
            call()


@pytest.mark.parametrize("epoch", ["9" * 5000, "\u00b2", "soon", "-1"])
def test_a_date_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, epoch: str) -> None:
    """It is not used, and nothing breaks."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", epoch)
    publish(inputs(tmp_path / "in", weights()), tmp_path / "releases", name="a", version="1")


def test_a_damaged_file_is_not_published(tmp_path: Path) -> None:
    """Devices compare bytes with what the index says of them, which would be of the damaged ones (S1)."""
    publish(inputs(tmp_path / "in", weights()), tmp_path / "releases", name="a", version="1")
    before = {path for path in (tmp_path / "releases").rglob("*") if path.is_file()}
    path = tmp_path / "in/model.ptd"
    with open_ptd(path) as data:
        start, _ = data.byte_range(next(iter(data)))
    data = bytearray(path.read_bytes())
    data[start] ^= 1
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match=r"model\.ptd"):
        publish(tmp_path / "in", tmp_path / "releases", name="a", version="2")
    assert {path for path in (tmp_path / "releases").rglob("*") if path.is_file()} == before
