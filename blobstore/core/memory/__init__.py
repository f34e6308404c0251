"""Bytes in memory: tensor layouts, dtypes, content addresses, comparison, tensors of any framework, mapped files."""
