"""Keys: which are blobstore's own, and which near ones a message about an unknown key names."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from blobstore.core.constants import KEY_PREFIX, OF_PROGRAMS_KEY
from blobstore.core.constants import WORKING_COPY_KEY as WORKING_COPY
from blobstore.core.errors import InvalidKeyError

__all__ = [
    "KEY_PREFIX",
    "OF_PROGRAMS",
    "WORKING_COPY",
    "check_key",
    "check_keys",
    "is_content_key",
    "near",
    "prefix_apart",
    "suggest",
]

OF_PROGRAMS = {OF_PROGRAMS_KEY: "1"}
"""Metadata of the data files that are written together with programs, so that their keys belong to programs."""

_CONTENT_KEY = re.compile(r"tensor\.[0-9a-f]{32}\.")

_MOST = 5000
"""Of more keys only those that contain the name are looked at: comparing texts takes microseconds each."""


def check_key(key: str, where: str = "", what: str = "key") -> None:
    """Raise InvalidKeyError unless a key is text that a file can have as a key.

    The message begins with `where`, such as "model.pte: ", and calls it `what`.
    """
    if not isinstance(key, str) or not key:
        raise InvalidKeyError(f"{where}a {what} must be a non-empty string, got {key!r}")
    if "\0" in key:
        raise InvalidKeyError(f"{where}{what} {key!r} contains a NUL character")
    try:
        key.encode()
    except UnicodeEncodeError as error:
        raise InvalidKeyError(f"{where}{what} {key!r} is not valid Unicode: {error.reason}") from None


def check_keys(keys: Iterable[str]) -> None:
    """Check many keys as `check_key` does."""
    for key in keys:
        if not (type(key) is str and key and key.isascii() and "\0" not in key):
            check_key(key)


def is_content_key(key: str) -> bool:
    """Whether a key is one of those that `blobstore.core.formats.pte.content_key` makes: of contents, and no name."""
    return _CONTENT_KEY.match(key) is not None


def near(name: object, known: Collection[str]) -> list[str]:
    """At most three of the names that are known, each once, the most similar first."""
    if not isinstance(name, str) or not name:
        return []
    plain, known = name.casefold(), dict.fromkeys(known)
    similar = [key for key in known if key != name and _differ_in_front(key.casefold(), plain)][:3]
    if not similar and len(known) <= _MOST:
        import difflib

        similar = difflib.get_close_matches(name, known, cutoff=0.75)
    return similar


def prefix_apart(given: Collection[str], known: Collection[str], *, given_in: str, known_in: str) -> str:
    """A sentence, if the names given are known with a prefix, such as `module.`, or lack one; else nothing."""
    first, every = next(iter(given), ""), set(known)
    for dot in re.finditer(r"\.", first):
        prefix = first[: dot.end()]
        if all(name.startswith(prefix) and name[len(prefix) :] in every for name in given):
            return f"the names in {given_in} have the prefix '{prefix}', which those of {known_in} lack"
    for longer in known:
        prefix = longer[: -len(first)] if first and longer.endswith(f".{first}") else ""
        if prefix and all(f"{prefix}{name}" in every for name in given):
            return f"the names of {known_in} have the prefix '{prefix}', which those in {given_in} lack"
    return ""


def suggest(name: object, keys: Collection[str]) -> str:
    """The end of a message about an unknown key: near ones; that the keys are contents; or nothing."""
    if similar := near(name, keys):
        return f"; did you mean {' or '.join(map(repr, similar))}?"
    named = [key for key in keys if not key.startswith(KEY_PREFIX)]
    if named and all(map(is_content_key, named)):
        return (
            "; the keys of this file are contents, not names: deduplicate the programs with "
            "`blobstore dedup --names model.safetensors` to have the names of a checkpoint"
        )
    return ""


def _differ_in_front(one: str, other: str) -> bool:
    """Whether two names are equal but for capital letters, or for the modules in front."""
    return one == other or one.endswith(f".{other}") or other.endswith(f".{one}")
