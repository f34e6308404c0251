"""`make fuzz`: coverage-guided search for files that a reader crashes on, chokes on, or reads otherwise than another."""
