"""Contents by their bytes, whatever is said of their digests (R1, S1)."""

from hypothesis import given
from hypothesis import strategies as st

from blobstore.core.memory.digest import Digest, digest
from blobstore.core.memory.distinct import Distinct

SAID = [Digest(4, bytes(16)), Digest(4, bytes([1] * 16))]


@given(st.lists(st.tuples(st.sampled_from([b"aaaa", b"bbbb", b"cccc", b"dddd"]), st.sampled_from(SAID))))
def test_a_number_stands_for_the_bytes(met: list[tuple[bytes, Digest]]) -> None:
    contents = Distinct()
    numbers: dict[tuple[bytes, Digest], int] = {}
    for data, said in met:
        assert contents.find(memoryview(data), said) == numbers.get((data, said))
        if (data, said) not in numbers:
            contents.add(memoryview(data), said, len(numbers))
            numbers[data, said] = len(numbers)


def test_many_contents_under_one_digest_cost_little(comparisons: list[int]) -> None:
    """Each was compared with all before it: 3,000 blobs of 600 KB took two minutes."""
    contents = Distinct()
    many = [memoryview(number.to_bytes(4, "little")) for number in range(500)]
    for number, data in enumerate([*many, *many]):
        found = contents.find(data, digest(many[0]))
        assert found == (None if number < 500 else number - 500)
        if found is None:
            contents.add(data, digest(many[0]), number)
    assert len(comparisons) <= len(many) * 2
