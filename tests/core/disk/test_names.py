"""Names of hidden files: unpredictable, in the target's folder, and recognized by their patterns."""

from pathlib import Path

from blobstore.core.disk.names import JOURNAL, TEMPORARY, journal_name, temporary_beside


def test_names_match_their_pattern_and_no_two_are_equal():
    """A name cannot be guessed, so no other user can plant a file there."""
    temporary = [temporary_beside(Path("folder", "x" * 250)) for _ in range(100)]
    assert {path.parent for path in temporary} == {Path("folder")}
    assert all(TEMPORARY.fullmatch(path.name) and not JOURNAL.fullmatch(path.name) for path in temporary)
    journals = [journal_name() for _ in range(100)]
    assert all(JOURNAL.fullmatch(name) and not TEMPORARY.fullmatch(name) for name in journals)
    assert len({*temporary, *journals}) == 200
