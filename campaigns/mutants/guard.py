"""What the lists of guards are made of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Guard:
    """A piece of source without which something bad gets through, and what the mutant has in its place.

    Attributes:
        name: what the guard is for; unique.
        file: the source, from the root of the project.
        text: the piece; it occurs once in the file. In C++ it is an expression, or statements that declare nothing that
            is used behind them, up to a semicolon or a brace.
        mutant: what takes its place.
        tests: what must fail: pytest's ids, of files or tests, and names of programs in runtime_bindings/tests.
        survives: why no test fails; "" if one must.
    """

    name: str
    file: str
    text: str
    mutant: str
    tests: tuple[str, ...]
    survives: str = ""

    @property
    def native(self) -> bool:
        """Whether it is in C++."""
        return self.file.endswith((".cpp", ".h"))
