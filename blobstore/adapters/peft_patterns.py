"""The expressions of PEFT's alpha_pattern: which module has which alpha.

PEFT tries one expression after the other for each module. A small file may have so many of both that this takes minutes, so
expressions of one form, which have their dots in the same places, are looked up all at once.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

__all__ = ["MOST_FORMS", "Patterns"]

MOST_FORMS = 256
"""More forms are refused; the expressions of a model have some dozens."""

_LITERAL = re.compile(r"\^?(?:[A-Za-z0-9_.-]|[^\x00-\x7f]|\\[^A-Za-z0-9_])+\$?")
_CHARACTER = re.compile(r"\\(.)|(.)", re.DOTALL)


class Patterns:
    """Expressions with a number each, of which the first one that matches counts.

    Only letters, digits, `_`, `-`, characters beyond ASCII, dots, other characters behind a backslash, and anchors are taken:
    another expression from a file could match for hours. A dot stands for any character.

    Raises:
        ValueError: of an expression of another kind, or of one form too many; the message says so.
    """

    def __init__(self, entries: Iterable[tuple[str, float]]) -> None:
        # by the number of characters: the bits that are compared; and by these and "^", the position and the number
        self._forms: dict[int, dict[int, dict[tuple[int, bool], tuple[int, float]]]] = defaultdict(dict)
        forms = 0
        for position, (key, number) in enumerate(entries):
            if not _LITERAL.fullmatch(key):
                raise ValueError(f"the expression {key!r}; only names of modules, or ends of them, can be honoured")
            at_start = key.startswith("^")
            characters = [(escaped or plain, plain) for escaped, plain in _CHARACTER.findall(key[at_start:])]
            if characters[-1][1] == "$":
                characters.pop()
            masks = (b"\0" * 4 if plain == "." else b"\xff" * 4 for _, plain in characters)
            compared = int.from_bytes(b"".join(masks), "little")
            same_length = self._forms[len(characters)]
            forms += compared not in same_length
            if forms > MOST_FORMS:
                raise ValueError(
                    f"expressions that differ in length or in the places of their dots in more than {MOST_FORMS} ways"
                )
            bits = _bits("".join(character for character, _ in characters)) & compared
            same_length.setdefault(compared, {}).setdefault((bits, at_start), (position, number))

    def number(self, module: str) -> float | None:
        """The number of a module: that of the first expression that is the end of its name, behind a dot, or all of it."""
        found = [*self._matching(module, True), *self._matching(module, False)]
        for dot in re.finditer(r"\.", module):
            found += self._matching(module[dot.end() :], False)
        return min(found)[1] if found else None

    def _matching(self, text: str, at_start: bool) -> Iterator[tuple[int, float]]:
        """The position and the number of each expression that matches a text wholly."""
        if same_length := self._forms.get(len(text)):
            bits = _bits(text)
            for compared, table in same_length.items():
                if match := table.get((bits & compared, at_start)):
                    yield match


def _bits(text: str) -> int:
    """Text as a number, in which one operation selects characters, of 32 bits each."""
    return int.from_bytes(text.encode("utf-32-le", "surrogatepass"), "little")
