"""Where guards are in sources, however the source is wrapped."""

import ast
import re
from collections.abc import Iterator, Sequence

from campaigns.mutants.guard import Guard


class StaleGuardError(Exception):
    """A guard of the list is no longer in the source, or not clearly."""


def mutated(source: str, guard: Guard) -> str:
    """A source in Python without the guard; formatted otherwise, and without comments.

    Raises:
        StaleGuardError: the guard is not there, or more than once.
    """
    tree = ast.parse(source)
    wanted = _parsed(guard.text)
    [(owner, field, at)] = _only(list(_runs(tree, wanted)), guard)
    if isinstance(wanted, list):
        getattr(owner, field)[at : at + len(wanted)] = ast.parse(guard.mutant).body
    elif at is None:
        setattr(owner, field, _parsed(guard.mutant))
    else:
        getattr(owner, field)[at] = _parsed(guard.mutant)
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def span(source: str, guard: Guard) -> tuple[int, int]:
    """From where to where a guard in C++ is.

    Raises:
        StaleGuardError: it is not there, or more than once.
    """
    text = re.compile(r"\s*".join(map(re.escape, re.sub(r"\s+", "", guard.text))))
    [only] = _only([match.span() for match in text.finditer(source)], guard)
    return only


def _only(found: list, guard: Guard) -> list:
    if len(found) != 1:
        raise StaleGuardError(f"the guard occurs {len(found)} times in {guard.file}, expected once: {guard.text!r}")
    return found


def _parsed(text: str) -> ast.expr | list[ast.stmt]:
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError:
        return ast.parse(text).body


def _runs(tree: ast.AST, wanted: ast.expr | list[ast.stmt]) -> Iterator[tuple[ast.AST, str, int | None]]:
    """The places of an expression or of statements: the node, its field, and where in a list."""
    for node in ast.walk(tree):
        for field, value in ast.iter_fields(node):
            if isinstance(value, list):
                size = len(wanted) if isinstance(wanted, list) else 1
                for at in range(len(value) - size + 1):
                    there = value[at : at + size] if isinstance(wanted, list) else value[at]
                    if _is_same(there, wanted):
                        yield node, field, at
            elif _is_same(value, wanted):
                yield node, field, None


def _is_same(one: object, other: ast.AST | Sequence[ast.AST]) -> bool:
    if isinstance(other, Sequence):
        return isinstance(one, list) and all(map(_is_same, one, other))
    return isinstance(one, ast.AST) and type(one) is type(other) and ast.dump(one) == ast.dump(other)
