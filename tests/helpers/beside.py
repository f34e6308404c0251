"""Code that runs beside a test: in threads, in a forked child, or in a process of its own."""

import contextlib
import importlib.util
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest

from tests.helpers.native_build import ROOT

MOST = 120  # seconds, which only a hang explains


@contextlib.contextmanager
def running(*loops: Callable[[], object]) -> Iterator[list[BaseException]]:
    """Call each of these again and again in a thread of its own, until the block ends. What one raises ends its thread, is in
    the list at once, and is raised behind the block."""
    stop, failures = threading.Event(), list[BaseException]()

    def repeat(loop: Callable[[], object]) -> None:
        try:
            while not stop.is_set():
                loop()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=repeat, args=(loop,)) for loop in loops]
    for thread in threads:
        thread.start()
    try:
        yield failures
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]


def in_child(work: Callable[[], object]) -> Callable[[], int]:
    """Fork, and do this in the child. The function that is returned waits for its end; 0 if it raised nothing."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return lambda: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def load_example(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of an example."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def run_script(code: str, *arguments: object, status: int = 0) -> str:
    """Run Python code, perhaps indented, in a process that must end with this status. What it prints."""
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), *map(str, arguments)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=MOST, check=False)
    except subprocess.TimeoutExpired:
        pytest.fail("it hangs")
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout
