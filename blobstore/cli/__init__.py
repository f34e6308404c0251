"""The command line: `blobstore --help`. Needs the `cli` extra."""

from __future__ import annotations

import io
import os
import sys

__all__ = ["main"]

ERROR, INTERRUPTED, PIPE_CLOSED = 3, 130, 141
"""Exit codes: an error, Ctrl-C, and a reader of the output that had enough, the latter two as shells number them."""


def main() -> None:
    """Entry point of the `blobstore` command; leaves the process with its exit code.

    Nothing else is imported before this runs, so Ctrl-C ends the command quietly from its first moment on.
    """
    try:
        code = _run()
    except KeyboardInterrupt:
        code = INTERRUPTED
    _leave(code)


def _run() -> int:
    import signal

    def lost(unraisable: sys.UnraisableHookArgs) -> None:
        # Ctrl-C came inside a finalizer or a callback, which cannot raise: raise it again outside
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.001)
        else:
            sys.__unraisablehook__(unraisable)

    signal.signal(signal.SIGALRM, signal.default_int_handler)
    sys.unraisablehook = lost
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115 - for as long as the process lives
    if sys.stdout is None:
        sys.stderr.write("blobstore: cannot print: standard output is closed\n")
        return ERROR
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # what the terminal cannot show is spelled out
    stdout = sys.stdout
    try:
        from blobstore.cli.app import app

        app()
    except SystemExit as left:
        if sys.stdout is not stdout:  # how click says that it met a closed pipe
            sys.stdout = stdout
            return PIPE_CLOSED
        return left.code if isinstance(left.code, int) else 0
    except ImportError as error:
        if error.name not in {"typer", "rich", "click"}:
            raise
        sys.stderr.write("blobstore: the command line needs more packages: pip install 'blobstore[cli]'\n")
        return ERROR
    except Exception:  # a defect; Python's own exit code would be that of an answer
        sys.excepthook(*sys.exc_info())
        return ERROR
    return 0


def _leave(code: int) -> None:
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the answer is given
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:  # nobody reads it; Python is not to try again when it ends
            code = code or PIPE_CLOSED
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if code == INTERRUPTED:
        os._exit(code)  # not waiting for threads that still work on what nobody wants any more
    sys.exit(code)
