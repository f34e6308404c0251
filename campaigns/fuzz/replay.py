"""Try earlier findings again, without instrumentation: `python -m campaigns.fuzz.replay [FOLDER]`.

The folder has one folder for each target. Every file is tried in a process of its own, so that none can end the others.
"""

import sys
import time
import traceback
from pathlib import Path

from campaigns.children import in_child, say
from campaigns.fuzz import targets
from campaigns.fuzz.budget import SECONDS, Budget

FOUND = Path(__file__).parents[2] / "tests" / "data" / "found"


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOUND
    wrong = 0
    files = [(name, path) for name in targets.TARGETS for path in sorted((folder / name).glob("*"))]
    for name, path in files:
        if reason := replay(name, path.read_bytes()):
            wrong += 1
            say(f"{name} {path}: {reason}")
    say(f"{len(files)} files, {wrong} findings")
    sys.exit(1 if wrong else 0)


def replay(name: str, data: bytes) -> str:
    """Why the bytes are a finding; empty if they are not."""
    targets.PREPARATIONS.get(name, bool)()  # here, so that this process removes it

    def tried() -> str:
        try:
            with Budget():
                targets.check(name, data)
        except BaseException as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            return f"{type(error).__name__}: {error} ({Path(place.filename).name}, {place.name})"
        return ""

    result = in_child(tried, 10 * SECONDS)  # which ends a process that hangs without computing
    return f"ended by signal {result['signal']}" if "signal" in result else str(result["value"])


def kind(reason: str) -> str:
    """What stays the same while an input is minimized: the error and its place, without the message."""
    return reason.split(":", 1)[0] + reason[reason.rfind("(") :]


def minimize(name: str, data: bytes, seconds: float = 20) -> bytes:
    """A smaller input with the same finding, made by removing pieces and zeroing bytes until the time is over."""
    wanted = kind(replay(name, data))
    end = time.monotonic() + seconds
    piece = max(1, len(data) // 2)
    while piece and time.monotonic() < end:
        at = 0
        while at < len(data) and time.monotonic() < end:
            shorter = data[:at] + data[at + piece :]
            zeroed = data[:at] + bytes(len(data[at : at + piece])) + data[at + piece :]
            if shorter and kind(replay(name, shorter)) == wanted:
                data = shorter
            elif zeroed != data and kind(replay(name, zeroed)) == wanted:
                data, at = zeroed, at + piece
            else:
                at += piece
        piece //= 2
    return data


if __name__ == "__main__":
    main()
