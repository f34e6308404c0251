"""Where guards are in sources, by a function and an expression, however the source is wrapped."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from campaigns.mutants.guard import Guard

_QUALIFIERS = re.compile(r"(?:\s|\bconst\b|\bnoexcept\b|\boverride\b|\bfinal\b|->[^;{}]*?(?=\{))*")
_MEMBER = re.compile(r"[\s,]*[\w:]+(?:<[^;{}()]*>)?\s*(?=[({])")
_NAME = re.compile(r"(?<![\w~])~?([A-Za-z_]\w*)\s*\(")
_NO_FUNCTIONS = {"if", "for", "while", "switch", "catch", "return", "sizeof", "alignof", "decltype", "defined"}
# A comment, a raw string, a string or a character: what is inside is no code.
_NO_CODE = re.compile(r'//[^\n]*|/\*.*?\*/|R"\((?:.*?)\)"|"(?:\\.|[^"\\\n])*"|(?<!\w)\'(?:\\.|[^\'\\\n])+\'', re.DOTALL)


class StaleGuardError(Exception):
    """A guard of the list is no longer in the source, or not clearly."""


def mutated(source: str, guard: Guard) -> str:
    """A source in Python without the guard; formatted otherwise, and without comments.

    Raises:
        StaleGuardError: the guard is not there, or more than once.
    """
    tree = ast.parse(source)
    [function] = _only([node for name, node in _functions(tree) if name == guard.function], guard, "function")
    wanted = _parsed(guard.text)
    found = list(_runs(function, wanted))
    [(owner, field, at)] = _only(found, guard, "guard")
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
    code = _NO_CODE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), source)
    bodies = [span for name, span in _definitions(code) if name == guard.function]
    if not bodies:
        raise StaleGuardError(f"there is no function {guard.function} in {guard.file}")
    text = re.compile(r"\s*".join(map(re.escape, re.sub(r"\s+", "", guard.text))))
    found = [match.span() for body in bodies for match in text.finditer(source, *body)]
    [only] = _only(sorted(set(found)), guard, "guard")
    return only


def _only(found: list, guard: Guard, what: str) -> list:
    if len(found) != 1:
        text = guard.function if what == "function" else guard.text
        raise StaleGuardError(f"the {what} occurs {len(found)} times in {guard.file}, expected once: {text!r}")
    return found


def _parsed(text: str) -> ast.expr | list[ast.stmt]:
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError:
        return ast.parse(text).body


def _functions(tree: ast.AST, inside: str = "") -> Iterator[tuple[str, ast.AST]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{inside}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{inside}{node.name}", node
        else:
            yield from _functions(node, inside)


def _runs(function: ast.AST, wanted: ast.expr | list[ast.stmt]) -> Iterator[tuple[ast.AST, str, int | None]]:
    """The places in a function of an expression or of statements: the node, its field, and where in a list."""
    for node in ast.walk(function):
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


def _definitions(code: str) -> Iterator[tuple[str, tuple[int, int]]]:
    """The functions that are defined in C++, with the places of their bodies."""
    for match in _NAME.finditer(code):
        if match[1] in _NO_FUNCTIONS:
            continue
        at = _QUALIFIERS.match(code, _closed(code, match.end() - 1)).end()
        if code[at : at + 1] == ":" and code[at : at + 2] != "::":  # a constructor gives its members
            at += 1
            while member := _MEMBER.match(code, at):
                at = _closed(code, member.end())
            at += len(code[at:]) - len(code[at:].lstrip())
        if code[at : at + 1] == "{":
            yield match[1], (at, _closed(code, at))


def _closed(code: str, at: int) -> int:
    """Behind the bracket that closes the one at a place."""
    depth = 0
    for bracket in re.compile(r"[(){}\[\]]").finditer(code, at):
        depth += 1 if bracket[0] in "({[" else -1
        if depth == 0:
            return bracket.end()
    return len(code)
