"""Text for people: sizes, and names from hostile files."""

from hypothesis import given
from hypothesis import strategies as st

from blobstore.core.text import printable, quoted, size


def test_sizes_have_three_digits_and_units_of_a_thousand():
    """Rounding never shows four digits."""
    numbers = (0, 7, 999, 1000, 12345, 999_600, 4_000_000_000, 7 * 10**12, -12345)
    assert [size(number) for number in numbers] == [
        "0 B", "7 B", "999 B", "1.00 KB", "12.3 KB", "1.00 MB", "4.00 GB", "7 TB", "-12.3 KB",
    ]  # fmt: skip


@given(text=st.text())
def test_printable_text_has_no_character_that_acts(text):
    """Escape sequences, line breaks and direction marks are spelled out; everything else stays."""
    shown = printable(text)
    assert shown.isprintable()
    assert shown == text or not text.isprintable()


def test_unprintable_characters_are_spelled_out():
    """Also half of a surrogate pair, which no encoding has."""
    assert printable("a\x1b[31m\n\u202e\ud800 ü") == "a\\x1b[31m\\n\\u202e\\ud800 ü"


def test_lists_of_names() -> None:
    """Names are quoted, and beyond a limit only their number is given."""
    assert quoted([]) == ""
    assert quoted(["a", "b"]) == quoted(["a", "b"], most=2) == "'a', 'b'"
    assert quoted(iter("abcd"), most=2) == "'a', 'b' and 2 others"
