"""An application with one language model, two adapters of PEFT, training and releases.

The folder of the device has the current release: a program with its data files and a program that trains its adapter, as
docs/language-models.md makes them. An adapter that was trained here is kept beside it, and is there when the application
starts again, however it ended:

    python examples/llm/app.py device --from http://server/llama/latest/index.json \\
        --adapter english=peft/english --adapter german=peft/german

Standard input has one command a line, and standard output one answer:

    ask english once | german hello    two users at the same time
    train english once upon a time     20 steps on a text, published to the running model
    update                             take the newest release
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from blobstore.adapters import load_adapter, save_adapter
from blobstore.llm import Runners
from blobstore.lowering import quiet
from blobstore.releases import Release, pull
from blobstore.runtime import BlobCache
from blobstore.training import AdamW, TrainingProgram

with quiet():
    import executorch.kernels.quantized  # noqa: F401
    from executorch.extension.llm.custom_ops import custom_ops  # noqa: F401
    from executorch.extension.llm.runner import TextLLMRunner
    from pytorch_tokenizers import get_tokenizer

USERS, STEPS, TOKENS = 2, 20, 12
SCALE = 2.0  # what the branches of the program multiply with: lora_alpha / r


class App:
    """The model of the current release, with the adapters of the users."""

    def __init__(self, device: Path, server: str, adapters: dict[str, str]) -> None:
        self.device, self.server, self.folders = device, server, adapters
        if not (device / "current").exists():
            pull(server, device)
        self.open()

    def open(self) -> None:
        self.release = Release.open(self.device, data=["foundation.ptd"])
        files = self.release.path
        self.tokenizer = get_tokenizer(str(files / "tokenizer.json"))
        model = [str(files / name) for name in ("model.pte", "tokenizer.json", "foundation.ptd")]
        pairs = [(TextLLMRunner(*model), self.layer()) for _ in range(USERS)]
        trained = {name: self.trained(name) for name in self.folders if self.trained(name).exists()}
        self.adapters = {**self.folders, **trained}
        self.runners = Runners(pairs, self.adapters)

    def layer(self) -> BlobCache:
        return BlobCache(self.release.path / "model_lora.ptd", base=self.release.cache)

    def trained(self, name: str) -> Path:
        return self.device / f"{name}.trained.ptd"

    def ask(self, requests: str) -> str:
        def answer(request: str) -> str:
            adapter, _, prompt = request.strip().partition(" ")
            return self.runners.generate(prompt, adapter, max_new_tokens=TOKENS, temperature=0)

        with ThreadPoolExecutor(USERS) as pool:
            return " | ".join(pool.map(answer, requests.split("|")))

    def train(self, what: str) -> str:
        name, _, text = what.partition(" ")
        files, ids = self.release.path, torch.tensor([self.tokenizer.encode(text, bos=False, eos=False)])
        base = BlobCache(files / "train_foundation.ptd")
        training = TrainingProgram(files / "train.pte", BlobCache(files / "train_adapter.ptd", base=base))
        load_adapter(layer := self.layer(), self.adapters[name])
        for tensor, parameter in training.named_parameters().items():
            parameter.copy_(torch.from_numpy(layer.tensors.value(tensor)[0]))
        optimizer = AdamW(training.named_parameters().values(), lr=0.01)
        for _ in range(STEPS):
            (loss,) = training.step(optimizer, ids[:, :-1], ids[:, 1:])
        self.adapters[name] = path = self.trained(name)
        save_adapter(path, training.named_parameters(), foundation=files / "foundation.ptd", scale=SCALE)
        self.runners.set_adapter(name, path)
        return f"{name} {float(loss):.3f}"

    def update(self, _: str) -> str:
        version = pull(self.server, self.device).version
        self.runners.close()
        self.release.close()
        self.open()
        return version


def main() -> None:
    """Obey standard input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", type=Path)
    parser.add_argument("--from", dest="server", required=True)
    parser.add_argument("--adapter", action="append", required=True, metavar="NAME=FOLDER")
    given = parser.parse_args()
    app = App(given.device, given.server, dict(text.split("=", 1) for text in given.adapter))
    for line in sys.stdin:
        command, _, rest = line.strip().partition(" ")
        print({"ask": app.ask, "train": app.train, "update": app.update}[command](rest), flush=True)


if __name__ == "__main__":
    main()
