"""Training on the device: joint forward/backward programs, checkpoints, and publishing to programs that serve.

manager = lower_training(module, (x, y), tag="model")  # ahead of time

training = TrainingProgram("train.pte", cache)
optimizer = torch.optim.Adam(training.named_parameters().values(), lr=1e-3)
loss, *rest = training.step(optimizer, x, y)
training.publish(serving_cache)
training.save("checkpoint.ptd", optimizer)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from blobstore.core.lazy import lazily, usable

if TYPE_CHECKING:
    from blobstore.training.adamw import AdamW
    from blobstore.training.joint_export import lower_training
    from blobstore.training.mezo import MeZO
    from blobstore.training.training_program import TrainingProgram

__all__ = ["AdamW", "MeZO", "TrainingProgram", "lower_training"]

_HOME = {
    "adamw": ("AdamW",),
    "joint_export": ("lower_training",),
    "mezo": ("MeZO",),
    "training_program": ("TrainingProgram",),
}


def __getattr__(name: str) -> Any:
    return lazily(__name__, _HOME, name, needs="training")


def __dir__() -> list[str]:
    return usable(__name__, __all__)
