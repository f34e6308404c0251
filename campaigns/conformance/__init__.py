"""`make conformance`: ExecuTorch's own tests on our parts, and the files of its versions in both directions."""
