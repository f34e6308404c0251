"""The report proposes a pool where that takes much less than its other commands leave, and says about how much (B2)."""

import html
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import blobstore
from blobstore.core.text import amount, size
from blobstore.reporting import PoolAdvice, Report
from blobstore.reporting.checked import MalformedError
from blobstore.reporting.json_output import SCHEMA, from_json, to_json
from blobstore.reporting.show.html import to_html
from blobstore.reporting.show.lineage import find_lineage
from tests.helpers import models
from tests.reporting.browsing import browsing
from tests.reporting.find.test_zoo import printed
from tests.reporting.planted import Tensor, write_safetensors

Weights = dict[str, np.ndarray]


def _base(random: np.random.Generator, width: int) -> Weights:
    shapes = {"attn.q": (width, width), "attn.k": (width, width), "up": (3 * width, width), "down": (width, 3 * width)}
    layers = {f"layers.{i}.{name}.weight": shape for i in range(4) for name, shape in shapes.items()}
    layers["embed.weight"] = (1500, width)
    return {name: (random.standard_normal(shape) * 0.02).astype(np.float32) for name, shape in layers.items()}


def write_families(folder: Path) -> None:
    """Three families of twenty: bases, tuned layers, halves, a head, adapters, half of them in data files."""
    random = np.random.default_rng(3)
    for family, width in enumerate((96, 112, 128)):
        base = _base(random, width)
        for team in range(4):
            tuned = {**base, "layers.3.up.weight": base["layers.3.up.weight"] + np.float32(0.01 * (team + 1))}
            half = {key: value.astype(np.float16) for key, value in base.items()}
            tied = {**base, "lm_head.weight": base["embed.weight"]}
            lora = {f"layers.{i}.lora": random.standard_normal((8, width)).astype(np.float32) for i in range(4)}
            for kind, weights in enumerate((base, tuned, half, tied, lora)):
                path = folder / f"family-{family}" / f"team-{team}"
                path.mkdir(parents=True, exist_ok=True)
                if (kind + team) % 2:
                    save_file(weights, path / f"model-{kind}.safetensors")
                else:
                    blobstore.save_file(weights, path / f"model-{kind}.ptd")


def _tuned(noise: float, save: Callable[[Weights, Path], Any], suffix: str) -> Callable[[Path], None]:
    """A base and fine-tunes in all directions, in which each weight moved."""

    def write(folder: Path) -> None:
        folder.mkdir()
        random = np.random.default_rng(5)
        base = _base(random, 128)
        for number in range(7):
            moved = {k: v + (noise * random.standard_normal(v.shape)).astype(np.float32) for k, v in base.items()}
            save(moved if number else base, folder / f"run-{number}.{suffix}")

    return write


def _save_bfloat16(weights: Weights, path: Path) -> None:
    """All but the base, which stays in float32."""
    if path.stem == "run-0":
        save_file(weights, path)
    else:
        write_safetensors(path, [Tensor.bfloat16(key, value) for key, value in weights.items()])


def _save_torch(weights: Weights, path: Path) -> None:
    """As training writes it."""
    torch.save({key: torch.from_numpy(value) for key, value in weights.items()}, path)


def _advice(report: Report) -> PoolAdvice:
    assert report.pool is not None
    return report.pool


def _added(command: str) -> tuple[int, dict[str, bytes]]:
    """Bytes of the pool that the command makes, and the files that come out of it."""
    from blobstore.pool import Pool

    program, pool, add, folder, *paths, as_, reference = shlex.split(command)
    assert (program, pool, add, as_) == ("blobstore", "pool", "add", "--as")
    with Pool(folder, create=True) as opened:
        opened.add(paths, reference)
        out = opened.get(reference, "restored")
    assert out
    restored = {str(path.relative_to("restored")): path.read_bytes() for path in Path("restored").rglob("*.*")}
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file()), restored


@pytest.mark.long
@pytest.mark.parametrize(
    ("write", "most"),
    [
        (write_families, 0.1),
        (_tuned(1e-6, save_file, "safetensors"), 0.6),
        (_tuned(1e-4, save_file, "safetensors"), 0.75),
        (_tuned(1e-4, _save_bfloat16, "safetensors"), 0.5),
        (_tuned(1e-6, _save_torch, "pt"), 0.6),
    ],
    ids=["families", "float32", "far", "bfloat16", "torch"],
)
def test_a_pool_takes_what_the_report_says(
    write: Callable[[Path], None], most: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a tenth; the bound is one; and the command works as it is printed."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "zoo")
    report = blobstore.report("zoo")
    before = {path: path.read_bytes() for path in (tmp_path / "zoo").rglob("*.*")}
    advice = _advice(report)
    assert advice.command == "blobstore pool add pool zoo --as zoo@1"
    assert not advice.is_bound
    taken, restored = _added(advice.command)
    assert abs(advice.bytes - taken) <= 0.1 * taken
    assert taken < most * report.total_bytes
    assert sorted(restored.values()) == sorted(before.values())
    bound = blobstore.report("zoo", exact_only=True).pool
    if write is write_families:
        assert bound is not None
        assert bound.is_bound
        assert bound.bytes >= taken


@pytest.mark.long
def test_the_advice_is_shown_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an estimate; JSON has it, and a report that is read from JSON."""
    monkeypatch.chdir(tmp_path)
    write_families(tmp_path / "my zoo!")
    report = blobstore.report("my zoo!")
    advice = _advice(report)
    assert advice.command == "blobstore pool add pool 'my zoo!' --as my-zoo@1"
    text = printed(report)
    assert advice.command in text
    assert text.index("estimated from samples, by") < text.index(advice.command) < text.index("blobstore delta")
    page = to_html(report)
    in_pool = f"about {size(advice.bytes)} in a pool"
    assert in_pool in page and "all 60 files (estimate)" in page
    assert f"{in_pool}: <code>{html.escape(advice.command)}</code>" in report._repr_html_()
    plain = json.loads(json.dumps(to_json(report)))
    pytest.importorskip("jsonschema").validate(plain, json.loads(SCHEMA.read_text()))
    assert plain["pool"] == {"command": advice.command, "bytes": advice.bytes, "is_bound": False}
    assert from_json(plain) == report
    with pytest.raises(MalformedError, match="expected true or false"):
        from_json({**plain, "pool": {**plain["pool"], "is_bound": "false"}})
    (tmp_path / "pool").mkdir()
    assert _advice(blobstore.report("my zoo!")).command.startswith("blobstore pool add pool-2 ")


async def test_the_browser_copies_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the first of its commands, which replaces no files: `a` still shows those after the others."""
    monkeypatch.chdir(tmp_path)
    write_families(tmp_path / "zoo")
    report = blobstore.report("zoo")
    async with browsing(report, (120, 40)) as screen:
        rows = (await screen.press("3")).rows
        assert "60 files" in rows[0] and "blobstore pool add pool zoo --as zoo@1" in rows[0]
        assert f"about {size(_advice(report).bytes)} in a pool, which gives" in (await screen.press("enter")).text
        await screen.press("escape", "y")
        assert screen.app.clipboard == _advice(report).command
        assert (await screen.press("1", "a")).heading.startswith("after all commands: ")


def test_no_pool_where_it_is_no_help(tmp_path: Path) -> None:
    """Programs are for devices; one command is enough for two equal files; one file has no versions."""
    for length in (32, 64, 128):
        models.mlp().write(tmp_path / "programs", f"minilm-{length}")
    assert blobstore.report(tmp_path / "programs").pool is None
    (tmp_path / "twice").mkdir()
    random = np.random.default_rng(1)
    for name in "ab":
        blobstore.save_file({"w": random.standard_normal((50, 50))}, tmp_path / "twice" / f"{name}.ptd")
    assert blobstore.report(tmp_path / "twice").pool is None


def test_what_files_come_from(tmp_path: Path) -> None:
    """By names and contents: more, fewer or other tensors, another type; programs with digests for names come from nothing."""
    base = _base(np.random.default_rng(2), 16)
    moved = {key: value + np.float32(1) for key, value in base.items()}
    layer = [key for key in base if key.startswith("layers.3.")]
    zoo = {
        "base": base,
        "copy": base,
        "other": {"head": np.ones((3, 5), np.float32), "tail": np.ones((7, 2), np.float32)},
        "plus": {**base, "lm_head.weight": np.ones((16, 3), np.float32)},
        "half": {key: value.astype(np.float16) for key, value in base.items()},
        "tuned": {**base, "embed.weight": moved["embed.weight"]},
        "layer": {**base, **{key: moved[key] for key in layer}},
        "all": moved,
        "less": {key: value for key, value in base.items() if key not in layer},
    }
    for name, weights in zoo.items():
        save_file(weights, tmp_path / f"{name}.safetensors")
    models.mlp().write(tmp_path, "program")
    report = blobstore.report(tmp_path)
    names = [Path(file.path).stem for file in report.files]
    found = {names[one.file]: (names[one.base], one.words) for one in find_lineage(report)}
    assert found == {
        "base": ("less", "and 4 tensors of layers.3"),
        "copy": ("less", "and 4 tensors of layers.3"),
        "plus": ("less", "and 5 tensors"),
        "half": ("less", "in half, and 4 tensors of layers.3"),
        "tuned": ("less", "with other values in embed.weight, and 4 tensors of layers.3"),
        "layer": ("less", "and 4 tensors of layers.3"),
        "all": ("less", "with other values in all 13 tensors, and 4 tensors of layers.3"),
    }
    (tmp_path / "less.safetensors").unlink()
    report = blobstore.report(tmp_path)
    names = [Path(file.path).stem for file in report.files]
    found = {names[one.file]: (names[one.base], one.words) for one in find_lineage(report)}
    assert found == {
        "copy": ("base", "the same tensors"),
        "plus": ("base", "and lm_head.weight"),
        "half": ("base", "in half"),
        "tuned": ("base", "with other values in embed.weight"),
        "layer": ("base", "with other values in 4 tensors of layers.3"),
        "all": ("base", "with other values in all 17 tensors"),
    }
    assert "and lm_head.weight" in printed(report)
    assert "6 files come from others" in to_html(report)


def test_parameters_are_counted(tmp_path: Path) -> None:
    """Elements, once for a weight with two names; adapters and halves as well."""
    weight = np.zeros((1200, 1000), np.float16)
    save_file({"w": weight, "b": np.ones(7, np.float32)}, tmp_path / "a.safetensors")
    blobstore.save_file({"w": weight, "tied": weight}, tmp_path / "b.ptd")
    report = blobstore.report(tmp_path)
    assert [file.parameters for file in report.files] == [1_200_007, 1_200_000]
    assert [file["parameters"] for file in to_json(report)["files"]] == [1_200_007, 1_200_000]
    assert printed(report).count("1.20M") == 2


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (999, "999"), (1000, "1.00K"), (22_713_216, "22.7M"), (7_241_732_096, "7.24B")]
)
def test_amounts_for_people(number: int, text: str) -> None:
    assert amount(number) == text
