"""Mistakes that a type checker finds before anything runs."""

import torch

import blobstore
from blobstore.lowering import lower
from blobstore.runtime import BlobCache, Program

blobstore.dedup("a.pte", "out")  # mistake: the name
blobstore.runtime.BlobCash("a.ptd")  # mistake: the name, in a module
blobstore.save_file("a.ptd", {})  # mistake: the order
BlobCache("a.ptd", "writable")  # mistake: no such mode
blobstore.load_file("a.ptd", "tf")  # mistake: no such framework
blobstore.safe_open("a.ptd", "np").get_tensor("a").requires_grad_()  # mistake: an array has no gradient
lower(torch.nn.Linear(1, 1), (torch.ones(1, 1),), tags="model")  # mistake: the keyword
method = Program("a.pte").method(0)  # mistake: methods have names
blobstore.dedup_programs("a.pte", "out").program  # mistake: the attribute
number: int = BlobCache("a.ptd")["a"]  # mistake: a tensor
tensor = blobstore.torch.load_file("a.ptd")["a"] @ blobstore.load_file("a.ptd", "pt")["b"]
