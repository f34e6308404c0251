"""The case study of docs/case-study.md: `make case-study`.

It lowers a small zoo, runs the commands of the page, and measures what that saves. Programs and results stay in a folder, so
a second run lowers nothing. It writes the table on the page, and `docs/img/case-study.svg`.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import pool_files
from benchmarks.__main__ import put, table
from benchmarks.case_study.memory import grown
from benchmarks.case_study.models import FORMS, LANGUAGES, TUNED, write_chat, write_zoo
from benchmarks.case_study.pictures import draw
from tests.releases.server import serving

PAGE = Path(__file__).parents[2] / "docs" / "case-study.md"
PICTURE = PAGE.parent / "img" / "case-study.svg"
_RETRAINED = "coach"


@dataclass
class Zoo:
    """The folders of the study.

    Attributes:
        shipped: programs as ExecuTorch writes them.
        again: a later training of a fine-tune.
    """

    folder: Path

    def __post_init__(self) -> None:
        self.shipped, self.again = (self.folder / name for name in ("zoo", "again"))

    def programs(self, *patterns: str) -> list[Path]:
        return sorted(path for pattern in patterns for path in self.shipped.glob(pattern))

    def blobstore(self, *arguments: object) -> str:
        """Run a command of the project; what it printed."""
        print("$ blobstore", *arguments, flush=True)
        command = [sys.executable, "-m", "blobstore", *map(str, arguments)]
        done = subprocess.run(command, cwd=self.folder, stdout=subprocess.PIPE, text=True, check=True)
        print(done.stdout if len(done.stdout) < 4000 else "…", flush=True)
        return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(prog="make case-study", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("build/case-study"))
    parser.add_argument("--out", type=Path, help="write page and picture there, and not into docs")
    options = parser.parse_args()
    zoo = Zoo(options.folder.resolve())
    _lower(zoo)
    found = {"disk": _disk(zoo), "way": _way(zoo), "memory": _memory(zoo)}
    page, picture = PAGE, PICTURE
    if options.out is not None:
        page, picture = options.out / PAGE.name, options.out / PICTURE.name
        shutil.copy(PAGE, page)
    (zoo.folder / "found.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    draw(found, picture)
    figures = "\n".join(["| | before | after |", "|---|---:|---:|", *(f"| {' | '.join(row)} |" for row in rows(found))])
    text = page.read_text(encoding="utf-8")
    page.write_text(
        re.sub(r"(<!-- figures -->\n).*?(<!-- /figures -->)", rf"\1\n{figures}\n\n\2", text, flags=re.DOTALL),
        encoding="utf-8",
    )
    with tempfile.TemporaryDirectory(dir=zoo.folder) as folder:
        put([page], "pool_files", "\n".join(line for line, _ in table(pool_files, Path(folder))))


def _lower(zoo: Zoo) -> None:
    """What an earlier run lowered is used."""
    stamp = zoo.folder / "lowered"
    if not stamp.exists():
        for count, path in enumerate(write_zoo(zoo.shipped), 1):
            print(f"{count}. {path.relative_to(zoo.folder)}: {path.stat().st_size:,} bytes", flush=True)
        write_chat(zoo.again / "chat" / f"{_RETRAINED}.pte", _RETRAINED, again=1)
        stamp.touch()
    for path in zoo.folder.iterdir():
        if path.is_dir() and path not in {zoo.shipped, zoo.again}:
            shutil.rmtree(path)


def _bytes(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.is_file())


def _disk(zoo: Zoo) -> dict[str, Any]:
    """Bytes on the disk of who keeps all programs: as they are, without copies, and in a pool."""
    groups = {
        "nine languages": zoo.programs("speech/*/*.pte"),
        "transcription": zoo.programs("transcription/*.pte"),
        "text model, three forms": [zoo.shipped / "chat" / f"{form}.pte" for form in FORMS],
        "six fine-tunes": [zoo.shipped / "chat" / f"{name}.pte" for name in TUNED],
    }
    report = json.loads(zoo.blobstore("report", "zoo", "--json", "--no-cache"))
    zoo.blobstore("dedup", "zoo", "-o", "all")
    zoo.blobstore("pool", "add", "pool", "zoo", "--as", "zoo@1")
    first = _bytes((zoo.folder / "pool").rglob("*"))
    shutil.copytree(zoo.shipped, zoo.folder / "zoo2")
    shutil.copytree(zoo.again, zoo.folder / "zoo2", dirs_exist_ok=True)
    zoo.blobstore("pool", "add", "pool", "zoo2", "--as", "zoo@2")
    shutil.rmtree(zoo.folder / "zoo2")
    zoo.blobstore("pool", "get", "pool", "zoo@1", "-o", "back")
    for path in zoo.programs("*/*.pte", "*/*/*.pte"):
        assert (zoo.folder / "back" / path.relative_to(zoo.shipped)).read_bytes() == path.read_bytes(), path
    return {
        "groups": {name: _bytes(paths) for name, paths in groups.items()},
        "report": report["total_saves"],
        "dedup": _bytes((zoo.folder / "all").rglob("*")),
        "pool": first,
        "pool, next version": _bytes((zoo.folder / "pool").rglob("*")) - first,
        "a program": _bytes([zoo.again / "chat" / f"{_RETRAINED}.pte"]),
    }


def _way(zoo: Zoo) -> dict[str, list[int]]:
    """Bytes on the way to a device: of the programs that it lacks, and of what a pull fetches."""
    base = ["zoo/speech/en-us", "zoo/transcription", "zoo/chat"]
    more = [f"zoo/speech/{language}" for language in LANGUAGES if language != "en-us"]
    steps = {
        "first install": (base, zoo.programs("speech/en-us/*", "transcription/*", "chat/*")),
        "eight more languages": (more, [p for p in zoo.programs("speech/*/*") if p.parent.name != "en-us"]),
        "a fine-tune, trained again": (["again/chat"], list((zoo.again / "chat").iterdir())),
    }
    found = {}
    with serving(zoo.folder) as server:
        for number, (name, (inputs, programs)) in enumerate(steps.items(), 1):
            for folder in map(Path, inputs):
                target = zoo.folder / "chosen" / Path(*folder.parts[1:])
                shutil.copytree(zoo.folder / folder, target, dirs_exist_ok=True)
            zoo.blobstore("dedup", "chosen", "-o", "app", "--prune")
            zoo.blobstore("publish", "app", "-o", "releases", "--name", "app", "--version", f"1.{number}")
            pulled = zoo.blobstore("pull", f"{server.url}/releases/app/latest/index.json", "device", "--json")
            found[name] = [_bytes(programs), json.loads(pulled)["fetched_bytes"]]
    return found


def _memory(zoo: Zoo) -> dict[str, list[int]]:
    """Memory of two processes, each of which loads two programs."""
    pairs = {
        "two languages": [f"speech/{language}/decoder.pte" for language in ("en-us", "en-gb")],
        "two fine-tunes": [f"chat/{name}.pte" for name in TUNED[:2]],
    }
    current = zoo.folder / "device" / "current"
    found = {}
    for name, programs in pairs.items():
        before = grown("stock", [zoo.shipped / one for one in programs], Path("-"), Path("-"))
        ours = [current / one for one in programs], current / "shared.ptd", zoo.folder / "packed"
        grown("blobstore", *ours, processes=1)  # the first start packs, and writes what later ones map
        found[name] = [before, grown("blobstore", *ours)]
    return found


def rows(found: dict[str, Any]) -> list[tuple[str, str, str]]:
    """The table on the page."""
    disk, total = found["disk"], sum(found["disk"]["groups"].values())
    lines = [
        ("on disk, as `report` foresees it", total, total - disk["report"]),
        ("on disk, after `dedup`", total, disk["dedup"]),
        ("in the pool, after `pool add`", total, disk["pool"]),
        ("in the pool, for a fine-tune that was trained again", disk["a program"], disk["pool, next version"]),
        *((f"on the way: {name}", *pair) for name, pair in found["way"].items()),
        *((f"in memory: {name} in each of two processes", *pair) for name, pair in found["memory"].items()),
    ]
    return [(work, _mb(before), f"{_mb(after)} ({100 * after / before:.2g} %)") for work, before, after in lines]


def _mb(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"


if __name__ == "__main__":
    main()
