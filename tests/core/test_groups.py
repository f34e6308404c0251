"""Items that were joined, directly or over others, are in one group."""

from hypothesis import given
from hypothesis import strategies as st

from blobstore.core.groups import Groups

JOINS = st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=8)


@given(joins=JOINS)
def test_groups_are_the_connected_components(joins: list[list[int]]) -> None:
    """The oracle merges plain sets."""
    expected = [{n} for n in range(10)]
    for items in joins:
        touched = [group for group in expected if group & set(items)]
        expected = [group for group in expected if group not in touched]
        if touched:
            expected.append(set().union(*touched))
    groups = Groups(range(10))
    for items in joins:
        groups.join(items)
    found = groups.members()
    assert sorted(map(sorted, found)) == sorted(map(sorted, expected))
    for members in found:
        assert len({groups.root(item) for item in members}) == 1


def test_the_first_item_gives_the_root() -> None:
    """An item that was never mentioned is a group of its own, and members keep their order."""
    groups = Groups("cab")
    assert groups.root("z") == "z"
    groups.join("ab")
    assert groups.root("b") == "a"
    groups.join("ba")
    assert groups.members() == [["c"], ["a", "b"], ["z"]]
