"""Hooks of mkdocs: links to files of the repository, and no request to another host; `make site` runs them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.utils import log

ROOT = Path(__file__).parents[1]
CODE = re.compile(r"^ *(```+).*?^ *\1 *$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
# What a browser fetches by itself; links that a reader follows are no matter
FETCHED = re.compile(
    r"<(?:script|img|iframe|source|video|audio)\b[^>]*?\bsrc=[\"']?(?:https?:)?//[^\"'\s>]+"
    r"|<link\b(?=[^>]*\brel=[\"']?(?:stylesheet|preconnect|preload|icon))[^>]*?\bhref=[\"']?(?:https?:)?//[^\"'\s>]+"
)


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Turn links that leave docs/ into links to the repository, if there is such a file."""
    folder = Path(page.file.abs_src_path).parent
    docs = Path(config.docs_dir)

    def replaced(match: re.Match[str]) -> str:
        target = (folder / match[1]).resolve()
        if target.is_relative_to(docs):
            return match[0]
        if not target.is_relative_to(ROOT) or not target.exists():
            log.warning("%s: link to %s, which is not in the repository", page.file.src_uri, match[1])
            return match[0]
        kind = "tree" if target.is_dir() else "blob"
        return f"{config.extra['repository']}/{kind}/main/{target.relative_to(ROOT).as_posix()}{match[2] or ''}"

    parts, end = [], 0
    for code in CODE.finditer(markdown):
        parts += [LINK.sub(replaced, markdown[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, LINK.sub(replaced, markdown[end:])])


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Refuse a page that would load something from another host."""
    if found := FETCHED.search(output):
        raise PluginError(f"{page.file.src_uri} would load from another host: {found[0]}")
    return output


def on_post_build(config: Any, **_: Any) -> None:
    """Refuse style sheets that would load something from another host."""
    for sheet in Path(config.site_dir).rglob("*.css"):
        if found := re.search(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//[^)\"']+", sheet.read_text(encoding="utf-8")):
            raise PluginError(f"{sheet} would load from another host: {found[0]}")
