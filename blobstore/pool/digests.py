"""A digest as safe as SHA-256, and three times as fast on processors with instructions for that: by it files are read back."""

from blobstore.core.requirements import needed

with needed("a pool needs blake3", "pool"):
    from blake3 import blake3

__all__ = ["blake3"]
