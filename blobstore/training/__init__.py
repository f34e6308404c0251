"""Training on the device: joint forward/backward programs, checkpoints, and publishing to programs that serve.

manager = lower_training(module, (x, y), tag="model")  # ahead of time

training = TrainingProgram("train.pte", cache)
optimizer = torch.optim.Adam(training.named_parameters().values(), lr=1e-3)
loss, *rest = training.step(optimizer, x, y)
training.publish(serving_cache)
training.save("checkpoint.ptd", optimizer)
"""

from blobstore.training.joint_export import lower_training
from blobstore.training.training_program import TrainingProgram

__all__ = ["TrainingProgram", "lower_training"]


def __dir__() -> list[str]:
    return list(__all__)
