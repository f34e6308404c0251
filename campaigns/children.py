"""What all campaigns do: print lines at once, and work in processes that may end in any way."""

import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any


def say(line: str) -> None:
    """Print a line now."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def in_child(work: Callable[[], Any], patience: float) -> dict[str, Any]:
    """Do work in a forked process.

    Args:
        work: its result goes through JSON.
        patience: the seconds after which the process is ended.

    Returns:
        its `value`; or its `error`, whether that is one of the library (`ours`), and its `trace`; or the `signal` that ended
        the process.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # ExecuTorch logs a lot
        try:
            result: dict[str, Any] = {"value": work()}
        except BaseException as error:  # the parent judges all errors
            from blobstore import BlobStoreError

            ours = isinstance(error, BlobStoreError)
            result = {"error": f"{type(error).__name__}: {error}", "ours": ours}
            if not ours:
                result["trace"] = traceback.format_exc()
        with os.fdopen(writer, "w") as pipe:
            json.dump(result, pipe)
        os._exit(0)
    os.close(writer)
    alarm = threading.Timer(patience, os.kill, (child, signal.SIGTERM))
    alarm.start()
    with os.fdopen(reader) as pipe:
        text = pipe.read()
        _, status = os.waitpid(child, 0)
    alarm.cancel()
    return {"signal": os.WTERMSIG(status)} if os.WIFSIGNALED(status) else json.loads(text)
