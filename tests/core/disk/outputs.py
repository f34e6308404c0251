"""Helpers for tests of outputs: writing files, reading them back, and system calls that fail."""

import os

import torch

import blobstore
from blobstore.core.disk.staging import Staging


def save(path, value=1.0):
    blobstore.save_file({"w": torch.full((8,), value)}, path)


def damage(path, key):
    """Change a byte of a blob of a .ptd."""
    with blobstore.open_ptd(path) as data_map:
        start, _ = data_map.byte_range(key)
    data = bytearray(path.read_bytes())
    data[start] ^= 1
    path.write_bytes(data)


def group(folder, content=b"new"):
    with Staging() as staging:
        for name in "abc":
            with staging.open(folder / name) as file:
                file.write(content)


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def leftovers(folder):
    return [path.name for path in folder.rglob("*") if path.name.startswith((".blobstore-", ".lowered-"))]


def fail(monkeypatch, call, number, failure):
    """Make a system call fail once, at this number, counted from 1."""
    real, count = getattr(os, call), []

    def failing(*arguments, **options):
        count.append(None)
        if len(count) == number:
            raise OSError(failure, os.strerror(failure))
        return real(*arguments, **options)

    monkeypatch.setattr(os, call, failing)
