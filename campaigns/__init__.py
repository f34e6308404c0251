"""Campaigns: long searches for what tests do not find, by fuzzing, failing system calls, load, and others' tests."""
