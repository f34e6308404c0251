"""A process for each architecture: one that is killed, or never ends, takes nothing else with it."""

from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["try_one"]

_PROCESSES = get_context("forkserver")  # a new interpreter would import for ten seconds
_PROCESSES.set_forkserver_preload(["campaigns.architectures.ready"])


def try_one(kind: str, seconds: int) -> dict[str, Any]:
    """One type, in a process of its own, which has what it imports from the one that it is forked from."""
    ours, its = _PROCESSES.Pipe(duplex=False)
    process = _PROCESSES.Process(target=_try, args=(kind, its))
    process.start()
    its.close()
    try:
        if ours.poll(seconds):
            return ours.recv()  # type: ignore[no-any-return]
        return {"kind": kind, "result": "untried", "message": f"not done after {seconds} seconds"}
    except EOFError:
        process.join()
        return {"kind": kind, "result": "ours", "message": f"the process ended with {process.exitcode}"}
    finally:
        process.kill()
        process.join()


def _try(kind: str, answer: Connection) -> None:
    from blobstore.lowering import quiet
    from campaigns.architectures.trial import trial

    with quiet():
        answer.send(trial(kind))
