"""File formats, each as a data map: `.ptd`, `.pte`, `.safetensors`."""
