"""What the process that all others are forked from does once: it imports, and lowers a model for the first time."""

import gc
import os

import torch

from blobstore.lowering import quiet
from campaigns.architectures import trial
from tests.helpers import lowering_speed

torch.set_num_threads(1)  # small models gain nothing from threads, and a fork would lose them
if "UNPATCHED_TORCH" not in os.environ:
    lowering_speed.install()
with quiet():
    trial.exported_both_ways("bert")
gc.collect()
gc.freeze()
gc.set_threshold(100_000, 20, 100)  # the objects of torch's modules stay
