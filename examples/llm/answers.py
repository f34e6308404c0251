"""Several users of one language model, each with an adapter of their own, at the same time.

docs/language-models.md makes the files; here is one program on one foundation, with a runner for each user:

    python examples/llm/answers.py llama.pte model/tokenizer.json foundation.ptd llama_lora.ptd \\
        --adapter english=english.ptd --adapter german=german.ptd --ask english "once" --ask german=0.8 "once"
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from blobstore.llm import Runners
from blobstore.lowering import quiet
from blobstore.runtime import BlobCache


def answers(
    program: Path,
    tokenizer: Path,
    foundation: Path,
    layer: Path,
    adapters: dict[str, Path],
    users: list[tuple[str, float, str]],
    tokens: int,
) -> list[str]:
    """The answer to each user: an adapter, its strength, and a prompt."""
    with quiet():
        import executorch.kernels.quantized  # noqa: F401
        from executorch.extension.llm.custom_ops import custom_ops  # noqa: F401
        from executorch.extension.llm.runner import TextLLMRunner

    base = BlobCache(foundation)  # in memory once, for all runners
    pairs = [(TextLLMRunner(str(program), str(tokenizer), str(foundation)), BlobCache(layer, base=base)) for _ in users]

    def answer(user: tuple[str, float, str]) -> str:
        adapter, strength, prompt = user
        return runners.generate(prompt, adapter, strength, max_new_tokens=tokens, temperature=0)

    with Runners(pairs, adapters) as runners, ThreadPoolExecutor(len(users)) as pool:
        return list(pool.map(answer, users))


def main(arguments: list[str] | None = None) -> list[str]:
    """Print and return the answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("program", "tokenizer", "foundation", "layer"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--adapter", action="append", required=True, metavar="NAME=FILE")
    parser.add_argument("--ask", action="append", required=True, nargs=2, metavar=("NAME[=STRENGTH]", "PROMPT"))
    parser.add_argument("--tokens", type=int, default=20)
    given = parser.parse_args(arguments)
    adapters = {name: Path(file) for name, _, file in (text.partition("=") for text in given.adapter)}
    users = []
    for who, prompt in given.ask:
        name, _, strength = who.partition("=")
        users.append((name, float(strength or 1), prompt))
    told = answers(given.program, given.tokenizer, given.foundation, given.layer, adapters, users, given.tokens)
    for (who, prompt), text in zip(given.ask, told, strict=True):
        print(f"{who}: {prompt}{text}")
    return told


if __name__ == "__main__":
    main()
