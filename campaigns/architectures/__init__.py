"""`make architectures`: what becomes of each architecture of transformers, in tiny configurations."""

import sys
from types import ModuleType

# The wheel of torchvision on PyPI has its operators compiled for CUDA; timm, which imports it, calls none of them.
sys.modules["torchvision._meta_registrations"] = ModuleType("without operators")
