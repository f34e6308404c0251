"""What the tests of language models share: models, the programs that ExecuTorch's exporter makes of them, and silence."""

import fcntl
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.llm import letters, llama
from tests.llm.llama import Llama


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Warnings of ExecuTorch's exporter, and of torch and torchao below it, are its own; ours stay errors."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            item.add_marker(pytest.mark.filterwarnings("error:::blobstore"))


def once(factory: pytest.TempPathFactory, name: str, write: Callable[[Path], None]) -> Path:
    """A folder that one of the processes of a run writes, and all of them read."""
    base = factory.getbasetemp()
    place = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = place.with_suffix(".done")
        if not done.exists():
            shutil.rmtree(place, ignore_errors=True)  # of a process that failed
            place.mkdir()
            write(place)
            done.touch()
    return place


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the checkpoints `a` and `b`, and the adapters `one` and `two` in PEFT's format."""

    def write(folder: Path) -> None:
        model = Llama()
        llama.write_model(folder, model, {"a": model.checkpoint(0), "b": model.checkpoint(1)})
        for seed, name in enumerate(("one", "two")):
            llama.write_peft(folder / name, model.adapter(seed))

    return once(tmp_path_factory, "llm", write)


@pytest.fixture(scope="session")
def stock(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """The text of a program that ExecuTorch's own exporter makes now: `stock("a", adapter="one", quantized=False)`."""
    texts: dict[tuple[Any, ...], str] = {}

    def fresh(checkpoint: str, adapter: str = "", *, quantized: bool = False, model: Path = folder) -> str:
        key = (checkpoint, adapter, quantized, model)
        if key not in texts:
            from executorch.examples.models.llama.export_llama_lib import export_llama

            program = tmp_path_factory.mktemp("stock") / "model.pte"
            with silent():
                export_llama(llama.config(model, checkpoint, program, adapter=adapter, quantized=quantized))
            texts[key] = llama.text(llama.runner(program, model / "tokenizer.json"))
        return texts[key]

    return fresh


@pytest.fixture(scope="session")
def live(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `model.pte`, `base.ptd` and `lora.ptd`: checkpoint `a` with adapter `one`, by the command line.

    Half of the options are in a YAML file, as for ExecuTorch's own command.
    """
    return once(tmp_path_factory, "llm-live", lambda made: export_by_command(folder, made / "live")) / "live"


def export_by_command(folder: Path, target: Path) -> None:
    target.mkdir()
    (folder / "export.yaml").write_text(
        f"""
base:
  model_class: llama3_2
  params: {folder}/params.json
  checkpoint: {folder}/a.pth
  tokenizer_path: {folder}/tokenizer.json
  metadata: '{llama.METADATA}'
  lora_config:
    adapter_checkpoint: {folder}/one/adapter_model.safetensors
    adapter_config: {folder}/one/adapter_config.json
model:
  use_kv_cache: true
  use_sdpa_with_kv_cache: true
backend:
  xnnpack:
    enabled: true
    extended_ops: true
export:
  max_seq_length: 128
  max_context_length: 128
  output_name: {target}/model.pte
  output_dir: {target}
  foundation_weights_file: replaced by an argument
  lora_weights_file: lora.ptd
""",
        encoding="utf-8",
    )
    overrides = ["export.foundation_weights_file=base", f"hydra.run.dir={folder}/hydra"]
    command = [sys.executable, "-m", "blobstore.export_llm", "--config", str(folder / "export.yaml"), *overrides]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    shutil.copy(folder / "tokenizer.json", target.parent)


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `tests.llm.letters.write` writes."""
    return once(tmp_path_factory, "letters", letters.write)


class silent:  # noqa: N801
    """Keeps what the exporter logs out of the log of a failing test, which it would bury."""

    def __enter__(self) -> None:
        self._level = logging.root.manager.disable
        logging.disable(logging.WARNING)

    def __exit__(self, *_: object) -> None:
        logging.disable(self._level)


@pytest.fixture(autouse=True)
def operators() -> Iterator[None]:
    """The operators of language models, registered as an application does before it loads one."""
    import executorch.kernels.quantized  # noqa: F401
    from executorch.extension.llm.custom_ops import custom_ops  # noqa: F401

    yield
