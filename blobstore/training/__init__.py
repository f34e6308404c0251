"""Training on the device: joint forward/backward programs, checkpoints, and publishing to programs that serve.

manager = lower_training(module, (x, y), tag="model")  # ahead of time

training = TrainingProgram("train.pte", cache)
optimizer = torch.optim.Adam(training.named_parameters().values(), lr=1e-3)
loss, *rest = training.step(optimizer, x, y)
training.publish(serving_cache)
training.save("checkpoint.ptd", optimizer)
"""

from blobstore.core.distribution import install
from blobstore.core.errors import MissingDependencyError

try:
    from blobstore.training.joint_export import lower_training
    from blobstore.training.training_program import TrainingProgram
except MissingDependencyError:
    raise
except ImportError as error:
    raise MissingDependencyError(f"training needs torch and executorch: {install('executorch')}") from error

__all__ = ["TrainingProgram", "lower_training"]


def __dir__() -> list[str]:
    return list(__all__)
