"""`make crash`: every system call of everything that writes fails, or is the last one of its process."""
