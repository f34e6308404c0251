"""Mutations that keep digests correct and JSON valid, so that readers do not stop at those checks."""

import json
import random
import struct
from collections.abc import Callable
from typing import Any

import xxhash

from campaigns.fuzz.answers import ANSWER, KIND

Mutate = Callable[[bytes, int], bytes]
"""libFuzzer's own mutation, called with bytes and the largest size of the result."""

_ODD = (None, True, -1, 0, 1, 2**31, 2**63, 2**70, 0.5, 1e308, "", "x", "\0", "é", [], {}, [[]], [0, 0], {"x": 1})


def sealed(data: bytes, most: int, seed: int, mutate: Mutate) -> bytes:
    """A `.ptd` whose manifest is corrected after the mutation, if it still has one."""
    changed = bytearray(mutate(data, most))
    if seed % 4:
        reseal(changed)
    return bytes(changed)


def reseal(data: bytearray) -> None:
    """Correct the digests of the head and of the manifest, if they can be found."""
    start = data.rfind(b"BM01") - 4
    end = len(data) - 32  # the digest, the length, and the magic
    if data[-8:] != b"BLOBMAN1" or start < 0 or end <= start + 8 or len(data) < 48:
        return
    try:
        base = struct.unpack_from("<Q", data, 32)[0]
        root = start + struct.unpack_from("<I", data, start)[0]
        table = root - struct.unpack_from("<i", data, root)[0]
        head = struct.unpack_from("<H", data, table + 6)[0]
    except struct.error:
        return
    if head and root + head + 16 <= end and base <= len(data):
        data[root + head : root + head + 16] = xxhash.xxh3_128_digest(bytes(data[:base]))
    data[-16:-8] = struct.pack("<Q", end - start)
    data[end : end + 16] = xxhash.xxh3_128_digest(bytes(data[start:end]))


def structured(data: bytes, most: int, seed: int, mutate: Mutate) -> bytes:
    """JSON with one element replaced, removed or repeated; bytes that are not JSON are mutated like any others."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return mutate(data, most)
    chance = random.Random(seed)
    if chance.random() < 0.1:
        return mutate(data, most)
    changed = json.dumps(_change(tree, chance), separators=(",", ":")).encode()
    return changed if len(changed) <= most else mutate(data, most)


def with_header(data: bytes, most: int, seed: int, mutate: Mutate) -> bytes:
    """A `.safetensors` whose header is mutated as JSON and has the recorded length."""
    try:
        (length,) = struct.unpack_from("<Q", data)
        header, rest = data[8 : 8 + length], data[8 + length :]
    except (struct.error, OverflowError):
        return mutate(data, most)
    changed = structured(header, max(1, most - len(rest) - 8), seed, mutate)
    return (struct.pack("<Q", len(changed)) + changed + rest)[:most]


def _change(tree: Any, chance: random.Random) -> Any:
    places = list(_places(tree))
    if not places:
        return chance.choice(_ODD)
    holder, key = chance.choice(places)
    match chance.randrange(4):
        case 0:
            del holder[key]
        case 1:
            other, other_key = chance.choice(places)
            holder[key] = json.loads(json.dumps(other[other_key]))
        case 2 if isinstance(holder, list):
            holder.extend(json.loads(json.dumps(holder[key])) for _ in range(chance.choice([1, 1, 100])))
        case _:
            value = holder[key]
            near = [value + 1, value - 1, -value] if type(value) is int else []
            holder[key] = chance.choice([*near, *json.loads(json.dumps(_ODD))])
    return tree


def _places(tree: Any) -> Any:
    if isinstance(tree, dict | list):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield tree, key
            yield from _places(value)


def answers(data: bytes, most: int, seed: int, mutate: Mutate) -> bytes:
    """The answers of a server, one of them changed, repeated or left out; mostly with the length of its body."""
    chance = random.Random(seed)
    kind, mark, rest = data.partition(KIND)
    pieces = rest.split(ANSWER)
    if not mark or chance.random() < 0.1:
        return mutate(data, most)
    at = chance.randrange(len(pieces))
    match chance.randrange(8):
        case 0:
            del pieces[at]
        case 1:
            pieces.insert(at, chance.choice(pieces))
        case 2:
            pieces.insert(at, chance.choice(_ODD_ANSWERS))
        case _:
            head, blank, body = pieces[at].partition(b"\r\n\r\n")
            lines = head.split(b"\r\n")
            match chance.randrange(5):
                case 0:
                    line = chance.randrange(len(lines))
                    lines[line] = mutate(lines[line] or b"x", 200)
                case 1:
                    lines.insert(chance.randrange(1, len(lines) + 1), chance.choice(_ODD_HEADERS))
                case 2 if len(lines) > 1:
                    del lines[chance.randrange(1, len(lines))]
                case 3:
                    body = mutate(body or b"x", max(1, most // 2))
                case _:
                    body = structured(body, most, seed, mutate)
            if chance.random() < 0.8:
                lines = [
                    b"Content-Length: %d" % len(body) if one.startswith(b"Content-Length") else one for one in lines
                ]
            pieces[at] = b"\r\n".join(lines) + blank + body
    changed = kind + mark + ANSWER.join(pieces)
    return changed if len(changed) <= most else mutate(data, most)


_ODD_ANSWERS = (
    b"HTTP/1.1 100 Continue\r\n\r\n",
    b"HTTP/1.1 204 No Content\r\n\r\n",
    b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:{port}/elsewhere\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 307 Found\r\nLocation: //[::1\r\nContent-Length: 0\r\n\r\n",
    b'HTTP/1.1 401 No\r\nWWW-Authenticate: Bearer realm="http://127.0.0.1:{port}/token"\r\nContent-Length: 0\r\n\r\n',
    b'HTTP/1.1 401 No\r\nWWW-Authenticate: Basic realm="x"\r\nContent-Length: 0\r\n\r\n',
    b'HTTP/1.1 200 OK\r\nContent-Length: 15\r\n\r\n{"token":"abcd"}',
    b"HTTP/1.1 429 Slow\r\nRetry-After: 0\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 503 Slow\r\nRetry-After: Wed, 21 Oct 2099 07:28:00 GMT\r\n\r\n",
    b'HTTP/1.1 404 No\r\nContent-Length: 44\r\n\r\n{"errors":[{"code":"UNKNOWN","message":"no"}]}',
    b"HTTP/1.1 206 Partial\r\nContent-Range: bytes 0-9/10\r\nContent-Length: 10\r\n\r\n0123456789",
)
_ODD_HEADERS = (
    b"Transfer-Encoding: chunked",
    b"Transfer-Encoding: gzip, chunked",
    b"Content-Encoding: gzip",
    b"Content-Length: -1",
    b"Content-Length: 1, 2",
    b"Content-Length: 99999999999999999999",
    b"Content-Range: bytes 0-18446744073709551616/*",
    b"Connection: close",
    b"Location: \xff\x00",
    b" folded",
    b"no colon",
    b": no name",
    b"X: " + b"y" * 9000,
)


MUTATORS: dict[str, Callable[[bytes, int, int, Mutate], bytes]] = {
    "ptd": sealed,
    "safetensors": with_header,
    "checkpoint": structured,
    "baseline": structured,
    "index": structured,
    "parts": structured,
    "ways": structured,
    "http": answers,
    "journal": structured,
    "adapter": sealed,
    "peft": structured,
}
