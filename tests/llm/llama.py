"""Tiny Llamas: a checkpoint, a tokenizer and PEFT adapters, made on the spot, and configurations to export them with."""

import json
import string
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PROJECTIONS = {"wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "o_proj"}
FEED_FORWARD = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
RANK, LORA_ALPHA = 8, 16
MODULES = ("wq", "wv", "w2")
"""The layers that have an adapter."""
METADATA = json.dumps({"get_bos_id": 0, "get_eos_ids": [1 << 20]})
"""No token of the models ends a text: otherwise ExecuTorch's runner takes one of them for the end."""


@dataclass(frozen=True)
class Llama:
    """The parameters of a model, under the names that ExecuTorch's exporter reads."""

    dim: int = 32
    n_layers: int = 1
    n_heads: int = 2
    n_kv_heads: int = 1
    vocab_size: int = 128
    hidden_dim: int = 64
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    use_scaled_rope: bool = False

    def layers(self) -> dict[str, tuple[int, int]]:
        """The shape (out, in) of each linear layer of a block."""
        head = self.dim // self.n_heads
        return {
            "attention.wq": (self.dim, self.dim),
            "attention.wk": (head * self.n_kv_heads, self.dim),
            "attention.wv": (head * self.n_kv_heads, self.dim),
            "attention.wo": (self.dim, self.dim),
            "feed_forward.w1": (self.hidden_dim, self.dim),
            "feed_forward.w2": (self.dim, self.hidden_dim),
            "feed_forward.w3": (self.hidden_dim, self.dim),
        }

    def checkpoint(self, seed: int, *, tied: bool = False) -> dict[str, Tensor]:
        """Random weights that let the model say something else for each seed; `tied` as torch saves tied embeddings."""
        chance = torch.Generator().manual_seed(seed)

        def random(*sizes: int) -> Tensor:
            return torch.randn(sizes, generator=chance)

        tensors = {"tok_embeddings.weight": random(self.vocab_size, self.dim), "norm.weight": 1 + random(self.dim) / 10}
        for number in range(self.n_layers):
            for name, (out, inputs) in self.layers().items():
                tensors[f"layers.{number}.{name}.weight"] = random(out, inputs) * inputs**-0.5
            for name in ("attention_norm", "ffn_norm"):
                tensors[f"layers.{number}.{name}.weight"] = 1 + random(self.dim) / 10
        embedding = tensors["tok_embeddings.weight"]
        tensors["output.weight"] = embedding if tied else random(self.vocab_size, self.dim)
        return tensors

    def adapter(self, seed: int, modules: Iterable[str] = MODULES, scale: float = 0.3) -> dict[str, Tensor]:
        """A random adapter for these layers of every block, by the names of the Llama checkpoint."""
        chance = torch.Generator().manual_seed(seed)
        tensors = {}
        for number in range(self.n_layers):
            for name, (out, inputs) in self.layers().items():
                if name.rpartition(".")[2] in set(modules):
                    path = f"layers.{number}.{name}"
                    tensors[f"{path}.lora_a.weight"] = torch.randn((RANK, inputs), generator=chance) * scale
                    tensors[f"{path}.lora_b.weight"] = torch.randn((out, RANK), generator=chance) * scale
        return tensors

    def rotated(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of a checkpoint or an adapter with the rows of queries and keys in the order of transformers, which rotates
        halves of a head where Llama rotates pairs."""
        heads = {"wq": self.n_heads, "wk": self.n_kv_heads}
        made = dict(tensors)
        for name, tensor in tensors.items():
            for layer in heads.keys() & set(name.split(".")):
                if "lora_a" not in name:
                    pairs = tensor.unflatten(0, (heads[layer], -1, 2))
                    made[name] = pairs.transpose(1, 2).flatten(0, 2).contiguous()
        return made

    def tell(self, tensors: Mapping[str, Tensor], prompt: str = "once", tokens: int = 40) -> str:
        """What eager PyTorch generates with the tensors of a checkpoint and an adapter, always the likeliest token."""
        from executorch.examples.models.llama.llama_transformer import construct_transformer
        from executorch.examples.models.llama.model_args import ModelArgs

        targets = [{**PROJECTIONS, **FEED_FORWARD}[name] for name in MODULES]
        lora = {"r": RANK, "lora_alpha": LORA_ALPHA, "target_modules": targets}
        module = construct_transformer(ModelArgs(**asdict(self), max_seq_len=128, max_context_len=128, **lora)).eval()
        module.load_state_dict(dict(tensors))
        tokenizer = make_tokenizer(self.vocab_size)
        ids = tokenizer.encode(prompt).ids
        begun = len(ids)
        with torch.no_grad():
            while len(ids) < begun + tokens:
                ids.append(int(module(torch.tensor([ids]))[0].flatten()[-self.vocab_size :].argmax()))
        return str(tokenizer.decode(ids[begun:]))


def write_model(folder: Path, model: Llama, checkpoints: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Write `params.json`, `tokenizer.json`, and `<name>.pth` for each checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "params.json").write_text(json.dumps(asdict(model)), encoding="utf-8")
    make_tokenizer(model.vocab_size).save(str(folder / "tokenizer.json"))
    for name, tensors in checkpoints.items():
        torch.save(dict(tensors), folder / f"{name}.pth")


def make_tokenizer(size: int) -> Any:
    """A tokenizer of Hugging Face's format whose tokens are letters, digits and pairs of letters, all of them ASCII.

    With bytes as tokens, the callback of ExecuTorch's runner fails at the first piece of a longer UTF-8 sequence.
    """
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    letters = list(string.ascii_letters + string.digits)
    pairs = [(one, other) for one in letters for other in letters]
    tokens = [*letters, *(one + other for one, other in pairs)][:size]
    merges = [(one, other) for one, other in pairs if one + other in set(tokens)]
    tokenizer = Tokenizer(BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def write_peft(folder: Path, tensors: Mapping[str, Tensor], **config: Any) -> None:
    """Write an adapter as PEFT does: `adapter_config.json` and `adapter_model.safetensors`.

    Args:
        folder: made if it is missing.
        tensors: by the names of the Llama checkpoint.
        config: further fields of the configuration.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    names = {name: peft_name(name) for name in tensors}
    save_file({names[name]: tensor for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    targets = sorted({name.split(".")[-3] for name in names.values()})
    found = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": LORA_ALPHA, "bias": "none"}
    text = json.dumps({**found, "target_modules": targets, **config})
    (folder / "adapter_config.json").write_text(text, encoding="utf-8")


def peft_name(name: str) -> str:
    """PEFT's name for a tensor of an adapter, given that of the Llama checkpoint."""
    layers, number, _, module, which, weight = name.split(".")
    group = "self_attn" if module in PROJECTIONS else "mlp"
    letter = {"lora_a": "lora_A", "lora_b": "lora_B"}[which]
    target = {**PROJECTIONS, **FEED_FORWARD}[module]
    return f"base_model.model.model.{layers}.{number}.{group}.{target}.{letter}.{weight}"


def config(model: Path, checkpoint: str, program: Path, *, adapter: str = "", quantized: bool = False) -> Any:
    """An `LlmConfig` for the model in a folder.

    Args:
        model: what `write_model` wrote.
        checkpoint: the name of its checkpoint.
        program: the path of the program; its folder must exist, and gets the data files, too.
        adapter: the name of a folder in it, which `write_peft` wrote.
        quantized: 8da4w, with embeddings of 4 bits, in groups of 32.
    """
    from executorch.extension.llm.export.config.llm_config import LlmConfig, LoraConfig, ModelType

    made = LlmConfig()
    made.base.model_class = ModelType.llama3_2
    made.base.params, made.base.checkpoint = str(model / "params.json"), str(model / f"{checkpoint}.pth")
    made.base.tokenizer_path = str(model / "tokenizer.json")
    made.base.metadata = METADATA
    made.model.use_kv_cache = made.model.use_sdpa_with_kv_cache = True
    made.export.max_seq_length = made.export.max_context_length = 128
    made.export.output_name, made.export.output_dir = str(program), str(program.parent)
    made.backend.xnnpack.enabled = made.backend.xnnpack.extended_ops = True
    if adapter:
        made.base.lora_config = LoraConfig(
            adapter_checkpoint=str(model / adapter / "adapter_model.safetensors"),
            adapter_config=str(model / adapter / "adapter_config.json"),
        )
    if quantized:
        made.quantization.qmode, made.quantization.group_size = "8da4w", 32
        made.quantization.embedding_quantize = "4,32"
    return made


def runner(program: Path, tokenizer: Path, data: Path | None = None) -> Any:
    """ExecuTorch's own `TextLLMRunner`."""
    from executorch.extension.llm.runner import TextLLMRunner

    paths = [str(path) for path in (program, tokenizer, data) if path is not None]
    return TextLLMRunner(*paths)


def text(runner: Any, prompt: Any = "once", tokens: int = 40) -> str:
    """What a runner generates, always taking the likeliest token."""
    from executorch.extension.llm.runner import GenerationConfig

    pieces: list[str] = []
    runner.reset()
    runner.generate(prompt, GenerationConfig(max_new_tokens=tokens, temperature=0.0, echo=False), pieces.append)
    return "".join(pieces)
