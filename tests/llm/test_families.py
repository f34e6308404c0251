"""Families of language models with adapters of PEFT as they are, in ExecuTorch's runner (L1, L2, L3).

The oracle is PEFT on transformers' eager model. Gemma 3 and Granite are compared with ExecuTorch's own eager model, which
lacks what sets them apart from Llama; `test_where_executorch_differs` shows that it does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from blobstore.adapters import import_peft, load_adapter, load_adapters, set_adapter_strength
from blobstore.llm import export_llm
from blobstore.runtime import BlobCache, serving
from tests.llm import families, llama
from tests.llm.conftest import silent
from tests.llm.families import FAMILIES, MODULES

pytestmark = pytest.mark.long

TOKENS, MOST_RANK = 24, 8


def configuration(folder: Path, key: str, context: int) -> Any:
    from executorch.extension.llm.export.config.llm_config import ModelType

    config = llama.config(folder, "model", folder / "live.pte")
    config.base.model_class = ModelType(FAMILIES[key].model_class)
    config.export.max_seq_length = config.export.max_context_length = context
    return config


def exported(folder: Path, key: str, context: int) -> tuple[BlobCache, Any]:
    """A program with room for adapters in the runner, and the cache that it is on."""
    families.write_model(folder, key, context)
    with silent():
        export_llm(configuration(folder, key, context), room={"r": MOST_RANK, "modules": MODULES})
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
        models = {name: families.executorch_model(key, context, folder if name else None) for name in models}
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


@pytest.mark.parametrize("key", [key for key, family in FAMILIES.items() if family.as_transformers])
def test_executorchs_eager_model_is_that_of_transformers(key: str, tmp_path: Path) -> None:
    """With an adapter in its branches: the names and rows that the tests use are right."""
    model = families.save_peft(tmp_path / "peft", key, 128, 1)
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    own = families.executorch_model(key, 128, tmp_path / "peft")
    torch.testing.assert_close(families.logits_of(own, ids), families.logits_of(model, ids), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("key", [key for key, family in FAMILIES.items() if not family.as_transformers])
def test_where_executorch_differs(key: str) -> None:
    """What is said above of Gemma 3 and Granite; if this fails, transformers can be their oracle, too."""
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    own, other = (
        make(key, 128) for make in (lambda *of: families.executorch_model(*of, None), families.transformers_model)
    )
    assert (families.logits_of(own, ids) - families.logits_of(other, ids)).abs().max() > 0.1
