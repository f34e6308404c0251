"""Run several processes (worker.py) at once for some minutes: `make soak MINUTES=…`.

Some have their own caches, in every mode; others share working copies, on which further processes commit until they are
killed at a random moment. The run ends with an error if a process saw anything that no commit wrote, if something failed
or hung, or if a process kept growing: in anonymous memory, open descriptors, maps, delegates or packed weights.
"""

import argparse
import json
import random
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from blobstore.runtime import BlobCache, make_working_copy
from campaigns.children import say
from campaigns.lowered import lower_network
from campaigns.network import weight_keys
from campaigns.soak.worker import DELTA, FIRST, PATIENCE, REMEMBERED

WORKERS = {
    "private, delegated": ["--mode", "private", "--delegated"],
    "private, portable": ["--mode", "private"],
    "copy, delegated": ["--mode", "copy", "--delegated"],
    "nested, delegated": ["--mode", "nested", "--delegated"],
    "shared, delegated": ["--mode", "shared", "--delegated"],
    "shared, delegated too": ["--mode", "shared", "--delegated"],
    "shared, portable": ["--mode", "shared"],
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 32), help="of an earlier run, to repeat it")
    parser.add_argument("--only", default="", help="workers whose name contains this")
    options = parser.parse_args()
    seconds = options.minutes * 60
    say(f"{options.minutes:g} minutes with --seed {options.seed}")
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="soak-") as place:
        folder = Path(place)
        _prepare(folder)
        chosen = {name: arguments for name, arguments in WORKERS.items() if options.only in name}
        workers = {}
        for number, (name, arguments) in enumerate(chosen.items()):
            command = [sys.executable, "-m", "campaigns.soak.worker", place, "--name", str(number), *arguments]
            command += ["--seed", str(options.seed + number), "--seconds", str(seconds)]
            log = (folder / f"{number}.log").open("w+")
            workers[name] = (subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True), log)
        shared = any("shared" in name for name in chosen)
        kills = _kill_victims(folder, random.Random(options.seed), seconds if shared else 0)
        for name, (worker, log) in workers.items():
            try:
                output, _ = worker.communicate(timeout=seconds + 3 * PATIENCE)
            except subprocess.TimeoutExpired:
                worker.kill()
                output, _ = worker.communicate()
            wrong += _print_worker(name, worker.returncode, output, log)
        for path in folder.glob("*.copy.ptd"):
            BlobCache(path, "shared").verify()
        litter = [path.name for path in folder.iterdir() if path.name.startswith(".blobstore-") or "tmp" in path.name]
    say(f"{kills} processes were killed in commits; temporary files left beside the data: {len(litter)}")
    say(f"{wrong} findings")
    sys.exit(1 if wrong else 0)


def _prepare(folder: Path) -> None:
    for name in ("delegated", "portable"):
        lower_network(folder, name, FIRST, delegated=name == "delegated")
        data = folder / f"{name}.ptd"
        make_working_copy(data, folder / f"{name}.copy.ptd")
        np.zeros(REMEMBERED, np.uint64).tofile(folder / f"{name}.values")
        with BlobCache(data) as cache:
            cache.update_blobs(
                {key: np.full(len(cache.get_data(key)) // 4, DELTA, np.float32) for key in weight_keys(cache)}
            )
            cache.save(folder / f"{name}.delta.ptd", dirty_only=True)


def _kill_victims(folder: Path, chance: random.Random, seconds: float) -> int:
    """Kill processes in the middle of commits for this time; return the number of kills."""
    end, kills = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        path = folder / chance.choice(["delegated.copy.ptd", "portable.copy.ptd"])
        command = [sys.executable, "-m", "campaigns.soak.victim", path, chance.randrange(1 << 32)]
        victim = subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert victim.stdout
        victim.stdout.readline()
        time.sleep(chance.random() * 0.2)
        victim.kill()
        victim.communicate()
        kills += victim.returncode < 0
    return kills


def _print_worker(name: str, code: int, output: str, log: object) -> int:
    """Print what a worker did, and return the number of its findings."""
    try:
        result = json.loads(output.splitlines()[-1])
    except (ValueError, IndexError):
        log.seek(0)  # type: ignore[attr-defined]
        tail = log.read()[-2000:]  # type: ignore[attr-defined]
        result = {"counts": {}, "size": {}, "wrong": [f"ended with {code}: {tail}"]}
    done = ", ".join(f"{count:,} {what}" for what, count in sorted(result["counts"].items()))
    size = ", ".join(f"{count:,} {what}" for what, count in result["size"].items())
    say(f"{name}: {done}\n    at the end {size}")
    for finding in result["wrong"]:
        say(f"FINDING {name}: {finding}")
    return len(result["wrong"])


if __name__ == "__main__":
    main()
