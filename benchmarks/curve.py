"""How a pool and other stores grow with the versions of a model: `make curve` draws `docs/img/pool-curve.svg`.

The versions are those of `benchmarks.pool`: fine-tunes of a sentence encoder in bfloat16. Each store has all files of each
version, compressed as it does by default; the pool's bytes are those of its whole folder. The numbers are written beside the picture.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt

from benchmarks.pool import versions_in
from benchmarks.release_peers import COMPRESSING
from blobstore.pool import Pool

OUT = Path(__file__).parents[1] / "docs" / "img" / "pool-curve.svg"
PEERS = ("hf-xet", "borg", "casync")
AT = (1, 2, 6, 11, 16, 21, 26, 31)
"""After how many versions the other stores are measured, each time anew."""

_LINE = 90  # MB that a label takes


def measure(folder: Path) -> dict[str, dict[int, int]]:
    """Bytes after some numbers of versions, by the store."""
    versions = versions_in(folder)
    copies = accumulate((version / "model.ptd").stat().st_size for version in versions)
    curves = {"copies": dict(enumerate(copies, 1))}
    for peer in PEERS:
        curves[peer] = {number: _peer(peer, versions[:number], folder / peer) for number in AT}
        print(peer, curves[peer], flush=True)
    curves["blobstore pool"] = {}
    with Pool(folder / "pool", create=True) as pool:
        for number, version in enumerate(versions, 1):
            pool.add(version, f"encoder@{version.name}")
            files = (path for path in (folder / "pool").rglob("*") if path.is_file())
            curves["blobstore pool"][number] = sum(path.stat().st_size for path in files)
    return curves


def _peer(name: str, versions: Sequence[Path], place: Path) -> int:
    place.mkdir()
    nbytes = COMPRESSING[name](versions, place)
    shutil.rmtree(place)
    if nbytes is None:
        raise SystemExit(f"{name} is not installed")
    return nbytes


def draw(curves: dict[str, dict[int, int]], path: Path) -> None:
    """One line for each store, with its name and its last number at its end."""
    mpl.rcParams.update(
        {"svg.hashsalt": "blobstore", "font.size": 9, "svg.fonttype": "none", "font.family": "sans-serif"}
    )
    figure, panel = plt.subplots(figsize=(7.2, 3.2), layout="constrained")
    room = 0.0  # labels do not overlap
    for name, curve in sorted(curves.items(), key=lambda item: max(item[1].values())):
        ours = name == "blobstore pool"
        color, width = ("#3f51b5", 2.6) if ours else ("#6f757e", 1.4)
        panel.plot(list(curve), [nbytes / 1e6 for nbytes in curve.values()], color=color, linewidth=width)
        last = curve[max(curve)] / 1e6
        room = max(room + _LINE, last)
        weight = "bold" if ours else "normal"
        panel.text(max(curve) + 0.4, room, f"{name}  {last:,.0f} MB", color=color, va="center", weight=weight)
    panel.set(xlabel="versions of a fine-tuned sentence encoder, bfloat16", ylabel="MB on disk", xlim=(1, 31), ylim=0)
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(visible=True, axis="y", color="#e4e4e4", linewidth=0.7)
    figure.savefig(path, metadata={"Date": None}, facecolor="white", bbox_inches="tight")
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--again", action="store_true", help="draw the numbers that are there")
    numbers = OUT.with_suffix(".json")
    if parser.parse_args().again:
        curves = {name: {int(n): b for n, b in one.items()} for name, one in json.loads(numbers.read_text()).items()}
    else:
        with tempfile.TemporaryDirectory() as folder:
            curves = measure(Path(folder))
        numbers.write_text(json.dumps(curves) + "\n", encoding="utf-8")
    draw(curves, OUT)


if __name__ == "__main__":
    main()
