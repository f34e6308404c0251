"""docs/commands.md lists what the command line has, and the pages name only options that exist."""

import re
from pathlib import Path

import pytest

from tests.core import golden

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*[a-z]")
ROW = re.compile(r"^\| \[?`([a-z ]+)`\]?[^|]*\|[^|]*\|([^|]*)\|$", re.MULTILINE)


@pytest.fixture(scope="module")
def every() -> dict[str, set[str]]:
    """The long options of each command and group by its name, such as `packed gc`; those of blobstore itself by ""."""
    return {
        name.removeprefix("blobstore").strip(): {one for one in options if one.startswith("--")}
        for name, options in golden.commands().items()
    }


@pytest.fixture(scope="module")
def known(every: dict[str, set[str]]) -> dict[str, set[str]]:
    """Without groups."""
    return {
        name: options
        for name, options in every.items()
        if name and not any(other.startswith(f"{name} ") for other in every)
    }


def test_the_page_lists_every_command_with_every_option(known: dict[str, set[str]]) -> None:
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert {name: set(OPTION.findall(row)) for name, row in ROW.findall(page)} == known


def test_a_command_on_a_page_has_the_options_that_stand_with_it(known: dict[str, set[str]]) -> None:
    """Of each line of a script or of code in a sentence that begins with `blobstore` and a command."""
    checked = 0
    for page in PAGES:
        for line in re.findall(r"blobstore ((?:[a-z]+ )[^`\n]*)", page.read_text(encoding="utf-8")):
            first, second, *_ = [*line.split(), ""]
            group = next((name for name in known if name.startswith(f"{first} ")), None)
            name = first if group is None else f"{first} {second if f'{first} {second}' in known else 'list'}"
            if name not in known:
                continue
            checked += 1
            unknown = set(OPTION.findall(line.split(" #")[0])) - known[name]
            assert not unknown, f"{page.name}: {line}"
    assert checked > 30


def test_an_option_in_a_sentence_is_one_of_some_command(every: dict[str, set[str]]) -> None:
    """Code in sentences that is nothing but an option, perhaps with a value."""
    options = set().union(*every.values(), {"--help"})
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for option in re.findall(r"`(--[a-z-]+)[^`]*`", text):
            assert option in options, f"{page.name}: {option}"
