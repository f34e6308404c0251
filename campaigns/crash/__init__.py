"""`make crash`: in everything that writes, every system call fails, or the process is killed at it."""
