"""Every error that blobstore raises, in one tree.

A class that is also a standard kind of error derives from that kind too, so that code which knows nothing of
blobstore can still handle it. Each message names the file, the key, what was expected and what was found::

    BlobStoreError
    ├── InvalidFileError        (ValueError)     a file is not what it claims to be
    │   └── IntegrityError                       its structure is sound, its bytes are not what was written
    ├── UnsupportedProgramError (ValueError)     a program holds something that a rewrite would lose
    ├── FileAccessError         (OSError)        the operating system refused: missing, no permission, disk full
    ├── OutputPathError         (ValueError)     an output would replace an input, or what is not to be replaced
    ├── KeyNotFoundError        (KeyError)
    ├── SliceError              (IndexError)     an index that does not fit the tensor
    ├── KeyConflictError        (ValueError)     one key, two contents
    ├── InvalidKeyError         (ValueError)
    ├── InvalidTagError         (ValueError)
    ├── InvalidAlignmentError   (ValueError)
    ├── LayoutError             (ValueError)     a tensor layout that is impossible or disagrees with its bytes
    ├── UnsupportedDataError    (TypeError)      no bytes can be taken from this object
    ├── UpdateError             (ValueError)     weights that cannot be changed so: refused, incomplete, not finite
    ├── AdapterError            (ValueError)     an adapter of another foundation, incomplete, or in the way of another
    ├── DataChangedError        (RuntimeError)   memory or a file changed after it was added
    ├── ClosedError             (ValueError)     a data map was used after close()
    ├── MissingDependencyError  (ImportError)    an optional package is needed
    ├── UnsupportedOperationError (ValueError)   this cache, or its mode, cannot do that
    ├── ProgramError            (RuntimeError)   ExecuTorch cannot load a program or a method
    │   ├── MissingBackendError                  ... because nobody registered the backend of a delegate
    │   └── ExecutionError                       a method failed while it ran
    ├── MethodNotFoundError     (KeyError)       a program has no such method
    ├── InputError              (ValueError)     the inputs of a call do not fit the method
    ├── TrainingError           (RuntimeError)   a step cannot be done
    │   ├── NotFiniteLossError                   ... because the loss is infinite or NaN
    │   └── GradientError                        ... right: a lowered step computes other gradients than PyTorch
    └── CheckpointError         (ValueError)     a checkpoint that is sound, but of another model, optimizer or base
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

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
    "ProgramError",
    "SliceError",
    "TrainingError",
    "UnsupportedDataError",
    "UnsupportedOperationError",
    "UnsupportedProgramError",
    "UpdateError",
]


class BlobStoreError(Exception):
    """Root of the tree."""


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
    """A program holds something that cannot be rewritten without loss.

    Attributes:
        path: the program as the caller named it.
        reason: what is not covered.
    """

    def __init__(self, path: str | os.PathLike[str], reason: str) -> None:
        super().__init__(f"{os.fspath(path)}: {reason}")
        self.path = Path(path)
        self.reason = reason


class FileAccessError(BlobStoreError, OSError):
    """The operating system refused an operation on a file; `errno` and `filename` are set as in OSError."""

    def __init__(self, path: str | os.PathLike[str], cause: OSError | str) -> None:
        self.path = Path(path)
        number = cause.errno if isinstance(cause, OSError) else None
        reason = (cause.strerror or str(cause)) if isinstance(cause, OSError) else cause
        super().__init__(number if number is not None else errno.EIO, reason, os.fspath(path))

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


class OutputPathError(BlobStoreError, ValueError):
    """An output path is one of the inputs, of a file of another kind, or of another output."""


class KeyNotFoundError(BlobStoreError, KeyError):
    """A key is not in the map."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0])


class SliceError(BlobStoreError, IndexError):
    """An index is out of range, or is not one that a tensor of this shape takes."""


class KeyConflictError(BlobStoreError, ValueError):
    """One key was given two different contents."""


class InvalidKeyError(BlobStoreError, ValueError):
    """A key is empty, holds a NUL, is not valid Unicode, or is reserved."""


class InvalidTagError(BlobStoreError, ValueError):
    """A tag is not a plain file name."""


class InvalidAlignmentError(BlobStoreError, ValueError):
    """An alignment is not a positive integer within the limits of the format."""


class LayoutError(BlobStoreError, ValueError):
    """A tensor layout is impossible, or it disagrees with the bytes that it describes."""


class UnsupportedDataError(BlobStoreError, TypeError):
    """No bytes can be taken from an object: its type, dtype, device or storage is not supported."""


class UpdateError(BlobStoreError, ValueError):
    """Weights cannot be changed in the way that was asked for; nothing was changed."""


class AdapterError(BlobStoreError, ValueError):
    """An adapter is for another foundation, is not complete, or cannot be put in or taken out now; nothing was changed."""


class DataChangedError(BlobStoreError, RuntimeError):
    """Memory or a file that a store refers to changed between `add` and `write`."""


class ClosedError(BlobStoreError, ValueError):
    """A data map was used after it was closed."""


class MissingDependencyError(BlobStoreError, ImportError):
    """An optional package is needed for what was asked."""


class UnsupportedOperationError(BlobStoreError, ValueError):
    """What was asked is not possible with this cache, in its mode or at this moment."""


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
    """A step cannot be done, or not with this optimizer; parameters and optimizer are as they were.

    Only where an optimizer fails halfway, as the message then says, are they as it left them.
    """


class NotFiniteLossError(TrainingError):
    """The loss is infinite or NaN."""


class GradientError(TrainingError):
    """A lowered program's loss or gradients are not those of eager PyTorch."""


class CheckpointError(BlobStoreError, ValueError):
    """A checkpoint does not belong to the program, the optimizer or the base that it was given for."""
