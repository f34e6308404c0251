"""Small releases."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from blobstore import open_ptd, save_file
from blobstore.releases import Patience

NOW = Patience(attempts=3, pause=lambda seconds: None)
Weights = dict[str, np.ndarray]


def published_once(publish_all: Callable[[Path], object]) -> Any:
    """A fixture: the folder `releases` that a function makes in a folder. It is called once, and each test has a copy of all
    that it wrote, in its `tmp_path`."""

    made: list[Path] = []

    def releases(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
        if not made:
            publish_all(folder := tmp_path_factory.mktemp("published"))
            made.append(folder)
        shutil.copytree(made[0], tmp_path, dirs_exist_ok=True)
        return tmp_path / "releases"

    return pytest.fixture(releases)


def keys(
    folder: Path, name: str = "key", curve: ec.EllipticCurve | None = None, password: bytes | None = None
) -> tuple[Path, Path, ec.EllipticCurvePrivateKey]:
    """The files of a private and a public key, and the key."""
    key = ec.generate_private_key(curve or ec.SECP256R1())
    secret = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    private, public = folder / name, folder / f"{name}.pub"
    private.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, secret))
    public.write_bytes(
        key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return private, public, key


def weights(seed: int = 0, layers: int = 6, size: int = 128) -> Weights:
    """Weights as training leaves them: their high bytes compress."""
    rng = np.random.default_rng(seed)
    return {f"layer{i}.weight": (rng.standard_normal((size, size)) * 0.05).astype(np.float32) for i in range(layers)}


def inputs(folder: Path, tensors: Weights, files: int = 3) -> Path:
    """A folder to publish."""
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.ptd")
    (folder / "tokenizer").mkdir(exist_ok=True)
    for i in range(files):
        (folder / "tokenizer" / f"{i}.json").write_text(f"{{{i}}}" * 50)
    return folder


def found(folder: Path, *names: str) -> Weights:
    """The tensors of data files; those of the later ones count."""
    tensors: Weights = {}
    for name in names or ("model.ptd",):
        with open_ptd(folder / name, verify=True) as data_map:
            tensors.update({key: data_map.numpy(key).copy() for key in data_map})
    return tensors


def read_ways(release: Path) -> dict[str, Any]:
    """The list of ways beside an index."""
    data = zstandard.ZstdDecompressor().decompress((release / "ways.json.zst").read_bytes())
    ways: dict[str, Any] = json.loads(data)
    return ways


def write_ways(release: Path, ways: dict[str, Any]) -> None:
    """Replace it."""
    (release / "ways.json.zst").write_bytes(zstandard.ZstdCompressor().compress(json.dumps(ways).encode()))


def same(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[key], other[key]) for key in one)


def spoil(path: Path, damage: str) -> None:
    """Damage a file in one of the ways that downloads go wrong."""
    data = path.read_bytes()
    middle = len(data) // 2
    path.unlink()
    if damage != "missing":
        path.write_bytes(
            {
                "a bit": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
                "a byte less": data[:-1],
                "a byte more": data + b"x",
                "of something else": b"\x55" * len(data),
            }[damage]
        )
