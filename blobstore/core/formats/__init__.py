"""File formats, each read as a data map: `.ptd`, `.pte`, `.safetensors`."""
