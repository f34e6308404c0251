"""One word has one meaning: the pages use the words of docs/glossary.md, and no two classes have one name (H2)."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def words() -> list[str]:
    """What the glossary explains: the bold words of its tables."""
    glossary = (DOCS / "glossary.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .*\|$", glossary, re.MULTILINE)
    return [word for row in rows for word in re.findall(r"\*\*([^*]+)\*\*", row)]


def test_the_glossary_explains_a_word_once() -> None:
    assert sorted(words()) == sorted(set(words()))


@pytest.mark.parametrize("word", words())
def test_a_page_uses_a_word_of_the_glossary(word: str) -> None:
    """In the singular or the plural; a word that no page uses needs no explanation."""
    plural = f"{word.removesuffix('y')}ies" if word.endswith("y") else f"{word}s"
    pages = [page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md") if page.name != "glossary.md"]
    assert any(re.search(rf"\b({word}|{plural})\b", page, re.IGNORECASE) for page in pages)


def test_a_class_has_a_name_of_its_own() -> None:
    """Private ones, too: whoever reads two rooms meets one name for one thing."""
    places = defaultdict(list)
    for path in sorted((ROOT / "blobstore").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {name: where for name, where in places.items() if len(where) > 1} == {}
