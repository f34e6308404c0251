"""Constants inside the payloads of made-up backends: which leave holes, and why others stay.

The backends are functions from constants to bytes, so each test knows what its payload follows.
"""

import hashlib
import itertools
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from blobstore.core.constants import MOST_HOLES
from blobstore.lowering.holes.probes import other_values
from blobstore.lowering.holes.search import Payload, Search

Values = Mapping[str, Tensor]


def raw(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def search(
    tensors: dict[str, Tensor],
    compile_: Callable[[dict[str, Tensor]], bytes],
    comparable: Callable[[bytes], object] = bytes,
    named_data: object = None,
) -> tuple[Search, bytes]:
    """Search in what a backend makes of constants, and check that the holes hold what they say."""
    calls: list[int] = []

    def lower(values: Values) -> Payload:
        calls.append(len(values))
        result = SimpleNamespace(processed_bytes=compile_({**tensors, **values}), data_store_output=named_data)
        return Payload(result)

    found = Search(lower, tensors, comparable)
    payload = found.run()
    assert found.found.keys() | found.refused.keys() <= tensors.keys()
    assert not found.found.keys() & found.refused.keys()
    assert len(calls) < 60
    return found, payload.data


def random(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda t: t,
    "transposed": lambda t: t.transpose(0, 1),
    "half": lambda t: t.half(),
    "bfloat16": lambda t: t.bfloat16(),
    "half, transposed": lambda t: t.transpose(0, 1).half(),
    "channels last": lambda t: t.permute(0, 2, 3, 1),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str) -> None:
    """A constant is found in each form, and the payload is the backend's own (R1)."""
    tensors = {"w": random(4, 6, 2, 3) if form == "channels last" else random(7, 5), "b": random(7, seed=1)}
    made = [b"head" + raw(FORMS[form](tensors["w"])) + b"middle" + raw(tensors["b"]) + b"tail"]
    found, payload = search(tensors, lambda v: b"head" + raw(FORMS[form](v["w"])) + b"middle" + raw(v["b"]) + b"tail")
    assert payload == made[0]
    assert found.found["w"].places == (4,)
    assert found.found["b"].places == (payload.index(b"middle") + 6,)


def follows(found: Search, payload: bytes, tensors: Values, compile_: Callable[[dict[str, Tensor]], bytes]) -> None:
    """Check that holes hold their constants, and that with others in them the payload is what the backend makes of these."""
    changed = {name: other_values(tensors[name], i + 5) for i, name in enumerate(found.found)}
    filled = bytearray(payload)
    for name, located in found.found.items():
        own, other = (raw(one[name].half() if name.startswith("half") else one[name]) for one in (tensors, changed))
        for place in located.places:
            assert payload[place : place + len(own)] == own
            filled[place : place + len(own)] = other
    assert bytes(filled) == compile_({**tensors, **changed})


def weights(count: int) -> dict[str, Tensor]:
    return {f"w{i}": random(16, seed=i) for i in range(count)}


def joined(values: Values) -> bytes:
    return b"".join(map(raw, values.values()))


def scaled(values: Values, added: int = 0) -> bytes:
    """A backend that neither multiplies by 1 nor adds 0."""
    gamma = b"" if bool((values["gamma"] == 1).all()) else b"*" + raw(values["gamma"] + added)
    return raw(values["w"]) + gamma + (b"+" + raw(values["beta"]) if values["beta"].any() else b"")


NEUTRAL = {"gamma": torch.ones(8), "beta": torch.zeros(8), "w": random(8)}
EQUAL = {"a": torch.zeros(8), "b": torch.zeros(8), "c": random(8), "d": random(8), "e": random(8, seed=2)}
# Constants, what a backend makes of them, those that leave, and why the others stay
KINDS: dict[str, tuple[dict[str, Tensor], Callable[[Values], bytes], set[str], str]] = {
    "combined with another": (
        {"w": random(8), "b": random(8, seed=1), "shift": random(8, seed=2)},
        lambda v: raw(v["w"]) + raw(v["b"] + v["shift"]),
        {"w"},
        "combined it with other constants",
    ),
    "with a checksum": (
        weights(5),
        lambda v: joined(v) + hashlib.sha256(raw(v["w3"])).digest(),
        {"w0", "w1", "w2", "w4"},
        "more of the payload changes",
    ),
    "with a checksum of everything": (weights(40), lambda v: joined(v) + hashlib.sha256(joined(v)).digest(), set(), ""),
    "equal ones, which are stored once": (
        EQUAL,
        lambda v: b"/".join(dict.fromkeys(map(raw, v.values()))),
        {*EQUAL},
        "",
    ),
    "numbers that do nothing": (NEUTRAL, scaled, {*NEUTRAL}, ""),
    "numbers that do nothing, and cannot leave": (NEUTRAL, lambda v: scaled(v, 1), {"w", "beta"}, ""),
    "a part of another": (
        {"w": random(8), "part": random(8)[2:5].clone()},
        lambda v: raw(torch.cat([v["w"][:2], v["part"], v["w"][5:]])),
        {"part"},
        "",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_leaves_and_what_stays(kind: str) -> None:
    """What leaves can change alone, and the rest of the payload is the backend's own (R1, B5)."""
    tensors, compile_, leaves, reason = KINDS[kind]
    found, payload = search(tensors, compile_)
    assert found.found.keys() == leaves
    assert found.refused.keys() == tensors.keys() - leaves
    assert all(reason in one for one in found.refused.values())
    follows(found, payload, tensors, compile_)


@pytest.mark.parametrize("value", [-float("inf"), float("nan"), torch.finfo(torch.float32).min])
def test_numbers_that_stay_the_same_when_they_are_changed(value: float) -> None:
    """Two constants of the same odd numbers leave separately, beside equal numbers that belong to neither (R1)."""
    tensors = {"a": torch.full((4,), value), "b": torch.full((4,), value), "c": random(4)}
    literal = raw(torch.full((9,), value))
    found, payload = search(tensors, lambda v: literal + raw(v["a"]) + raw(v["b"]) + raw(v["c"]) + literal)
    assert payload == literal + raw(tensors["a"]) + raw(tensors["b"]) + raw(tensors["c"]) + literal
    assert {name: one.places for name, one in found.found.items()} == {"a": (36,), "b": (52,), "c": (68,)}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_single_numbers_of_two_bytes(dtype: torch.dtype) -> None:
    """They are told from the other data, in which their bytes occur by chance, and from each other (R1)."""
    names = [f"w{i}" for i in range(20)]
    tensors = {name: torch.full((1,), 1.0, dtype=dtype) for name in names}
    noise = raw(torch.randint(0, 256, (1 << 18,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3)))
    found, payload = search(tensors, lambda v: noise + b"".join(raw(v[name]) for name in names) + noise)
    assert payload == noise + raw(torch.ones(20, dtype=dtype)) + noise
    for name, one in found.found.items():
        assert one.places == (len(noise) + 2 * names.index(name),)
    assert len(found.found) > len(names) // 2


def test_no_more_lowerings_than_promised() -> None:
    """What cannot be proved with so many stays, and its reason says so (R1); `search` counts the lowerings."""
    tensors = {f"w{i}": random(16, seed=i) for i in range(96)}

    def compile_(values: dict[str, Tensor]) -> bytes:
        return b"".join(raw(t) + hashlib.sha256(raw(t)).digest() * (i % 4 == 1) for i, t in enumerate(values.values()))

    found, payload = search(tensors, compile_)
    assert payload == compile_(tensors)
    reasons = set(found.refused.values())
    assert any("too many lowerings" in reason for reason in reasons)
    assert list(found.refused) == [name for name in tensors if name in found.refused], "in order, in every process"


@pytest.mark.parametrize("times", [1, 2, MOST_HOLES, MOST_HOLES + 1])
def test_several_places(times: int) -> None:
    """A constant may lie in several places, but not in many: small files must not become large payloads (B5)."""
    tensors = {"w": random(8), "b": random(8, seed=1)}
    found, payload = search(tensors, lambda v: raw(v["w"]) * times + raw(v["b"]))
    assert payload == raw(tensors["w"]) * times + raw(tensors["b"])
    assert len(found.found["b"].places) == 1
    if times <= MOST_HOLES:
        assert found.found["w"].places == tuple(range(0, 32 * times, 32))
    else:
        assert "more than 8 times" in found.refused["w"]


def test_names_with_counters() -> None:
    """What differs from lowering to lowering hides nothing if the backend's lowering says how to compare (R1)."""
    tensors = {"w": random(8)}
    counter = itertools.count(7)
    found, _ = search(tensors, lambda v: raw(v["w"]) + b"Constant_%d" % next(counter))
    assert "more of the payload changes" in found.refused["w"]
    found, _ = search(tensors, lambda v: raw(v["w"]) + b"Constant_%d" % next(counter), lambda p: p[:32])
    assert found.found.keys() == {"w"}


def test_named_data_and_no_constants() -> None:
    """Nothing is searched if constants are outside of the payload, or do not exist (R1)."""
    found, payload = search({"w": random(8)}, lambda v: raw(v["w"]), named_data=SimpleNamespace(buffers=[b"x"]))
    assert (found.found, found.refused, payload) == ({}, {}, raw(random(8)))
    found, payload = search({}, lambda v: b"no constants")
    assert (found.found, payload) == ({}, b"no constants")


SOME = st.sampled_from(["as it is", "half", "folded", "checked", "twice", "merged", "if not zero"])


def compiled(constants: dict[str, Tensor]) -> bytes:
    """What a backend makes of constants that say in their names what it does with them."""
    parts: list[bytes] = []
    for name, value in constants.items():
        own = raw(value)
        match name.rstrip("0123456789 "):
            case "half":
                parts.append(raw(value.half()))
            case "folded":
                parts.append(raw(value * 3 + 1))
            case "checked":
                parts.extend([own, hashlib.sha256(own).digest()])
            case "twice":
                parts.extend([own, b"again", own])
            case "merged":
                parts.extend([own] if own not in parts else [b"see above"])
            case "if not zero":
                parts.extend([b"+", own] if value.any() else [])
            case _:
                parts.append(own)
    return b"|".join(parts)


@settings(max_examples=60)
@given(kinds=st.lists(SOME, min_size=1, max_size=7), data=st.data())
def test_all_kinds_together(kinds: list[str], data: Any) -> None:
    """Whatever a backend does with its constants: what leaves can change, and everything else is as it was (R1)."""
    values = st.sampled_from([torch.zeros(6), torch.ones(6), random(6), random(6, seed=9), random(6, seed=10)])
    tensors = {f"{kind} {i}": data.draw(values).clone() for i, kind in enumerate(kinds)}

    found, payload = search(tensors, compiled)
    follows(found, payload, tensors, compiled)
    assert all(not name.startswith(("folded", "checked")) for name in found.found)
