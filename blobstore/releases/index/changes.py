"""A long list of parts as what changed since that of an earlier release, which has most of its digests.

Changes lie beside the index. Like ways, they are not signed: what they give is compared with the digest that the index has.
They are the list, in a frame of zstd, in which a digest that the earlier list has is a number: its place among the contents
there, less the place behind the one before.
"""

from __future__ import annotations

import re

from blobstore.core.errors import InvalidFileError
from blobstore.releases.index.index import Object
from blobstore.releases.index.parts import Parts
from blobstore.releases.index.ways import compressed, decompressed

__all__ = ["LONG", "changed_list", "changes_between", "changes_since"]

LONG = 1 << 16
"""Bytes of a list; a shorter one is fetched."""

_CONTENT = re.compile(rb',(?:"([0-9a-f]{64})"|(-?[0-9]{1,18}))\]')


def changes_since(earlier: Object) -> str:
    """The name of the changes since a list, beside the index of a release."""
    return f"since-{earlier.sha256}.json.zst"


def changes_between(earlier: Parts, parts: bytes) -> bytes:
    """What `changed_list` reads."""
    places = {digest.encode(): place for place, digest in enumerate(earlier.contents)}
    following = 0

    def shortened(content: re.Match[bytes]) -> bytes:
        nonlocal following
        place = places.get(content[1])
        expected, following = following, (following if place is None else place) + 1
        return content[0] if place is None else b",%d]" % (place - expected)

    return compressed(_CONTENT.sub(shortened, parts))


def changed_list(changes: bytes, earlier: Parts, wanted: Object, where: str) -> bytes:
    """The list that changes give; its digest is not compared.

    Raises:
        InvalidFileError: they are malformed, or do not fit to the earlier list.
    """
    text = decompressed(changes, where, "what changed in a list of parts")
    digests = [digest.encode() for digest in earlier.contents]
    following, room = 0, wanted.size - len(text)

    def whole(content: re.Match[bytes]) -> bytes:
        nonlocal following, room
        place = following + int(content[2] or 0)
        following = place + 1
        if content[1]:
            return content[0]
        if not 0 <= place < len(digests) or (room := room - 66 + len(content[2])) < 0:  # a digest has 66, quoted
            raise InvalidFileError(where, "what changed in a list of parts does not fit to the earlier list")
        return b',"%s"]' % digests[place]

    return _CONTENT.sub(whole, text)
