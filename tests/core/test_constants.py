"""The constants of both languages are the same (R4)."""

from schema.constants import HEADER, header


def test_the_header_is_that_of_the_module():
    assert HEADER.read_text(encoding="utf-8") == header(), "run `make constants`"


def test_no_other_file_of_cpp_spells_one_out():
    """Neither a key nor a magic; numbers mean other things elsewhere."""
    texts = [line.split(" = ")[1].rstrip(";") for line in header().splitlines() if "char k" in line]
    assert len(texts) > 10
    sources = [path for kind in ("*.cpp", "*.h") for path in HEADER.parents[1].rglob(kind) if path != HEADER]
    found = [(path.name, text) for path in sources for text in texts if text in path.read_text(encoding="utf-8")]
    assert found == []
