"""What publishing says that devices will fetch is what they fetch (F1)."""

from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

import blobstore
from blobstore.releases import publish, pull
from tests.releases.models import inputs, weights
from tests.releases.server import serving


@pytest.mark.long
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("files", [1, 40])
def test_publishing_predicts_to_the_byte(tmp_path: Path, files: int, plain: bool) -> None:
    """What a device without anything fetches, and one with the release before; where nothing is new, it is the index (F1)."""
    tensors = weights(layers=6, size=32)
    with serving(tmp_path / "releases") as server:
        for version in ("1", "2", "3"):
            done = publish(
                inputs(tmp_path / "in", tensors, files=files),
                tmp_path / "releases",
                name="a",
                version=version,
                plain=plain,
            )
            place = f"{server.url}/a/{version}/index.json"
            server.log.clear()
            assert pull(place, tmp_path / f"new {version}").fetched_bytes == done.first_bytes
            several = [asked for _, _, asked, _ in server.log if asked and "," in asked]
            assert bool(several) == (version != "1")  # contents of the first release lie between others
            folder = pull(tmp_path / "releases/a" / version, tmp_path / f"folder {version}")
            assert folder.fetched_bytes == done.first_bytes or plain  # whole files of a folder cost less than decoding
            if done.update_bytes is not None:
                assert pull(place, tmp_path / f"new {int(version) - 1}").fetched_bytes == done.update_bytes
            index = (tmp_path / "releases/a" / version / "index.json").stat().st_size
            assert pull(place, tmp_path / f"new {version}").fetched_bytes == index
            changed = {key: tensors[key] * np.float32(1.00001) for key in ("layer1.weight", "layer4.weight")}
            tensors = {**tensors, **changed}


@pytest.mark.long
def test_publishing_predicts_what_devices_fetch_of_a_zoo(tmp_path: Path) -> None:
    """Teams with fine-tunes, halves, transposed copies, adapters and equal files, in two formats; then with changes (F1)."""
    generator = np.random.default_rng(0)
    base = {f"layer.{i}": generator.standard_normal((64, 64), np.float32) * np.float32(0.02) for i in range(4)}
    base["embed"] = generator.standard_normal((500, 64), np.float32)
    for number in range(60):
        team, kind = divmod(number, 6)
        own = {
            0: base,
            1: {**base, "embed": base["embed"] + np.float32(team)},
            2: {name: tensor.astype(np.float16) for name, tensor in base.items()},
            3: {**base, "head": np.ascontiguousarray(base["embed"].T), "mask": np.zeros((256, 64), np.float32)},
            4: {f"lora.{i}": generator.standard_normal((8, 64), np.float32) for i in range(4)},
            5: {**base, "own": np.full((64, 64), number, np.float32)},
        }[kind]
        path = tmp_path / "in" / f"team-{team}" / f"{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        if number % 2:
            safetensors.numpy.save_file(own, f"{path}.safetensors")
        else:
            blobstore.save_file(own, f"{path}.ptd")
    published = publish(tmp_path / "in", tmp_path / "releases", name="zoo", version="1")
    with serving(tmp_path / "releases") as server:
        pulled = pull(f"{server.url}/zoo/1/index.json", tmp_path / "device")
        assert pulled.files == 60 and pulled.fetched_bytes == published.first_bytes
        assert published.first_bytes < published.release_bytes / 2
        for number in range(0, 60, 6):  # which were equal, and are in twos then
            changed = {**base, "embed": base["embed"] + np.float32(number // 12)}
            blobstore.save_file(changed, tmp_path / "in" / f"team-{number // 6}" / f"{number}.ptd", force=True)
        again = publish(tmp_path / "in", tmp_path / "releases", name="zoo", version="2")
        assert again.update_bytes is not None and again.update_bytes < published.first_bytes / 2
        assert pull(f"{server.url}/zoo/2/index.json", tmp_path / "device").fetched_bytes == again.update_bytes
