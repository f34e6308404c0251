"""A zoo of two hundred small models in nested folders, as a team has them: `python -m tests.reporting.zoo FOLDER`.

Families share a backbone, input sizes of a model share everything, fine-tunes differ in a few elements, halves and
checkpoints lie beside the programs, and every fifth file has nothing in common with any other.
"""

import hashlib
import sys
from pathlib import Path

import numpy as np

from tests.reporting.planted import Payload, Tensor, write_ptd, write_safetensors

FAMILIES = {
    "vision/mobile": ("classify", "detect", "segment", "pose", "depth"),
    "vision/edge": ("classify", "detect", "segment"),
    "speech/en": ("wake-word", "commands", "dictation"),
    "speech/de": ("wake-word", "commands"),
    "language/tiny": ("chat", "rewrite", "embed", "rank"),
    "language/small": ("chat", "embed"),
}
VARIANTS = ("128", "192", "224", "256", "320", "512")
SIZE = 200


def write_zoo(folder: Path, *, files: int = SIZE) -> Path:
    """Write the zoo below a folder that need not exist.

    Returns:
        The checkpoint that names the tensors of the first family.
    """
    checkpoint = None
    written = 0
    for number, (family, tasks) in enumerate(FAMILIES.items()):
        backbone = _tensors(number, "backbone", 10, 24 << (number % 3), exact_in_half=number % 2 == 0)
        path = _in(folder / "checkpoints" / f"{family.replace('/', '-')}.safetensors")
        saved = [Tensor.of(key, value) for key, value in backbone.items()]
        if number % 2:
            saved.append(Tensor.of("head.tied", backbone["backbone.9.weight"]))
            saved.append(Tensor.of("backbone.1.weight.transposed", backbone["backbone.1.weight"].T * np.float32(1)))
        write_safetensors(path, saved)
        checkpoint = checkpoint or path
        halves = [Tensor.of(key, value.astype(np.float16)) for key, value in backbone.items()]
        write_ptd(_in(folder / family / "shared" / "half.ptd"), halves)
        written += 2
        for at, task in enumerate(tasks):
            head = _tensors(1000 + 10 * number + at, f"{task}.head", 3, 60)
            for variant in VARIANTS:
                weights = {**backbone, **head}
                if variant == "512":  # a fine-tune of the same head
                    key = f"{task}.head.0.weight"
                    tuned = weights[key].copy()
                    tuned[0, :9] += 1
                    weights[key] = tuned
                path = _in(folder / family / task / f"{task}-{variant}.pte")
                payload = f"{family} {task} {variant}".encode() * 40
                Payload([payload], {_key(value): value.tobytes() for value in weights.values()}).write(path)
                written += 1
            adapters = _tensors(2000 + 10 * number + at, "lora", 2, 8)
            path = _in(folder / family / task / "adapters" / f"{task}-lora.ptd")
            write_ptd(path, [Tensor.of(key, value) for key, value in adapters.items()])
            written += 1
    for number in range(files - written):
        own = [Tensor.of(key, value) for key, value in _tensors(5000 + number, "own", 4, 30 + number).items()]
        if number % 6 == 0:
            own.append(Tensor.of("mask", np.zeros((128, 256), np.float32)))
        path = _in(folder / "experiments" / f"2026-{1 + number % 4:02}" / f"run-{number:03}.ptd")
        write_ptd(path, own, alignment=16384 if number % 8 == 1 else 128)
    return checkpoint if checkpoint is not None else folder


def _in(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _key(values: np.ndarray) -> str:
    """As ExecuTorch keys what delegates store."""
    return hashlib.sha256(values.tobytes()).hexdigest()


def _tensors(seed: int, name: str, layers: int, width: int, *, exact_in_half: bool = False) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    made = {}
    for layer in range(layers):
        rows, columns = width * (1 + layer % 3), width * 2
        weight = random.standard_normal((rows, columns)).astype(np.float16 if exact_in_half else np.float32)
        made[f"{name}.{layer}.weight"] = weight.astype(np.float32)
        made[f"{name}.{layer}.bias"] = random.standard_normal(rows).astype(np.float32)
    return made


if __name__ == "__main__":
    print(write_zoo(Path(sys.argv[1])))  # noqa: T201
