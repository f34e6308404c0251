"""Texts with one hash value."""

import numpy as np


def colliding_texts(count: int) -> list[bytes]:
    """Texts of 16 ASCII characters with one value of libstdc++'s std::hash, whose seed is constant."""
    factor, shift = np.uint64(0xC6A4A7935BD1E995), np.uint64(47)  # of MurmurHash64A
    inverse = np.uint64(pow(int(factor), -1, 1 << 64))
    seed = np.uint64(0xC70F6907 ^ 16 * int(factor) % (1 << 64))
    first = np.random.default_rng(0).integers(33, 127, (1 << 23, 8), np.uint8).view(np.uint64)[:, 0]
    mixed = first * factor
    state = (seed ^ (mixed ^ mixed >> shift) * factor) * factor
    mixed = state * inverse
    second = (mixed ^ mixed >> shift) * inverse  # brings the state to 0
    ascii_only = (second & np.uint64(0x8080808080808080)) == 0
    texts = np.stack([first[ascii_only], second[ascii_only]], axis=1).view("S16")[:, 0].tolist()
    found = [text for text in texts if len(text) == 16 and b"\0" not in text][:count]
    assert len(set(found)) == count
    return found
