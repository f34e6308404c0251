"""A tiny Llama whose tokens are letters and digits, none of more than one: a text is always split in the same way."""

import functools
from pathlib import Path

from torch import Tensor

from tests.llm import llama
from tests.llm.llama import LORA_ALPHA, RANK, Llama

MODEL = Llama(vocab_size=62)
TOKENS = 12
NAMES = {"one": 0, "two": 1}
"""The adapters, and the seeds that they are made of."""


def write(folder: Path) -> None:
    """Write `live/model.pte` with its data files, `tokenizer.json`, and the adapters `one.ptd` and `two.ptd`.

    The program needs no operators but ExecuTorch's own, so that it runs in C++ and Java, too.
    """
    from blobstore.llm import export_llm

    llama.write_model(folder, MODEL, {"a": MODEL.checkpoint(0)})
    llama.write_peft(folder / "first", MODEL.adapter(0))
    (folder / "live").mkdir()
    given = llama.config(folder, "a", folder / "live" / "model.pte", adapter="first")
    given.model.use_sdpa_with_kv_cache = False
    export_llm(given)
    for name, seed in NAMES.items():
        save(folder / f"{name}.ptd", seed, folder)


def save(path: Path, seed: int, folder: Path) -> None:
    """Write an adapter for the foundation in a folder."""
    from blobstore.adapters import save_adapter

    foundation = folder / "live" / "foundation.ptd"
    save_adapter(path, MODEL.adapter(seed), foundation=foundation, scale=LORA_ALPHA / RANK)


@functools.cache
def eager(prompt: str, adapter: str | int | None = None, strength: float = 1, tokens: int = TOKENS) -> str:
    """What eager PyTorch answers with an adapter, given by its name or its seed."""
    return MODEL.tell(weights(adapter, strength), prompt, tokens)


def weights(adapter: str | int | None, strength: float = 1) -> dict[str, Tensor]:
    """The foundation with an adapter, or with one that is off."""
    seed = NAMES[adapter] if isinstance(adapter, str) else adapter or 0
    factor = 0 if adapter is None else strength
    lora = {name: tensor * (factor if "lora_b" in name else 1) for name, tensor in MODEL.adapter(seed).items()}
    return {**MODEL.checkpoint(0), **lora}
