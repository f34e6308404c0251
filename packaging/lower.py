"""Write `linear.pte` and `linear.ptd` here: what `smoke.py` runs where there is no torch."""

from __future__ import annotations

import torch

from blobstore import save_programs
from blobstore.lowering import lower

if __name__ == "__main__":
    model = torch.nn.Linear(8, 2)
    torch.nn.init.constant_(model.weight, 0.5)
    torch.nn.init.ones_(model.bias)
    save_programs({"linear": lower(model.eval(), (torch.ones(1, 8),), tag="linear")}, ".")
