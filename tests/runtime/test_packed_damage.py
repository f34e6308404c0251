"""Files of packed weights that are damaged, hostile, or not what they were (K2)."""

import shutil
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blobstore.runtime import PackedStore
from tests.lowering import nets
from tests.lowering.live import lower_through, seeded
from tests.runtime import packed_files
from tests.runtime.packed_files import FOOTER, TRAILER, Entry, Running, ones, read, spoil

pytestmark = pytest.mark.long

INPUT = ones(2, 16)
FEW = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


class Made:
    """A program, its outputs, and a folder with a good file for it."""

    def __init__(self, folder: Path) -> None:
        self.model, self.packed = folder / "model", folder / "packed"
        lower_through({"forward": (seeded(nets.MLP), (torch.ones(2, 16),))}, self.model)
        self.outputs = Running.open(self.model, INPUT)()
        Running.open(self.model, INPUT, self.packed)
        self.good = packed_files.only(self.packed).read_bytes()
        self.parts = read(packed_files.only(self.packed))

    def heal(self) -> Path:
        """The only file, with good bytes."""
        path = packed_files.only(self.packed)
        spoil(path, self.good)
        Running.open(self.model, INPUT, self.packed)
        return packed_files.only(self.packed)

    def forge(self, entries: Sequence[Entry], maps: list[bytes]) -> Path:
        """The only file, with another table whose digests fit."""
        path = self.heal()
        table = table_of([(entry.digest, entry.map) for entry in entries], 1, self.parts.covers[0], maps, len(maps))
        head = self.good[: self.parts.digests]
        spoil(path, whole(head, table, index_of(entries), len(entries), len(head)))
        return path

    def matters(self, place: int) -> bool:
        """Whether a byte is more than padding."""
        entries = self.parts.entries
        return place >= self.parts.digests or any(e.offset <= place < e.offset + e.size for e in entries)

    def check(self, *, dropped: bool, **options: Any) -> PackedStore:
        """Load the program: its outputs are right, and the statistics say whether the file was built again."""
        store = PackedStore(self.packed, **options)
        assert Running.open(self.model, INPUT, store)() == self.outputs
        assert store.stats.dropped == store.stats.builds == int(dropped), store.stats
        assert (store.stats.hits, store.stats.fallbacks) == (1, 0)
        if dropped:
            assert [reason for reason in store.stats.reasons if reason.startswith("the file was damaged: ")]
            assert packed_files.only(self.packed).read_bytes() == self.good
        return store


@pytest.fixture(scope="module")
def made(tmp_path_factory: Any) -> Made:
    return Made(tmp_path_factory.mktemp("damage"))


def flip(data: bytes, place: int, bit: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]


@FEW
@given(st.data())
def test_a_flipped_bit_is_found(made: Made, data: st.DataObject) -> None:
    """Also if the time of the file is as before; the file is built again (K2)."""
    path = made.heal()
    place = data.draw(st.integers(0, len(made.good) - 1))
    spoil(path, flip(made.good, place, data.draw(st.integers(0, 7))), times=data.draw(st.booleans()))
    made.check(dropped=made.matters(place))


def test_every_byte_of_the_table_matters(made: Made) -> None:
    """`list` finds each of them (K2)."""
    path = made.heal()
    store = PackedStore(made.packed)
    for place in range(made.parts.digests, len(made.good)):
        spoil(path, flip(made.good, place, place % 8))
        assert store.list()[0].problem, place
    spoil(path, made.good)
    assert store.list()[0].problem == "" == store.verify()[0].problem


def test_every_byte_of_an_entry_matters(made: Made) -> None:
    """`verify` finds each of them, `list` does not look at them (K2)."""
    path = made.heal()
    store = PackedStore(made.packed)
    for entry in made.parts.entries:
        for place in range(entry.offset, entry.offset + entry.size, 7):
            spoil(path, flip(made.good, place, place % 8))
            assert "digest" in store.verify()[0].problem
            assert store.list()[0].problem == ""
    spoil(path, made.good)


def test_every_length(made: Made) -> None:
    """No length but its own is right; a load drops what was cut off (K2)."""
    path = made.heal()
    store = PackedStore(made.packed)
    lengths = {*range(0, len(made.good), 97), *range(len(made.good) - 90, len(made.good)), *range(25)}
    for length in lengths:
        spoil(path, made.good[:length])
        assert store.list()[0].problem, length
    spoil(path, made.good + b"\0")
    assert store.list()[0].problem
    spoil(path, made.good[:-1])
    made.check(dropped=True)


def test_damage_below_a_running_program(made: Made) -> None:
    """A new load in the same process reads the new file, although ExecuTorch still has the old one open (K2)."""
    path = made.heal()
    running = Running.open(made.model, INPUT, made.packed)
    assert running() == made.outputs
    entry = made.parts.entries[0]
    spoil(path, flip(made.good, entry.offset + 40, 6))
    made.check(dropped=True)
    del running


def test_verify_always_compares(made: Made) -> None:
    """`verify=True` reads all entries at each load; otherwise only a file that is new or changed (K2)."""
    made.heal()
    size = sum(entry.size for entry in made.parts.entries)
    assert made.check(dropped=False).stats.verified_bytes == 0
    store = made.check(dropped=False, verify=True)
    assert store.stats.verified_bytes == size
    assert Running.open(made.model, INPUT, store)() == made.outputs
    assert store.stats.verified_bytes == 2 * size


def test_a_copied_folder(made: Made, tmp_path: Path) -> None:
    """Its files are new, and are compared once (K2)."""
    made.heal()
    shutil.copytree(made.packed, tmp_path / "copy")
    for expected in (sum(entry.size for entry in made.parts.entries), 0):
        store = PackedStore(tmp_path / "copy")
        assert Running.open(made.model, INPUT, store)() == made.outputs
        assert (store.stats.verified_bytes, store.stats.builds) == (expected, 0)


def test_another_version_of_the_runtime(made: Made) -> None:
    """Its file is not touched with, and goes when this one is built (K2)."""
    path = made.heal()
    foundation, _, end = path.name.split("-")
    other = path.with_name(f"{foundation}-{'0' * 16}-{end}")
    path.rename(other)
    Path(f"{path}.used").rename(f"{other}.used")
    store = PackedStore(made.packed)
    assert Running.open(made.model, INPUT, store)() == made.outputs
    assert (store.stats.builds, store.stats.dropped, store.stats.fallbacks) == (1, 0, 0)
    assert packed_files.only(made.packed) != other
    assert sorted(one.name for one in made.packed.iterdir()) == sorted(
        [only := packed_files.only(made.packed).name, f"{only}.used", "building.lock"]
    )


@pytest.mark.parametrize("content", [b"", b"no file of packed weights", bytes(1 << 16)], ids=["empty", "text", "zeros"])
def test_a_file_of_another_format(made: Made, content: bytes) -> None:
    """Under a name of a packed file it is dropped; under another name it stays (K2)."""
    path = made.heal()
    other = made.packed / "notes.packed"
    other.write_bytes(content)
    spoil(path, content)
    made_good = PackedStore(made.packed)
    assert Running.open(made.model, INPUT, made_good)() == made.outputs
    assert (made_good.stats.dropped, made_good.stats.builds) == (1, 1)
    assert other.read_bytes() == content
    assert [file.problem != "" for file in made_good.list() if file.path == other] == [True]
    other.unlink()


def test_a_link_is_not_followed(made: Made, tmp_path: Path) -> None:
    """Neither to read nor to remove what it leads to (K2)."""
    path = made.heal()
    outside = tmp_path / "outside"
    shutil.move(path, outside)
    path.symlink_to(outside)
    store = PackedStore(made.packed)
    assert Running.open(made.model, INPUT, store)() == made.outputs
    assert store.stats.fallbacks == 0
    assert outside.read_bytes() == made.good
    if path.is_symlink():
        path.unlink()


NUMBERS = st.one_of(
    st.integers(0, 2**64 - 1),
    st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, 4096]),
    st.integers(0, 1 << 15),
)


def hostile_map(data: st.DataObject) -> bytes:
    """A map with the fields of one; see `PackedMap::encode`."""
    small = st.integers(0, 9)
    field = st.one_of(NUMBERS, small)
    nests = data.draw(st.integers(0, 3))
    numbers = [data.draw(field), data.draw(st.one_of(st.just(nests), NUMBERS))]
    for _ in range(nests):
        dims = data.draw(st.integers(0, 3))
        numbers += [data.draw(small), data.draw(small), *(data.draw(field) for _ in range(3))]
        numbers += [data.draw(st.one_of(st.just(dims), NUMBERS)), *(data.draw(field) for _ in range(3 * dims))]
    return struct.pack(f"<{len(numbers)}Q", *numbers)[: data.draw(st.sampled_from([None, -1, -8]))]


def table_of(entries: list[tuple[bytes, int]], covers: int, cover: bytes, maps: list[bytes], counted: int) -> bytes:
    """The part before the index: digests and maps."""
    parts = [digest + struct.pack("<I", number) for digest, number in entries]
    parts += [struct.pack("<Q", covers), cover, struct.pack("<Q", counted)]
    parts += [struct.pack("<Q", len(one)) + one for one in maps]
    return b"".join(parts)


def index_of(entries: Sequence[Entry]) -> bytes:
    """What the file says of its entries."""
    names = [entry.name.encode() for entry in entries]
    return b"".join(
        struct.pack("<I", len(name)) + name + struct.pack("<QQI", entry.offset, entry.size, entry.seed)
        for name, entry in zip(names, entries, strict=True)
    )


def whole(head: bytes, table: bytes, index: bytes, count: int, start: int) -> bytes:
    """A file with digests that fit."""
    at = len(head) + len(table)
    digest = xxhash.xxh3_128_digest(table + index)
    trailer = TRAILER.pack(start, (at - start) % 2**64, digest, b"BSPACK01")
    return head + table + index + trailer + FOOTER.pack(at, count, 0x58505743, 2)


@FEW
@given(st.data())
def test_a_hostile_table(made: Made, data: st.DataObject) -> None:
    """With digests that fit: no offset, size or count leads out of the file (K2)."""
    path = made.heal()
    entries = []
    for entry in made.parts.entries:
        fields = [entry.offset, entry.size]
        if data.draw(st.booleans()):
            fields[data.draw(st.integers(0, 1))] = data.draw(NUMBERS)
        size = data.draw(st.one_of(st.just(len(entry.name)), st.integers(0, 2**32 - 1)))
        name = entry.name.encode()
        entries.append(struct.pack("<I", size) + name + struct.pack("<QQI", *fields, entry.seed))
    count = data.draw(st.one_of(st.just(len(entries)), st.integers(0, 2**32 - 1)))
    covers = data.draw(st.one_of(st.just(1), NUMBERS))
    start = data.draw(st.one_of(st.just(made.parts.digests), NUMBERS))
    head = made.good[: made.parts.digests]
    maps = list(made.parts.maps)
    numbers = [entry.map for entry in made.parts.entries]
    if data.draw(st.booleans()):
        numbers[0] = data.draw(st.integers(0, 2**32 - 1))
    counted = data.draw(st.one_of(st.just(len(maps)), NUMBERS))
    about = [(entry.digest, number) for entry, number in zip(made.parts.entries, numbers, strict=True)]
    changed = whole(head, table_of(about, covers, made.parts.covers[0], maps, counted), b"".join(entries), count, start)
    spoil(path, changed)
    store = PackedStore(made.packed)
    listed, verified = store.list(), store.verify()
    if changed == made.good:
        assert listed[0].problem == verified[0].problem == ""
    else:
        assert verified[0].problem
    assert Running.open(made.model, INPUT, store)() == made.outputs
    assert packed_files.only(made.packed).read_bytes() == made.good


@FEW
@given(st.data())
def test_hostile_maps(made: Made, data: st.DataObject) -> None:
    """With digests that fit: what is no map is dropped, and no map reads or writes outside of its weights (K2).

    Whoever can write such a file decides what an update gives; but the update ends, and a revert gives the outputs back.
    """
    maps = [data.draw(st.one_of(st.just(one), st.builds(lambda: hostile_map(data)))) for one in made.parts.maps]
    made.forge(made.parts.entries, maps)
    store = PackedStore(made.packed)
    running = Running.open(made.model, INPUT, store)
    assert running() == made.outputs
    running.cache.update({"layers.0.weight": torch.ones(24, 16), "layers.1.weight": torch.ones(24, 24)})
    running()
    running.cache.revert()
    assert running() == made.outputs


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("an entry among the digests", "lies outside of the file"),
        ("a map too many", "has a map that is not there"),
        ("bytes that are no map", "one of its maps is not valid"),
    ],
)
def test_a_table_that_leads_elsewhere(made: Made, case: str, reason: str) -> None:
    """With digests that fit (K2)."""
    entries, maps = list(made.parts.entries), list(made.parts.maps)
    if case == "an entry among the digests":
        entries[0] = replace(entries[0], offset=made.parts.digests, size=16)
    elif case == "a map too many":
        entries[0] = replace(entries[0], map=len(maps) + 1)
    else:
        maps[0] = b"\xff" * 16
    made.forge(entries, maps)
    assert reason in PackedStore(made.packed).list()[0].problem
    made.check(dropped=True)


def test_a_map_of_another_size(made: Made) -> None:
    """It is not used: the update packs the weights anew, as without one (K2)."""
    [size, *rest] = struct.unpack(f"<{len(made.parts.maps[0]) // 8}Q", made.parts.maps[0])
    for changed in ([size + 4, *rest], [size, 1, 0, 0, size - 3, 0, 0, 0], [size, 1, 0, 0, 0, 2**40, 0, 0]):
        maps = [struct.pack(f"<{len(changed)}Q", *changed)] * len(made.parts.maps)
        path = made.forge(made.parts.entries, maps)
        store = PackedStore(made.packed)
        running, plain = (Running.open(made.model, INPUT, one) for one in (store, None))
        assert running() == made.outputs
        for one in (running, plain):
            one.cache.update({"layers.0.weight": torch.ones(24, 16), "layers.1.weight": torch.ones(24, 24)})
        assert running() == plain() != made.outputs
        assert (store.stats.builds, store.stats.written, store.stats.repacked) == (0, 0, 1)
    spoil(path, made.good)
