"""What the lists of guards are made of."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Guard:
    """An expression without which something bad gets through, and what the mutant has in its place.

    Only guards of trust (data of any origin) and durability (nothing lost, the old or the new one) are in the lists.

    Attributes:
        name: what the guard is for; unique.
        file: the source, from the root of the project.
        text: the guard; it occurs once in the source. Its layout does not count. In Python it is an expression, or
            statements. In C++ it is an expression, or statements that declare nothing that is used behind them, up to a
            semicolon or a brace.
        tests: what must fail: pytest's ids, of files or tests, and names of programs in runtime_bindings/tests.
        mutant: what takes its place; the same kind of thing. Most guards are conditions that never hold then.
    """

    name: str
    file: str
    text: str
    tests: tuple[str, ...]
    mutant: str = "0"

    @property
    def native(self) -> bool:
        """Whether it is in C++."""
        return self.file.endswith((".cpp", ".h"))


def guards(rows: dict[str, list[tuple[Any, ...]]]) -> list[Guard]:
    """Those of each file: their names, texts, tests, and the mutants that are not the usual one."""
    return [Guard(name, file, *row) for file, found in rows.items() for name, *row in found]
