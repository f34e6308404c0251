"""The type of a lowered program. ExecuTorch's own class ships no types, so type checkers would take it for anything."""

from __future__ import annotations

from collections.abc import Set
from io import BufferedIOBase
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch.export import ExportedProgram

__all__ = ["LoweredProgram"]


class LoweredProgram(Protocol):
    """What `to_executorch()` returns, an `ExecutorchProgramManager`, which has more than is listed here."""

    @property
    def methods(self) -> Set[str]:
        """The names of the methods."""

    @property
    def buffer(self) -> bytes:
        """The program, as it is written."""

    def exported_program(self, method_name: str = "forward") -> ExportedProgram:
        """The graph of a method."""

    def write_to_file(self, open_file: BufferedIOBase) -> None:
        """Write the program, without the data that was tagged for files."""

    def write_tensor_data_to_file(self, outdir: str) -> None:
        """Write the data files, each as `outdir/<tag>.ptd`."""
