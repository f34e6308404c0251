"""`make architectures`: what becomes of each architecture of transformers, in tiny configurations."""
