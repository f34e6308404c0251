"""How the bytes of blobs are stored, and how they are made again of that."""
