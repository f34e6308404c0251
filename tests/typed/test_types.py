"""What a type checker makes of a user's script: nothing that it gets is of an unknown type (U1)."""

from __future__ import annotations

import ast
import builtins
import json
import os
import re
import subprocess
import sys
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.native_build import ROOT

pytest.importorskip("mypy")
pytest.importorskip("pyright")
pytestmark = pytest.mark.long

SCRIPT = Path(__file__).with_name("script.py")
ARRAYS = Path(__file__).with_name("arrays.py")
MISTAKES = Path(__file__).with_name("mistakes.py")

UNKNOWN = re.compile(r"\b(Any|Unknown)\b")
OF_NUMPY = re.compile(r"dtype\[Any\]|(?<=ndarray\[)tuple\[Any, \.\.\.\]")
"""Which dtype an array has, a file says when it is read; and numpy itself forgets how many dimensions a part has."""


class Revealing(ast.NodeTransformer):
    """Asks a type checker, before each statement, for the types of all values in it: names, attributes, items, calls.

    Modules and what they define are left alone, and so are calls that are made for what they do.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.asked = 0
        self.defined = set(dir(builtins))
        for statement in tree.body:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                self.defined |= {alias.asname or alias.name.split(".")[0] for alias in statement.names}
            elif isinstance(statement, ast.FunctionDef | ast.ClassDef):
                self.defined.add(statement.name)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        return node  # the user's own model

    def generic_visit(self, node: ast.AST) -> Any:
        node = super().generic_visit(node)
        if not isinstance(node, ast.stmt) or isinstance(node, ast.FunctionDef | ast.Import | ast.ImportFrom):
            return node
        values: dict[str, ast.expr] = {}
        for _, part in ast.iter_fields(node):
            for child in part if isinstance(part, list) else [part]:
                if isinstance(child, ast.expr | ast.withitem):
                    values |= {ast.unparse(value): value for value in self.values(child)}
        if isinstance(node, ast.Expr):
            values.pop(ast.unparse(node), None)
        self.asked += len(values)
        ask = ast.Name("reveal_type", ast.Load())
        return [*(ast.copy_location(ast.Expr(ast.Call(ask, [value], [])), node) for value in values.values()), node]

    def values(self, node: ast.AST) -> Iterator[ast.expr]:
        if self.is_definition(node):
            return
        if isinstance(node, ast.Call | ast.ListComp) or (
            isinstance(node, ast.Name | ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Load)
        ):
            yield node
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield from self.values(node.func.value)  # the method itself is a function of many types
        for child in ast.iter_child_nodes(node):
            if child is not getattr(node, "func", None) and not isinstance(node, ast.ListComp):
                yield from self.values(child)

    def is_definition(self, node: ast.AST) -> bool:
        while isinstance(node, ast.Attribute):
            node = node.value
        return isinstance(node, ast.Name) and node.id in self.defined


def run_mypy(script: Path, *options: str, paths: Sequence[Path] = (ROOT,)) -> list[str]:
    """Its messages, without the path."""
    environment = os.environ | {"MYPYPATH": os.pathsep.join(map(str, paths))}
    command = [
        sys.executable,
        *("-m", "mypy", "--config-file=", "--strict", "--follow-imports=silent"),
        *options,
        script.name,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=script.parent, env=environment)
    assert done.returncode in {0, 1}, done.stderr
    return [line.partition(":")[2] for line in done.stdout.splitlines() if line.startswith(script.name)]


def run_pyright(
    script: Path, python: str = sys.executable, paths: Sequence[Path] = (ROOT,), mode: str = "strict"
) -> list[str]:
    """Its messages in the form of mypy's: line, severity, text."""
    settings = {"typeCheckingMode": mode, "include": [script.name], "extraPaths": [str(path) for path in paths]}
    script.with_name("pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", python]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=script.parent)
    assert done.returncode in {0, 1}, done.stderr
    return [
        f"{message['range']['start']['line'] + 1}: {message['severity']}: {message['message']}"
        for message in json.loads(done.stdout)["generalDiagnostics"]
    ]


CHECKERS = {"mypy": run_mypy, "pyright": run_pyright}
each = pytest.mark.parametrize("checker", CHECKERS)


def revealed(script: Path, folder: Path) -> tuple[Path, int]:
    """A copy of a script that asks for types, and how many it asks for."""
    tree = ast.parse(script.read_text())
    asking = Revealing(tree)
    tree = ast.fix_missing_locations(asking.visit(tree))
    copy = folder / script.name
    copy.write_text(ast.unparse(tree))
    return copy, asking.asked


def check(messages: Sequence[str], copy: Path, asked: int) -> None:
    """Every value that was asked for has a type, and there is nothing to complain of."""
    lines = copy.read_text().splitlines()
    said = [message for message in messages if re.search("Revealed type is|Type of ", message)]
    unknown = [
        f"{message}\n    {lines[int(message.split(':')[0]) - 1].strip()}"
        for message in said
        if UNKNOWN.search(OF_NUMPY.sub("", re.sub(r"numpy\.", "", message)))
    ]
    assert not unknown, "\n".join(unknown)
    assert len(said) == asked
    assert not [message for message in messages if ": error: " in message]


@pytest.mark.slow
@each
def test_everything_that_a_script_gets_has_a_type(checker: str, tmp_path: Path) -> None:
    copy, asked = revealed(SCRIPT, tmp_path)
    assert asked > 200
    check(CHECKERS[checker](copy), copy, asked)


@each
def test_without_torch_arrays_have_types(checker: str, tmp_path: Path) -> None:
    """In an environment that has what blobstore itself needs."""
    copy, asked = revealed(ARRAYS, tmp_path)
    site = tmp_path / "site"
    site.mkdir()
    for package in ("numpy", "flatbuffers", "xxhash"):
        module = __import__(package)
        (site / package).symlink_to(Path(str(module.__file__)).parent, target_is_directory=True)
    venv.create(tmp_path / "venv")
    python = str(tmp_path / "venv" / "bin" / "python")
    paths = (ROOT, site)
    if checker == "mypy":
        check(run_mypy(copy, "--python-executable", python, paths=paths), copy, asked)
    else:
        check(run_pyright(copy, python, paths), copy, asked)


@pytest.mark.slow_for("mypy")
@each
def test_mistakes_are_found(checker: str, tmp_path: Path) -> None:
    """Each line that has a mistake, and no other."""
    copy = tmp_path / MISTAKES.name
    copy.write_text(MISTAKES.read_text())
    expected = {number for number, line in enumerate(copy.read_text().splitlines(), 1) if "# mistake" in line}
    found = {int(message.split(":")[0]) for message in CHECKERS[checker](copy) if ": error: " in message}
    assert found == expected


@pytest.mark.parametrize(("page", "of_executorch"), [("README.md", 0), ("docs/tutorial.md", 4)])
def test_pages_have_no_mistakes(page: str, of_executorch: int, tmp_path: Path) -> None:
    """The tutorial also calls ExecuTorch, whose types leave a method None, and continues a script on another page."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks))
    messages = run_pyright(script, mode="standard")
    theirs = [one for one in messages if re.search('of "None"|Import "export"|"tagger" is possibly unbound', one)]
    assert len(messages) == len(theirs) == of_executorch, messages


@pytest.mark.slow
def test_the_script_runs(tmp_path: Path) -> None:
    """Its types are of something that works."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", SCRIPT, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
