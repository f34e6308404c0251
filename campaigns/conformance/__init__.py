"""`make conformance`: ExecuTorch's own tests on this library, and files exchanged with other versions of ExecuTorch."""
