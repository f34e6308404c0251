"""Training on the device: joint forward/backward programs, checkpoints, and publishing to programs that serve.

training = TrainingProgram("train.pte", cache)
optimizer = torch.optim.Adam(training.named_parameters().values(), lr=1e-3)
loss, *rest = training.step(optimizer, x, y)
training.publish(serving_cache)
training.save("checkpoint.ptd", optimizer)
"""

from blobstore.training.program import TrainingProgram

__all__ = ["TrainingProgram"]
