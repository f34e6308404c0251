"""How something is deprecated: who uses it sees a warning, and nothing outlives the version that the warning names."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import pytest
import typer

import blobstore
from blobstore.cli.exits import handled
from blobstore.cli.options import deprecated_option
from blobstore.core.deprecation import FORM, deprecated, warn
from blobstore.core.lazy import lazily

ROOT = Path(__file__).parents[2]
MESSAGE = "`old` is deprecated since blobstore 0.3 and will be removed in 0.5; use `new`"


@deprecated(MESSAGE)
def old(value: int, *, more: int = 0) -> int:
    """Add."""
    return value + more


def with_argument(new: int = 0, *, old: int | None = None) -> int:
    if old is not None:
        warn(MESSAGE)
        new = old
    return new


def test_a_function_warns_at_the_line_that_calls_it() -> None:
    with pytest.warns(DeprecationWarning, match=re.escape(MESSAGE)) as caught:
        assert old(1, more=2) == 3
    assert caught[0].filename == __file__
    assert old.__name__ == "old" and old.__doc__ == "Add."
    assert old.__deprecated__ == MESSAGE  # type: ignore[attr-defined]


def test_an_argument_warns_only_if_it_is_given() -> None:
    with pytest.warns(DeprecationWarning, match=re.escape(MESSAGE)) as caught:
        assert with_argument(old=3) == 3
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert with_argument(4) == 4


def test_a_name_of_a_module_warns_at_each_use_and_is_its_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    package = types.ModuleType("package_of_this_test")
    inside = types.ModuleType("package_of_this_test.inside")
    inside.new = object()  # type: ignore[attr-defined]
    for module in (package, inside):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    home, moved = {"new": "inside"}, {"old": ("new", MESSAGE)}
    package.__getattr__ = lambda name: lazily(package.__name__, home, name, moved)  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.warns(DeprecationWarning, match=re.escape(MESSAGE)) as caught:
            assert package.old is inside.new
        assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert package.new is inside.new
    with pytest.raises(AttributeError, match="has no attribute 'other'"):
        _ = package.other


@pytest.mark.parametrize(("arguments", "value", "line"), [([], 1, ""), (["--old", "2"], 2, f"blobstore: {MESSAGE}\n")])
def test_an_option_is_a_line_on_standard_error(
    arguments: list[str], value: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where it is given, and only there; `--help` does not offer it."""
    app = typer.Typer()
    given = []

    @app.command()
    @handled
    def command(old: Annotated[int, typer.Option(hidden=True, callback=deprecated_option(MESSAGE))] = 1) -> None:
        given.append(old)

    app(arguments, standalone_mode=False)
    assert given == [value]
    assert capsys.readouterr().err == line
    with pytest.raises(SystemExit):
        app(["--help"])
    assert "--old" not in capsys.readouterr().out


@pytest.mark.parametrize("message", ["`old` is deprecated", MESSAGE.replace("0.5", "later"), MESSAGE + "."])
def test_a_message_that_does_not_say_all_is_refused(message: str) -> None:
    with pytest.raises(ValueError, match="expected a message such as"):
        warn(message)
    with pytest.raises(ValueError, match="expected a message such as"):
        deprecated_option(message)


def number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


def deprecations(folder: Path) -> Iterator[re.Match[str]]:
    """The messages in the sources. Each is one literal, because this finds no others."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match = (
                FORM.fullmatch(node.value) if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
            )
            if match:
                yield match


def outlived(found: list[re.Match[str]], version: str) -> list[str]:
    return [one["what"] for one in found if number(one["until"]) <= number(version)]


def test_nothing_outlives_its_version(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(f"@deprecated({MESSAGE!r})\ndef old(): ...\n")
    (example,) = deprecations(tmp_path)
    assert outlived([example], "0.4.9") == [] and outlived([example], "0.5.0") == ["old"]
    assert outlived([example], "1.0.0") == ["old"]
    found = list(deprecations(ROOT / "blobstore"))
    assert outlived(found, blobstore.__version__) == []
    for one in found:  # the time that docs/stability.md promises
        since, until = number(one["since"]), number(one["until"])
        assert until >= (since[0], since[1] + 2) if since[0] == 0 else until > since and until[1] == 0, one[0]


def test_the_page_lists_what_is_deprecated() -> None:
    page = (ROOT / "docs" / "stability.md").read_text(encoding="utf-8")
    section = page.split("\n## Deprecated now\n")[1].split("\n## ")[0]
    listed = re.findall(r"^\| `([^`]+)` \| ([\d.]+) \| ([\d.]+) \| (`[^`]+`) \|$", section, re.MULTILINE)
    found = [(one["what"], one["since"], one["until"], one["use"]) for one in deprecations(ROOT / "blobstore")]
    assert sorted(listed) == sorted(found)
    assert ("Nothing is deprecated." in section) == (not found)


def test_a_message_is_given_as_a_literal() -> None:
    """So that the tests above and type checkers see it: no variable, no f-string."""
    own = {"deprecation.py", "lazy.py"}
    for path in sorted(path for path in (ROOT / "blobstore").rglob("*.py") if path.name not in own):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
            if name in {"deprecated", "deprecated_option", "warn"}:
                assert isinstance(node.args[0], ast.Constant), f"{path}:{node.lineno}"  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.long
def test_type_checkers_see_it(tmp_path: Path) -> None:
    """As PEP 702 defines it."""
    script = tmp_path / "script.py"
    script.write_text(
        "from blobstore.core.deprecation import deprecated\n"
        f"@deprecated({MESSAGE!r})\ndef old(value: int) -> int:\n    return value\n\nold(1)\n"
    )
    command = [sys.executable, "-m", "mypy", "--strict", "--enable-error-code", "deprecated", "--cache-dir", tmp_path]
    done = subprocess.run([*command, script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert MESSAGE in done.stdout, done.stdout + done.stderr
