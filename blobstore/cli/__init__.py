"""The command line: `blobstore --help`. Needs the `cli` extra."""

from __future__ import annotations

import io
import os
import sys

from blobstore.core.distribution import install

__all__ = ["main"]

WRONG, ERROR, BUSY, INTERRUPTED, PIPE_CLOSED = 2, 3, 75, 130, 141
"""Exit codes: a wrong command line, an error, a server that asks to come back later, Ctrl-C, and a reader that closed the
pipe; sysexits.h and shells use the same numbers for the last three."""


def main() -> None:
    """Entry point of the `blobstore` command; ends the process with its exit code.

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
        # Ctrl-C came inside a finalizer or a callback, which cannot raise; raise it again outside
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.001)
        else:
            sys.__unraisablehook__(unraisable)

    signal.signal(signal.SIGALRM, signal.default_int_handler)
    sys.unraisablehook = lost
    return _call() if _prepare_streams() else ERROR


def _prepare_streams() -> bool:
    """Make the standard streams usable; False if there is no standard output."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115 - for as long as the process lives
    if sys.stdout is None:
        sys.stderr.write("blobstore: cannot print: standard output is closed\n")
        return False
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # spell out what the terminal cannot show
    return True


def _call() -> int:
    stdout = sys.stdout
    if "" in sys.argv[1:]:  # as a path, it would be the folder that the shell is in
        place = sys.argv.index("", 1)
        sys.stderr.write(f"blobstore: argument {place} is empty; is a variable of the shell not set?\n")
        return WRONG
    try:
        from blobstore.cli.app import app

        app()
    except SystemExit as left:
        if sys.stdout is not stdout:  # click replaces it when the pipe is closed
            sys.stdout = stdout
            return PIPE_CLOSED
        return left.code if isinstance(left.code, int) else 0
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in {"typer", "rich", "click"}:
            raise
        sys.stderr.write(f"blobstore: the command line needs more packages: {install('cli')}\n")
        return ERROR
    except Exception:  # a defect; Python would exit with 1, the code for "no"
        sys.excepthook(*sys.exc_info())
        return ERROR
    return 0


def _leave(code: int) -> None:
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the output is complete
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:  # the reader is gone; keep Python from flushing again at exit
            code = code or PIPE_CLOSED
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if code == INTERRUPTED:
        os._exit(code)  # without waiting for threads whose results are no longer wanted
    sys.exit(code)
