"""Tensors that were cut, joined and distributed: what each such version adds to a pool and to other stores, in one series."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.harness import Row
from benchmarks.pool import checkpoints, half
from benchmarks.release_peers import COMPRESSING
from blobstore.pool import Pool

TITLE = "Cut and joined tensors"

_PEERS, _TOTALS = ("casync", "hf-xet"), ("borg", "restic")
_TUNED = 10  # versions of the series, of three steps each
_WORTH = 1.1

_Model = dict[str, torch.Tensor]
_LAYER = re.compile(r"(.*\.layer)\.(\d+)\.(.*)")
_QUERY = "attention.self.query."


def rows(folder: Path) -> Iterator[Row]:
    versions = _versions(folder)
    theirs = {name: taken for name in _PEERS if (taken := _taken(name, versions, folder / name)) is not None}
    has_all = len(theirs) == len(_PEERS)  # otherwise there is nothing to be better than
    ours: list[int] = []
    with Pool(folder / "pool", create=True) as pool:
        for number, (what, path) in enumerate(versions):
            added = pool.add(path, f"encoder@{number}")
            ours.append(added.stored_bytes)
            figures = ", ".join(f"{name} {taken[number] / 1e6:.2f}" for name, taken in theirs.items())
            least = min((taken[number] for taken in theirs.values()), default=ours[-1])
            yield Row(
                f"{what}, {added.bytes / 1e6:.1f} MB",
                f"{ours[-1] / 1e6:.2f} MB ({figures})",
                "at most 1.1 x the better of both" if has_all else "",
                not has_all or ours[-1] <= _WORTH * least,
            )
        assert pool.verify() == []
    paths = [path for _, path in versions]
    for name in _TOTALS:
        (folder / name).mkdir()
        if (total := COMPRESSING[name](paths, folder / name)) is not None:
            yield Row(f"all of them, against {name}", f"{sum(ours) / total:.2f} x its bytes", "", True)


def _taken(name: str, versions: Sequence[tuple[str, Path]], folder: Path) -> list[int] | None:
    """The bytes that each version adds to another store."""
    sizes = [0]
    folder.mkdir()
    for _, path in versions:
        size = COMPRESSING[name]([path], folder)  # it goes on with what is there
        if size is None:
            return None
        sizes.append(size)
    return [after - before for before, after in itertools.pairwise(sizes)]


def _versions(folder: Path) -> list[tuple[str, Path]]:
    """A name and a folder of each version of the series."""
    series = checkpoints(folder)
    base, tuned, later = (half(next(itertools.islice(series, number, None))[1]) for number in (0, _TUNED - 1, 2))
    other = {name: tensor.flatten().flip(0).reshape(tensor.shape) for name, tensor in base.items()}
    third = {name: -tensor for name, tensor in base.items()}
    versions: list[tuple[str, list[_Model]]] = [
        ("a sentence encoder in bfloat16", [base]),
        ("a fine-tune of it", [tuned]),
        ("the fine-tune, its vocabulary with 64 rows more", [_longer(tuned)]),
        ("  its MLP cut to three quarters", [_cut(tuned)]),
        ("  for tensor parallelism, on two ranks", [_rank(tuned, number) for number in range(2)]),
        ("  query, key and value in one tensor", [_fused(tuned)]),
        ("  all layers in one tensor", [_stacked(tuned)]),
        ("  all in one flat tensor", [_flat(tuned)]),
        ("the next fine-tune, query, key and value in one tensor", [_fused(later)]),
        ("another encoder, query, key and value in one tensor", [_fused(other)]),
        ("  in tensors of their own", [other]),
        ("a third encoder, all layers in one tensor", [_stacked(third)]),
        ("  in tensors of their own", [third]),
    ]
    places = []
    for number, (what, files) in enumerate(versions):
        place = folder / f"{number:02d}"
        place.mkdir()
        for shard, model in enumerate(files):
            tensors = {name: tensor.clone().contiguous() for name, tensor in model.items()}
            save_file(tensors, place / f"model-{shard}.safetensors")
        places.append((what, place))
    return places


def _longer(model: _Model) -> _Model:
    (name,) = (name for name in model if name.endswith("word_embeddings.weight"))
    generator = torch.Generator().manual_seed(2)
    more = torch.randn(64, model[name].shape[1], generator=generator) * 0.02
    return {**model, name: torch.cat([model[name], more.to(model[name].dtype)])}


def _cut(model: _Model) -> _Model:
    kept = dict(model)
    for name, tensor in model.items():
        if "intermediate.dense" in name:
            kept[name] = tensor[: len(tensor) * 3 // 4]
        elif re.search(r"\d\.output\.dense\.weight", name):
            kept[name] = tensor[:, : tensor.shape[1] * 3 // 4]
    return kept


def _rank(model: _Model, number: int) -> _Model:
    shard = dict(model)
    for name, tensor in model.items():
        if re.search(r"(query|key|value|intermediate\.dense)\.|word_embeddings", name):
            shard[name] = tensor.chunk(2)[number]
        elif name.endswith("output.dense.weight"):
            shard[name] = tensor.chunk(2, 1)[number]
    return shard


def _fused(model: _Model) -> _Model:
    fused = {name: tensor for name, tensor in model.items() if not re.search(r"self\.(query|key|value)\.", name)}
    for name in model:
        if _QUERY in name:
            parts = [model[name.replace("query", part)] for part in ("query", "key", "value")]
            fused[name.replace("query", "qkv")] = torch.cat(parts)
    return fused


def _stacked(model: _Model) -> _Model:
    layers: dict[str, list[torch.Tensor]] = {}
    stacked: _Model = {}
    for name, tensor in model.items():
        if match := _LAYER.fullmatch(name):
            layers.setdefault(f"{match[1]}.{match[3]}", []).append(tensor)
        else:
            stacked[name] = tensor
    return {**stacked, **{name: torch.stack(tensors) for name, tensors in layers.items()}}


def _flat(model: _Model) -> _Model:
    return {"flat": torch.cat([tensor.flatten() for tensor in model.values() if tensor.is_floating_point()])}
