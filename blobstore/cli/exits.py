"""Exit codes.

0 done; 1 the answer is no (`diff` found differences, `verify` found damage); 2 the command line is wrong; 3 an error,
printed on standard error in one line; 75 a server asks to come back later; 130 interrupted by Ctrl-C; 141 the reader of the output closed the pipe. If the files
of one command have different outcomes, the largest code counts.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import typer

from blobstore.cli import BUSY, ERROR, INTERRUPTED, PIPE_CLOSED
from blobstore.cli.output import print_error
from blobstore.core.errors import BlobStoreError, ServerBusyError

__all__ = ["NO", "handled"]

NO = 1
P = ParamSpec("P")
R = TypeVar("R")


def handled(command: Callable[P, R]) -> Callable[P, R]:
    """Print an error of this library in one line and exit with ERROR; any other is a defect and keeps its traceback.

    Ctrl-C and a closed pipe have their own exit codes.
    """

    @functools.wraps(command)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            try:
                return command(*args, **kwargs)
            finally:
                sys.stdout.flush()
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except BlobStoreError as error:
            print_error(error)
            raise typer.Exit(BUSY if isinstance(error, ServerBusyError) else ERROR) from None
        except BrokenPipeError:
            raise typer.Exit(PIPE_CLOSED) from None
        except OSError as error:
            if error.filename is not None:  # of a file: that it is no BlobStoreError is a defect
                raise
            print_error(f"cannot print: {error}")
            raise typer.Exit(ERROR) from None

    return wrapper
