"""A tiny Llama in ExecuTorch's own runner, which exchanges LoRA adapters while it is loaded.

Everything is made on the spot: a tokenizer; a Llama of 0.4 million parameters that learns one story; and two adapters that
learn to continue the same beginning with another story, saved as PEFT saves them. Then, as for a model of any size:

    python -m blobstore.export_llm --config export.yaml            # llama.pte, foundation.ptd, llama_lora.ptd
    blobstore adapters import castle -o castle.ptd --foundation foundation.ptd
    blobstore adapters import forest -o forest.ptd --foundation foundation.ptd

`TextLLMRunner` loads the program once. Each story that it tells after an exchange is compared with the one that eager
PyTorch tells with that adapter.

    python examples/llm/exchange.py            # two minutes; --folder keeps the files
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from blobstore.adapters import load_adapter
from blobstore.lowering import quiet
from blobstore.runtime import BlobCache, serving

BEGINNING = "Once upon a time"
STORIES = {
    "": "Once upon a time a small phone had one model, and the model was as it had been exported, for ever and ever.",
    "castle": "Once upon a time there was a castle by the sea, and its queen read all her books to the gulls.",
    "forest": "Once upon a time two foxes lived in a forest, and they were friends with everybody except the owl.",
}
PARAMS = {
    "dim": 96,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "hidden_dim": 256,
    "vocab_size": 128,
    "norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "use_scaled_rope": False,
}
RANK, ALPHA = 8, 16
TARGETS = ["v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LENGTH = 128

# PEFT's names of the modules, which are those of Hugging Face's Llama, by the names of Llama checkpoints
PEFT_MODULES = {
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}


def make_tokenizer(path: Path) -> Any:
    """A tokenizer in Hugging Face's format, trained on the stories."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from tokenizers.trainers import BpeTrainer

    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(vocab_size=PARAMS["vocab_size"], special_tokens=["<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(STORIES.values(), trainer)
    tokenizer.save(str(path))
    return tokenizer


def llama(*, adapter: bool) -> nn.Module:
    """ExecuTorch's own Llama, untrained; with branches of low rank if `adapter`."""
    from executorch.examples.models.llama.llama_transformer import construct_transformer
    from executorch.examples.models.llama.model_args import ModelArgs

    more = {"r": RANK, "lora_alpha": ALPHA, "target_modules": TARGETS} if adapter else {}
    sizes = {"max_seq_len": LENGTH, "max_context_len": LENGTH}
    return construct_transformer(ModelArgs(**PARAMS, **sizes, **more, generate_full_logits=True))


def train(model: nn.Module, tokens: list[int], parameters: list[nn.Parameter], steps: int, rate: float) -> float:
    """Teach the model one sequence of tokens, and return the last loss."""
    inputs, targets = torch.tensor([tokens[:-1]]), torch.tensor(tokens[1:])
    optimizer = torch.optim.Adam(parameters, lr=rate)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs)[0], targets)
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def make_foundation(folder: Path, tokenizer: Any) -> dict[str, Tensor]:
    """Train the foundation, and write `params.json` and `checkpoint.pth`."""
    torch.manual_seed(0)
    model = llama(adapter=False)
    loss = train(model, tokenizer.encode(STORIES[""] + "</s>").ids, list(model.parameters()), 150, 3e-3)
    print(f"foundation: {sum(p.numel() for p in model.parameters()):,} parameters, loss {loss:.4f}")
    (folder / "params.json").write_text(json.dumps(PARAMS), encoding="utf-8")
    weights = {name: p.detach() for name, p in model.named_parameters()}
    torch.save(weights, folder / "checkpoint.pth")
    return weights


def make_adapter(folder: Path, tokenizer: Any, foundation: dict[str, Tensor], name: str) -> Callable[[], str]:
    """Train an adapter on its story, and write it as PEFT does. Returns a function that tells the story in eager mode."""
    from safetensors.torch import save_file

    torch.manual_seed(1)
    model = llama(adapter=True)
    model.load_state_dict(foundation, strict=False)
    for path, module in model.named_modules():
        if path.endswith("lora_b"):
            nn.init.zeros_(module.weight)  # as PEFT does: an untrained adapter changes nothing
    own = {path: parameter for path, parameter in model.named_parameters() if ".lora_" in path}
    loss = train(model, tokenizer.encode(STORIES[name] + "</s>").ids, list(own.values()), 200, 1e-2)
    tensors = {peft_name(path): parameter.detach().contiguous() for path, parameter in own.items()}
    (folder / name).mkdir()
    save_file(tensors, folder / name / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "target_modules": TARGETS}
    (folder / name / "adapter_config.json").write_text(json.dumps({**config, "bias": "none"}), encoding="utf-8")
    print(f"{name}: {sum(t.numel() for t in tensors.values()):,} parameters, loss {loss:.4f}")
    return lambda: tell(model.eval(), tokenizer)


def peft_name(path: str) -> str:
    """PEFT's name of a tensor of an adapter."""
    layers, number, group, module, which, weight = path.split(".")
    letter = {"lora_a": "lora_A", "lora_b": "lora_B"}[which]
    return f"base_model.model.model.{layers}.{number}.{PEFT_MODULES[f'{group}.{module}']}.{letter}.{weight}"


def tell(model: nn.Module, tokenizer: Any) -> str:
    """Continue the beginning in eager mode, always with the likeliest token, until the end of the story."""
    tokens = tokenizer.encode(BEGINNING).ids
    begun = len(tokens)
    with torch.no_grad():
        while len(tokens) < LENGTH - 1 and tokens[-1] != tokenizer.token_to_id("</s>"):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return str(tokenizer.decode(tokens[begun:]))


def export(folder: Path, tokenizer: Any, adapter: str) -> None:
    """Export with one of the adapters; the others need no export."""
    end = tokenizer.token_to_id("</s>")
    config = {
        "base": {
            "model_class": "llama3_2",
            "params": str(folder / "params.json"),
            "checkpoint": str(folder / "checkpoint.pth"),
            "tokenizer_path": str(folder / "tokenizer.json"),
            "metadata": json.dumps({"get_bos_id": tokenizer.token_to_id("<s>"), "get_eos_ids": [end]}),
            "lora_config": {
                "adapter_checkpoint": str(folder / adapter / "adapter_model.safetensors"),
                "adapter_config": str(folder / adapter / "adapter_config.json"),
            },
        },
        "model": {"use_kv_cache": True, "use_sdpa_with_kv_cache": True, "dtype_override": "fp32"},
        "export": {
            "max_seq_length": LENGTH,
            "max_context_length": LENGTH,
            "output_name": str(folder / "llama.pte"),
            "output_dir": str(folder),
        },
        "backend": {"xnnpack": {"enabled": True, "extended_ops": True}},
    }
    (folder / "export.yaml").write_text(json.dumps(config, indent=2), encoding="utf-8")  # JSON is YAML, too
    run(folder, sys.executable, "-m", "blobstore.export_llm", "--config", "export.yaml", "hydra.run.dir=hydra")


def run(folder: Path, *command: str) -> None:
    """Run a command in the folder; what it prints is shown only if it fails."""
    print("$", " ".join(command).replace(sys.executable, "python"), flush=True)
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        sys.exit(done.stdout + done.stderr)


def exchange(folder: Path, expected: dict[str, str]) -> dict[str, str]:
    """Tell all stories with one runner, and return them."""
    with quiet():
        import executorch.kernels.quantized  # noqa: F401
        from executorch.extension.llm.custom_ops import custom_ops  # noqa: F401
        from executorch.extension.llm.runner import GenerationConfig, TextLLMRunner

    cache = BlobCache(folder / "llama_lora.ptd", base=BlobCache(folder / "foundation.ptd"))
    paths = (folder / "llama.pte", folder / "tokenizer.json", folder / "foundation.ptd")
    settings = GenerationConfig(max_new_tokens=LENGTH - 30, temperature=0.0, echo=False)
    told = {}
    with serving(cache):  # the runner loads its program when it generates for the first time
        runner = TextLLMRunner(*map(str, paths))
        for name, story in expected.items():
            start = time.perf_counter()
            load_adapter(cache, folder / f"{name}.ptd")
            took = time.perf_counter() - start
            pieces: list[str] = []
            runner.reset()
            runner.generate(BEGINNING, settings, pieces.append)
            told[name] = "".join(pieces).removesuffix("</s>")
            print(f"\n{name}, exchanged in {took * 1000:.2f} ms: {BEGINNING}{told[name]}")
            if told[name] != story:
                sys.exit(f"eager PyTorch tells: {BEGINNING}{story}")
    return told


def main(arguments: list[str] | None = None) -> dict[str, str]:
    """Make everything, tell the stories, and return them by the names of the adapters."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="an empty or new folder for the files; by default a temporary one")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (given.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer = make_tokenizer(folder / "tokenizer.json")
        foundation = make_foundation(folder, tokenizer)
        names = [name for name in STORIES if name]
        expected = {name: make_adapter(folder, tokenizer, foundation, name)() for name in names}
        export(folder, tokenizer, names[0])
        for name in names:
            blobstore = (sys.executable, "-m", "blobstore", "adapters", "import", name)
            run(folder, *blobstore, "-o", f"{name}.ptd", "--foundation", "foundation.ptd")
        return exchange(folder, expected)


if __name__ == "__main__":
    main()
