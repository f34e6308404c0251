"""ExecuTorch's own runner of several modalities on a cache: what docs/cpp.md says of it (L3, B3)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blobstore.errors import UpdateError
from blobstore.lowering.export import quiet
from blobstore.runtime import BlobCache, make_working_copy, serving
from tests.llm import llama
from tests.lowering.live import BlobStorePartitioner, XnnpackPartitioner, write

pytestmark = pytest.mark.long

SIZE, DIM, TOKENS = 64, 8, 12


class TokenEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SIZE, DIM)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.embedding(ids)
        return found


class TextDecoder(nn.Module):
    """Tells the next token from the last one and its position."""

    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(DIM, SIZE)

    def forward(self, embeddings: Tensor, position: Tensor) -> Tensor:
        found: Tensor = self.output(embeddings + torch.sin(position.to(torch.float32)))
        return found


def modules(seed: int) -> tuple[TokenEmbedding, TextDecoder]:
    torch.manual_seed(seed)
    return TokenEmbedding().eval(), TextDecoder().eval()


def eager(embedding: TokenEmbedding, decoder: TextDecoder, prompt: str = "a") -> str:
    """What eager PyTorch generates, always the likeliest token."""
    tokenizer = llama.make_tokenizer(SIZE)
    ids = list(tokenizer.encode(prompt).ids)
    assert len(ids) == 1  # the methods take one token at a time
    with torch.no_grad():
        while len(ids) <= TOKENS:
            logits = decoder(embedding(torch.tensor([[ids[-1]]])), torch.tensor([len(ids) - 1]))
            ids.append(int(logits.flatten().argmax()))
    return str(tokenizer.decode(ids[1:]))


def exported(folder: Path) -> Path:
    """A program as the runner takes it, with its weights in `model.ptd`, and a tokenizer."""
    with quiet():
        from executorch.exir import ExecutorchBackendConfig, to_edge_transform_and_lower
    embedding, decoder = modules(0)
    inputs = {
        "token_embedding": (embedding, (torch.zeros(1, 1, dtype=torch.int64),)),
        "text_decoder": (decoder, (torch.zeros(1, 1, DIM), torch.zeros(1, dtype=torch.int64))),
    }
    with quiet(), torch.no_grad():
        edge = to_edge_transform_and_lower(
            {name: torch.export.export(module, args, strict=True) for name, (module, args) in inputs.items()},
            partitioner={name: [BlobStorePartitioner(XnnpackPartitioner(), tag="model")] for name in inputs},
            constant_methods={"get_max_seq_len": 128, "get_bos_id": 0, "get_eos_ids": [1 << 20]},
        )
        manager = edge.to_executorch(ExecutorchBackendConfig(external_constants=lambda _: "model"))
    llama.make_tokenizer(SIZE).save(str(folder / "tokenizer.json"))
    return write(manager, folder)


def told(runner: Any) -> str:
    from executorch.extension.llm.runner import make_text_input

    return llama.text(runner, [make_text_input("a")], TOKENS)


def test_its_delegates_follow_and_its_embedding_does_not(tmp_path: Path) -> None:
    """It reads its file by default, so what no delegate has stays, and an update of that is refused as a whole."""
    from executorch.extension.llm.runner import MultimodalRunner

    path = exported(tmp_path)
    make_working_copy(tmp_path / "model.ptd", tmp_path / "live.ptd")
    cache = BlobCache(tmp_path / "live.ptd", "shared")
    with serving(cache):  # it loads its methods when it generates for the first time
        runner = MultimodalRunner(str(path), str(tmp_path / "tokenizer.json"), str(tmp_path / "live.ptd"))
        before = told(runner)
    assert before == eager(*modules(0))
    embedding, decoder = modules(1)
    with pytest.raises(UpdateError, match=r"'embedding\.weight'.*LoadMode::Mmap"):
        cache.update({**embedding.state_dict(), **decoder.state_dict()})
    assert told(runner) == before
    cache.update(decoder.state_dict())
    assert told(runner) == eager(modules(0)[0], decoder) != before
    cache.load(tmp_path / "model.ptd")
    assert told(runner) == before
