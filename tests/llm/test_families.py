"""Families of language models with adapters of PEFT as they are, in ExecuTorch's runner (L1, L2, L3).

The oracle is PEFT on transformers' eager model. Gemma 3 and Granite are compared with ExecuTorch's own eager model, which
lacks what sets them apart from Llama.
"""

import copy
import functools
import random
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from blobstore.adapters import import_peft, load_adapter, load_adapters, read_adapter, set_adapter_strength
from blobstore.llm import export_llm
from blobstore.runtime import BlobCache, serving
from tests.llm import families, llama
from tests.llm.conftest import silent
from tests.llm.families import FAMILIES, MODULES

pytestmark = pytest.mark.long

TOKENS, MOST_RANK = 24, 8
PROMPT, FIRST_FORBIDDEN = "once upon a time", 120


def configuration(folder: Path, key: str, context: int, *, quantized: bool = False) -> Any:
    from executorch.extension.llm.export.config.llm_config import ModelType

    config = llama.config(folder, "model", folder / "live.pte", quantized=quantized)
    config.base.model_class = ModelType(FAMILIES[key].model_class)
    config.export.max_seq_length = config.export.max_context_length = context
    return config


def exported(folder: Path, key: str, context: int, **options: Any) -> tuple[BlobCache, Any]:
    """A program with room for adapters in the runner, and the cache that it is on."""
    families.write_model(folder, key, context)
    with silent():
        export_llm(configuration(folder, key, context, **options), room={"r": MOST_RANK, "modules": MODULES})
    cache = BlobCache(folder / "live_lora.ptd", base=BlobCache(folder / "foundation.ptd"))
    with serving(cache):
        runner = llama.runner(folder / "live.pte", folder / "tokenizer.json", folder / "foundation.ptd")
        llama.text(runner, tokens=1)
    return cache, runner


def told(runner: Any, prompt: str, expected: str) -> str:
    """As much of what the runner says as is expected."""
    return llama.text(runner, prompt, tokens=TOKENS)[: len(expected)]


@pytest.mark.slow
@pytest.mark.parametrize("key", FAMILIES)
def test_the_text_is_that_of_peft(key: str, tmp_path: Path) -> None:
    """Without an adapter, with a folder as it is, with an imported file, with patterns of scales, and turned off again."""
    family, context, folder = FAMILIES[key], 128, tmp_path / "peft"
    cache, runner = exported(tmp_path / "model", key, context)
    models = {"": families.transformers_model(key, context), "peft": families.save_peft(folder, key, context, 1)}
    if not family.as_transformers:
        stock = models[""]
        models[""] = families.executorch_model(family, stock, context)
        models["peft"] = families.with_adapter(family, stock, context, folder)
    base, want = (families.generated(model, "once", TOKENS) for model in models.values())
    assert len(base) >= TOKENS // 2 and len(want) >= TOKENS // 2 and not base.startswith(want[:4])
    assert told(runner, "once", base) == base
    load_adapter(cache, folder)
    assert told(runner, "once", want) == want
    set_adapter_strength(cache, 0)
    assert told(runner, "once", base) == base
    data = tmp_path / "model"
    import_peft(folder, tmp_path / "a.ptd", foundation=data / "foundation.ptd", like=data / "live_lora.ptd")
    load_adapter(cache, tmp_path / "a.ptd", program_scale=1)
    assert told(runner, "once", want) == want
    if family.as_transformers:
        some = [family.targets[0], family.targets[-1]]
        patterns = {"rank_pattern": {some[0]: 3}, "alpha_pattern": {some[1]: 5}}
        other = families.save_peft(tmp_path / "other", key, context, 2, target_modules=some, **patterns)
        load_adapters(cache, [tmp_path / "other"])
        text = families.generated(other, "once", TOKENS)
        assert told(runner, "once", text) == text != want[: len(text)]


@pytest.mark.slow
def test_a_context_of_2048(tmp_path: Path) -> None:
    """A prompt of 1,900 tokens, read with the adapter (L3)."""
    context, prompt = 2048, "".join(chr(ord("A") + (7 * n + n * n // 5) % 26) + "9" for n in range(950))
    cache, runner = exported(tmp_path / "model", "llama", context)
    model = families.save_peft(tmp_path / "peft", "llama", context, 1)
    assert len(llama.make_tokenizer(families.VOCAB).encode(prompt).ids) == 1900
    load_adapter(cache, tmp_path / "peft")
    want = families.generated(model, prompt, TOKENS)
    assert len(want) >= TOKENS // 2
    assert told(runner, prompt, want) == want


@pytest.mark.slow
@pytest.mark.parametrize("key", ["llama", "qwen 3"])
def test_a_quantized_foundation(key: str, tmp_path: Path) -> None:
    """8da4w with embeddings of 4 bits: the text is that of ExecuTorch's own export with this adapter (L1, L3)."""
    from executorch.examples.models.llama.export_llama_lib import export_llama
    from executorch.extension.llm.export.config.llm_config import LoraConfig
    from safetensors.torch import load_file, save_file

    context, folder = 128, tmp_path / "model"
    cache, runner = exported(folder, key, context, quantized=True)
    peft = tmp_path / "peft"
    families.save_peft(peft, key, context, 1, r=MOST_RANK, lora_alpha=MOST_RANK)
    stock = configuration(folder, key, context, quantized=True)
    stock.export.output_name = str(folder / "stock.pte")
    tensors = load_file(peft / "adapter_model.safetensors")
    if not FAMILIES[key].hf_rope:  # ExecuTorch's exporter renames, and leaves rows where they are
        for name, tensor in tensors.items():
            if "lora_B" in name and ("q_proj" in name or "k_proj" in name):
                tensors[name] = families.neighbours(tensor, FAMILIES[key].head_dim).contiguous()
    save_file(tensors, tmp_path / "rows.safetensors")
    stock.base.lora_config = LoraConfig(
        adapter_checkpoint=str(tmp_path / "rows.safetensors"), adapter_config=str(peft / "adapter_config.json")
    )
    with silent():
        export_llama(stock)
    want = llama.text(llama.runner(folder / "stock.pte", folder / "tokenizer.json"), tokens=TOKENS)
    base = llama.text(runner, tokens=TOKENS)
    assert read_adapter(folder / "live_lora.ptd").scale == 1
    load_adapter(cache, peft)
    assert llama.text(runner, tokens=TOKENS) == want != base


def sentencepiece(folder: Path) -> tuple[Path, list[int], Callable[[list[int]], str]]:
    """A tokenizer of SentencePiece: its file, a prompt, and how it decodes what follows."""
    import io

    import sentencepiece

    model, chance = io.BytesIO(), random.Random(0)  # noqa: S311
    words = ["".join(chance.choices(string.ascii_lowercase, k=chance.randint(2, 6))) for _ in range(400)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(" ".join(words[n : n + 8]) for n in range(0, 400, 8)),
        model_writer=model,
        vocab_size=FIRST_FORBIDDEN,
        model_type="bpe",
        minloglevel=2,
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())

    def decode(ids: list[int]) -> str:
        return "".join(processor.id_to_piece(number).replace("\u2581", " ") for number in ids)

    return folder / "tokenizer.model", processor.encode(PROMPT), decode


def tiktoken(folder: Path) -> tuple[Path, list[int], Callable[[list[int]], str]]:
    """The same of tiktoken: printable ASCII and some pairs, as a file of Llama 3 has them."""
    import base64

    import tiktoken

    tokens = [chr(code) for code in range(32, 127)]
    tokens += [one + other for one, other in zip("onceupatm", "ncepaonti", strict=True)]
    ranks = {token.encode(): rank for rank, token in enumerate(tokens)}
    lines = "".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())
    (folder / "tokenizer.tiktoken").write_text(lines)
    encoding = tiktoken.Encoding("tiny", pat_str=r"\s?\w+|\S+", mergeable_ranks=ranks, special_tokens={})
    return folder / "tokenizer.tiktoken", encoding.encode(PROMPT), encoding.decode


@pytest.mark.slow
def test_tokenizers_of_other_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SentencePiece and tiktoken, whose own packages are the oracles for prompts and texts (L3)."""
    context, stock = 128, families.transformers_model.__wrapped__
    monkeypatch.setattr(families, "VOCAB", 384)  # tiktoken's files for Llama have 256 special tokens behind the others

    @functools.cache
    def printable(key: str, context: int) -> Any:
        """Tokens that are control characters, or in no tokenizer, are never the likeliest."""
        model = copy.deepcopy(stock(key, context))
        with torch.no_grad():
            model.lm_head.weight[:3] = 0
            model.lm_head.weight[FIRST_FORBIDDEN - 20 :] = 0
        return model

    monkeypatch.setattr(families, "transformers_model", printable)
    cache, _ = exported(tmp_path / "model", "llama", context)
    model = families.save_peft(tmp_path / "peft", "llama", context, 1)
    for path, prompt, decode in (sentencepiece(tmp_path), tiktoken(tmp_path)):
        load_adapters(cache, [])
        with serving(cache):
            runner = llama.runner(tmp_path / "model/live.pte", path, tmp_path / "model/foundation.ptd")
            base = decode(families.generated_ids(printable("llama", context), prompt, TOKENS))
            assert told(runner, PROMPT, base) == base
        load_adapter(cache, tmp_path / "peft")
        want = decode(families.generated_ids(model, prompt, TOKENS))
        assert len(want) >= TOKENS // 2
        assert told(runner, PROMPT, want) == want != base[: len(want)]
