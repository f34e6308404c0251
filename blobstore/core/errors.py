"""Every error that blobstore raises, in one tree.

Each class also derives from the standard exception that it resembles, so that code without knowledge of blobstore can
handle it. Each message names the file, the key, what was expected and what was found:

    BlobStoreError
    ├── InvalidFileError        (ValueError)     a file is malformed
    │   └── IntegrityError                       its structure is valid, but its bytes were changed
    ├── UnsupportedProgramError (ValueError)     a rewrite of a program would lose something
    ├── FileAccessError         (OSError)        the operating system refused: missing, no permission, disk full
    ├── OutputPathError         (ValueError)     an output would replace an input or a protected file
    ├── KeyNotFoundError        (KeyError)
    ├── SliceError              (IndexError)     an index does not fit the tensor
    ├── KeyConflictError        (ValueError)     one key for two contents
    ├── InvalidKeyError         (ValueError)
    ├── InvalidTagError         (ValueError)
    ├── InvalidAlignmentError   (ValueError)
    ├── LayoutError             (ValueError)     a tensor layout that is impossible or does not fit its bytes
    ├── UnsupportedDataError    (TypeError)      this object gives no bytes
    ├── UpdateError             (ValueError)     an update that is refused, incomplete or not finite
    ├── AdapterError            (ValueError)     an adapter of another foundation, incomplete, or in conflict
    ├── DataChangedError        (RuntimeError)   memory or a file changed after it was added
    ├── ClosedError             (ValueError)     a data map was used after close()
    ├── MissingDependencyError  (ImportError)    an optional package is needed
    ├── UnsupportedOperationError (ValueError)   not possible with this cache or in its mode
    ├── ProgramError            (RuntimeError)   ExecuTorch cannot load a program or a method
    │   ├── MissingBackendError                  ... because the backend of a delegate is not registered
    │   └── ExecutionError                       a method failed while it ran
    ├── MethodNotFoundError     (KeyError)       a program has no such method
    ├── InputError              (ValueError)     the inputs of a call do not fit the method
    ├── TrainingError           (RuntimeError)   a training step is not possible
    │   ├── NotFiniteLossError                   ... because the loss is infinite or NaN
    │   └── GradientError                        a lowered step and PyTorch compute different gradients
    ├── CheckpointError         (ValueError)     a valid checkpoint of another model, optimizer or base
    ├── PoolError               (ValueError)     a pool has no such version, or cannot take this one
    ├── ReleaseError            (ValueError)     a release cannot be published, or does not fit this folder
    │   └── TrustError                           ... or is unsigned, foreign, or older than what is installed
    └── TransferError           (OSError)        a server cannot be reached, refuses, or sends something else
        └── ServerBusyError                      ... and says when to come back
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

__all__ = [
    "AdapterError",
    "BlobStoreError",
    "CheckpointError",
    "ClosedError",
    "DataChangedError",
    "ExecutionError",
    "FileAccessError",
    "GradientError",
    "InputError",
    "IntegrityError",
    "InvalidAlignmentError",
    "InvalidFileError",
    "InvalidKeyError",
    "InvalidTagError",
    "KeyConflictError",
    "KeyNotFoundError",
    "LayoutError",
    "MethodNotFoundError",
    "MissingBackendError",
    "MissingDependencyError",
    "NotFiniteLossError",
    "OutputPathError",
    "PoolError",
    "ProgramError",
    "ReleaseError",
    "ServerBusyError",
    "SliceError",
    "TrainingError",
    "TransferError",
    "TrustError",
    "UnsupportedDataError",
    "UnsupportedOperationError",
    "UnsupportedProgramError",
    "UpdateError",
]


class BlobStoreError(Exception):
    """Root of the tree. Every error can be pickled, so worker processes report it as it is."""

    def __reduce__(self) -> tuple[Any, ...]:
        # the inherited one calls the class with the arguments of the standard exception, not with those of its __init__
        reduced: Any = super().__reduce__()
        _, arguments, *state = reduced
        return _unpickled, (type(self), arguments), *state


def _unpickled(kind: type[BlobStoreError], arguments: tuple[Any, ...]) -> BlobStoreError:
    """An error with the arguments of its standard exception, without a call of its own `__init__`."""
    error = kind.__new__(kind, *arguments)
    super(BlobStoreError, error).__init__(*arguments)
    return error


class InvalidFileError(BlobStoreError, ValueError):
    """A file is malformed.

    Attributes:
        path: the file as the caller named it.
        reason: what was expected and what was found.
    """

    def __init__(self, path: str | os.PathLike[str], reason: str) -> None:
        super().__init__(f"{os.fspath(path)}: {reason}")
        self.path = Path(path)
        self.reason = reason


class IntegrityError(InvalidFileError):
    """The bytes of a file do not have the digest that was recorded when they were written."""


class UnsupportedProgramError(BlobStoreError, ValueError):
    """A program cannot be rewritten without loss.

    Attributes:
        path: the program as the caller named it.
        reason: what would be lost.
    """

    def __init__(self, path: str | os.PathLike[str], reason: str) -> None:
        super().__init__(f"{os.fspath(path)}: {reason}")
        self.path = Path(path)
        self.reason = reason


class FileAccessError(BlobStoreError, OSError):
    """The operating system refused an operation on a file. `errno` and `filename` are set, as in OSError."""

    def __init__(self, path: str | os.PathLike[str], cause: OSError | str) -> None:
        self.path = Path(path)
        number = cause.errno if isinstance(cause, OSError) else None
        reason = (cause.strerror or str(cause)) if isinstance(cause, OSError) else cause
        super().__init__(number if number is not None else errno.EIO, reason, os.fspath(path))

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


class OutputPathError(BlobStoreError, ValueError):
    """An output path is an input, another output, or a file of another format."""


class KeyNotFoundError(BlobStoreError, KeyError):
    """A key is not in the map."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0])


class SliceError(BlobStoreError, IndexError):
    """An index is out of range, or is not one that a tensor of this shape takes."""


class KeyConflictError(BlobStoreError, ValueError):
    """One key was used for two different contents."""


class InvalidKeyError(BlobStoreError, ValueError):
    """A key is empty, holds a NUL, or is not valid Unicode."""


class InvalidTagError(BlobStoreError, ValueError):
    """A tag is not a plain file name."""


class InvalidAlignmentError(BlobStoreError, ValueError):
    """An alignment is not a positive integer within the limits of the format."""


class LayoutError(BlobStoreError, ValueError):
    """A tensor layout is impossible, or does not fit the bytes that it describes."""


class UnsupportedDataError(BlobStoreError, TypeError):
    """No bytes can be taken from an object: its type, dtype, device or storage is not supported."""


class UpdateError(BlobStoreError, ValueError):
    """An update of weights was refused; nothing was changed."""


class AdapterError(BlobStoreError, ValueError):
    """An adapter is for another foundation, is incomplete, or cannot be merged or undone now; nothing was changed."""


class DataChangedError(BlobStoreError, RuntimeError):
    """Memory or a file that a store refers to changed between `add` and `write`."""


class ClosedError(BlobStoreError, ValueError):
    """A data map was used after it was closed."""


class MissingDependencyError(BlobStoreError, ImportError):
    """This operation needs an optional package."""


class UnsupportedOperationError(BlobStoreError, ValueError):
    """The operation is not possible with this cache, in its mode, or at this moment."""


class ProgramError(BlobStoreError, RuntimeError):
    """ExecuTorch cannot load a program or a method."""


class MissingBackendError(ProgramError):
    """A method is delegated to a backend that this process does not have."""


class ExecutionError(ProgramError):
    """A method failed while it ran."""


class MethodNotFoundError(BlobStoreError, KeyError):
    """A program has no such method."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0])


class InputError(BlobStoreError, ValueError):
    """The inputs of a call do not fit the method: their number, kind, dtype or shape."""


class TrainingError(BlobStoreError, RuntimeError):
    """A step is not possible, or not with this optimizer; parameters and optimizer are unchanged.

    The exception is an optimizer that fails halfway: parameters and optimizer stay as it left them, and the message says
    so.
    """


class NotFiniteLossError(TrainingError):
    """The loss is infinite or NaN."""


class GradientError(TrainingError):
    """The loss or the gradients of a lowered program differ from those of eager PyTorch."""


class CheckpointError(BlobStoreError, ValueError):
    """A checkpoint does not belong to this program, optimizer or base."""


class PoolError(BlobStoreError, ValueError):
    """A pool has no such version or blob, cannot take this version, or is no pool."""


class ReleaseError(BlobStoreError, ValueError):
    """A release cannot be published from these files, or does not fit the folder that it is pulled into."""


class TrustError(ReleaseError):
    """A release is refused: it is unsigned, signed by another key, not the pinned one, or older than what is installed."""


class TransferError(BlobStoreError, OSError):
    """A server cannot be reached, refuses, or sends something other than what was asked for."""

    def __str__(self) -> str:  # OSError would print a tuple
        return str(self.args[0])


class ServerBusyError(TransferError):
    """A server asks to come back, later than the caller would wait.

    Attributes:
        retry_after: seconds after which to try again, for a schedule. It is the time that the server asked for, and a random
            part more, so that devices that were told the same do not come together.
    """

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after
