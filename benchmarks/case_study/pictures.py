"""The picture of the case study: bytes on the disk, on the way and in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

__all__ = ["draw"]

_SHIPPED, _OURS = "#d1495b", "#0b6e99"
_GROUPS = ("#d1495b", "#e08e79", "#edae49", "#b5838d")


def draw(found: dict[str, Any], path: Path) -> None:
    """Three panels; the left one has what the bytes of the zoo are of."""
    mpl.rcParams.update({"svg.hashsalt": "blobstore", "font.size": 9, "axes.titlesize": 10, "axes.titleweight": "bold"})
    figure, panels = plt.subplots(1, 3, figsize=(10, 3.4), layout="constrained", width_ratios=(1, 1.25, 1))
    _disk(panels[0], found["disk"])
    _pairs(panels[1], found["way"], "On the way to a device, MB", ("programs as they are", "blobstore pull"))
    _pairs(panels[2], found["memory"], "Memory of two processes, MB", ("ExecuTorch", "blobstore"))
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(True, axis="y", color="#e4e4e4", linewidth=0.7)
        panel.set_axisbelow(True)
    figure.savefig(path, metadata={"Date": None}, facecolor="white")
    plt.close(figure)


def _disk(panel: Axes, disk: dict[str, Any]) -> None:
    bottom = 0.0
    for (name, size), colour in zip(disk["groups"].items(), _GROUPS, strict=True):
        panel.bar([0], [size / 1e6], bottom=[bottom], color=colour, width=0.6)
        share = 0.7 if bottom == 0 else 0.5  # of the height: the label of the next bar is low
        panel.text(0.36, bottom + share * size / 1e6, name, ha="left", va="center", color="#444444", fontsize=8)
        bottom += size / 1e6
    bars = panel.bar([1, 2], [disk["dedup"] / 1e6, disk["pool"] / 1e6], color=_OURS, width=0.6)
    panel.bar_label(bars, fmt=_label, padding=2)
    panel.text(0, bottom, _label(bottom), ha="center", va="bottom")
    panel.set_xticks([0, 1, 2], ["as shipped", "dedup", "pool"])
    panel.set_title("On disk, MB")
    panel.set_ylim(0, 1.1 * bottom)


def _pairs(panel: Axes, pairs: dict[str, list[int]], title: str, legend: tuple[str, str]) -> None:
    for which, (name, colour) in enumerate(zip(legend, (_SHIPPED, _OURS), strict=True)):
        places = [at + (which - 0.5) * 0.4 for at in range(len(pairs))]
        bars = panel.bar(places, [pair[which] / 1e6 for pair in pairs.values()], width=0.38, color=colour, label=name)
        panel.bar_label(bars, fmt=_label, padding=2, fontsize=8)
    names = [name.replace(", ", ",\n").replace("eight more", "eight more\n") for name in pairs]
    panel.set_xticks(range(len(pairs)), names)
    panel.set_title(title)
    panel.set_ylim(0, 1.3 * max(max(pair) for pair in pairs.values()) / 1e6)
    panel.legend(frameon=False, loc="upper right")


def _label(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"
