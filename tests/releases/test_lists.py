"""Lists of parts and ways that contradict themselves (F3, F4)."""

from __future__ import annotations

import json

import pytest

from blobstore.errors import InvalidFileError
from blobstore.releases.index.index import File, Index, Object
from blobstore.releases.index.parts import Part, Parts, parse_parts
from blobstore.releases.index.ways import parse_ways

ONE, OTHER = "1" * 64, "2" * 64
INDEX = Index(
    format="blobstore.release.1",
    name="a",
    version="1",
    published=1,
    executorch="1.5",
    files=(File("m", "other", "f" * 64, 100),),
    parts=Object("e" * 64, 10),
)


def listed(*parts: tuple[int, int, str]) -> bytes:
    return json.dumps({"format": "blobstore.parts.1", "files": [parts]}).encode()


def test_a_content_with_two_sizes() -> None:
    """One digest cannot be that of both."""
    assert parse_parts(listed((0, 40, ONE), (40, 40, ONE), (80, 20, OTHER)), INDEX, "it").contents == {
        ONE: 40,
        OTHER: 20,
    }
    with pytest.raises(InvalidFileError, match=f"it.*the content {ONE} occurs with 40 and 60 bytes"):
        parse_parts(listed((0, 40, ONE), (40, 60, ONE)), INDEX, "it")


@pytest.mark.parametrize("inside", [True, False])
def test_a_base_of_another_size(inside: bool) -> None:
    """A difference has as many bytes as its base, a content of the release or a further one."""
    parts = Parts("blobstore.parts.1", ((Part(0, 40, ONE), Part(40, 60, OTHER)),))

    def ways(base: int, size: int) -> bytes:
        listed = [[["near1", 0, 0, 5, base]], [["raw", 0, 5, 60]], *([] if inside else [[]])]
        bases = [] if inside else [["3" * 64, size]]
        described = {"format": "blobstore.ways.1", "index": "f" * 64, "objects": [["4" * 64, 65]], "bases": bases}
        return json.dumps({**described, "ways": listed}).encode()

    if not inside:
        assert parse_ways(ways(2, 40), "f" * 64, parts, "it").ways[0][0].base == 2
    with pytest.raises(InvalidFileError, match="content 0 cannot travel as 'near1'"):
        parse_ways(ways(1 if inside else 2, 41), "f" * 64, parts, "it")
