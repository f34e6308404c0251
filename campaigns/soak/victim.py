"""A process that commits to a shared working copy until it is killed."""

import random
import sys

import numpy as np

from blobstore.runtime import BlobCache
from campaigns.network import LARGEST, weight_keys

cache = BlobCache(sys.argv[1], "shared")
chance = random.Random(int(sys.argv[2]))
keys = weight_keys(cache)
print("ready", flush=True)  # noqa: T201
while True:
    value = chance.randint(1, LARGEST)
    cache.update_blobs({key: np.full(len(cache.get_data(key)) // 4, value, np.float32) for key in keys})
