"""Which `adapter_config.json` is read, and what scale a module then has; `re` and PEFT are the oracles (L2, X3)."""

import json
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from blobstore.adapters import read_adapter
from blobstore.adapters.peft_folder import read_peft
from blobstore.errors import AdapterError, BlobStoreError

MODULE = "model.layers.1.q_proj"


def scale_of(config: bytes, module: str = MODULE) -> float | None:
    """The scale of a module, None if the folder is refused."""
    with tempfile.TemporaryDirectory() as name:
        folder = write(Path(name), config, module)
        try:
            [pair] = read_peft(folder).pairs
        except BlobStoreError:
            return None
        return pair.scale


def write(folder: Path, config: bytes, *modules: str) -> Path:
    one = np.zeros((1, 1), np.float16)
    tensors = {f"{name}.lora_{half}.weight": one for name in modules for half in "AB"}
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_bytes(config)
    return folder


def config(**fields: Any) -> bytes:
    return json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 2, **fields}).encode()


SOUND = config(alpha_pattern={"q_proj": 3})
REFUSED = {
    "a key twice": b'{"peft_type": "LORA", "r": 1, "r": 1}',
    "a key twice, spelled out": b'{"peft_type": "LORA", "r": 1, "\\u0072": 1}',
    "a key twice where it does not matter": b'{"peft_type": "LORA", "r": 1, "revision": {"a": 1, "a": 1}}',
    "a module twice": b'{"peft_type": "LORA", "r": 1, "alpha_pattern": {"q_proj": 1, "q_proj": 2}}',
    "a byte order mark": b"\xef\xbb\xbf" + SOUND,
    "UTF-16": SOUND.decode().encode("utf-16"),
    "no UTF-8": SOUND.replace(b"q_proj", b"\xed\xa0\x80"),
    "nested too deeply": config(revision=[]).replace(b"[]", b"[" * 200 + b"]" * 200),
    "an expression": config(alpha_pattern={"[qk]_proj": 3}),
    "a class of characters": config(alpha_pattern={r"\w_proj": 3}),
    "nothing but anchors": config(alpha_pattern={"^$": 3}),
    "a backslash at the end": config(alpha_pattern={"q_proj\\": 3}),
    "too many forms": config(alpha_pattern={"a" * length: 1 for length in range(1, 258)}),
}
TAKEN = {
    "as it is": (SOUND, 3),
    "nested": (config(revision=[]).replace(b"[]", b"[" * 199 + b"]" * 199), 2),
    "half a surrogate pair": (config(alpha_pattern={"\ud800": 3}), 2),
    "a byte order mark in a name": (config(alpha_pattern={"\ufeff": 3, "q_proj": 4}), 4),
    "the first of two": (config(alpha_pattern={"layers.1.q_proj": 3, "q_proj": 4}), 3),
    "a dot for any character": (config(alpha_pattern={"layers...q_proj": 3}), 3),
    "an anchor in front": (config(alpha_pattern={"^q_proj": 3, "^model.layers.1.q_proj$": 4}), 4),
    "not behind a dot": (config(alpha_pattern={"proj": 3}), 2),
    "many forms": (config(alpha_pattern={"a" * length: 1 for length in range(1, 257)}), 2),
}


@pytest.mark.parametrize("text", REFUSED.values(), ids=REFUSED)
def test_refused(text: bytes) -> None:
    assert scale_of(text) is None


@pytest.mark.parametrize(("text", "scale"), TAKEN.values(), ids=TAKEN)
def test_taken(text: bytes, scale: float) -> None:
    assert scale_of(text) == scale


CHARACTERS = "ab.1_-$^\\ \n\u00e9\u20ac\ud800\ufeff\U0001f600"


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    st.text(st.sampled_from("ab.1_-\u00e9\u20ac\U0001f600"), min_size=1, max_size=8),
    st.dictionaries(st.text(st.sampled_from(CHARACTERS), max_size=8), st.integers(1, 50), max_size=6),
    st.booleans(),
)
def test_alphas_of_any_module(module: str, patterns: dict[str, int], escaped: bool) -> None:
    """As PEFT finds them: the oracle is its own expression."""
    text = json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 0.5, "alpha_pattern": patterns}, ensure_ascii=escaped)
    found = scale_of(text.encode("utf-8", "surrogatepass"), module)
    if found is not None:
        matching = [alpha for key, alpha in patterns.items() if re.match(rf"(.*\.)?({key})$", module)]
        assert found == (matching[0] if matching else 0.5)


@given(st.data())
def test_any_file_of_tensors(data: st.DataObject) -> None:
    """In which bytes were changed, or that is truncated: it is read or refused, and nothing else happens (B5)."""
    with tempfile.TemporaryDirectory() as name:
        folder = write(Path(name), config(), MODULE)
        tensors = folder / "adapter_model.safetensors"
        text = bytearray(tensors.read_bytes())
        for _ in range(data.draw(st.integers(0, 3))):
            text[data.draw(st.integers(0, len(text) - 1))] = data.draw(
                st.sampled_from(b'\0\1\x08 "{}[],:0123456789F_~\xff')
            )
        tensors.write_bytes(text[: data.draw(st.none() | st.integers(0, len(text)))])
        try:
            read_peft(folder)
        except BlobStoreError as error:
            assert str(tensors) in str(error)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 10) | st.floats() | st.text(st.sampled_from(CHARACTERS), max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["a", "b"]), inner, max_size=2),
    max_leaves=4,
)
NAMES = st.sampled_from(
    [
        *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights", "bias"),
        *("use_dora", "modules_to_save", "revision", "new"),
    ]
)


@given(st.lists(st.tuples(NAMES, VALUES), max_size=4), st.data())
def test_any_fields(fields: list[tuple[str, Any]], data: st.DataObject) -> None:
    """Also those that occur twice, and texts in which a byte was changed: Python's own `json` reads what is taken."""
    listed = [("peft_type", "LORA"), ("r", 1), *fields]
    text = bytearray(
        ("{" + ", ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in listed) + "}").encode()
    )
    if data.draw(st.booleans()):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    if scale_of(bytes(text)) is not None:
        taken = json.loads(bytes(text))
        assert taken["peft_type"] == "LORA"
        assert type(taken["r"]) is int and taken["r"] > 0


def _forms(length: int) -> list[str]:
    """Expressions for the end of a module, all with dots in other places."""
    return [
        "".join("." if number >> bit & 1 else "a" for bit in range(8)) + "b" * (length - 8) for number in range(256)
    ]


BOMBS = {
    "many of both": ([f"m{i}" for i in range(2500)], [f"x{i}m" for i in range(30_000)]),
    "as many forms as can be": ([f"q{'a' * 60}.{'a' * 50}{i:05}" for i in range(1500)], _forms(55)),
    "many ends of names": (["a." * 70 + f"{i:05}" for i in range(1500)], ["a." * i + "b1" for i in range(1, 70)]),
}


@pytest.mark.long
@pytest.mark.parametrize(("modules", "patterns"), BOMBS.values(), ids=BOMBS)
def test_a_small_folder_costs_little(modules: list[str], patterns: list[str], tmp_path: Path) -> None:
    """Below 1 MB, at most two seconds of processor time, however many modules meet however many expressions (B5)."""
    write(tmp_path, config(alpha_pattern=dict.fromkeys(patterns, 1)), *modules)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 1_000_000
    began = time.process_time()
    assert len(read_peft(tmp_path).pairs) == len(modules)
    assert time.process_time() - began <= 2


def test_files_that_must_be_saved_or_imported_first(tmp_path: Path) -> None:
    """The message says so, and not what an opened file lacks."""
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 1}))
    (tmp_path / "adapter_model.bin").write_bytes(b"x")
    with pytest.raises(AdapterError, match=r"adapter_model\.bin is a pickle, which may run code; save it"):
        read_peft(tmp_path)
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    for read in (read_adapter, read_peft):
        with pytest.raises(AdapterError, match=r"a\.gguf: an adapter in GGUF is not read; import the folder of PEFT"):
            read(tmp_path / "a.gguf")
