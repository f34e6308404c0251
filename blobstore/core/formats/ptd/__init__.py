"""The .ptd file format: ExecuTorch's FT01 with a manifest of digests; see docs/format.md."""
