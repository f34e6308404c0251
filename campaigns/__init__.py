"""Campaigns: long searches for defects that tests miss, by fuzzing, failing system calls, load, and ExecuTorch's tests."""
