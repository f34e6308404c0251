"""Runs work repeatedly in forked processes, each killed a step later: `python -m tests.helpers.interruptions JOB FOLDER`.

With `many` behind them, the group is written in one temporary folder.

It is a program of its own, so that the forked processes have no threads. Each job prints JSON.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from blobstore import BlobStoreError
from blobstore.core.disk.recovery import recover
from blobstore.core.disk.staging import Staging

KILLED = 77
CALLS = ("link", "replace", "rename", "fsync", "unlink", "rmdir", "mkdir")


def main() -> None:
    sys.stdout.write(json.dumps(JOBS[sys.argv[1]](Path(sys.argv[2]))))


def forked(work: Callable[[], Any]) -> int:
    """The exit code of a process that does the work."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BlobStoreError:
            os._exit(1)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(2)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_at_call(number: int, work: Callable[[], Any]) -> None:
    """Do the work; the process ends before this call, counted from 1, among those that change a folder."""
    count = 0

    def watch(name: str) -> None:
        real = getattr(os, name)

        def watched(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == number:
                os._exit(KILLED)
            return real(*arguments, **options)

        setattr(os, name, watched)

    for name in CALLS:
        watch(name)
    work()


def kills(folder: Path, template: Path, work: Callable[[Path], Any], code: int = 0) -> Iterator[Path]:
    """For each call, a copy of the template after the work on it was killed before that call.

    Args:
        folder: where the copies go.
        template, work: what is worked on, and the work.
        code: the exit code of the process that is not killed.
    """
    number = 0
    while True:
        number += 1
        place = folder / str(number)
        shutil.copytree(template, place, symlinks=True)
        ended = forked(lambda place=place, number=number: killed_at_call(number, lambda: work(place)))
        if ended != KILLED:
            if ended != code:
                raise RuntimeError(f"{place} ended with {ended}")
            return
        yield place


def left(folder: Path) -> list[str]:
    """The hidden files."""
    return [path.name for path in folder.rglob(".blobstore-*")]


# A group of files in several folders: one is replaced, one is new, one is written twice.


def _template(folder: Path) -> Path:
    template = folder / "template"
    for name in ("out", "out/below", "elsewhere"):
        (template / name).mkdir(parents=True)
    (template / "out" / "a").write_bytes(b"old a")
    (template / "out" / "below" / "twice").write_bytes(b"old twice")
    (template / "elsewhere" / "b").write_bytes(b"old b")
    return template


def _write_group(place: Path) -> None:
    with Staging(folder=place / "out", many=sys.argv[3:] == ["many"]) as group:
        for name, again in (
            ("out/a", False),
            ("out/below/twice", False),
            ("elsewhere/b", False),
            ("out/c", False),
            ("out/below/twice", True),
            ("out/d", False),
        ):
            with group.open(place / name, again=again) as file:
                file.write(f"new {name} {again}".encode())


def _recover(place: Path) -> None:
    for name in ("out", "out/below", "elsewhere"):
        recover(place / name)


def _fails(place: Path) -> None:
    """The last rename fails, so all of them are undone."""
    real, count = os.replace, 0

    def replace(source: Any, target: Any) -> None:
        nonlocal count
        count += Path(target).name == "d"
        if Path(target).name == "d" and count == 1:
            raise PermissionError(1, "Operation not permitted")
        real(source, target)

    os.replace = replace  # type: ignore[assignment]
    _write_group(place)


def group(folder: Path) -> Any:
    return [_seen(place, "out") for place in kills(folder / "kill", _template(folder), _write_group)]


def group_elsewhere(folder: Path) -> Any:
    """The group is found from another of its folders."""
    return [_seen(place, "elsewhere") for place in kills(folder / "kill", _template(folder), _write_group)]


def group_undone(folder: Path) -> Any:
    return [_seen(place, "out") for place in kills(folder / "kill", _template(folder), _fails, code=1)]


def _seen(place: Path, first: str) -> Any:
    """Whether the files are all old or all new: after the kill, after recovery, and at the end; and the leftovers."""
    before = _whole(place)
    recover(place / first)
    after = _whole(place)
    _recover(place)
    return before, after, _whole(place), left(place)


def _whole(place: Path) -> str:
    found = {
        str(path.relative_to(place)): path.read_text().split()[0]
        for path in place.rglob("*")
        if path.is_file() and not path.name.startswith(".blobstore-")
    }
    new = {"out/a": "new", "out/below/twice": "new", "elsewhere/b": "new", "out/c": "new", "out/d": "new"}
    old = {"out/a": "old", "out/below/twice": "old", "elsewhere/b": "old"}
    return "old" if found == old else "new" if found == new else "mixed"


def recovery(folder: Path) -> Any:
    """The recovery is killed, too: before each of its calls, after each kill between two renames."""
    template = _template(folder)
    found = []
    for place in kills(folder / "kill", template, _write_group):
        if _whole(place) == "mixed":
            number = 0
            ended = KILLED
            # In the same folder: the next recovery continues a half finished group.
            while ended == KILLED:
                number += 1
                ended = forked(
                    lambda place=place, number=number: killed_at_call(number, lambda: recover(place / "out"))
                )
            _recover(place)
            found.append((number, _whole(place), left(place)))
    return found


JOBS = {job.__name__: job for job in (group, group_elsewhere, group_undone, recovery)}

if __name__ == "__main__":
    main()
