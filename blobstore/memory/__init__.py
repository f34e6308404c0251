"""Bytes in memory: layouts of tensors, content addresses, buffers, tensors of any framework, maps of files."""
