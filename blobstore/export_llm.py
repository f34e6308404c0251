"""`python -m blobstore.export_llm`: ExecuTorch's `export_llm`, with the same arguments and YAML files.

    python -m blobstore.export_llm --config model.yaml
    python -m blobstore.export_llm base.model_class=llama3_2 base.checkpoint=... backend.xnnpack.enabled=true ...

Beside ExecuTorch's options, it has `room`, and `base.lora_config` can be given by arguments, too:

    ... base.lora_config.adapter_checkpoint=german/adapter_model.safetensors \
        base.lora_config.adapter_config=german/adapter_config.json
    ... room.r=64 "room.modules=[q_proj,v_proj]"

See `blobstore.llm.export_llm` for what becomes of the weights.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from blobstore.core.errors import BlobStoreError

__all__ = ["main"]


def main() -> None:
    """Export as the arguments of the process say; exits with 1 after one of the library's own errors."""
    try:
        _main()
    except BlobStoreError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(1)


def _main() -> None:
    from blobstore.llm import export_llm
    from blobstore.runtime.executorch import export_llm as stock

    failures: list[BlobStoreError] = []

    def export(config: Any) -> None:
        try:
            export_llm(config, room=None if config.room is None else config.room.given())
        except BlobStoreError as error:
            failures.append(error)  # hydra would print it with a traceback
            sys.exit(1)

    original, stock.export_llama = stock.export_llama, export
    original_config, stock.LlmConfig = stock.LlmConfig, _with_room(stock.LlmConfig)
    stock.cs.store(name="llm_config", node=_defaults(stock.LlmConfig, sys.argv[1:]))
    try:
        stock.main()
    except SystemExit:
        if failures:
            raise failures[0] from None
        raise
    finally:
        stock.export_llama = original
        stock.LlmConfig = original_config
        stock.cs.store(name="llm_config", node=original_config)


@dataclasses.dataclass
class _Room:
    """What `room` may have. `export_llm` checks it."""

    r: Any = None
    modules: Any = None
    alpha: Any = None

    def given(self) -> dict[str, Any]:
        """What of it was given."""
        return {name: value for name, value in vars(self).items() if value is not None}


def _with_room(config: type[Any]) -> type[Any]:
    """ExecuTorch's configuration with `room`, see `blobstore.llm.export_llm`."""
    field = ("room", _Room | None, dataclasses.field(default=None))
    return dataclasses.make_dataclass(config.__name__, [field], bases=(config,))


def _defaults(config: type[Any], arguments: list[str]) -> Any:
    """The configuration that arguments change. Hydra changes nothing inside of what is None, so what they name is there."""
    from omegaconf import MISSING

    from blobstore.runtime.executorch import LoraConfig

    made = config()
    named = {argument.lstrip("+").partition("=")[0] for argument in arguments}
    if any(name == "room" or name.startswith("room.") for name in named):
        made.room = _Room()
    if any(name.startswith("base.lora_config") for name in named):
        made.base.lora_config = LoraConfig(adapter_checkpoint=MISSING)
    return made


if __name__ == "__main__":
    main()
